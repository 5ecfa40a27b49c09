"""What a compiled program keeps alive, and why such a program cannot be serialized."""

from typing import Any


class Held:
    """What a compiled program keeps alive."""

    __slots__ = ("_name", "_thing")

    def __init__(self, name: str, thing: Any):
        self._name, self._thing = name, thing

    def __reduce__(self) -> Any:
        raise TypeError(
            f"offload({self._name}): the program holds a plan, which lives in the process that "
            "made it, and cannot be serialized. Serialize the function itself, or compile it in "
            "each process."
        )
