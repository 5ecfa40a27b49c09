"""The least capacity that `place_intervals` needs, over that in which an instance is known to fit:
`python -m benchmarks.placement FOLDER`, of files NAME.CAPACITY.csv with id, lower, upper, size."""

import argparse
import pathlib
import time

import numpy as np

from jaxoffload.plan.alloc import place_intervals

STEP = 0.005


def least(path: pathlib.Path, search: bool) -> tuple[float, float]:
    """The ratio from which on every capacity is enough, in steps of 0.005; seconds of the last."""
    _, lower, upper, size = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.int64).T
    known = int(path.name.split(".")[1])
    ratio, seconds = 1.3, float("nan")
    while ratio >= 1:
        start = time.perf_counter()
        found = place_intervals(lower, upper, size, int(ratio * known), search=search)
        if found is None:
            break
        assert (found + size <= ratio * known).all()
        seconds = time.perf_counter() - start
        ratio -= STEP
    return ratio + STEP, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    for path in sorted(parser.parse_args().folder.glob("*.csv")):
        for search in (False, True):
            ratio, seconds = least(path, search)
            how = "with search" if search else "fast path"
            print(f"{path.name}: {how}: {ratio:.3f} in {seconds:.3f} s", flush=True)


if __name__ == "__main__":
    main()
