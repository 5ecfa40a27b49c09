"""Files that are there whole or not at all, also when the process is killed while it writes.

A file is written under another name in the same folder, handed to the drive, and renamed.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxoffload.errors import DiskError

UNFINISHED = ".unfinished-"
"""How the names of files and folders begin that are not complete; `kill -9` leaves them behind."""


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str], private: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which becomes `path` when the block ends well, and is removed else.

    Args:
      private: whether only its owner may read it; else what the umask says.

    Raises:
      DiskError: the folder cannot be written to, or is full; `path` is as it was.
    """
    folder, name = os.path.split(os.path.abspath(path))
    beside = os.path.join(folder, f"{UNFINISHED}{secrets.token_hex(4)}-{name}")
    with disk_errors(f"writing {os.fspath(path)}"):
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            raise
        sync_folder(folder)


def write_json(path: str | os.PathLike[str], value: Any, private: bool = False) -> None:
    """Writes JSON, indented, as `replaced` does."""
    with replaced(path, private) as file:
        file.write(json.dumps(value, indent=2, sort_keys=True).encode() + b"\n")


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Hands names in a folder to the drive, so that a rename outlives a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Errors of the system as a `DiskError` that says what was being done."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(
            error.errno,
            f"{doing}: {error.strerror}. What was there before is as it was. Free space, or name "
            "another folder.",
        ) from error
