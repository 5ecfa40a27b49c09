"""What machine code depends on beside the program: who compiled it, how, and for which processor.

Takes a client; gives text that differs where the same program may be compiled to other code.
"""

import functools
import hashlib
import os
from typing import Any

import jax
import jaxlib

import jaxoffload
from jaxoffload import _native

_FORMAT = 3
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
    """Of the package's own files and native module, by their sizes and times: a plan is what this
    very planner makes. To read them all would take as long as to plan a small function."""
    root = os.path.dirname(jaxoffload.__file__)
    found = [("", _stamp(_native.__file__))]
    for folder, _, names in os.walk(root):
        paths = [os.path.join(folder, name) for name in names if name.endswith(".py")]
        found += [(path[len(root) :], _stamp(path)) for path in paths]
    return hashlib.blake2b(repr(sorted(found)).encode(), digest_size=32).hexdigest()


def _stamp(path: str) -> tuple[int, int]:
    """Differs once a file has been written again."""
    about = os.stat(path)
    return about.st_size, about.st_mtime_ns
