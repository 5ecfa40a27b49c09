"""`ragged_dot` by blocks of rows, where XLA multiplies every row with every group's matrix.

On a CPU `jax.lax.ragged_dot` (m, k) x (g, k, n) is made of a dense product: g copies of the rows,
zero where they are not the group's, so g times the work and m x g x k numbers. Rows are sorted by
group, so they are typed rows (typed.py) whose type is known by counting: blocks of one group each,
a matrix a block. It is right as typed products are; rows behind the last group are zero, as they
are in JAX. Derivatives are ragged products, too.

A matrix is gathered for each block, so blocks are as large as the model of the device wants them:
small ones have few empty slots, large ones few matrices.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload.capture import cost
from jaxoffload.capture.flat import Equation, Operation
from jaxoffload.rewrite import typed

NAME = "ragged_dot_general"
_BETTER = 0.95
_LETTERS = "abcdefghijklmnopqrstuvw"


@dataclasses.dataclass(frozen=True, slots=True)
class _Product:
    """A ragged product of one of two forms, by the letters of its dimensions: rows are "y" and
    groups are "z", of the matrices or, where it sums over rows, of the result.

    Attributes:
      left, right, out: a letter for each dimension.
      sizes: of the letters.
    """

    left: str
    right: str
    out: str
    sizes: dict[str, int]

    @property
    def rows(self) -> int:
        return self.sizes["y"]

    @property
    def groups(self) -> int:
        return self.sizes["z"]

    @property
    def sums_rows(self) -> bool:
        return "y" not in self.out

    def count(self, letters: str) -> int:
        """Elements of so many dimensions."""
        return math.prod(self.sizes[x] for x in letters)

    def expanded(self) -> int:
        """Elements of the copies of rows that XLA's dense product makes on a CPU."""
        copied = self.count(self.left) + (self.count(self.right) if self.sums_rows else 0)
        return self.groups * copied

    def flops(self, rows: int) -> float:
        every = set(self.left + self.right) - {"y", "z"}
        return 2.0 * rows * self.count("".join(every))


def _product_of(e: Equation) -> _Product | None:
    """The product that an equation is; None where it has batches, or is no such product."""
    params = e.operation.params
    numbers = params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    left, right, sizes = (x.aval for x in e.inputs)
    if lb or rb or params["group_offset"] is not None or params["out_sharding"] is not None:
        return None
    if len(numbers.lhs_ragged_dimensions) != 1 or sizes.ndim != 1:
        return None
    (ragged,) = numbers.lhs_ragged_dimensions
    letters = iter(_LETTERS)
    names = ["y" if d == ragged else next(letters) for d in range(left.ndim)]
    others: list[str] = ["" for _ in range(right.ndim)]
    for a, b in zip(lc, rc, strict=True):
        others[b] = names[a]
    for d in numbers.rhs_group_dimensions:
        others[d] = "z"
    others = [x or next(letters) for x in others]
    free = [x for d, x in enumerate(names) if d not in lc]
    free += [x for d, x in enumerate(others) if d not in rc and x != "z"]
    if ragged in lc:
        if numbers.rhs_group_dimensions:
            return None
        free = ["z", *free]
    elif len(numbers.rhs_group_dimensions) != 1:
        return None
    known = dict(zip(names, left.shape, strict=True)) | dict(zip(others, right.shape, strict=True))
    known["z"] = sizes.shape[0]
    return _Product("".join(names), "".join(others), "".join(free), known)


def expands_to(eqn: Any) -> int:
    """Bytes of the copies that a jaxpr's equation makes on a CPU; 0 where it makes none."""
    if eqn.primitive.name != NAME:
        return 0
    found = _product_of(Equation(Operation(eqn), tuple(eqn.invars), tuple(eqn.outvars)))
    return 0 if found is None else found.expanded() * eqn.invars[0].aval.dtype.itemsize


def typed_products(equations: list[Equation], rates: cost.Rates) -> list[Equation]:
    """Equations with ragged products by blocks, where that takes less time. Those that were given
    know from now on what they cost."""
    if not rates.is_host:
        return equations  # elsewhere XLA has kernels for them
    return [_by_blocks(e, rates) if e.operation.name == NAME else e for e in equations]


def _by_blocks(e: Equation, rates: cost.Rates) -> Equation:
    found = _product_of(e)
    if found is None or not found.rows or not found.groups:
        return e
    item = e.inputs[0].aval.dtype.itemsize
    plain = sum(v.num_bytes() for v in (*e.values(), *e.outputs))
    e.flops, e.traffic = found.groups * found.flops(found.rows), plain + 2 * item * found.expanded()
    e.seconds = None

    def work(block: int) -> tuple[float, int]:
        blocks = typed.num_blocks(found.rows, found.groups, block)
        matrix = found.count(found.out if found.sums_rows else found.right) // found.groups
        copied = found.count(found.left) + found.count(found.right if found.sums_rows else "y")
        slots = blocks * block
        traffic = plain + 2 * item * (blocks * matrix + copied * slots // found.rows)
        return found.flops(slots), traffic

    sizes = [2**i for i in range(3, max(4, found.rows.bit_length() + 1))]
    took = {b: float(rates.kernel_seconds(*work(b))) for b in sizes}
    block = min(took, key=lambda b: took[b])
    if took[block] > _BETTER * cost.seconds(e, rates):
        return e
    out = e.outputs[0].aval
    params = e.operation.params
    how = (params["precision"], params["preferred_element_type"])

    def function(left: Any, right: Any, sizes: Any) -> Any:
        return _computed(found, block, out.dtype, *how, left, right, sizes)

    parts = dataclasses.astuple(found)[:3], tuple(found.sizes.items()), block, str(out.dtype), how
    operation = Operation.of_function("ragged", function, e.operation.eqn, str(parts))
    made = Equation(operation, e.inputs, e.outputs)
    made.flops, made.traffic = work(block)
    return made


def _computed(
    found: _Product, block: int, dtype: Any, precision: Any, wanted: Any, left: Any, right: Any,
    sizes: Any,
) -> Any:  # fmt: skip
    row_of, slot_of, kind_of = typed.groups_of_sizes(sizes, found.rows, block)
    left = jnp.moveaxis(left, found.left.index("y"), 0)
    a = "y" + found.left.replace("y", "")
    if found.sums_rows:
        # Parts of a sum over rows are added: none is rounded to fewer digits than float32's.
        if wanted is None and jnp.issubdtype(dtype, jnp.floating):
            wanted = jnp.promote_types(dtype, jnp.float32)
        right = jnp.moveaxis(right, found.right.index("y"), 0)
        b = "y" + found.right.replace("y", "")
        made = typed.outer_sums(
            left, right, row_of, kind_of, f"{a},{b}->{found.out}", found.groups,
            precision=precision, preferred_element_type=wanted,
        )  # fmt: skip
        return made.astype(dtype)
    right = jnp.moveaxis(right, found.right.index("z"), 0)
    b, out = "z" + found.right.replace("z", ""), "y" + found.out.replace("y", "")
    slot_of = jnp.minimum(slot_of, len(row_of) - 1)
    made = typed.product(
        left, right, row_of, slot_of, kind_of, f"{a},{b}->{out}",
        precision=precision, preferred_element_type=wanted,
    )  # fmt: skip
    there = lax.iota(jnp.int32, found.rows) < jnp.sum(sizes)
    made = jnp.where(lax.expand_dims(there, range(1, made.ndim)), made, jnp.zeros((), made.dtype))
    return jnp.moveaxis(made.astype(dtype), 0, found.out.index("y"))
