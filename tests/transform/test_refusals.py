"""What a plan cannot be made for: run whole where nothing demands a plan, else refused by name."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import checkify, io_callback, serialize_executable

import jaxoffload as jo

pytestmark = pytest.mark.filterwarnings("ignore:.*everything fits:jaxoffload.OffloadWarning")
X = jnp.arange(24, dtype=jnp.float32).reshape(4, 6) / 7


def free(function, **options):
    return jo.offload(function, device_memory=None, **options)


def small(function, **options):
    return jo.offload(function, device_memory=64, **options)


def test_export_without_a_budget_and_its_refusal_with_one():
    f = free(lambda x: jnp.tanh(x) * 2)
    exported = export.export(jax.jit(f))(X)
    np.testing.assert_allclose(exported.call(X), jnp.tanh(X) * 2, rtol=1e-6)
    budget = jo.offload(lambda x: jnp.tanh(x) * 2, device_memory="1MiB")
    with pytest.raises(NotImplementedError, match="exported with a budget.*exported.call"):
        export.export(jax.jit(budget))(X)
    assert jo.offload(exported.call, device_memory=None)(X).shape == X.shape


def test_symbolic_shapes():
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b, 6"), jnp.float32)
    exported = export.export(jax.jit(free(lambda batch: batch * 2)))(shape)
    np.testing.assert_allclose(exported.call(X), X * 2)
    with pytest.raises(TypeError, match=r"batch has the shape \(b, 6\).*device_memory=None"):
        export.export(jax.jit(small(lambda batch: batch * 2)))(shape)


def test_a_compiled_program_with_a_plan_is_not_serialized():
    compiled = jax.jit(free(lambda x: x * 2)).lower(X).compile()
    with pytest.raises((TypeError, pickle.PicklingError), match="holds a plan.*cannot be serial"):
        serialize_executable.serialize(compiled)


def test_refs_of_the_caller():
    def f(ref, x):
        ref[...] += x
        return x * 2

    for function in (jax.jit(f), free(f)):
        ref = jax.new_ref(X)
        np.testing.assert_array_equal(function(ref, X), X * 2)
        np.testing.assert_array_equal(ref[...], X * 2)
    with pytest.raises(TypeError, match="ref is a Ref.*Pass its value"):
        small(f)(jax.new_ref(X), X)


def test_refs_that_a_function_closes_over():
    for wrap in (jax.jit, free):
        ref = jax.new_ref(X)

        def f(x, ref=ref):
            ref[...] += x
            return x * 2

        function = wrap(lambda x: f(x))
        np.testing.assert_array_equal(function(X), X * 2)
        np.testing.assert_array_equal(function(X), X * 2)
        np.testing.assert_array_equal(ref[...], X * 3)
    with pytest.raises(jo.CaptureError, match=r"test_refusals.py:\d+.*Ref that is not the func"):
        small(lambda x: f(x))(X)


def _with_callback(seen):
    def f(x):
        return io_callback(lambda v: seen.append(1) or np.asarray(v), x, x * 2, ordered=True)

    return f


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["direct", "in jit"])
def test_ordered_effects(how, capfd):
    def f(x):
        jax.debug.print("the sum is {s:.1f}", s=x.sum(), ordered=True)
        return x * 2

    np.testing.assert_array_equal(how(free(f))(X), X * 2)
    jax.effects_barrier()
    assert "the sum is 39.4" in capfd.readouterr().out
    seen = []
    np.testing.assert_array_equal(how(free(_with_callback(seen)))(X), X * 2)
    jax.effects_barrier()
    assert seen == [1]
    for g, name in ((f, "debug"), (_with_callback(seen), "io_callback")):
        if how is jax.jit:
            match = rf"{name}.*test_refusals.py:\d+.*outside of jax.jit.*whole, which"
            with pytest.raises(jo.CaptureError, match=match):
                how(small(g))(X)
        else:
            with pytest.raises(jo.PlanError, match="below the smallest feasible"):
                how(small(g))(X)


def test_what_cannot_be_cut_runs_whole_within_its_budget():
    seen = []
    f = _with_callback(seen)
    with pytest.raises(jo.CaptureError) as caught:
        jax.jit(small(f))(X)
    least = int(str(caught.value).split("device_memory=")[1].split()[0])
    np.testing.assert_array_equal(jax.jit(jo.offload(f, device_memory=least))(X), X * 2)
    with pytest.raises(jo.CaptureError):
        jax.jit(jo.offload(f, device_memory=least - 1))(X)


def test_a_check_that_nobody_made_a_result():
    def f(x):
        checkify.check(x.sum() > 0, "no")
        return x * 2

    with pytest.raises(ValueError, match="was not functionalized"):
        free(f)(X)
    with pytest.raises(jo.CaptureError, match="offload.checkify.checkify.f"):
        small(f)(X)


def test_a_named_axis_that_nobody_names():
    with pytest.raises(NameError, match="unbound axis name"):
        free(lambda x: jax.lax.psum(x, "nobody"))(X)


def test_messages_name_the_users_function_and_arguments():
    def pick(params, flag, *, mode):
        return params["w"] if flag.sum() > 0 else mode

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"pick at (.|\n)*argument flag"):
        small(pick, static_argnames="mode")({"b": X, "w": X}, X, mode=3)
    with pytest.raises(TypeError, match=r"offload\(words\): result\['b'\]\[0\] is a str"):

        def words(x):
            return {"a": x, "b": ["text"]}

        small(words)(X)

    leaked = []
    small_leak = jo.offload(lambda x: (leaked.append(x), x * 2)[1], device_memory="1MiB")
    small_leak(X)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        leaked[0] + 1
