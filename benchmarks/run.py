"""One entry to every benchmark: `python -m benchmarks.run NAME [--small] [--out FOLDER]`."""

import argparse
import importlib

NAMES = ("ratios", "first_call", "restart", "steady", "split", "accuracy", "overhead", "planner",
         "disk", "ram", "simulated", "throttled", "finetune", "soak")  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "all"))
    parser.add_argument("--small", action="store_true", help="sizes that take seconds")
    parser.add_argument("--out", help="folder for the JSON results")
    args = parser.parse_args(argv)
    for name in NAMES if args.name == "all" else (args.name,):
        importlib.import_module(f"benchmarks.{name}").run(small=args.small, out=args.out)


if __name__ == "__main__":
    main()
