"""One entry to every benchmark: `python -m benchmarks.run NAME [--small] [--out FOLDER]`; plans
also [--against FILE]."""

import argparse
import importlib

NAMES = ("ratios", "first_call", "restart", "steady", "vertices", "split", "accuracy", "overhead",
         "planner", "plans", "gpu_plans", "disk", "ram", "host", "cycle", "loops", "large",
         "matrices", "graphs", "rows", "device_rows", "simulated", "devices", "bus", "sharded",
         "mesh", "throttled", "finetune", "soak")  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "all"))
    parser.add_argument("--small", action="store_true", help="sizes that take seconds")
    parser.add_argument("--out", help="folder for the JSON results")
    parser.add_argument("--against", help="of plans: the JSON of another version")
    args = parser.parse_args(argv)
    if args.against and args.name != "plans":
        parser.error(f"--against={args.against} is for plans, not for {args.name}.")
    for name in NAMES if args.name == "all" else (args.name,):
        more = {"against": args.against} if args.against else {}
        importlib.import_module(f"benchmarks.{name}").run(small=args.small, out=args.out, **more)


if __name__ == "__main__":
    main()
