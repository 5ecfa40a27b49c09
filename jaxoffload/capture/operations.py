"""What is known of each operation, in one table: `TABLE`.

To teach capture a primitive is to add an entry, and a case to tests/capture/test_operations.py; and
a rule to along.py where none there says how it works along a dimension. What has no entry runs all
the same: XLA may fuse it within its vertex, but it is not split and not recomputed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import along, along_batches, along_loops, along_places, along_random
from jaxoffload.capture.flat import Equation
from jaxoffload.capture.way import Rule, Way


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """How the stages of capture treat an operation.

    Attributes:
      is_elementwise: each element of the output needs the operands' same element; it fuses.
      fuses_operand: what makes its operand is fused into it, as into anything elementwise.
      is_light: it takes no longer than to read its operands, so that where it stands is no matter.
      is_priced: `cost` tells its time, as its operands' bytes and `flops` say; only what is priced
        is made again. A `while` or a sort takes longer.
      is_cheap: a few instructions an element, as no root or exponential is: rather made again than
        kept.
      is_view: its result holds no more than its operand, and every reader repeats it.
      is_placement: its result has its operands' elements in other places; it fuses.
      joins: of a reduction, what joins two parts of its result.
      overwrites: which operands' memory its output may take: "none", "first" or "all".
      takes_rows: it may read a few rows of its first operand only.
      has_several: it may have more than one output and still be split.
      flops: floating-point operations, by parameters, operands and results (each with its `aval`);
        None: one for each element of the output.
      multiplies: whether it is a product, of which a GPU has another rate for each dtype.
      copies: bytes of operands and results that it keeps in another order while it runs.
      ways: how it works along a dimension, for loops over tiles (split.py) and for stacks in
        pieces (scan.py); None: as a whole only.
    """

    is_elementwise: bool = False
    fuses_operand: bool = False
    is_light: bool = False
    is_priced: bool = False
    is_cheap: bool = False
    is_view: bool | Callable[[Equation], bool] = False
    is_placement: bool = False
    joins: Callable | None = None
    overwrites: str = "none"
    takes_rows: bool = False
    has_several: bool = False
    flops: Callable[[dict[str, Any], Sequence[Any], Sequence[Any]], float] | None = None
    multiplies: bool = False
    copies: Callable[[Equation], int] | None = None
    ways: Rule | None = None


def _widens(equation: Equation) -> bool:
    """A conversion to a dtype that is no smaller."""
    before, after = equation.inputs[0].aval, equation.outputs[0].aval
    return len(equation.inputs) == 1 and compat.byte_count(before) <= compat.byte_count(after)


def _product_flops(
    params: dict[str, Any], operands: Sequence[Any], results: Sequence[Any]
) -> float:
    (contracted, _), _ = params["dimension_numbers"]
    shape = operands[0].aval.shape
    return 2.0 * _elements(results) * math.prod(shape[d] for d in contracted)


def _convolution_flops(
    params: dict[str, Any], operands: Sequence[Any], results: Sequence[Any]
) -> float:
    kernel = operands[1].aval.shape
    features = params["dimension_numbers"].rhs_spec[0]
    return 2.0 * _elements(results) * math.prod(kernel) / kernel[features]


def _convolution_copies(equation: Equation) -> int:
    """What is not batch, space, features (kernels: space, features in, features out) is transposed
    before or after: of a gradient by the kernel both operands are."""
    numbers = equation.operation.params["dimension_numbers"]
    last = len(numbers.lhs_spec) - 1
    space = range(1, last)
    images, kernels = (0, last, *space), (last, last - 1, *range(last - 1))
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    arrays = (*equation.inputs, *equation.outputs)
    return sum(
        compat.byte_count(array.aval)
        for array, spec, order in zip(arrays, specs, (images, kernels, images), strict=True)
        if tuple(spec) != order
    )


def _elements(results: Sequence[Any]) -> float:
    return float(sum(math.prod(v.aval.shape) for v in results))


def _flops_of_bits(_: dict[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> float:
    return along_random.OPERATIONS * _elements(results)


def _transform_flops(
    params: dict[str, Any], operands: Sequence[Any], results: Sequence[Any]
) -> float:
    """As products would have in the time that a core takes: 8 times those of the algorithm."""
    is_complex = _elements(operands) == _elements(results)
    count = max(_elements(operands), _elements(results))
    return (40 if is_complex else 20) * count * math.log2(max(2, math.prod(params["fft_lengths"])))


def _scan_flops(params: dict[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> float:
    """Likewise: XLA goes over all of it once for each power of two in the axis' size."""
    size = operands[0].aval.shape[params["axis"]]
    return 50 * _elements(results) * math.log2(max(2, size))


