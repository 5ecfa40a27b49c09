"""The `jaxoffload` command; see command/table.py."""

import sys

from jaxoffload.command.table import run


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
