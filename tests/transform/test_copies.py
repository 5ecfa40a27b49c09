"""Offloaded functions are copied and pickled like functions."""

import concurrent.futures
import copy
import functools
import multiprocessing
import pickle
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo

pytestmark = pytest.mark.filterwarnings("ignore:.*everything fits:jaxoffload.OffloadWarning")
X = np.arange(12, dtype=np.float32).reshape(3, 4)
BUDGET = 1 << 16


@functools.partial(jo.offload, device_memory=BUDGET, static_argnums=1, donate_argnames="x")
def named(x, power):
    return jnp.sin(x) ** power


class Model:
    def __init__(self):
        self.scale = np.float32(3)
        self.step = jo.offload(self.scaled, device_memory=BUDGET)

    def scaled(self, x):
        return x * self.scale

    @functools.partial(jo.offload, device_memory=None, cut="always", static_argnums=0)
    def method(self, x):
        return x + self.scale


def plain(x, power):
    return jnp.cos(x) ** power


def test_one_that_its_name_means_is_itself():
    for step in (named, Model.method):
        assert pickle.loads(pickle.dumps(step)) is step
        assert copy.deepcopy(step) is step and copy.copy(step) is step


def test_a_notebooks_is_no_name_elsewhere(monkeypatch):
    notebook = types.ModuleType("__main__")
    step = jo.offload(lambda x: x, device_memory=BUDGET)
    notebook.step, step.__module__, step.__qualname__ = step, "__main__", "step"
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    assert not isinstance(step.__reduce__(), str)
    notebook.__file__ = "train.py"
    assert step.__reduce__() == "step"


def test_another_is_made_again_with_its_options(tmp_path):
    step = jo.offload(
        plain, device_memory=BUDGET, host_memory="1GiB", static_argnums=1, donate_argnums=0,
        launch=jo.policies.random(3, delays=1e-4), cut="always", disk=tmp_path,
    )  # fmt: skip
    want = jnp.cos(X) ** 2
    np.testing.assert_allclose(step(jnp.asarray(X), 2), want, rtol=1e-6)
    for other in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step), copy.copy(step)):
        assert other is not step and repr(other) == repr(step)
        assert other._options == step._options and other.__name__ == "plain"
        assert other.last_run is None and other.profile == step.profile
        given = jnp.asarray(X)
        np.testing.assert_allclose(other(given, 2), want, rtol=1e-6)
        assert given.is_deleted()


def test_a_copy_of_a_bound_method_is_bound_to_the_copy():
    model = Model()
    np.testing.assert_array_equal(model.step(X), X * 3)
    other = copy.deepcopy(model)
    other.scale = np.float32(5)
    np.testing.assert_array_equal(other.step(X), X * 5)
    np.testing.assert_array_equal(model.step(X), X * 3)
    np.testing.assert_array_equal(model.method(X), X + 3)


def test_in_another_process():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        for step in (named, jo.offload(plain, device_memory=BUDGET, static_argnums=1)):
            want = step(jnp.asarray(X), 3)
            np.testing.assert_array_equal(pool.submit(step, X, 3).result(), want)


def test_inside_of_transformations():
    step = copy.deepcopy(jo.offload(lambda x: x * x, device_memory=BUDGET, cut="always"))
    np.testing.assert_array_equal(jax.jit(step)(X), X * X)
    np.testing.assert_array_equal(jax.grad(lambda x: step(x).sum())(jnp.asarray(X)), 2 * X)
