"""What an optimized HLO module, as text, says of how it will run on a GPU.

Takes the text; gives which outputs are written into which parameters, how many operations its
entry launches, copies among them, and whose code they call.
"""

import collections
import dataclasses
import re

_IDLE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"})
"""Operations that launch nothing."""
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
    """

    aliases: tuple[tuple[int, int], ...]
    launches: int
    copies: int
    calls: dict[str, int]


def read(text: str) -> Module:
    """Reads a module's text, as `HloModule.to_string` gives it."""
    head = text[: text.find("\n")] if "\n" in text else text
    launches = copies = 0
    calls: collections.Counter[str] = collections.Counter()
    in_entry = False
    for line in text.splitlines():
        if line.startswith("ENTRY "):
            in_entry = True
        elif line.startswith("}"):
            in_entry = False
        operation = _operation(line)
        if operation is None:
            continue
        if in_entry and operation not in _IDLE:
            launches += 1
            is_copy = operation in ("copy", "copy-start") or "calls=%wrapped_copy" in line
            copies += is_copy
        called = _called(operation, line)
        if called is not None:
            calls[called] += 1
    return Module(_aliases(head), launches, copies, dict(sorted(calls.items())))


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
