"""Programs with a hole for one constant, for hypothesis: what is drawn is where the constant stands
and what is computed with it, so that two programs can be had that differ in the constant alone."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Operations that round once, or not at all, so that any correct kernel gives the same bits. None
# follows a product with a sum, which some kernels would contract.
_FLOAT = {
    "bits": lambda x, c: lax.bitcast_convert_type(jnp.where(x == x, c, c), _bits(x.dtype)),
    "product": lambda x, c: x * c,
    "sum": lambda x, c: x + c,
    "maximum": lambda x, c: jnp.maximum(x, c),
    "sign": lambda x, c: jnp.signbit(jnp.full_like(x, c)),
    "compare": lambda x, c: x < c,
    "equal": lambda x, c: jnp.full_like(x, c) == c,
    "select": lambda x, c: jnp.where(x > 0, x, c),
    "pad": lambda x, c: jnp.pad(x, 1, constant_values=c)[:, 0],
    "update": lambda x, c: x.at[1, 2].set(c),
    "fill": lambda x, c: x.at[jnp.array([0, 9])].get(mode="fill", fill_value=c),
    "clamp": lambda x, c: lax.clamp(jnp.asarray(-1, x.dtype), jnp.full_like(x, c), x),
    "convert": lambda x, c: jnp.full_like(x, c).astype(jnp.int32),
    "apply": lambda x, c: x.at[1].apply(lambda y: y * c),
    "reduction": lambda x, c: lax.reduce(
        x, jnp.full_like(x, c)[0, 0], lambda a, b: lax.max(lax.max(a, b), jnp.full_like(a, c)), (0,)
    ),
}
_INTEGER = {
    "product": lambda x, c: x * c,
    "sum": lambda x, c: x + c,
    "difference": lambda x, c: c - x,
    "xor": lambda x, c: x ^ c,
    "maximum": lambda x, c: jnp.maximum(x, c),
    "compare": lambda x, c: x < c,
    "select": lambda x, c: jnp.where(x > 0, x, c),
    "update": lambda x, c: x.at[1, 2].set(c),
    "reduce": lambda x, c: (x * c).sum(axis=0, dtype=x.dtype),
}

# The result's dtype is the constant's.
_BOOLEAN = {name: _FLOAT[name] for name in ("product", "sum", "maximum", "compare", "select")}


def _bits(dtype):
    return {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[np.dtype(dtype).itemsize]


def _top(f, c):
    return lambda x: f(x, c)


def _jit(f, c):
    return lambda x: jax.jit(lambda y: f(y, c))(x)


def _while(f, c):
    """The constant is written in a jit within the loop, as a library's helper would be."""

    def of(x):
        inner = jax.jit(lambda y: f(y, c))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(inner, x))
        return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, inner(x)), (0, zeros))[1]

    return of


def _cond(f, c):
    inner = jax.jit(lambda y: f(y, c))
    return lambda x: lax.cond(x[0, 0] == x[0, 0], inner, lambda y: inner(-y), x)


def _scan(f, c):
    inner = jax.jit(lambda y: f(y, c))
    return lambda x: lax.scan(lambda n, _: (n + 1, inner(x)), 0, length=2)[1]


def _map(f, c):
    inner = jax.jit(lambda y: f(y, c))
    return lambda x: lax.map(lambda i: inner(jnp.roll(x, i)), jnp.arange(2))


def _checkpoint(f, c):
    return lambda x: jax.checkpoint(lambda y: f(y, c))(x)


def _vmap(f, c):
    return lambda x: jax.vmap(lambda y: f(y, c))(x[None])


def _array(f, c):
    """The constant is an array that the function closes over."""
    array = np.asarray(c)
    return lambda x: f(x, jnp.asarray(array, x.dtype))


def _captured(f, c):
    """The constant is in an array that a jit within a loop closes over."""
    array = np.full((2,), c)
    return _while(lambda x, _: f(x, jnp.asarray(array, x.dtype)[0]), c)


PLACES = {
    "at the top": _top,
    "in a jit": _jit,
    "in a jit in a while": _while,
    "in a jit in a cond": _cond,
    "in a jit in a scan": _scan,
    "in a jit in a map": _map,
    "in a checkpoint": _checkpoint,
    "in a vmap": _vmap,
    "in an array": _array,
    "in an array in a jit in a while": _captured,
}


@st.composite
def holes(draw, dtype):
    """(name, make): `make(constant)` is a function of one (5, 6) array of a dtype, of some 2 to 8
    operations."""
    kind = np.dtype(dtype).kind
    table = {"b": _BOOLEAN, "i": _INTEGER, "u": _INTEGER, "f": _FLOAT}[kind]
    names = draw(st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=4, unique=True))
    place = draw(st.sampled_from(sorted(PLACES)))
    flips = draw(st.integers(0, 3))

    def body(x, c):
        for axis in range(flips):
            x = jnp.flip(x, axis % 2)
        return {name: table[name](x, c) for name in names}

    return f"{', '.join(names)} {place}", functools.partial(PLACES[place], body)
