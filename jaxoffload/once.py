"""A value that is made once, by whoever asks first, with no lock held while it is made."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any


class Once:
    """Makes a value when it is first asked for; other threads wait for it meanwhile.

    Making it may run anything: a thread that asks again while it makes the value makes one for
    itself, instead of waiting for itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: concurrent.futures.Future[Any] | None = None
        self._maker = 0

    def get(self, make: Callable[[], Any]) -> Any:
        """The value.

        Raises:
          what `make` raises, in every thread that waited for it; the next one tries again.
        """
        me = threading.get_ident()
        while True:
            with self._lock:
                made = self._made
                if made is None:
                    made, self._maker = concurrent.futures.Future(), me
                    self._made = made
                    break
                if self._maker == me and not made.done():
                    return make()
            try:
                return made.result()
            except BaseException as error:
                theirs = made.done() and made.exception() is error
                if not theirs or isinstance(error, Exception):
                    raise
                # Whoever made it was interrupted, not we.
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                self._made = None
            made.set_exception(error)
            raise
        made.set_result(value)
        return value

    def made(self) -> list[Any]:
        """The value, if it is made."""
        with self._lock:
            made = self._made
        done = made is not None and made.done() and made.exception() is None
        return [made.result()] if done else []


class OnceEach:
    """A value for each key, made once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Any, Once] = {}

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """The key's value. Raises: as `Once.get`."""
        with self._lock:
            once = self._known.setdefault(key, Once())
        return once.get(make)

    def made(self) -> list[Any]:
        """The values that are made."""
        with self._lock:
            known = list(self._known.values())
        return [value for once in known for value in once.made()]

    def clear(self) -> None:
        """Forgets all values."""
        with self._lock:
            self._known.clear()
