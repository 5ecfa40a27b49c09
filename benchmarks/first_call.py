"""Time to the first result over jit's, for small programs of every kind (`programs.py`).

For each program: the first call of `jax.jit`; offloaded with no limit, with half of the memory that
XLA says the jitted program needs, and with the least budget; the search for that budget; and the
refusal of one byte less. Processor seconds and wall seconds, each the least of a few rounds in
which the ways take turns, every cache cleared before each. A worker process does the work: a way
that takes longer than the limit costs that way alone, and its time is then a lower bound.

`python -m benchmarks.first_call [--quick] [--libraries] [--only TEXT ...] [--out FOLDER]`;
`--libraries` takes programs of other libraries (`libraries.py`) instead.
"""

import argparse
import gc
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import jaxoffload as jo
from benchmarks.libraries import LIBRARIES
from benchmarks.measure import machine, save
from benchmarks.programs import PROGRAMS
from benchmarks.ratios import difference, jit_peak_bytes

ALL = PROGRAMS | LIBRARIES
WAYS = ("jit", "none", "half", "search", "least", "refusal")
"""`half` and `least` are budgets; `search` finds the least one, `refusal` is of one byte less."""
QUICK = (
    "scan of 1,000 steps",
    "gradient of a scan of 100 steps",
    "convolution net, gradient",
    "graph network, gradient",
    "checkpoint saving dots, gradient",
    "one transformer block, gradient",
    "LSTM of 100 steps, gradient",
    "optax: AdamW, clipped and scheduled",
    "n bodies, 50 steps, gradient",
)
SMALL = ("switch of five branches", "Hessian")
LIMIT_SECONDS = 120.0
LONG_SECONDS = 5.0
"""A way that takes this long is not taken a second time."""


class _Worker:
    """A process that times one way of one program at a time.

    Args:
      limit: seconds that one way may take.
    """

    def __init__(self, limit: float):
        self._limit = limit
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self._pipe.recv()  # it has imported everything and is warm

    def ask(self, *question: Any) -> dict[str, Any]:
        """A way's answer; the limit as its time, and a new process, where it takes longer."""
        self._pipe.send(question)
        try:
            if self._pipe.poll(self._limit):
                return self._pipe.recv()
            answer = {"wall": self._limit, "cpu": self._limit, "ended": "at the limit"}
        except EOFError:
            answer = {"ended": "the process died"}
        self.stop()
        self._start()
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Any) -> None:
    warnings.simplefilter("ignore")
    _warm()
    pipe.send(None)
    made: tuple[str, Any] | None = None
    while True:
        try:
            name, way, budget = pipe.recv()
        except EOFError:
            return
        try:
            if made is None or made[0] != name:
                made = name, ALL[name][1]()
            answer = _time(way, *made[1], budget)
        except Exception as error:  # what one way cannot do must not end the others
            answer = {"ended": f"{type(error).__name__}: {error}"[:300]}
        pipe.send(answer)


def _warm() -> None:
    """What only a process's first call pays for, whatever the program."""
    x = np.ones((64, 64), np.float32)
    chain = lambda x: jax.numpy.tanh(x @ x) @ x  # noqa: E731
    jax.block_until_ready(jax.jit(chain)(x))
    for budget in (None, 64 * 1024):
        jax.block_until_ready(jo.offload(chain, device_memory=budget)(x))


def _time(way: str, function: Callable[..., Any], args: Any, budget: int | None) -> dict[str, Any]:
    """Seconds of one way, with nothing cached. Before that, jit's peak where it is asked for."""
    if way == "peak":
        return {"bytes": jit_peak_bytes(function, args, ())}
    jax.clear_caches()
    jo.clear_caches()
    gc.collect()
    answer: dict[str, Any] = {}
    own = lambda *args: function(*args)  # noqa: E731  (no cache knows it)
    if way == "jit":
        call = jax.jit(own)
    else:
        call = jo.offload(own, device_memory=budget)
    out = None
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        if way == "search":
            answer["bytes"] = call.plan(*args).min_device_memory
        else:
            out = jax.block_until_ready(call(*args))
    except jo.PlanError:
        answer["refused"] = True
    answer["cpu"], answer["wall"] = time.process_time() - cpu, time.perf_counter() - wall
    if out is not None and way != "jit":
        answer["difference"] = difference(jax.jit(function)(*args), out)
    return answer


