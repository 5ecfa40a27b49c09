"""Two programs that are easily taken for one, after one another in one process: each equals its own
`jax.jit`.

They differ in one ingredient: a constant that prints like another, a static argument that compares
equal to another, or a setting of JAX's. A failure names it.
"""

import collections
import dataclasses
import enum
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from tests.foreign import judge
from tests.foreign.programs import holes


def bits(pattern, dtype):
    return np.array(pattern, f"u{np.dtype(dtype).itemsize}").view(dtype)[()]


def ways(function, **options):
    """The function offloaded, in each way to call it."""
    free = jo.offload(function, device_memory=None, check=True, **options)
    fine = jo.offload(function, device_memory=None, vertex_memory=1, check=True, **options)
    jitted = jax.jit(
        free,
        static_argnums=options.get("static_argnums"),
    )
    return {"direct": free, "single operations": fine, "in jit": jitted}


def difference(want, got):
    """In words, between two outcomes of `judge.run`; "" if there is none. NaN equals NaN."""
    if want[0] is not None or got[0] is not None:
        if type(want[0]) is type(got[0]):
            return ""
        return f"{_outcome(got)}, where jit {_outcome(want)}"
    if jax.tree.structure(want[1]) != jax.tree.structure(got[1]):
        return f"{jax.tree.structure(got[1])}, not {jax.tree.structure(want[1])}"
    for (path, w), g in zip(
        jax.tree_util.tree_leaves_with_path(want[1]), jax.tree.leaves(got[1]), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if text := judge.bit_difference(w, g):
            return f"{name} {text}"
    return "" if want[2] == got[2] else f"weak types {got[2]}, not {want[2]}"


def _outcome(outcome):
    error = outcome[0]
    return "returns" if error is None else f"raises {type(error).__name__}: {str(error)[:200]}"


# Constants --------------------------------------------------------------------------------------

CONSTANTS = {
    "float32 that prints alike": (
        np.float32,
        [
            (0.0003, 0.000300004),
            (3.16227766e-4, 3.1623e-4),
            (np.float32(1 / 3), np.nextafter(np.float32(1 / 3), np.float32(1))),
            (np.float32(0.1), np.nextafter(np.float32(0.1), np.float32(0))),
            (1e-30, 1.000001e-30),
            (16777216.0, 16777214.0),
        ],
    ),
    "float64 that prints alike": (
        np.float64,
        [
            (math.pi, 3.14159265),
            (0.1, math.nextafter(0.1, 1)),
            (2.0**53, 2.0**53 + 2),
            (1e300, math.nextafter(1e300, 0)),
        ],
    ),
    "half that prints alike": (
        np.float16,
        [(np.float16(0.1), np.nextafter(np.float16(0.1), np.float16(1)))],
    ),
    "zero's sign": (np.float32, [(0.0, -0.0), (np.float32(0.0), np.float32(-0.0))]),
    "zero's sign in float64": (np.float64, [(0.0, -0.0)]),
    "infinity": (np.float32, [(math.inf, -math.inf), (math.inf, float(np.finfo("f4").max))]),
    "NaN's payload": (
        np.float32,
        [
            (bits(0x7FC00000, "f4"), bits(0x7FC00001, "f4")),
            (bits(0x7FC00000, "f4"), bits(0xFFC00000, "f4")),
        ],
    ),
    "NaN's payload in float64": (
        np.float64,
        [(bits(0x7FF8000000000000, "f8"), bits(0x7FF8000000000001, "f8"))],
    ),
    "denormal": (np.float32, [(1e-45, 3e-45), (1e-45, 0.0), (1.1754942e-38, 1.1754944e-38)]),
    "denormal in float64": (np.float64, [(5e-324, 1e-323)]),
    "int64 beyond float64": (
        np.int64,
        [(2**53, 2**53 + 1), (2**62, 2**62 + 1), (-(2**63), 2**63 - 1)],
    ),
    "int32 beyond float32": (np.int32, [(2**24, 2**24 + 1), (2**31 - 1, -(2**31))]),
    "small integer": (np.int8, [(1, -1), (127, -128)]),
    "unsigned integer": (np.uint32, [(np.uint32(2**32 - 1), np.uint32(2**32 - 2))]),
    "dtype of a NumPy scalar": (
        np.bool_,
        [
            (np.int8(1), np.int32(1)),
            (np.int16(1), np.float16(1)),
            (np.uint8(1), np.float32(1)),
            (np.bool_(True), np.int8(1)),
        ],
    ),
}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("kind", CONSTANTS)
@hypothesis.settings(
    max_examples=1,
    deadline=None,
    # Programs are small as they are drawn, and every step down would compile half a dozen.
    phases=[hypothesis.Phase.reuse, hypothesis.Phase.generate],
)
@hypothesis.given(data=st.data())
def test_constants_that_look_alike_are_told_apart(kind, data):
    dtype, pairs = CONSTANTS[kind]
    constants = data.draw(st.permutations([constant for pair in pairs for constant in pair]))
    name, make = data.draw(holes(dtype))
    x = (np.arange(30).reshape(5, 6) - 11).astype(dtype)
    jo.clear_caches()
    found = []
    with jax.enable_x64(np.dtype(dtype).itemsize == 8):
        for i, constant in enumerate(constants):
            function = make(constant)
            want = judge.run(jax.jit(function), x)
            hypothesis.assume(want[0] is None)
            for way, offloaded in ways(function).items():
                if text := difference(want, judge.run(offloaded, x)):
                    after = f" after {', '.join(map(repr, constants[:i]))}" if i else ""
                    found.append(f"{kind}: {constant!r}{after}, {name}, {way}: {text}")
    assert not found, "\n".join(found)


# Static arguments --------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Setting:
    value: object


class Text(str):
    pass


STATIC = {
    "int and float": (1, 1.0),
    "int and bool": (1, True),
    "float and bool": (1.0, True),
    "int and text": (1, "1"),
    "int and enum": (1, Colour.RED),
    "text and its subclass": ("1", Text("1")),
    "int and NumPy's": (1, np.int32(1)),
    "NumPy's of two dtypes": (np.float32(1), np.int8(1)),
    "tuples of int and float": ((1,), (1.0,)),
    "nested tuples": (((1,), 2), ((True,), 2)),
    "frozen dataclasses": (Setting(1), Setting(1.0)),
    "zero's sign": (0.0, -0.0),
    "zero's sign in a tuple": ((0.0,), (-0.0,)),
    "NaN": (math.nan, float("nan")),
    "complex and float": (1.0, 1 + 0j),
    "None and False": (None, False),
    "dtypes": (np.dtype("float16"), "float16"),
}


def depending_on_static():
    """A function that no jit knows yet. Its results tell the static argument's value, its type and
    the sign of a zero; none is weakly typed."""

    def function(x, n):
        while isinstance(n, tuple | Setting):
            n = n[0] if isinstance(n, tuple) else n.value
        text = f"{type(n).__name__}{n!r}"
        number = n if isinstance(n, int | float | complex | np.generic) else len(text)
        product = x * number
        return (
            product.astype(product.dtype),
            x + len(text),
            jnp.float32(math.copysign(1, complex(number).real)),
        )

    return function


@pytest.mark.drawn(17)
@pytest.mark.parametrize("by", ["position", "name"])
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("kind", STATIC)
def test_static_arguments_that_look_alike_are_told_apart(kind, swapped, by):
    """Where jit itself takes two for one, as it does (1,) and (1.0,), its answer is right, too."""
    pair = STATIC[kind][::-1] if swapped else STATIC[kind]
    x = np.arange(6, dtype=np.int32)
    found = []
    option = {"static_argnums": 1} if by == "position" else {"static_argnames": "n"}
    jitted = jax.jit(depending_on_static(), **option)
    free = jo.offload(depending_on_static(), device_memory=None, check=True, **option)
    ways = {"direct": free, "in jit": jax.jit(free, **option)}
    for value in pair:
        dynamic, named = ((x, value), {}) if by == "position" else ((x,), {"n": value})
        alone = judge.run(jax.jit(depending_on_static(), **option), *dynamic, **named)
        shared = judge.run(jitted, *dynamic, **named)
        for way, offloaded in ways.items():
            got = judge.run(offloaded, *dynamic, **named)
            if (text := difference(alone, got)) and difference(shared, got):
                found.append(f"{kind}: {value!r} of {pair}, {way}: {text}")
    assert not found, "\n".join(found)


# Weak types --------------------------------------------------------------------------------------

WEAK = {
    "constant": (lambda: 1.5, ()),
    "Python scalar passed through": (lambda x: x, (2.0,)),
    "Python scalar times a constant": (lambda x: x * 2, (3,)),
    "broadcast": (lambda: jnp.broadcast_to(2.0, (3,)), ()),
    "loop's counter": (lambda: jax.lax.fori_loop(0, 3, lambda i, n: n + i, 0), ()),
    "strong array": (lambda x: x * 2.0, (np.float32(1),)),
}


@pytest.mark.parametrize("kind", WEAK)
def test_weak_types_are_kept(kind):
    function, args = WEAK[kind]
    want = judge.run(jax.jit(function), *args)
    found = [
        f"{kind}, {way}: {text}"
        for way, offloaded in ways(function).items()
        if (text := difference(want, judge.run(offloaded, *args)))
    ]
    assert not found, "\n".join(found)


# Settings ---------------------------------------------------------------------------------------


def fresh(function):
    """The same function as another object: jit keeps what it compiled for a function."""
    return lambda *args: function(*args)


Case = collections.namedtuple("Case", "settings function args")

KEY_WORDS = np.array([7, 9], np.uint32)


def bits_of_key(words):
    return jax.random.bits(jax.random.wrap_key_data(words, impl="threefry2x32"), (6,))


MATRIX = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
SETTINGS = {
    "enable_x64, astype": Case(
        [lambda: jax.enable_x64(False), lambda: jax.enable_x64(True)],
        lambda x: x.astype(float) / 3,
        (np.float32(2),),
    ),
    "enable_x64, arange": Case(
        [lambda: jax.enable_x64(False), lambda: jax.enable_x64(True)],
        lambda: jnp.arange(3) * 1.5,
        (),
    ),
    "enable_x64, literal": Case(
        [lambda: jax.enable_x64(False), lambda: jax.enable_x64(True)],
        lambda x: jnp.full((2,), 1e-9) + x,
        (np.float32(1),),
    ),
    "enable_x64, Python scalar": Case(
        [lambda: jax.enable_x64(False), lambda: jax.enable_x64(True)], lambda x: x * 2, (3.5,)
    ),
    "threefry_partitionable": Case(
        [lambda: jax.threefry_partitionable(False), lambda: jax.threefry_partitionable(True)],
        bits_of_key,
        (KEY_WORDS,),
    ),
    # A CPU has one precision for all that it knows, and jit refuses what it does not know.
    "default_matmul_precision": Case(
        [
            lambda: jax.default_matmul_precision("highest"),
            lambda: jax.default_matmul_precision("TF32_TF32_F32"),
        ],
        lambda x: x @ x,
        (np.eye(4, dtype=np.float32),),
    ),
    "numpy_rank_promotion": Case(
        [lambda: jax.numpy_rank_promotion("allow"), lambda: jax.numpy_rank_promotion("raise")],
        lambda x: x + x[0],
        (MATRIX,),
    ),
    "numpy_dtype_promotion": Case(
        [
            lambda: jax.numpy_dtype_promotion("standard"),
            lambda: jax.numpy_dtype_promotion("strict"),
        ],
        lambda x: x + jnp.arange(8, dtype=jnp.int32)[None],
        (MATRIX,),
    ),
    "default_prng_impl": Case(
        [lambda: jax.default_prng_impl("threefry2x32"), lambda: jax.default_prng_impl("rbg")],
        lambda: jax.random.bits(jax.random.key(3), (6,)),
        (),
    ),
    "debug_nans": Case(
        [lambda: jax.debug_nans(False), lambda: jax.debug_nans(True)], jnp.log, (-MATRIX,)
    ),
    "debug_infs": Case(
        [lambda: jax.debug_infs(False), lambda: jax.debug_infs(True)],
        jnp.exp,
        (1e3 * MATRIX,),
    ),
}


@pytest.mark.drawn(8)
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_setting_around_the_call_is_followed(kind, swapped):
    """The same offloaded object under one setting, another and the first again.

    Where jit itself does not look at a setting, its answer is right, too.
    """
    case = SETTINGS[kind]
    contexts = case.settings[::-1] if swapped else case.settings
    jitted = jax.jit(fresh(case.function))
    offloaded = ways(fresh(case.function))
    found = []
    for i, context in enumerate([*contexts, contexts[0]]):
        with context():
            alone = judge.run(jax.jit(fresh(case.function)), *case.args)
            shared = judge.run(jitted, *case.args)
            for way, function in offloaded.items():
                got = judge.run(function, *case.args)
                if (text := difference(alone, got)) and difference(shared, got):
                    found.append(f"{kind}, setting {i}, {way}: {text}")
    assert not found, "\n".join(found)


WITHIN = {
    "threefry_partitionable": (
        bits_of_key,
        [lambda: jax.threefry_partitionable(False), lambda: jax.threefry_partitionable(True)],
        (KEY_WORDS,),
    ),
    "default_matmul_precision": (
        lambda x: x @ x,
        SETTINGS["default_matmul_precision"].settings,
        SETTINGS["default_matmul_precision"].args,
    ),
    "default_prng_impl": (
        lambda: jax.random.bits(jax.random.key(3), (6,)),
        SETTINGS["default_prng_impl"].settings,
        (),
    ),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("kind", WITHIN)
def test_a_setting_inside_the_function_is_followed(kind, swapped):
    """Two functions that differ only in a setting that each makes for itself."""
    body, contexts, args = WITHIN[kind]
    found = []
    jo.clear_caches()
    for i, context in enumerate(contexts[::-1] if swapped else contexts):

        def function(*args, context=context):
            with context():
                return body(*args)

        want = judge.run(jax.jit(function), *args)
        for way, offloaded in ways(function).items():
            if text := difference(want, judge.run(offloaded, *args)):
                found.append(f"{kind}, function {i}, {way}: {text}")
    assert not found, "\n".join(found)
