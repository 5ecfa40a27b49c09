"""Closed-form models from the papers, for comparison with plans.

Bytes, seconds, and operations throughout. Where a paper's formula cannot be meant as printed, the
docstring says what was changed.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Fuyou:
    """Fuyou, section 4.5: time of a training step whose states are on SSDs.

    Attributes:
      parameters: p, of the model.
      forward_compute: T_f^comp, seconds.
      optimizer_compute: T_o^comp, seconds of the CPU.
      gpu: BW_GPU, bytes a second each way.
      ssd_read, ssd_write: BW_S2C and BW_C2S, of one drive.
      num_ssds: N_SSD.
    """

    parameters: float
    forward_compute: float
    optimizer_compute: float
    gpu: float
    ssd_read: float
    ssd_write: float
    num_ssds: int

    def forward(self, swapped: float = 0.0) -> float:
        """T_f, equations 2 to 4.

        Args:
          swapped: D_f, bytes of activations that go to the SSDs.
        """
        weights = 2 * self.parameters
        return max(
            self.forward_compute,
            max(weights, swapped) / self.gpu,
            (weights / self.ssd_read + swapped / self.ssd_write) / self.num_ssds,
        )

    def backward_links(self, swapped: float = 0.0) -> tuple[float, float]:
        """T_b+o of the GPU's link and of the SSDs, equations 6 and 7."""
        weights, states = 2 * self.parameters, 12 * self.parameters
        read = (states + weights + swapped) / self.ssd_read
        written = (states + weights) / self.ssd_write
        return (weights + swapped) / self.gpu, (read + written) / self.num_ssds

    def backward(self, swapped: float = 0.0, recomputed: float = 0.0) -> float:
        """T_b+o, equations 5 to 8.

        Args:
          recomputed: RC(D_f), seconds of recomputation.
        """
        compute = 2 * self.forward_compute + recomputed
        return max(compute, self.optimizer_compute, *self.backward_links(swapped))

    def step(self, swapped: float = 0.0, recomputed: float = 0.0) -> float:
        """T_iter, equation 1."""
        return self.forward(swapped) + self.backward(swapped, recomputed)

    def most_swapped(self, recomputed: float) -> float:
        """D_MAX, equations 9 and 10: beyond it swapping cannot pay."""
        compute = 2 * self.forward_compute + recomputed
        gain = compute - max(self.backward_links())
        drives = min(self.ssd_read, self.ssd_write) * self.num_ssds
        return max(0.0, gain) * min(self.gpu, drives)

    def choose(self, layers: Sequence["SwapLayer"]) -> int:
        """How many layers to swap, those of the highest benefit first (equations 11 and 12).

        A layer that is not swapped is recomputed. The paper subtracts "throughput times FLOP" for a
        swapped layer; what is meant is FLOP over throughput, which is `SwapLayer.seconds`.
        """
        ranked = sorted(layers, key=lambda layer: -layer.benefit)
        recomputed = sum(layer.seconds for layer in ranked)
        limit = self.most_swapped(recomputed)
        best, least, swapped = 0, self.step(0.0, recomputed), 0.0
        for count, layer in enumerate(ranked, 1):
            swapped += layer.bytes
            recomputed -= layer.seconds
            took = self.step(swapped, recomputed)
            if swapped <= limit and took < least:
                best, least = count, took
        return best


@dataclasses.dataclass(frozen=True, slots=True)
class SwapLayer:
    """An activation that is swapped or made again.

    Attributes:
      bytes: its size.
      seconds: what making it again takes.
    """

    bytes: float
    seconds: float

    @property
    def benefit(self) -> float:
        """SBF, equation 12: what is saved for each byte that is moved."""
        return self.seconds / self.bytes


def transformer_layers(
    batch: int, length: int, width: int, flops_per_second: float, itemsize: int = 2
) -> dict[str, SwapLayer]:
    """The four linear layers of a transformer block, Fuyou's table 2.

    The table prints b s h^3 where the operations of a product are b s h^2.
    """
    unit = batch * length * width
    shapes = {"qkv": (3, 6), "htoh": (1, 2), "hto4h": (4, 8), "4htoh": (1, 8)}
    return {
        name: SwapLayer(size * unit * itemsize, work * unit * width / flops_per_second)
        for name, (size, work) in shapes.items()
    }


def lifespan_seconds(activations: float, bandwidth: float, endurance: float) -> float:
    """SSDTrain's projected lifespan of drives (section 5.3 and figure 5.10).

    Activations are written in half of a step, so a step takes twice the time of writing them.

    Args:
      activations: bytes a step.
      bandwidth: bytes a second that are written.
      endurance: bytes that the drives take in all, what is credited for long writes included.
    """
    step = 2 * activations / bandwidth
    return endurance * step / activations
