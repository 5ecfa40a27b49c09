"""Rows of tables that are cut along their rows: every device reads and writes its own, with jit's
results in bounds and beyond."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.capture.test_placing import LINE, SQUARE, run, same

TABLE = np.random.default_rng(0).standard_normal((256, 6)).astype(np.float32)
ROWS = np.array([3, 255, 0, 64, 63, 300, -1, -300], np.int32)
NEW = np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6)
MODES = ("clip", "fill", "promise_in_bounds")


def read(mode, table, rows):
    return table.at[rows].get(mode=mode)


def read_elements(mode, table, rows):
    return table.at[rows, jnp.abs(rows) % 7].get(mode=mode)


def read_words(mode, table, rows):
    return (table * 100).astype(jnp.int32).at[rows.astype(jnp.uint8)].get(mode=mode)


def write(how, mode, table, rows):
    return getattr(table.at[rows], how)(NEW, mode=mode)


FUNCTIONS = {
    **{f"read, {mode}": functools.partial(read, mode) for mode in MODES},
    "read elements": functools.partial(read_elements, "fill"),
    "read words": functools.partial(read_words, "clip"),
    **{f"{how}, fill": functools.partial(write, how, "fill") for how in ("set", "add", "multiply")},
    **{f"{how}, clip": functools.partial(write, how, "clip") for how in ("add", "max")},
}


@pytest.mark.parametrize("mesh, spec", [(LINE, P("x")), (SQUARE, P("y", "x"))], ids=["1", "2"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_rows_are_those_of_jit(function, mesh, spec):
    args = jnp.asarray(TABLE), jnp.asarray(ROWS)
    for of_rows in (P(), P("x")):
        found, _, counts = run(function, mesh, [spec, of_rows], *args)
        np.testing.assert_array_equal(found[0], jax.jit(function)(*args))
        moved = [bytes for each in counts.values() for bytes in each]
        assert max(moved, default=0) < TABLE.nbytes // 4, counts


def loss(table, rows):
    return (jnp.tanh(table[rows]) ** 2).sum()


def test_neither_table_nor_gradient_is_ever_whole():
    rows = ROWS % 256
    for mesh, spec in ((LINE, P("x")), (SQUARE, P(("x", "y"))), (SQUARE, P("x", "y"))):
        out_specs, counts = same(jax.grad(loss), mesh, [spec, P()], TABLE, rows)
        assert out_specs == (spec,)
        assert counts.keys() == {"sum"} and max(counts["sum"]) <= NEW.nbytes


def test_a_table_smaller_than_its_rows_is_gathered():
    rows = np.arange(1024, dtype=np.int32) % 16
    _, counts = same(lambda t, i: t[i] * 2, LINE, [P("x"), P("x")], TABLE[:16], rows)
    assert counts == {"gather": [TABLE[:16].nbytes // 4]}
