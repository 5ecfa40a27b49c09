"""A process that compiles for a GPU that is not there: `python -m jaxoffload.compile.gpu_worker`.

JAX loads the CUDA plugin here, under settings that are this process's own. On standard input it
takes frames (eight bytes of length, little-endian, then as many bytes): first the description of
the GPU, then programs, each a portable StableHLO artifact; on standard output it answers each with
a frame of JSON. It ends when its input does, when nothing is asked for a while, and, whatever it is
doing, when an answer takes too long. What XLA says goes to standard error.
"""

import json
import os
import select
import signal
import struct
import sys
import time
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload.compile import hlo

IDLE_SECONDS = 60
"""After so long without a question the process ends; it takes a second to begin another."""
LENGTH = struct.Struct("<q")


def main() -> int:
    """Answers until there is nothing more to answer."""
    answers = os.dup(1)
    os.dup2(2, 1)
    limit = int(sys.argv[1])
    signal.alarm(limit)
    description = read_frame(0)
    if description is None:
        return 0
    try:
        device = compat.compile_only_device(description.decode())
    except Exception as error:
        write_frame(answers, {"error": f"{type(error).__name__}: {error}"})
        return 1
    write_frame(answers, {"ready": True})
    while True:
        signal.alarm(0)
        if not select.select([0], [], [], IDLE_SECONDS)[0]:
            return 0
        signal.alarm(limit)
        code = read_frame(0)
        if code is None:
            return 0
        write_frame(answers, answer(device, code))


def answer(device: Any, code: bytes) -> dict[str, Any]:
    """What is known of a program once it is compiled, or what XLA said in refusing it."""
    start = time.perf_counter()
    try:
        executable = compat.compile_only(device, code)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - start
    stats = executable.get_compiled_memory_stats()
    module = hlo.read(executable.hlo_modules()[0].to_string())
    return {
        "seconds": seconds,
        "temp_bytes": stats.temp_size_in_bytes,
        "held_bytes": stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes,
        "code_bytes": len(executable.serialize()),
        "aliases": module.aliases,
        "launches": module.launches,
        "copies": module.copies,
        "calls": module.calls,
        "expected_seconds": module.seconds,
        "without_estimate": module.without_estimate,
    }


def read_frame(handle: int) -> bytes | None:
    """The next frame's bytes; None where there is none any more."""
    head = _read(handle, LENGTH.size)
    return None if head is None else _read(handle, LENGTH.unpack(head)[0])


def write_frame(handle: int, value: Any) -> None:
    """Writes bytes, or a value as JSON."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    left = memoryview(LENGTH.pack(len(data)) + data)
    while left:
        left = left[os.write(handle, left) :]


def _read(handle: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(handle, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    sys.exit(main())
