"""A process that stands in for the one that compiles, and does what a program's bytes say."""

import os
import signal
import sys
import time

from jaxoffload.compile import gpu_worker

KNOWN = {
    "seconds": 0.5,
    "temp_bytes": 4096,
    "held_bytes": 5000,
    "code_bytes": 100,
    "aliases": [[0, 1]],
    "launches": 2,
    "copies": 1,
    "calls": {"Triton": 1},
}


def main():
    if gpu_worker.read_frame(0) == b"not a GPU":
        gpu_worker.write_frame(1, {"error": "ValueError: that is none"})
        return 1
    gpu_worker.write_frame(1, {"ready": True})
    while (code := gpu_worker.read_frame(0)) is not None:
        if code == b"die":
            print("out of luck", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if code.startswith(b"die once:"):
            path = code.removeprefix(b"die once:")
            if not os.path.exists(path):
                open(path, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        if code == b"hang":
            time.sleep(1000)
        if code == b"refuse":
            gpu_worker.write_frame(1, {"error": "XlaRuntimeError: no such thing"})
            continue
        gpu_worker.write_frame(1, KNOWN | {"temp_bytes": len(code), "code_bytes": os.getpid()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
