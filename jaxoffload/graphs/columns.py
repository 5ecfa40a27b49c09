"""A TaskGraph as flat arrays, for what looks at all of it.

Takes no vertex and no tensor, only their numbers: the planner's C++ reads these arrays, and NumPy.
"""

import dataclasses

import numpy as np

from jaxoffload.graphs.ragged import entries


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """A TaskGraph as flat arrays, for what looks at all of it. N vertices, T tensors; the offsets
    are CSR, int64.

    Attributes:
      bytes, tensor_device: of each tensor, int64[T], int32[T].
      argument, argument_offset: of each tensor that starts as part of a flat argument, which, and
        at which byte; -1 and 0 of others; int32[T], int64[T].
      result_offsets, result, result_offset: CSR, the parts of flat results that each tensor is,
        int32 and int64.
      kind, vertex_device, workspace, adds: of each vertex; the workspace of kernels only; uint8[N],
        int32[N], int64[N], uint8[N].
      input_offsets, inputs, gathered: CSR, the tensors that each vertex reads, and whether it takes
        a few rows of them only, int32 and uint8.
      output_offsets, outputs: CSR, the tensors that each vertex writes, int32.
      overwrite_offsets, overwrites: CSR, `Vertex.overwrites`, its pairs one after another, int32.
      donated: the pairs one after another, int32.
      disk_arguments, disk_results, device_arguments, device_results: sorted, int32.
      replicas: the pairs one after another, int32.
    """

    bytes: np.ndarray
    tensor_device: np.ndarray
    argument: np.ndarray
    argument_offset: np.ndarray
    result_offsets: np.ndarray
    result: np.ndarray
    result_offset: np.ndarray
    kind: np.ndarray
    vertex_device: np.ndarray
    workspace: np.ndarray
    adds: np.ndarray
    input_offsets: np.ndarray
    inputs: np.ndarray
    gathered: np.ndarray
    output_offsets: np.ndarray
    outputs: np.ndarray
    overwrite_offsets: np.ndarray
    overwrites: np.ndarray
    donated: np.ndarray
    disk_arguments: np.ndarray
    disk_results: np.ndarray
    device_arguments: np.ndarray
    device_results: np.ndarray
    replicas: np.ndarray

    def in_order(self, order: np.ndarray) -> "Columns":
        """The same with the vertices in another order, of which it names each once."""
        into, in_rows = _rows(self.input_offsets, order)
        out, out_rows = _rows(self.output_offsets, order)
        over, over_rows = _rows(self.overwrite_offsets, order)
        return dataclasses.replace(
            self,
            kind=self.kind[order],
            vertex_device=self.vertex_device[order],
            workspace=self.workspace[order],
            adds=self.adds[order],
            input_offsets=in_rows,
            inputs=self.inputs[into],
            gathered=self.gathered[into],
            output_offsets=out_rows,
            outputs=self.outputs[out],
            overwrite_offsets=over_rows,
            overwrites=np.ascontiguousarray(self.overwrites.reshape(-1, 2)[over].reshape(-1)),
        )


def _rows(offsets: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the rows of a CSR in another order, where their entries were, and their offsets."""
    at, _ = entries(offsets, order)
    found = np.zeros_like(offsets)
    np.cumsum(np.diff(offsets)[order], out=found[1:])
    return at, found
