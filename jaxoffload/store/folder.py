"""A folder of entries that outlive the process: bytes by name, checked when they are read.

Takes names and bytes; gives the bytes back, or None where there are none, or none to be trusted.
An entry is written beside its place and renamed, so that it is there whole or not at all, whatever
other processes do. It carries a checksum of its name and bytes. What is damaged, or belongs to
somebody else, counts as absent and is written anew. Nothing here raises: a folder that cannot be
used is no store, and the caller does the work himself.

Entries are machine code and plans, which are trusted: the folder must belong to the user alone.
"""

import contextlib
import functools
import hashlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

logger = logging.getLogger(__name__)

_MAGIC = b"JOSTORE1"
_DIGEST_BYTES = 32
_UNFINISHED = ".tmp"
_LONG_AGO = 3600.0
"""Seconds after which what is unfinished was left behind by a process that was killed."""
_FRESH = 60.0
"""Seconds within which another use of an entry is not noted: a write less."""
_AFTER_TRIM = 0.9
"""Share of the limit that is left once entries had to go."""
_LOOKS = 16
"""The folder is measured again after each such part of its limit has been written."""


class Entry(NamedTuple):
    """What the folder knows of an entry.

    Attributes:
      used: when it was last read or written, seconds since the epoch.
    """

    name: str
    bytes: int
    used: float


class Folder:
    """Entries in one folder, which is made when something is written. Thread-safe.

    Args:
      path: absolute.
      limit: bytes of all entries; beyond that the least recently used go.
    """

    def __init__(self, path: str, limit: int):
        self.path, self.limit = path, limit
        self._lock = threading.Lock()
        self._unmeasured: int | None = None  # bytes written since it was measured; None: never was
        self._is_writable = True

    def read(self, name: str) -> bytes | None:
        """An entry's bytes."""
        with self._quietly("read"), self._opened() as folder:
            if folder is None:
                return None
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            try:
                handle = os.open(name, flags, dir_fd=folder)
            except FileNotFoundError:
                return None
            with os.fdopen(handle, "rb") as file:
                found = os.fstat(handle)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                    _say(f"{self.path} holds an entry of another user, which is ignored")
                    return None
                text = file.read()
                if time.time() - found.st_mtime > _FRESH:
                    with contextlib.suppress(OSError):
                        os.utime(handle)
            data = _checked(name, text)
            if data is None:
                _say(f"{self.path} holds a damaged entry, which is ignored and made anew")
            return data
        return None

    def write(self, name: str, data: bytes) -> bool:
        """Keeps an entry, in the place of an older one; whether it did."""
        text = _MAGIC + _digest(name, data) + data
        if not self._is_writable or len(text) > self.limit:
            return False
        with self._quietly("written"):
            with contextlib.suppress(FileExistsError):
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                os.mkdir(self.path, 0o700)
            with self._opened() as folder:
                if folder is None:
                    self._is_writable = False
                    return False
                self._replace(folder, name, text)
                self._keep_within_limit(folder, len(text))
                return True
        self._is_writable = False  # full, or read-only: one try a process
        return False

    def entries(self) -> list[Entry]:
        """All entries, the least recently used first."""
        with self._quietly("read"), self._opened() as folder:
            return [] if folder is None else _entries(folder)
        return []

    def clear(self) -> int:
        """Removes all entries, unfinished ones too; the bytes that they took."""
        freed = 0
        with self._quietly("emptied"), self._opened() as folder:
            if folder is not None:
                for entry in (*_entries(folder), *_entries(folder, _UNFINISHED)):
                    freed += entry.bytes if _remove(folder, entry.name) else 0
        return freed

    def _replace(self, folder: int, name: str, text: bytes) -> None:
        beside = secrets.token_hex(8) + _UNFINISHED
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        handle = os.open(beside, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(handle)
            os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            _remove(folder, beside)
            raise

    def _keep_within_limit(self, folder: int, written: int) -> None:
        with self._lock:
            if self._unmeasured is not None:
                self._unmeasured += written
                if self._unmeasured < self.limit // _LOOKS:
                    return
            self._unmeasured = 0
        for left in _entries(folder, _UNFINISHED):
            if time.time() - left.used > _LONG_AGO:
                _remove(folder, left.name)
        found = _entries(folder)
        total = sum(entry.bytes for entry in found)
        if total <= self.limit:
            return
        for entry in found:
            if total <= _AFTER_TRIM * self.limit:
                break
            _remove(folder, entry.name)
            total -= entry.bytes

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """The folder, if there is one that is the user's alone; names in it are looked up from
        there, so that nobody can put another in its place meanwhile."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        try:
            found = os.fstat(handle)
            is_own = found.st_uid == os.geteuid() and not found.st_mode & 0o022
            if not is_own:
                _say(
                    f"{self.path} belongs to another user, or others may write to it: executables "
                    "and plans are not kept there. Run: chmod go-w, or name another folder in "
                    "JAXOFFLOAD_CACHE"
                )
            yield handle if is_own else None
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def _quietly(self, what: str) -> Iterator[None]:
        """Errors of the system are told once, and are no errors."""
        try:
            yield
        except OSError as error:
            _say(f"{self.path} cannot be {what}, so nothing is kept: {error.strerror or error}")


def _entries(folder: int, ending: str = "") -> list[Entry]:
    """Entries, or what is unfinished; the least recently used first."""
    found = []
    with os.scandir(folder) as listed:
        for each in listed:
            is_unfinished = each.name.endswith(_UNFINISHED)
            if is_unfinished != bool(ending) or not each.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError):  # of another process that removed it
                info = each.stat(follow_symlinks=False)
                found.append(Entry(each.name, info.st_size, info.st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def _remove(folder: int, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
        return True
    return False


def _digest(name: str, data: bytes) -> bytes:
    made = hashlib.blake2b(name.encode() + b"\0", digest_size=_DIGEST_BYTES)
    made.update(data)
    return made.digest()


def _checked(name: str, text: bytes) -> bytes | None:
    """The bytes that were written under a name; None if these are others."""
    start = len(_MAGIC) + _DIGEST_BYTES
    data = text[start:]
    if text[: len(_MAGIC)] != _MAGIC or text[len(_MAGIC) : start] != _digest(name, data):
        return None
    return data


@functools.cache
def _say(message: str) -> None:
    """Each message once a process."""
    logger.warning("%s.", message)
