"""What an optimized HLO module, as text, says of how it will run on a GPU.

Takes the text; gives which outputs are written into which parameters, how many operations its
entry launches, copies among them, whose code they call, and how long they take by XLA's own model.
"""

import collections
import dataclasses
import re

_IDLE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"})
"""Operations that launch nothing."""
_ENTRY = ""
"""Stands for the computation at which a module begins."""
_LIBRARIES = (
    ("__triton", "Triton"),
    ("__cublas$lt", "cuBLASLt"),
    ("cublas", "cuBLAS"),
    ("__cudnn", "cuDNN"),
    ("cusolver", "cuSOLVER"),
    ("cusparse", "cuSPARSE"),
    ("cub_", "CUB"),
    ("__cub$", "CUB"),
    ("DeviceRadixSort", "CUB"),
    ("TopK", "XLA's top-k"),
)
"""Whose code it is, by a part of a target's or a fusion's name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """One module.

    Attributes:
      aliases: for each output that is written into a parameter, its number and the parameter's.
      launches: operations of the entry that are launched, copies among them.
      copies: those that only copy.
      calls: of those, and of operations in loops, whose code they call and how often; XLA's own
        kernels are not among them. A custom call that is not known stands by its target.
      seconds: of all that has an estimate, loops as often as they are known to repeat: XLA's
        figure that knows a GPU's matrix units ("sol"). It has some under
        --xla_gpu_collect_cost_model_stats=true, which it refuses but for sm_90 and sm_100.
      without_estimate: of `launches`, loops aside, those that have none.
    """

    aliases: tuple[tuple[int, int], ...]
    launches: int
    copies: int
    calls: dict[str, int]
    seconds: float
    without_estimate: int


def read(text: str) -> Module:
    """Reads a module's text, as `HloModule.to_string` gives it."""
    head = text[: text.find("\n")] if "\n" in text else text
    launches = copies = without = 0
    calls: collections.Counter[str] = collections.Counter()
    times = _Times()
    name = None
    for line in text.splitlines():
        started = re.match(r"(ENTRY )?%(\S+) ", line)
        if started is not None:
            name = _ENTRY if started[1] else started[2]
        operation = _operation(line)
        if operation is None or name is None:
            continue
        is_priced = times.add(name, operation, line)
        if name == _ENTRY and operation not in _IDLE:
            launches += 1
            is_copy = operation in ("copy", "copy-start") or "calls=%wrapped_copy" in line
            copies += is_copy
            without += not is_priced
        called = _called(operation, line)
        if called is not None:
            calls[called] += 1
    of_entry = times.seconds(_ENTRY)
    return Module(_aliases(head), launches, copies, dict(sorted(calls.items())), of_entry, without)


class _Times:
    """What computations take, by what stands in a module's text."""

    def __init__(self) -> None:
        self._own: dict[str, float] = collections.defaultdict(float)  # microseconds
        self._loops: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)

    def add(self, computation: str, operation: str, line: str) -> bool:
        """Adds an instruction of a computation; whether its time is known."""
        if operation == "while":
            body = re.search(r"body=%([\w.-]+)", line)
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            if body is not None:
                self._loops[computation].append((body[1], int(trips[1]) if trips else 1))
            return True
        start = line.find('"reification_cost":[{')
        for cost in re.findall(r"\{[^{}]*\}", line[start:]) if start >= 0 else ():
            if '"name":"sol"' in cost:
                found = re.search(r'"exec_time_us":([0-9.eE+-]+)', cost)
                self._own[computation] += float(found[1]) if found else 0.0
                return True
        return False

    def seconds(self, computation: str) -> float:
        """Of a computation, with its loops."""
        loops = sum(trips * self.seconds(body) for body, trips in self._loops[computation])
        return self._own[computation] * 1e-6 + loops


def _aliases(head: str) -> tuple[tuple[int, int], ...]:
    """Pairs of output and parameter. The output of a module that has one is {}."""
    start = head.find("input_output_alias={")
    if start < 0:
        return ()
    found = re.finditer(r"\{(\d*)\}: \((\d+), \{\}, (?:may|must)-alias\)", head[start:])
    return tuple((int(match[1] or 0), int(match[2])) for match in found)


def _operation(line: str) -> str | None:
    """The opcode of an instruction's line."""
    found = re.match(r"\s+(?:ROOT )?%\S+ = ", line)
    if found is None:
        return None
    # Behind the shape, which may be a tuple's; an opcode begins with a letter and is followed by (.
    opcode = re.search(r"(?:^|[\s)}\]])([a-z][a-z0-9-]*)\(", line[found.end() :])
    return opcode[1] if opcode else None


def _called(operation: str, line: str) -> str | None:
    """Whose code an instruction calls, None if it is XLA's own."""
    if operation == "fft":
        return "cuFFT"
    if operation == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', line)
        return _library(target[1]) if target else None
    if operation == "fusion":
        kind = re.search(r'"kind":"(__[^"]*)"', line)
        return _library(kind[1]) if kind else None
    return None


def _library(name: str) -> str:
    return next((library for part, library in _LIBRARIES if part in name), name)
