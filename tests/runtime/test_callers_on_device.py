"""Arrays on a device as DeviceMemory makes and takes them: JAX's own, on CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoffload.runtime import callers_on_device
from jaxoffload.runtime.callers import address_of
from jaxoffload.runtime.callers_on_device import DeviceMemory

SHAPES = [jax.ShapeDtypeStruct(s, d) for s, d in (
    [((64,), np.float32)] * 5 + [((), np.int32)] * 2 + [((0, 3), np.float32)] * 2
    + [((4, 4), jnp.bfloat16), ((), np.bool_)]
)]  # fmt: skip


@pytest.fixture(params=[1, 2])
def memory(request):
    return DeviceMemory(tuple(jax.devices()[: request.param]))


def test_new_arrays_have_memory_of_their_own(memory):
    on = [memory._devices[i % len(memory._devices)] for i in range(len(SHAPES))]
    made = memory.empty(SHAPES, on)
    assert [(x.shape, x.dtype) for x in made] == [(s.shape, s.dtype) for s in SHAPES]
    assert [x.devices() for x in made] == [{device} for device in on]
    addresses = [address_of(x) for x in made if x.nbytes]
    assert len(set(addresses)) == len(addresses) == len(SHAPES) - 2
    assert memory.empty([], []) == []


def test_should_xla_give_two_results_one_memory_they_are_made_one_by_one(monkeypatch):
    one = jnp.zeros(64)
    monkeypatch.setattr(callers_on_device, "_all_empty", lambda shapes: lambda: [one] * len(shapes))
    made = DeviceMemory(tuple(jax.devices()[:1])).empty(SHAPES[:3], jax.devices()[:1] * 3)
    assert len({address_of(x) for x in made}) == 3


def test_what_is_donated_is_taken_over_where_it_is(memory):
    devices = memory._devices
    given = [jax.device_put(jnp.arange(64.0) + i, devices[i % len(devices)]) for i in range(6)]
    before = [address_of(x) for x in given]
    taken = memory.take_over(list(given))
    assert [address_of(x) for x in taken] == before and all(x.is_deleted() for x in given)
    for i, array in enumerate(taken):
        np.testing.assert_array_equal(array, np.arange(64.0) + i)
    assert memory.take_over([]) == []
