"""Packed matrices against the package gguf, NF4's definition and plain matrices."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.finetune import quantize
from jaxoffload.finetune.quantize import Quantized

SOURCE = np.random.default_rng(0)


def normal(*shape):
    return SOURCE.standard_normal(shape).astype(np.float32)


def q4_1(matrix):
    """Blocks of (float16 step, float16 least, 16 bytes of two elements each), packed here."""
    blocks = matrix.reshape(*matrix.shape[:-1], -1, 32)
    least = blocks.min(-1, keepdims=True).astype(np.float16)
    step = ((blocks.max(-1, keepdims=True) - least) / 15).astype(np.float16)
    codes = np.rint((blocks - least) / step).clip(0, 15).astype(np.uint8)
    packed = codes[..., :16] | codes[..., 16:] << 4
    heads = [x.view(np.uint8) for x in (step, least)]
    found = np.concatenate([*heads, packed], -1)
    return Quantized(found.reshape(*matrix.shape[:-1], -1), None, "q4_1", "float32")


PACKED = {
    "q4_1": q4_1,
    "int8": lambda m: quantize.quantize(m, "int8"),
    "int8 in blocks": lambda m: quantize.quantize(m, "int8", block=32),
    "nf4": lambda m: quantize.quantize(m, "nf4"),
}


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_blocks_of_gguf_are_unpacked_bit_for_bit(kind):
    quants = pytest.importorskip("gguf.quants", reason="pip install 'jaxoffload[finetune]'")
    types = pytest.importorskip("gguf").GGMLQuantizationType
    packed = quants.quantize(normal(24, 96) * 3, types[kind.upper()])
    want = quants.dequantize(packed, types[kind.upper()])
    got = Quantized(packed, None, kind, "float32")
    assert got.shape == (24, 96) and got.nbytes == packed.nbytes
    np.testing.assert_array_equal(jax.jit(Quantized.dequantize)(got), want)


def test_the_sixteen_values_are_those_of_the_normal_distribution():
    inverse = statistics.NormalDist().inv_cdf
    ends = 0.9677083
    above = [inverse(p) for p in np.linspace(ends, 0.5, 9)[:-1]]
    below = [-inverse(p) for p in np.linspace(ends, 0.5, 8)[:-1]]
    want = np.array(sorted([*above, 0.0, *below])) / max(above)
    np.testing.assert_allclose(quantize.NF4, want, atol=1e-6)


def test_nf4_takes_the_nearest_value_of_its_block():
    matrix = normal(3, 5, 128)
    got = np.asarray(quantize.quantize(matrix, "nf4").dequantize())
    for index in np.ndindex(3, 5, 128):
        *row, i = index
        block = matrix[(*row, slice(i // 64 * 64, i // 64 * 64 + 64))]
        choices = np.array(quantize.NF4) * np.abs(block).max()
        nearest = choices[np.abs(choices - matrix[index]).argmin()]
        np.testing.assert_allclose(got[index], nearest, rtol=1e-6, atol=1e-12)


def test_int8_is_off_by_half_a_step_at_most():
    matrix = normal(6, 40)
    matrix[2] = 0
    step = np.abs(matrix).max(-1, keepdims=True) / 127
    packed = quantize.quantize(matrix, "int8")
    assert packed.packed.dtype == np.int8 and packed.scales.shape == (6, 1)
    assert (np.abs(packed.dequantize() - matrix) <= 0.5001 * step).all()


@pytest.mark.parametrize("kind", PACKED)
def test_it_stands_for_its_matrix(kind):
    packed = PACKED[kind](normal(96, 64))
    plain = np.asarray(packed.dequantize())
    x, y = normal(2, 5, 64), normal(2, 5, 96)

    @jax.jit
    def uses(packed, x, y, rows):
        assert packed.shape == (96, 64) and packed.T.shape == (64, 96) and packed.ndim == 2
        return x @ packed.T, y @ packed, packed[rows]

    rows = np.array([[3, 0], [95, 3]])
    with jax.default_matmul_precision("highest"):
        got = uses(packed, x, y, rows)
    np.testing.assert_allclose(got[0], x @ plain.T, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(got[1], y @ plain, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(got[2], plain[rows])
    np.testing.assert_allclose(x[0] @ packed.T, x[0] @ plain.T, rtol=1e-5, atol=1e-4)
    order = SOURCE.permutation(96)
    np.testing.assert_array_equal(packed.permuted(order).dequantize(), plain[order])


@pytest.mark.parametrize("kind", PACKED)
def test_gradients_through_a_scan_keep_the_packed_bytes_only(kind):
    packed = jax.tree.map(jnp.asarray, PACKED[kind](normal(5, 64, 64)))
    plain = packed.dequantize()
    x = normal(7, 64)

    def loss(scale, stack, x):
        def layer(x, given):
            matrix, factor = given
            return jnp.tanh(x @ matrix.T) * factor, None

        return jnp.sum(jax.lax.scan(layer, x, (stack, scale))[0] ** 2)

    scale = jnp.ones(5)
    grad = jax.grad(loss)
    np.testing.assert_allclose(
        jax.jit(grad)(scale, packed, x), jax.jit(grad)(scale, plain, x), rtol=1e-4
    )
    kept = [
        out.aval.shape
        for eqn in jax.make_jaxpr(grad)(scale, packed, x).eqns
        if eqn.primitive.name == "scan"
        for out in eqn.outvars
    ]
    assert kept and (5, 64, 64) not in kept


def test_half_precision_weights_stand_for_half_precision():
    packed = quantize.quantize(jnp.asarray(normal(8, 64), jnp.bfloat16), "int8")
    assert packed.dtype == jnp.bfloat16 and packed.dequantize().dtype == jnp.bfloat16
    assert (jnp.ones((2, 64), jnp.bfloat16) @ packed.T).dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", ["q4_1", "nf4"])
def test_only_packed_bytes_cross_the_link(kind):
    """At a part of what the unpacked matrices take, from host memory, with jit's results."""
    count, width = 6, 256
    packed = PACKED[kind](normal(count, width, width) / 16)
    x = normal(16, width)

    def layers(stack, x):
        return jax.lax.scan(lambda x, m: (jnp.tanh(x @ m.T), None), x, stack)[0]

    want = jax.jit(layers)(packed, x)
    step = jo.offload(layers, device_memory=count * width * width, cut="always")
    got = step(jo.host_put(packed), x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert packed.nbytes <= step.last_run.bytes_reloaded <= packed.nbytes + 2 * x.nbytes


@pytest.mark.parametrize(
    "matrix, kind, match",
    [
        (np.ones((2, 64), np.float32), "int3", "kind='int3'"),
        (np.ones((2, 60), np.float32), "nf4", "rows of 60"),
        (np.full((2, 64), np.nan, np.float32), "int8", "not finite"),
    ],
)
def test_what_cannot_be_packed_is_refused(matrix, kind, match):
    with pytest.raises(ValueError, match=match):
        quantize.quantize(matrix, kind)


def test_rows_of_a_flipped_matrix_are_refused():
    with pytest.raises(TypeError, match="only rows"):
        PACKED["q4_1"](normal(8, 32)).T[np.array([1])]
