"""Writes a client project from the template beside this file."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 64
_STANDS_FOR_NAME = "first-word"
"""The template is a project of this name."""
_SUFFIX = ".txt"
"""Behind the names of the template's files, which are no modules of this package."""


class CannotWrite(ValueError):
    """The message says what to change."""


def write_project(name: str, parent: Path) -> Path:
    """Write `parent/name`, whole or not at all; returns the folder.

    Raises:
        CannotWrite: the name is none, the folder exists, or it cannot be written.
    """
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise CannotWrite(
            f"{name!r} is no project name: at most {_LONGEST} lower-case letters, digits and single hyphens, beginning "
            "with a letter"
        )
    target = parent / name
    if os.path.lexists(target):
        raise CannotWrite(f"{target} exists already: give another name, or another --dir")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
        try:
            _fill(scratch, name)
            scratch.chmod(0o755)
            os.rename(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise CannotWrite(f"{target} cannot be written: {error.strerror or error}") from None
    return target


def _fill(folder: Path, name: str) -> None:
    for part in files("a3r.client").joinpath("template").iterdir():
        text = part.read_text(encoding="utf-8").replace(_STANDS_FOR_NAME, name)
        (folder / part.name.removesuffix(_SUFFIX)).write_text(text, encoding="utf-8")
