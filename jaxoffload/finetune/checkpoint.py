"""Checkpoints of training, which are there whole or not at all.

    folder/step-00000100/state.safetensors   every array of the state, by its path
    folder/step-00000100/checkpoint.json     the step, what was trained, the state's SHA-256

A checkpoint is written under another name, handed to the drive, and renamed: a process that is
killed at any moment leaves the last one as it was. Only their owner can read them.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxoffload.errors import OffloadError
from jaxoffload.finetune import safetensors
from jaxoffload.finetune.atomic import UNFINISHED, disk_errors, sync_folder, write_json
from jaxoffload.runtime.arrays import DiskArray
from jaxoffload.runtime.checkpoint_file import open_safetensors

_STATE, _ABOUT = "state.safetensors", "checkpoint.json"
_FORMAT = 1


class CheckpointError(OffloadError, ValueError):
    """A checkpoint cannot be used: it is damaged, or of another training.

    The message names it and what is wrong. A damaged one can be deleted, so that the one before it
    is used; one of another training wants another folder, or the settings that it was made with.
    """


class Checkpoints:
    """The checkpoints in a folder, to which one process at a time writes.

    Args:
      folder: made if it is not there.
      keep: how many of the last to keep.
      say: told of damaged checkpoints that are passed over.
      only_reads: another process writes them. The folder may not be there.

    Raises:
      CheckpointError: another process is using the folder. DiskError: it cannot be written to.
      ValueError: keep is below 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 2,
        say: Callable[[str], None] = lambda text: None,
        only_reads: bool = False,
    ):
        if keep < 1:
            raise ValueError(f"Checkpoints: keep={keep} is below 1. Pass 2, for example.")
        self.folder, self._keep, self._say = os.path.abspath(folder), keep, say
        self._lock = -1
        if only_reads:
            return
        with disk_errors(f"Checkpoints: folder={self.folder!r}"):
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            self._lock = os.open(os.path.join(self.folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise CheckpointError(
                f"Checkpoints: {self.folder} is in use by another process. Wait for its end, or "
                "name another folder."
            ) from error
        for name in os.listdir(self.folder):
            if name.startswith(UNFINISHED):
                shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def close(self) -> None:
        """Lets other processes use the folder."""
        if self._lock >= 0:
            os.close(self._lock)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, the first first."""
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else ()
        found = (re.fullmatch(r"step-(\d{8,})", name) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def save(self, step: int, state: Any, about: Mapping[str, Any]) -> str:
        """Writes a checkpoint and deletes those that are too old to keep.

        Args:
          step: how many steps were taken.
          state: a pytree of arrays, of any tier.
          about: JSON values by name that say what is trained; `load` compares them.

        Returns:
          Its folder.

        Raises:
          DiskError: there is no room, or the folder cannot be written to. The checkpoints that were
          there before are as they were.
        """
        final = self._path(step)
        beside = os.path.join(self.folder, UNFINISHED + os.path.basename(final))
        try:
            with disk_errors(f"saving the checkpoint of step {step}"):
                os.mkdir(beside, 0o700)
                path = os.path.join(beside, _STATE)
                safetensors.save(path, _named(state), private=True)
                entry = {"bytes": os.path.getsize(path), "sha256": _sha256(path)}
                found = {"format": _FORMAT, "step": step, "about": dict(about), "state": entry}
                write_json(os.path.join(beside, _ABOUT), found, private=True)
                if os.path.exists(final):  # of a run that went on from an earlier step
                    os.rename(final, beside + "-old")
                os.rename(beside, final)
                sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        shutil.rmtree(beside + "-old", ignore_errors=True)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self._path(old), ignore_errors=True)
        return final

    def load(self, like: Any, about: Mapping[str, Any]) -> tuple[int, Any] | None:
        """The newest checkpoint that is not damaged, or None where there is none at all.

        Args:
          like: a pytree with the state's shapes and dtypes.
          about: as it was saved; values that differ are an error.

        Returns:
          The step, and the state as arrays that are read from the file when they are needed.

        Raises:
          CheckpointError: it is of another training, or all are damaged.
        """
        damaged = []
        for step in reversed(self.steps()):
            try:
                found = self._read(step)
            except (ValueError, OSError, KeyError, TypeError) as error:
                damaged.append(f"checkpoint {self._path(step)} is damaged: {error}")
                self._say(damaged[-1])
                continue
            self._check_same(step, found["about"], about)
            arrays = open_safetensors(os.path.join(self._path(step), _STATE))
            return step, self._fill(step, like, arrays)
        if damaged:
            raise CheckpointError(
                f"{damaged[0]}. None of {len(damaged)} can be used. Start anew in another folder."
            )
        return None

    def _path(self, step: int) -> str:
        return os.path.join(self.folder, f"step-{step:08}")

    def _read(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of itself, its state's bytes compared."""
        folder = self._path(step)
        with open(os.path.join(folder, _ABOUT), "rb") as file:
            found = json.load(file)
        if found["format"] != _FORMAT:
            raise ValueError(f"its format is {found['format']}, not {_FORMAT}")
        path = os.path.join(folder, _STATE)
        size, want = os.path.getsize(path), found["state"]["bytes"]
        if size != want:
            raise ValueError(f"{_STATE} has {size} bytes of {want}")
        if _sha256(path) != found["state"]["sha256"]:
            raise ValueError(f"{_STATE} has other bytes than were written (SHA-256)")
        return found

    def _check_same(self, step: int, was: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(dict(about)))
        others = [
            name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)
        ]
        if others:
            name = others[0]
            raise CheckpointError(
                f"checkpoint {self._path(step)} is of another training: {name} was "
                f"{was.get(name)!r:.200}, now it is {now.get(name)!r:.200}"
                + (f" (so do {', '.join(others[1:])} differ)" if others[1:] else "")
                + ". Go on with the settings of then, or name another folder."
            )

    def _fill(self, step: int, like: Any, arrays: dict[str, DiskArray]) -> Any:
        want = _named(like)
        if want.keys() != arrays.keys():
            name = min(want.keys() ^ arrays.keys())
            where = "the checkpoint" if name in arrays else "this training"
            raise CheckpointError(
                f"checkpoint {self._path(step)} is of another training: only {where} has {name}. "
                "Name another folder."
            )
        for name, leaf in want.items():
            have = arrays[name]
            if (have.shape, have.dtype) != (tuple(leaf.shape), np.dtype(leaf.dtype)):
                raise CheckpointError(
                    f"checkpoint {self._path(step)} is of another training: {name} is "
                    f"{have.dtype.name}{list(have.shape)}, here {np.dtype(leaf.dtype).name}"
                    f"{list(leaf.shape)}. Name another folder."
                )
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in want])


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