def _measure(worker: _Worker, name: str, rounds: int) -> dict[str, Any]:
    """One row: seconds of each way, and their ratios to jit's."""
    row: dict[str, Any] = {"program": name, "area": ALL[name][0]}
    peak = worker.ask(name, "peak", None)
    found: dict[str, dict[str, Any]] = {}
    if "bytes" not in peak:
        return row | {"ended": {"jit": peak["ended"]}}
    row["jit_peak_bytes"] = peak["bytes"]
    for _ in range(rounds):
        for way in WAYS:
            least = found.get("search", {}).get("bytes")
            budget = {"half": max(1, peak["bytes"] // 2), "least": least}.get(way)
            if way == "refusal" and least is not None:
                budget = least - 1
            if (way in ("least", "refusal") and not budget) or way in row.get("ended", {}):
                continue
            before = found.get(way)
            if before is not None and before["wall"] > LONG_SECONDS:
                continue
            now = worker.ask(name, way, budget)
            if "ended" in now:
                row.setdefault("ended", {})[way] = now["ended"]
            if before is not None and "cpu" in now:
                now = now | {k: min(before[k], now[k]) for k in ("cpu", "wall")}
            if "cpu" in now:
                found[way] = now
    row["min_device_memory"] = found.get("search", {}).get("bytes")
    for way, answer in found.items():
        row[way] = {k: answer[k] for k in ("cpu", "wall", "difference") if k in answer}
        row[way]["refused"] = answer.get("refused", False)
        if "jit" in found:
            row[way]["over_jit"] = answer["cpu"] / found["jit"]["cpu"]
            row[way]["wall_over_jit"] = answer["wall"] / found["jit"]["wall"]
    return row


def _cell(row: dict[str, Any], way: str) -> str:
    """A ratio for the table: with ">" where the limit ended it, in brackets a refusal."""
    if way not in row or "over_jit" not in row[way]:
        return "failed" if way in row.get("ended", {}) else "-"
    text = f"{row[way]['over_jit']:.1f}"
    if row.get("ended", {}).get(way) == "at the limit":
        return f"> {text}"
    return f"({text})" if row[way]["refused"] and way != "refusal" else text


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown: processor seconds of jit, and of every other way over them."""
    ways = WAYS[1:]
    lines = [
        f"| program | jit (s) | {' | '.join(ways)} |",
        f"|---|---|{'---|' * len(ways)}",
    ]
    for row in rows:
        jit = f"{row['jit']['cpu']:.2f}" if "jit" in row else "failed"
        lines.append(f"| {row['program']} | {jit} | {' | '.join(_cell(row, w) for w in ways)} |")
    for name, of in (("median", statistics.median), ("maximum", max)):
        cells = []
        for way in ways:
            ratios = [row[way]["over_jit"] for row in rows if "over_jit" in row.get(way, ())]
            cells.append(f"{of(ratios):.2f}" if ratios else "-")
        lines.append(f"| **{name}** | | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(
    small: bool = False,
    out: str | None = None,
    names: Sequence[str] | None = None,
    rounds: int = 2,
    limit: float = LIMIT_SECONDS,
) -> list[dict[str, Any]]:
    """Measures and prints.

    Args:
      small: two programs, once each.
      names: of the programs; None for all.
      rounds: how often each way is timed; the least counts.
      limit: wall seconds that one way may take.
    """
    print(machine())
    names, rounds = (SMALL, 1) if small else (names or tuple(PROGRAMS), rounds)
    worker = _Worker(limit)
    rows = []
    try:
        for name in names:
            row = _measure(worker, name, rounds)
            rows.append(row)
            cells = ", ".join(f"{way} {_cell(row, way)}" for way in WAYS[1:])
            seconds = row.get("jit", {}).get("cpu", float("nan"))
            print(f"{name}: jit {seconds:.2f} s; {cells} of it", flush=True)
            for way, why in row.get("ended", {}).items():
                print(f"  {way} ended: {why}", flush=True)
    finally:
        worker.stop()
    print(table(rows))
    save("first_call" if set(names) <= set(PROGRAMS) else "libraries", rows, out)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a handful of programs, once each")
    parser.add_argument("--libraries", action="store_true", help="programs of other libraries")
    parser.add_argument("--only", nargs="+", help="programs and areas whose names have these texts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds of one way")
    parser.add_argument("--out", help="folder for the JSON result")
    args = parser.parse_args(argv)
    names: Sequence[str] = QUICK if args.quick else tuple(PROGRAMS)
    if args.libraries:
        names = tuple(LIBRARIES)
    if args.only:
        names = [
            name
            for name, (area, _) in PROGRAMS.items()
            if any(text in name or text == area for text in args.only)
        ]
    run(False, args.out, names, 1 if args.quick else args.rounds, args.limit)


if __name__ == "__main__":
    main()
