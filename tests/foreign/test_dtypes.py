"""Every dtype that JAX has on a CPU is offloaded as jit computes it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxoffload as jo
from tests.foreign import judge

# XLA compiles float6_e2m3fn and float6_e3m2fn for no CPU.
SHARED_BYTES = ["int2", "int4", "uint2", "uint4", "float4_e2m1fn"]
OFFLOADED = """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64
    complex64 complex128 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz
    float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
""".split()


def function(x):
    """Values of the dtype are argument, intermediate and result."""
    y = jnp.flip(x, 0)
    wide = jnp.real(x).astype(jnp.float32) + jnp.real(y).astype(jnp.float32)
    return y.T.reshape(-1), wide.astype(x.dtype), jnp.sin(wide)


def array(name):
    values = np.array([[1, 0, 1], [0.5, 2, 4]])
    return values.astype(getattr(ml_dtypes, name, name))


@pytest.mark.drawn(9)
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("name", OFFLOADED + SHARED_BYTES)
def test_dtype_equals_jit(name):
    with jax.enable_x64(True):
        x = array(name)
        want = jax.jit(function)(x)
        plan = jo.offload(function, device_memory=None, vertex_memory=1).plan(x)
        least = plan.min_device_memory
        for options in ({"device_memory": None}, {"device_memory": least, "vertex_memory": 1}):
            offloaded = jo.offload(function, check=True, **options)
            for call in (offloaded, jax.jit(offloaded)):
                for w, g in zip(want, call(x), strict=True):
                    assert not judge.bit_difference(np.asarray(w), np.asarray(g))
