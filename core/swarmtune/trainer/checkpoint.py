"""Checkpoint folders: complete or absent.

A checkpoint is written beside its place, flushed to disk and renamed. A folder without `trainer.json` is no checkpoint;
one whose name begins with `.partial-` is left of an interrupted save, and the next save to the same place removes it.
Exports are written the same way (`place`).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATE = "trainer.json"
FORMAT = 1
PARTIAL = ".partial-"
RETIRED = ".retired-"
_REFUSED_WRITES = ("inline_container", "PytorchStreamWriter", "iostream error", "IoError")
"""In the messages of torch and safetensors, whose errors are no OSError."""


def write(path: Path, state: dict[str, Any], fill: Callable[[Path], None], *, needed_bytes: int) -> None:
    """Create or replace the checkpoint `path`: `fill` writes the files, `state` is what `read` gives back.

    Raises:
        OSError: not enough space (ENOSPC), or not writable. What was at `path` before is intact.
    """

    def fill_and_state(folder: Path) -> None:
        fill(folder)
        (folder / STATE).write_text(json.dumps({"format": FORMAT, **state}, indent=1))

    place(path, fill_and_state, needed_bytes=needed_bytes, what="a checkpoint", fix="lower checkpoint.keep_last")


def place(path: Path, fill: Callable[[Path], None], *, needed_bytes: int, what: str, fix: str) -> None:
    """Create or replace the folder `path` as a whole; `fill` writes its files.

    Raises:
        OSError: not enough space (ENOSPC; `what` and `fix` are for the sentence), or not writable. What was at `path`
            before is intact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, retired = path.parent / f"{PARTIAL}{path.name}", path.parent / f"{RETIRED}{path.name}"
    _recover(path, retired)
    for left in (partial, retired):  # of a save that was interrupted
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(path.parent).free
    if free < needed_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{what} needs {needed_bytes / 1e6:.0f} MB and {free / 1e6:.0f} MB are free; free some space, or {fix}",
            str(path),
        )
    partial.mkdir()
    try:
        _filled(partial, fill)
        _flush(partial)
        if path.exists():
            path.rename(retired)
        partial.rename(path)
    except BaseException:
        _recover(path, retired)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _flush_folder(path.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _filled(partial: Path, fill: Callable[[Path], None]) -> None:
    """Raises:
    OSError: also where a writer of tensors tells a refusal of the disk in its own way.
    """
    try:
        fill(partial)
    except OSError:
        raise
    except Exception as error:
        text = str(error)
        if "No space left" in text or "StorageFull" in text:
            raise OSError(errno.ENOSPC, f"no space left while writing: {text}", str(partial)) from error
        if any(sign in text for sign in _REFUSED_WRITES):
            raise OSError(errno.EIO, f"the disk refused a write, it may be full: {text}", str(partial)) from error
        raise


def read(path: Path) -> dict[str, Any]:
    """State of the checkpoint `path`.

    Raises:
        FileNotFoundError: no complete checkpoint there.
        ValueError: written by another version.
    """
    _recover(path, path.parent / f"{RETIRED}{path.name}")
    if not (path / STATE).is_file():
        raise FileNotFoundError(errno.ENOENT, f"no complete checkpoint ({STATE} is missing)", str(path))
    state = json.loads((path / STATE).read_text())
    if state.get("format") != FORMAT:
        raise ValueError(f"{path}: checkpoint format {state.get('format')}, this version reads {FORMAT}")
    return state


def _recover(path: Path, retired: Path) -> None:
    """Put the old checkpoint back when a replacement was interrupted between its two renames."""
    if retired.exists() and not path.exists():
        retired.rename(path)


def _flush(folder: Path) -> None:
    for file in sorted(folder.rglob("*")):
        if file.is_dir():
            _flush_folder(file)
        else:
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
