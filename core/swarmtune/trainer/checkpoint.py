"""Checkpoint folders: complete or absent.

A checkpoint is written beside its place, flushed to disk and renamed. A folder without `trainer.json` is no checkpoint;
one whose name begins with `.partial-` is left of an interrupted save, and the next save to the same place removes it.
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


def write(path: Path, state: dict[str, Any], fill: Callable[[Path], None], *, needed_bytes: int) -> None:
    """Create or replace the checkpoint `path`: `fill` writes the files, `state` is what `read` gives back.

    Raises:
        OSError: not enough space (ENOSPC), or not writable. What was at `path` before is intact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, retired = path.parent / f"{PARTIAL}{path.name}", path.parent / f"{RETIRED}{path.name}"
    _recover(path, retired)
    shutil.rmtree(partial, ignore_errors=True)
    free = shutil.disk_usage(path.parent).free
    if free < needed_bytes:
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint needs {needed_bytes / 1e6:.0f} MB and {free / 1e6:.0f} MB are free; "
            "free some space, or lower checkpoint.keep_last",
            str(path),
        )
    partial.mkdir()
    try:
        fill(partial)
        (partial / STATE).write_text(json.dumps({"format": FORMAT, **state}, indent=1))
        _flush(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if path.exists():
        path.rename(retired)
    partial.rename(path)
    _flush_folder(path.parent)
    shutil.rmtree(retired, ignore_errors=True)


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