def _panel_flops(_: dict[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> float:
    """Likewise, on average over the panels of a triangle: what another panel takes off is a
    product, what is solved or factored takes twice the time of one."""
    panels = [x.aval.shape[0] for x in operands if x.aval.shape]
    return (2.0 if len(panels) == 3 else 4.0) * _elements(results) * panels[-1]


def _panel_product_flops(
    _: dict[str, Any], operands: Sequence[Any], results: Sequence[Any]
) -> float:
    """Every element of the second factor's panel with every row of the result's."""
    return 2.0 * results[0].aval.shape[0] * _elements(operands[-2:-1])


def _of_matrices(cubes: float, squares: float, operand: int = 0) -> Known:
    """What is known of an operation on each matrix of a batch.

    Args:
      cubes, squares: floating-point operations as products would have in the time, for each
        element times the matrix' rows or columns, and for each element.
      operand: whose elements; those of right-hand sides may be few.
    """

    def flops(_: dict[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> float:
        shortest = min(operands[0].aval.shape[-2:])
        return (cubes * shortest + squares) * _elements(operands[operand : operand + 1])

    return Known(
        has_several=True, ways=along_batches.matrices(2), flops=flops, copies=_columns_of_results
    )


def _columns_of_results(equation: Equation) -> int:
    """LAPACK has matrices column by column."""
    return sum(compat.byte_count(v.aval) for v in equation.outputs)


def _sort_flops(params: dict[str, Any], operands: Sequence[Any], _: Sequence[Any]) -> float:
    """Likewise: by comparisons, one after the other."""
    size = operands[0].aval.shape[params["dimension"]]
    return 3200 * _elements(operands[:1]) * math.log2(max(2, size))


def _top_flops(_: dict[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> float:
    return 700 * _elements(operands)


def _index_flops(_: dict[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> float:
    """Likewise: elements are compared one by one."""
    return 450 * _elements(operands)


def _polynomial_flops(_: dict[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> float:
    return 2.0 * _elements(results) * (len(operands) - 2)


_NOTHING = Known()
_ELEMENTWISE = Known(
    is_elementwise=True,
    fuses_operand=True,
    is_light=True,
    is_priced=True,
    overwrites="all",
    ways=along.elementwise,
)
_VIEW = Known(is_view=True, is_light=True, is_priced=True, is_cheap=True)
_UPDATE = Known(overwrites="first")
_LIGHT = Known(is_light=True, is_priced=True)
_ROWS = Known(is_priced=True, is_placement=True, takes_rows=True)


def _reduction(joins: Callable) -> Known:
    return Known(
        fuses_operand=True,
        is_light=True,
        is_priced=True,
        joins=joins,
        ways=along.reduction(joins),
    )


def _along(param: str, **known: Any) -> Known:
    return Known(ways=along.along_others(param), **known)


TABLE: dict[str, Known] = {
    **dict.fromkeys(
        """
        acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clz cos cosh digamma
        div erf erf_inv erfc exp exp2 expm1 floor igamma igamma_grad_a igammac lgamma log log1p log2
        logistic nextafter polygamma population_count pow reduce_precision
        regularized_incomplete_beta rem round rsqrt sin sinh sqrt tan tanh zeta
        """.split(),
        _ELEMENTWISE,
    ),
    **dict.fromkeys(
        """
        abs add add_any and clamp complex conj eq eq_to ge gt imag integer_pow is_finite le le_to lt
        lt_to max min mul ne neg not one_minus_square or real select_n shift_left
        shift_right_arithmetic shift_right_logical sign square sub xor
        """.split(),
        dataclasses.replace(_ELEMENTWISE, is_cheap=True),
    ),
    "polynomial": dataclasses.replace(_ELEMENTWISE, flops=_polynomial_flops),
    "convert_element_type": dataclasses.replace(_ELEMENTWISE, is_cheap=True, is_view=_widens),
    # Views.
    "broadcast_in_dim": dataclasses.replace(_VIEW, ways=along.broadcast),
    "reshape": dataclasses.replace(_VIEW, ways=along.reshape),
    "transpose": dataclasses.replace(_VIEW, ways=along.transpose),
    "squeeze": dataclasses.replace(_VIEW, ways=along.squeeze),
    "iota": dataclasses.replace(_VIEW, ways=along_places.iota),
    "rev": dataclasses.replace(_VIEW, ways=along.along_others("dimensions")),
    **dict.fromkeys(("random_wrap", "random_unwrap"), _VIEW),
    "bitcast_convert_type": Known(ways=along.bitcast),
    # Reductions and scans along an axis.
    "reduce_sum": _reduction(lax.add),
    "reduce_max": _reduction(lax.max),
    "reduce_min": _reduction(lax.min),
    "reduce_prod": _reduction(lax.mul),
    "reduce_and": _reduction(lax.bitwise_and),
    "reduce_or": _reduction(lax.bitwise_or),
    "reduce_xor": dataclasses.replace(_LIGHT, fuses_operand=True),
    **dict.fromkeys(
        "reduce_window reduce_window_sum reduce_window_max reduce_window_min".split(),
        dataclasses.replace(
            _LIGHT, fuses_operand=True, has_several=True, ways=along_batches.windows
        ),
    ),
    **dict.fromkeys(
        "select_and_scatter_add select_and_gather_add".split(), Known(ways=along_batches.windows)
    ),
    **dict.fromkeys(
        ("argmax", "argmin"),
        Known(is_priced=True, flops=_index_flops, ways=along.reduction(None)),
    ),
    **dict.fromkeys(
        "cumsum cumprod cummax cummin".split(), _along("axis", is_priced=True, flops=_scan_flops)
    ),
    "cumlogsumexp": _along("axis"),
    "sort": _along("dimension", has_several=True, flops=_sort_flops),
    "top_k": _along("axis", has_several=True, flops=_top_flops),
    # Products.
    "dot_general": Known(
        is_priced=True, flops=_product_flops, multiplies=True, ways=along.dot_general
    ),
    "conv_general_dilated": Known(
        is_priced=True,
        flops=_convolution_flops,
        multiplies=True,
        copies=_convolution_copies,
        ways=along.convolution,
    ),
    # Of each matrix of a batch.
    "cholesky": _of_matrices(1.5, 600),
    "lu": _of_matrices(3, 1400),
    "qr": _of_matrices(12, 3600),
    **dict.fromkeys(("geqrf", "householder_product"), _of_matrices(6, 1800)),
    **dict.fromkeys(("eigh", "tridiagonal"), _of_matrices(20, 8000)),
    "svd": _of_matrices(45, 14000),
    **dict.fromkeys(("eig", "hessenberg", "schur"), _of_matrices(200, 25000)),
    "triangular_solve": dataclasses.replace(
        _of_matrices(2.2, 1400, operand=1), ways=along_batches.triangular_solve
    ),
    **dict.fromkeys(
        ("lu_pivots_to_permutation", "tridiagonal_solve"), Known(ways=along_batches.matrices(1))
    ),
    "fft": Known(is_priced=True, flops=_transform_flops, ways=along_batches.fft),
    "scan": Known(has_several=True, ways=along_loops.steps(lambda step: ways(step))),
    # Parts, rows, updates.
    "concatenate": Known(is_priced=True, is_placement=True, ways=along.concatenate),
    "slice": Known(is_priced=True, is_placement=True, ways=along.slice_),
    "pad": Known(is_priced=True, is_placement=True, ways=along.pad),
    "split": _along("axis", is_priced=True, is_placement=True, has_several=True),
    "gather": dataclasses.replace(_ROWS, ways=along.gather),
    "dynamic_slice": dataclasses.replace(_ROWS, ways=along.dynamic_slice),
    "random_bits": Known(is_priced=True, flops=_flops_of_bits, ways=along_random.bits),
    "dynamic_update_slice": dataclasses.replace(_UPDATE, ways=along.dynamic_update_slice),
    **dict.fromkeys(
        "scatter scatter-mul scatter-min scatter-max scatter-add scatter-sub".split(),
        dataclasses.replace(_UPDATE, ways=along.scatter),
    ),
    # Made by capture itself: see collectives.py, slicing.py, rows_on_disk.py, row_updates.py.
    "collective": Known(is_priced=True),  # and by what comes from other devices (search/program.py)
    "read rows": Known(takes_rows=True),
    "write rows": _UPDATE,
    "write piece": _UPDATE,
    "start": Known(is_priced=True),
    "slice[": dataclasses.replace(_LIGHT, is_placement=True),
    "stack": Known(is_placement=True),
    "columns[": Known(is_view=True, is_light=True, is_priced=True, takes_rows=True),
    "iota[": _LIGHT,
    "random_bits[": Known(is_priced=True, flops=_flops_of_bits),
    "gather[": Known(is_priced=True, is_placement=True),
    "scatter[": _UPDATE,
    # Of panels.py.
    **dict.fromkeys(
        ("cholesky[", "triangular_solve["),
        dataclasses.replace(_UPDATE, flops=_panel_flops),
    ),
    "dot_general[": dataclasses.replace(_UPDATE, flops=_panel_product_flops),
    "transpose[": _UPDATE,
    "combine[": Known(is_light=True, is_priced=True, is_placement=True, overwrites="all"),
}
"""By the primitive's name; of a name with a bracket what stands before it, and the bracket."""


def of(equation: Equation) -> Known:
    """What is known of an equation's operation."""
    return known(equation.operation.name)


@functools.cache
def known(name: str) -> Known:
    """The same by an operation's name."""
    kind, bracket, _ = name.partition("[")
    return TABLE.get(kind + bracket, _NOTHING)


def is_view(equation: Equation) -> bool:
    """Whether each reader repeats the operation rather than read its result from memory."""
    found = of(equation).is_view
    return found if isinstance(found, bool) else found(equation)


def copied_bytes(equation: Equation) -> int:
    """Bytes of operands and results that an equation keeps in another order while it runs."""
    copies = of(equation).copies
    return 0 if copies is None else copies(equation)


def working_set(equation: Equation) -> int:
    """Bytes of everything that one operation reads and writes, and of what it copies."""
    values = (*equation.values(), *equation.outputs)
    return sum(v.num_bytes() for v in values) + copied_bytes(equation)


def flops(
    name: str, params: dict[str, Any], operands: Sequence[Any], results: Sequence[Any]
) -> float:
    """Floating-point operations: exact for products, one an element elsewhere."""
    rule = known(name).flops
    return _elements(results) if rule is None else rule(params, operands, results)


def ways(equation: Equation) -> list[Way]:
    """Every way that is known here to compute an equation part by part."""
    known = of(equation)
    if known.ways is None or len(equation.outputs) != 1 and not known.has_several:
        return []
    return list(known.ways(equation))


def tilings(equation: Equation, count: int, known: Sequence[Way] | None = None) -> list[Way]:
    """Those that give `count` equal tiles.

    Args:
      known: of these ways; None: of all.
    """
    return [
        way
        for way in (ways(equation) if known is None else known)
        if all(
            size >= count and size % count == 0
            for size in (*way.inside, *(size for _, size in way.cut(equation)))
        )
    ]
