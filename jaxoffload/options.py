"""What a caller may ask of `offload`, checked once, frozen and hashable."""

import dataclasses
import errno
import math
import numbers
import os
import re
from collections.abc import Sequence

from jaxoffload import policies
from jaxoffload.errors import DiskError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


REWRITES = ("compact", "reorder", "typed")
"""Rewrites of a captured program, in the order in which they are done."""

Disk = tuple[str, ...]
"""Absolute paths of the folders over which the disk tier is striped."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Validated options.

    Attributes:
      device_memory: the budget in bytes, None for no limit, "auto" for what the device has free.
      is_auto: whether that was "auto", before it became a number.
      host_memory: bytes of host memory for tensors that the device cannot hold; None for no limit.
      disk: folders in which tensors go on where host memory is full, or None.
      vertex_memory: the largest working set of a vertex in bytes, which fixes the cut; None lets
        the cut follow the budget.
      launch: the launch policy.
      check: whether every run is watched by the live range checker.
      verify: whether the first run of each plan is compared with plain `jax.jit`.
      results: "device" or "host", where results go that do not follow a donated argument.
      policy: "auto": plans, and once the cut, are made again from what runs measured; "once": from
        estimates only.
      recompute: "auto": values are computed again where that is faster than moving them; "never";
        "always": whatever is read again late.
      host_compute: "auto": optimizers' updates run on the host's cores where that is faster than
        moving what they need, and what is in `compute_on` does; "never"; "always".
      cut: "auto": a function for which everything fits runs whole; "always": it is cut, too.
      rates: what a profile has measured, to take the place of the machine model's rates
        (`Machine.with_rates`): what is planned, and how it is cut, follows from the options alone.
      memory: bytes of RAM for arena, workspace, host tier and new results together, where the
        device's memory is the host's; None: each has limits of its own. `device_memory` is the
        same number then.
      rewrites: which rewrites of the program may be done, of `REWRITES`.
      rewrites_much: whether they are only where they save a lot.
      deterministic: False: sums over devices take what they add as it comes.
      around: bytes that were taken from `memory` for the loops around a part that they repeat.
      budgets: bytes of each device, where they were named one by one; `device_memory` is the least.
    """

    device_memory: int | str | None = "auto"
    host_memory: int | None = None
    disk: Disk | None = None
    vertex_memory: int | None = None
    launch: policies.LaunchPolicy = dataclasses.field(default_factory=policies.work_conserving)
    check: bool = False
    verify: bool = False
    results: str = "device"
    policy: str = "auto"
    recompute: str = "auto"
    cut: str = "auto"
    rates: tuple[tuple[str, float], ...] = ()
    memory: int | None = None
    host_compute: str = "auto"
    budgets: tuple[int, ...] = ()
    rewrites: tuple[str, ...] = ()
    rewrites_much: bool = False
    is_auto: bool = False
    around: int = 0
    deterministic: bool = True


def make_options(
    device_memory: object,
    host_memory: object,
    disk: object,
    vertex_memory: object,
    launch: object,
    check: bool,
    verify: bool,
    results: object,
    policy: object,
    recompute: object,
    cut: object,
    rates: tuple[tuple[str, float], ...] = (),
    memory: object = None,
    host_compute: object = "auto",
    rewrites: object = False,
    deterministic: bool = True,
) -> Options:
    """Options from what the user typed.

    Raises:
      TypeError, ValueError: names the option, its value, and what it may be.
    """
    budgets: tuple[int, ...] = ()
    if memory is not None and host_compute == "always":
        raise ValueError(
            "offload: host_compute='always' needs a device's memory apart from the host's, which "
            f"memory={memory!r} is both. Pass device_memory= in its place."
        )
    if memory is not None:
        _refuse_two_budgets(memory, device_memory, host_memory)
        device_memory = memory = parse_bytes(memory, "memory", "None")
    elif isinstance(device_memory, list | tuple):
        if not device_memory:
            raise ValueError(
                f"offload: device_memory={device_memory!r} names no device. Pass one amount, or "
                "one for each device of the mesh."
            )
        budgets = tuple(parse_bytes(each, "device_memory") for each in device_memory)
        device_memory = min(budgets)
    elif device_memory is not None and device_memory != "auto":
        device_memory = parse_bytes(device_memory, "device_memory", '"auto" or None')
    if host_memory is not None:
        host_memory = parse_bytes(host_memory, "host_memory", "None")
    folders = None if disk is None else parse_disk(disk, "disk")
    if vertex_memory is not None:
        vertex_memory = parse_bytes(vertex_memory, "vertex_memory", "None")
    flags = {"check": check, "verify": verify, "deterministic": deterministic}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"offload: {name}={value!r} is not a bool. Pass True or False.")
    if results not in ("device", "host"):
        raise ValueError(f'offload: results={results!r} is no tier. Pass "device" or "host".')
    if policy not in ("auto", "once"):
        raise ValueError(f'offload: policy={policy!r} is not known. Pass "auto" or "once".')
    for name, value in (("recompute", recompute), ("host_compute", host_compute)):
        if value not in ("auto", "never", "always"):
            raise ValueError(
                f'offload: {name}={value!r} is not known. Pass "auto", "never" or "always".'
            )
    if cut not in ("auto", "always"):
        raise ValueError(f'offload: cut={cut!r} is not known. Pass "auto" or "always".')
    return Options(
        device_memory, host_memory, folders, vertex_memory, policies.as_policy(launch), check,
        verify, str(results), str(policy), str(recompute), str(cut), rates,
        memory, str(host_compute), budgets, parse_rewrites(rewrites), rewrites == "auto",
        deterministic=deterministic,
    )  # fmt: skip


