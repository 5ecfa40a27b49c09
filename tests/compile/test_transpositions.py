"""Transpositions as they are lowered for the CPU: a few rows at a time."""

import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jaxoffload as jo
from jaxoffload import _jax_compat as compat
from jaxoffload.compile import transpositions
from jaxoffload.compile.lower import RULES


@st.composite
def transpositions_of(draw):
    shape = tuple(
        draw(st.lists(st.sampled_from((1, 2, 5, 16, 17, 40, 64)), min_size=2, max_size=4))
    )
    return shape, tuple(draw(st.permutations(range(len(shape)))))


@given(transpositions_of(), st.sampled_from([np.float32, np.int32, np.complex64]))
@settings(max_examples=50, deadline=None)
def test_every_element_comes_to_its_place(case, dtype):
    shape, order = case
    assume(math.prod(shape) < 2**17)
    x = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    with mock.patch.object(transpositions, "LEAST_SIZE", 0):
        found = jax.jit(lambda x: transpositions.transpose(x, permutation=order))(x)
    np.testing.assert_array_equal(found, x.transpose(order))


CASES = {
    "matrix": ((256, 512), (1, 0), np.float32, True),
    "of each batch": ((3, 256, 512), (0, 2, 1), np.float32, True),
    "all the other way": ((64, 32, 128), (2, 1, 0), np.float32, True),
    "rows stay rows": ((64, 32, 128), (1, 0, 2), np.float32, False),
    "few rows": ((16, 8192), (1, 0), np.float32, False),
    "few columns": ((8192, 8), (1, 0), np.float32, False),
    "small ones": ((64, 64, 128), (0, 2, 1), np.float32, False),
    "small": ((64, 64), (1, 0), np.float32, False),
    "bytes": ((256, 512), (1, 0), np.int8, False),
    "halves": ((256, 512), (1, 0), jnp.bfloat16, False),
}


@pytest.mark.parametrize("name", CASES)
def test_only_what_is_slow_is_made_in_a_loop(name):
    shape, order, dtype, is_loop = CASES[name]
    x = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    traced = jax.jit(lambda x: x.transpose(order)).trace(x)
    assert ("stablehlo.while" in compat.lower(traced, "cpu", RULES).as_text()) == is_loop
    found = jo.offload(lambda x: x.transpose(order), device_memory=None)(x)
    np.testing.assert_array_equal(found, x.transpose(order))


def test_keys():
    keys = jax.random.split(jax.random.key(0), (300, 300))
    found = jo.offload(lambda keys: keys.T, device_memory=None)(keys)
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys.T))
