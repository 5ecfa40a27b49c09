"""What machine code depends on beside the program: who compiled it, how, and for which processor.

Takes a client; gives text that differs where the same program may be compiled to other code.
"""

import functools
import hashlib
import os
import pathlib
from typing import Any

import jax
import jaxlib

import jaxoffload
from jaxoffload import _native

_FORMAT = 2
"""Of what is kept; a change of it makes all older entries void."""
_SETTINGS = ("XLA_", "TF_", "ONEDNN_", "DNNL_", "OMP_", "MKL_", "NPROC")
"""How the names of the variables begin that XLA and its libraries read."""
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")


def description(client: Any, plugin_path: str) -> str:
    """Everything but the program and its compile options."""
    file = os.stat(plugin_path)
    parts = [
        ("format", _FORMAT),
        ("versions", versions()),
        ("plugin", client.platform_name, client.platform_version, file.st_size, file.st_mtime_ns),
        ("attributes", sorted((k, repr(v)) for k, v in client.attributes.items())),
        ("devices", client.num_devices),
        ("processor", processor()),
        # XLA's compiler divides loops among them.
        ("processors", len(os.sched_getaffinity(0)), os.cpu_count()),
        ("settings", sorted(x for x in os.environ.items() if x[0].startswith(_SETTINGS))),
    ]
    return repr(parts)


def versions() -> tuple[str, ...]:
    """Of this package, jax and jaxlib."""
    return jaxoffload.__version__, jax.__version__, jaxlib.__version__


@functools.cache
def processor() -> str:
    """The processor's kind and features, as the system tells them of the first one."""
    found = {}
    with open("/proc/cpuinfo") as file:
        for line in file:
            name, colon, value = line.partition(":")
            if not colon and found:
                break
            if name.strip() in _CPU_FIELDS:
                found[name.strip()] = value.strip()
    return repr([os.uname().machine, sorted(found.items())])


@functools.cache
def source_digest() -> str:
    """Of the package's own files and native module: a plan is what this very planner makes."""
    made = hashlib.blake2b(digest_size=32)
    root = pathlib.Path(jaxoffload.__file__).parent
    for path in sorted(root.rglob("*.py")):
        data = path.read_bytes()
        made.update(f"{path.relative_to(root)}\0{len(data)}\0".encode() + data)
    native = os.stat(_native.__file__)  # of tens of megabytes, too many to read in each process
    made.update(f"{native.st_size} {native.st_mtime_ns}".encode())
    return made.hexdigest()
