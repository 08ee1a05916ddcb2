"""Putting skills where coding assistants look, without touching anything of the user's.

What always holds: everything is decided before the first file changes (`plan`), and it is all carried out or none of it
(`carry_out`). A skill's folder is ours while it holds exactly what its marker says we put there; such a folder is
updated. A folder that differs is the user's and is replaced only when that is asked for. Nothing else is touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from a3r.skills import Skill

FOLDERS = {
    "claude": Path(".claude/skills"),
    "opencode": Path(".opencode/skills"),
    "codex": Path(".codex/skills"),
    "qwen": Path(".qwen/skills"),
}
"""Assistant → where it looks for a project's skills."""
CLAUDE_SETTING = {"skillListingBudgetFraction": 0.03}
"""For .claude/settings.json. By default Claude Code spends 1 % of its context on the descriptions of all skills, its
own first: at 200,000 tokens most of ours would be shown by name only."""
MARKER = ".a3r-skill.json"


class InstallError(RuntimeError):
    """Nothing was installed; the message says what is in the way and what to do."""


class Action(StrEnum):
    ADD = "added"
    UPDATE = "updated"
    REPLACE = "replaced"
    KEEP = "the same already"
    REFUSE = "not touched: it holds changes that are not ours"


@dataclass(frozen=True)
class Step:
    """What is done for one skill in one folder."""

    skill: Skill
    target: Path
    action: Action

    @property
    def writes(self) -> bool:
        return self.action in {Action.ADD, Action.UPDATE, Action.REPLACE}


def plan(skills: Sequence[Skill], project: Path, assistants: Sequence[str], *, link: bool, force: bool) -> list[Step]:
    """What installing would do; changes nothing.

    Raises:
        InstallError: the project is no folder, or a file stands where a folder of skills belongs.
    """
    if not project.is_dir():
        raise InstallError(f"{project} is no folder; give the project's with --project")
    steps: list[Step] = []
    for assistant in assistants:
        root = project / FOLDERS[assistant]
        _check_root(root, project)
        if any(root.resolve() == step.target.parent.resolve() for step in steps):
            continue  # a link made two assistants' folders one, whose skills are planned already
        for skill in skills:
            steps.append(Step(skill, root / skill.name, _action(skill, root / skill.name, link=link, force=force)))
    return steps


def mend(skills: Sequence[Skill], project: Path, assistants: Sequence[str]) -> None:
    """Clear up after an installation that was killed: what it had prepared goes, what it had moved aside returns.

    Raises:
        InstallError: a folder cannot be written.
    """
    try:
        for root in {project / FOLDERS[assistant] for assistant in assistants}:
            for path in sorted(root.glob(".*-*")) if root.is_dir() else []:
                left = _LEFT.fullmatch(path.name)
                if left and left["name"] in {skill.name for skill in skills} and not _lives(int(left["pid"])):
                    _return_or_remove(path, root / left["name"], moved_aside=left["kind"] == "old")
    except OSError as error:
        raise InstallError(f"{error.filename or project}: {error.strerror or error}; nothing was installed") from error


def carry_out(steps: Sequence[Step], *, link: bool, version: str) -> None:
    """Do what a plan says, all of it or nothing.

    Raises:
        InstallError: a folder cannot be written; what was there before is there again.
    """
    work = [step for step in steps if step.writes]
    try:
        with contextlib.ExitStack() as staged:
            ready = [(step, staged.enter_context(_staged(step, link=link, version=version))) for step in work]
            _swap(ready)
    except OSError as error:
        raise InstallError(f"{error.filename or 'skills'}: {error.strerror or error}; nothing was installed") from error


# ---- deciding --------------------------------------------------------------------------------------------------------


def _check_root(root: Path, project: Path) -> None:
    for folder in (root, *root.parents):
        if folder == project:
            return
        if folder.is_symlink() and not folder.exists():
            raise InstallError(f"{folder} is a link to nothing; remove it or make what it points to")
        if folder.exists() and not folder.is_dir():
            raise InstallError(f"{folder} is a file where a folder belongs; move it away")


def _action(skill: Skill, target: Path, *, link: bool, force: bool) -> Action:
    if not target.exists() and not target.is_symlink():
        return Action.ADD
    if target.is_symlink() and Path(os.path.realpath(target)) == skill.folder.resolve():
        return Action.KEEP if link else Action.UPDATE
    is_ours = not target.is_symlink() and target.is_dir() and _is_ours(target)
    if not target.is_symlink() and target.is_dir() and digests(target) == source_digests(skill):
        return Action.UPDATE if link and is_ours else Action.KEEP
    if is_ours:
        return Action.UPDATE
    return Action.REPLACE if force else Action.REFUSE


def _is_ours(folder: Path) -> bool:
    """Does it hold what its marker says, and nothing else?"""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return marker["files"] == digests(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def source_digests(skill: Skill) -> dict[str, str]:
    """Path → sha256 of what is installed of a skill: all but its evals, which hold the answers."""
    return {file.as_posix(): _sha256(skill.folder / file) for file in skill.files(evals=False)}


def digests(folder: Path) -> dict[str, str]:
    """Path → sha256 of every file but the marker and byte code; a link is its target."""
    found: dict[str, str] = {}
    for root, folders, names in os.walk(folder):
        for name in names + [f for f in folders if Path(root, f).is_symlink()]:
            path = Path(root, name)
            if path.suffix != ".pyc" and path != folder / MARKER:
                key = path.relative_to(folder).as_posix()
                found[key] = f"link to {os.readlink(path)}" if path.is_symlink() else _sha256(path)
    return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- doing -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _staged(step: Step, *, link: bool, version: str) -> Iterator[Path]:
    """The skill, complete, under a hidden name beside its place; gone again when the block is left."""
    made = _make_folders(step.target.parent)
    part = step.target.with_name(f".{step.skill.name}.part-{os.getpid()}")
    try:
        if link:
            part.symlink_to(step.skill.folder.resolve())
        else:
            _copy(step.skill, part, version)
        yield part
    finally:
        _remove(part)
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: something was installed there
                folder.rmdir()


def _copy(skill: Skill, part: Path, version: str) -> None:
    part.mkdir()
    for file in skill.files(evals=False):
        (part / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(skill.folder / file, part / file)
    marker = {"installed_by": "a3r skills install", "version": version, "files": source_digests(skill)}
    (part / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


_LEFT = re.compile(r"\.(?P<name>[a-z0-9-]+)\.(?P<kind>part|old)-(?P<pid>[0-9]{1,9})")


def _return_or_remove(path: Path, target: Path, *, moved_aside: bool) -> None:
    if moved_aside and not target.exists() and not target.is_symlink():
        path.rename(target)
    else:
        _remove(path)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _make_folders(folder: Path) -> list[Path]:
    """Make it with its parents; those that were made, innermost first."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir()
    return missing


def _swap(ready: Sequence[tuple[Step, Path]]) -> None:
    """Rename all into place; on an error, rename all back."""
    done: list[tuple[Path, Path | None]] = []
    try:
        for step, part in ready:
            old = step.target.with_name(f".{step.skill.name}.old-{os.getpid()}")
            had = step.target.exists() or step.target.is_symlink()
            if had:
                step.target.rename(old)
            done.append((step.target, old if had else None))
            part.rename(step.target)
    except BaseException:
        for target, old in reversed(done):
            _remove(target)
            if old is not None:
                old.rename(target)
        raise
    for _, old in done:
        if old is not None:
            _remove(old)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
