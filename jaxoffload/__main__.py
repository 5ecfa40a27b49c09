"""`jaxoffload doctor`: what this machine has for jaxoffload. `jaxoffload finetune`: trains."""

import sys
from collections.abc import Sequence

from absl import app, logging

from jaxoffload.doctor import backends, diagnose

_USAGE = "usage: jaxoffload doctor\n       jaxoffload finetune --help"


def _main(arguments: Sequence[str]) -> int:
    logging.set_verbosity(logging.WARNING)  # not which platforms JAX tries in vain
    if list(arguments[1:]) != ["doctor"]:
        print(_USAGE, file=sys.stderr)
        return 2
    for line in diagnose():
        print(line)
    return 0 if any(report.available for report in backends()) else 1


def main() -> None:
    """The console script."""
    if sys.argv[1:2] == ["finetune"]:
        from jaxoffload.finetune import command  # what it needs is slow to import

        sys.exit(command.main(sys.argv[2:]))
    app.run(_main)


if __name__ == "__main__":
    main()
