"""The function and the shapes that a command line names.

A function is "module:name". Its arguments are a Python tuple in which an array is written as in
reports, `f32[512,512]`, in dicts, lists and tuples as the function takes them; or again
"module:name", of a function that returns them (traced, so that nothing is allocated).
"""

import ast
import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags

from jaxoffload.command.base import UsageError
from jaxoffload.options import parse_bytes
from jaxoffload.plan.cost.machines import MACHINES

_DTYPES = {
    "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16", "i8": "int8",
    "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16",
    "u32": "uint32", "u64": "uint64", "bool": "bool", "c64": "complex64", "c128": "complex128",
}  # fmt: skip


def define_flags(values: flags.FlagValues) -> None:
    """--args, --device_memory, --host_memory, --memory, --disk, --donate."""
    text = flags.DEFINE_string
    text(
        "args",
        None,
        "The function's arguments: shapes such as \"{'w': f32[512,512]}, f32[256,512]\", or "
        "module:name of a function that returns them.",
        flag_values=values,
    )
    text("device_memory", None, "Budget, as 8GiB; none: no limit.", flag_values=values)
    text("host_memory", None, "Host memory for what does not fit, as 64GiB.", flag_values=values)
    text("memory", None, "On a CPU, in place of both: RAM, as 2GiB.", flag_values=values)
    text("disk", None, "A folder to go on to where host memory is full.", flag_values=values)
    flags.DEFINE_list(
        "donate", [], "Positions of arguments whose memory results may take.", flag_values=values
    )


def options_of(values: flags.FlagValues) -> dict[str, Any]:
    """Options of `offload` by the flags.

    Raises:
      UsageError: a position is no number, or an amount is none.
    """
    found: dict[str, Any] = {"device_memory": None}
    for name in ("device_memory", "host_memory"):
        given = values[name].value
        if given is not None:
            found[name] = amount(str(given), name)
    if values.memory is not None:
        found["memory"] = amount(values.memory, "memory")
        if found.pop("device_memory") is not None or "host_memory" in found:
            raise UsageError("--memory is in place of --device_memory and --host_memory.")
    if values.disk is not None:
        found["disk"] = values.disk
    if values.donate:
        if not all(word.strip().isdigit() for word in values.donate):
            raise UsageError(f"--donate={','.join(values.donate)} names no positions. Pass 0,1.")
        found["donate_argnums"] = tuple(int(word) for word in values.donate)
    return found


def amount(text: str, flag: str) -> int:
    """Bytes of a flag's text.

    Raises:
      UsageError: it is no amount.
    """
    try:
        return parse_bytes(int(text) if text.isdigit() else text, flag)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error).removeprefix("offload: ")) from None


def machine_of(name: str) -> str:
    """The machine of that name, whatever its case.

    Raises:
      UsageError: there is none.
    """
    for known in MACHINES:
        if known.lower() == name.lower():
            return known
    raise UsageError(f"--machine={name!r} is not known. Pass one of {', '.join(MACHINES)}.")


def function_of(text: str) -> Callable[..., Any]:
    """What "module:name" stands for; modules of the present folder are found, too.

    Raises:
      UsageError: there is no such module, or nothing of that name in it that can be called.
    """
    found = re.fullmatch(r"([\w.]+):([\w.]+)", text)
    if found is None:
        raise UsageError(f"{text!r} names no function. Pass module:name, as in train:step.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        thing = importlib.import_module(found[1])
    except ImportError as error:
        raise UsageError(
            f"{text!r}: module {found[1]!r} cannot be imported: {error}. Call the command in the "
            "folder that holds it, or install it."
        ) from error
    for name in found[2].split("."):
        if not hasattr(thing, name):
            functions = [n for n, v in vars(thing).items() if callable(v) and n[:1] != "_"]
            known = ", ".join(functions[:8]) or "none"
            raise UsageError(f"{text!r}: {found[1]} has no {name!r}; it has {known}.")
        thing = getattr(thing, name)
    if not callable(thing):
        raise UsageError(f"{text!r} is a {type(thing).__name__}. Name a function.")
    return thing


def arguments_of(text: str | None, function: str) -> tuple[Any, ...]:
    """Shapes of the arguments.

    Raises:
      UsageError: the text is not understood; says where.
    """
    if text is None:
        raise UsageError(
            f"--args is missing: the shapes of what {function} takes, as in --args='f32[256,512]'."
        )
    if re.fullmatch(r"[\w.]+:[\w.]+", text.strip()):
        made = jax.eval_shape(function_of(text.strip()))
        return tuple(made) if isinstance(made, list | tuple) else (made,)
    try:
        tree = ast.parse(f"({text.replace('[]', '[()]')},)", mode="eval").body
    except SyntaxError as error:
        raise UsageError(
            f"--args={text!r} is not understood: {error.msg}. Write shapes as f32[256,512], in "
            "dicts, lists and tuples as the function takes them."
        ) from None
    assert isinstance(tree, ast.Tuple)
    return tuple(_shapes(node, text) for node in tree.elts)


def _shapes(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Tuple):
        return tuple(_shapes(inner, text) for inner in node.elts)
    if isinstance(node, ast.List):
        return [_shapes(inner, text) for inner in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(k, ast.Constant) for k in node.keys):
        keys = [k.value for k in node.keys if isinstance(k, ast.Constant)]
        return dict(zip(keys, [_shapes(v, text) for v in node.values], strict=True))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | bool):
        return node.value
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        dims = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        numbers = [d.value for d in dims if isinstance(d, ast.Constant)]
        if len(numbers) == len(dims) and all(type(n) is int for n in numbers):
            return jax.ShapeDtypeStruct(tuple(numbers), _dtype(node.value.id, text))
    raise UsageError(
        f"--args={text!r}: {ast.unparse(node)!r} is no shape. Write f32[256,512], f32[] for a "
        "scalar, or a number."
    )


def _dtype(name: str, text: str) -> Any:
    try:
        return jax.numpy.dtype(_DTYPES.get(name, name))
    except TypeError:
        raise UsageError(
            f"--args={text!r}: {name!r} is no dtype. Write one of {', '.join(_DTYPES)}."
        ) from None


def filled(shapes: Any) -> Any:
    """Arrays of those shapes: small random numbers, and zeros where numbers may be indices."""
    draw = np.random.default_rng(0)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            return jax.numpy.zeros(leaf.shape, leaf.dtype)
        return jax.numpy.asarray(0.02 * draw.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree.map(one, shapes)
