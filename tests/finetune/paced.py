"""The command, which takes a line of its input before each step: `python -m tests.finetune.paced`.

At the end of its input it goes on alone. So a test knows which steps were taken when it kills or
interrupts, however fast the machine is.
"""

import sys

from jaxoffload.command.table import run
from jaxoffload.finetune import train


def main() -> None:
    plain = train.Trainer.advance

    def advance(*args, **more):
        sys.stdin.readline()
        return plain(*args, **more)

    train.Trainer.advance = advance
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