def parse_rewrites(value: object) -> tuple[str, ...]:
    """Names of rewrites from what the user typed, in order.

    Raises:
      TypeError, ValueError: with the value and the remedy.
    """
    remedy = f'Pass "auto", True, False, or some of {", ".join(map(repr, REWRITES))} in a tuple.'
    if isinstance(value, str) and value == "auto" or value is True:
        return REWRITES
    if value is False:
        return ()
    if not isinstance(value, tuple | list):
        raise TypeError(f"offload: rewrites={value!r} is a {type(value).__name__}. {remedy}")
    for name in value:
        if name not in REWRITES:
            raise ValueError(f"offload: rewrites={value!r}: {name!r} is no rewrite. {remedy}")
    return tuple(name for name in REWRITES if name in value)


def _refuse_two_budgets(memory: object, device_memory: object, host_memory: object) -> None:
    for name, value, usual in (
        ("device_memory", device_memory, "auto"),
        ("host_memory", host_memory, None),
    ):
        if value != usual:
            raise ValueError(
                f"offload: memory={memory!r} and {name}={value!r} are two budgets for the same "
                "memory: memory counts arena, workspace, host tier and results together. Pass "
                f"memory alone (and disk=), or {name} without memory."
            )


def parse_disk(value: object, name: str) -> Disk:
    """Folders from a path or several.

    Args:
      name: the option's name, for errors.

    Raises:
      TypeError, ValueError: with the value and the remedy. DiskError: a folder is missing, or
      cannot be written to.
    """
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    folders = []
    for item in value if several else (value,):
        if not isinstance(item, str | bytes | os.PathLike):
            raise TypeError(
                f"offload: {name}={value!r} holds a {type(item).__name__}. Pass a folder, or "
                "several in a list."
            )
        folder = os.path.abspath(parse_path(item, f"offload: {name}"))
        _check_folder(folder, name)
        folders.append(folder)
    if not folders:
        raise ValueError(f"offload: {name}={value!r} names no folder. Pass one or more.")
    return tuple(folders)


def parse_path(value: object, name: str) -> str:
    """A path that the system can look up: text, not empty, without what no name may have.

    Args:
      name: what is being done and with what, for errors: "offload: disk".

    Raises:
      TypeError, ValueError: with the value and the remedy.
    """
    if not isinstance(value, str | bytes | os.PathLike):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}. Pass a path.")
    try:
        path = os.fsdecode(value)
        path.encode()
    except UnicodeError as error:
        raise ValueError(f"{name}={value!r} is not UTF-8: {error}. Rename it.") from error
    if not path or "\0" in path:
        raise ValueError(
            f"{name}={value!r} {'holds a NUL' if path else 'is empty'}. Pass a path ('.' is the "
            "current folder)."
        )
    return path


def _check_folder(folder: str, name: str) -> None:
    """Now, for a run may need it hours later."""
    code = errno.ENOENT
    if os.path.exists(folder):
        code = errno.EACCES if os.path.isdir(folder) else errno.ENOTDIR
        effective = os.access in os.supports_effective_ids
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK, effective_ids=effective):
            return
    raise DiskError(
        code,
        f"offload: {name}={folder!r}: {os.strerror(code)}. Make it, or name another folder, one "
        "that can be written to.",
    )


def parse_bytes(value: object, name: str, others: str = "") -> int:
    """Bytes from an int or from text such as "512MiB", "8GB", "1.5 GiB".

    Args:
      name: the option's name, for errors.
      others: other legal values, for errors.

    Raises:
      TypeError, ValueError: with the value and the remedy.

    >>> parse_bytes("1.5 KiB", "device_memory")
    1536
    """
    remedy = 'Pass a number of bytes or text such as "512MiB" or "8GB"'
    remedy += f", or {others}." if others else "."
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        raise TypeError(f"offload: {name}={value!r} is a {type(value).__name__}. {remedy}")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", value.lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"offload: {name}={value!r} is not an amount of memory. {remedy}")
        value = float(match[1]) * _UNITS[match[2]]
    amount = int(value) if isinstance(value, numbers.Integral) else float(value)
    if not 1 <= amount < 2**63:  # NaN, too
        raise ValueError(
            f"offload: {name}={value!r} is not a positive amount of memory, of one byte to 2**63. "
            f"{remedy}"
        )
    return math.floor(amount)


def format_bytes(count: float) -> str:
    """Bytes for people, in binary units.

    >>> format_bytes(536870912)
    '512 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
