"""How operations on windows, on matrices, and Fourier transforms, work along the dimensions that
they repeat over.

Rules as those of along.py: a window of one element that moves by one sees nothing of its
neighbours, and nothing that is done with one matrix of a batch is of another.
"""

from collections.abc import Iterator

from jaxoffload.capture.flat import Equation
from jaxoffload.capture.way import Changes, Rule, Way, unchanged

_OF_WINDOWS = "window_dimensions window_strides padding base_dilation window_dilation".split()
_ALONE = {"window_dimensions": 1, "window_strides": 1, "base_dilation": 1}
"""Params of a dimension along which windows do not meet; nothing is padded there."""


def windows(equation: Equation) -> Iterator[Way]:
    """Along dimensions that windows do not reach over; values to begin with are numbers."""
    params = equation.operation.params
    shape = equation.outputs[0].shape
    for d in range(len(shape)):
        is_alone = all(params[key][d] == value for key, value in _ALONE.items() if key in params)
        if not is_alone or any(params["padding"][d]):
            continue

        def changes(size: int | None, d: int = d) -> Changes | None:
            if size is not None:
                return {}
            given = {key: params[key] for key in _OF_WINDOWS if key in params}
            return {key: (*value[:d], *value[d + 1 :]) for key, value in given.items()}

        inputs = tuple(d if len(x.aval.shape) == len(shape) else None for x in equation.inputs)
        yield Way(inputs, (d,) * len(equation.outputs), changes)


def matrices(dims: int) -> Rule:
    """Along all dimensions but the last few of the first operand, which every operand and result
    begins with.

    Args:
      dims: how many these are.
    """

    def rule(equation: Equation) -> Iterator[Way]:
        for d in range(len(equation.inputs[0].aval.shape) - dims):
            yield Way((d,) * len(equation.inputs), (d,) * len(equation.outputs), unchanged)

    return rule


_of_batches = matrices(2)


def triangular_solve(equation: Equation) -> Iterator[Way]:
    """Along a batch, or along right-hand sides: none knows of another."""
    yield from _of_batches(equation)
    last = len(equation.outputs[0].aval.shape) - 1
    sides = last if equation.operation.params["left_side"] else last - 1
    yield Way((None, sides), (sides,))


def fft(equation: Equation) -> Iterator[Way]:
    """Along all dimensions but those that are transformed, the last ones."""
    lengths = equation.operation.params["fft_lengths"]
    for d in range(len(equation.inputs[0].aval.shape) - len(lengths)):
        yield Way((d,), (d,), unchanged)
