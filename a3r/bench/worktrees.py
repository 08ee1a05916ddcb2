"""A folder with the files of one commit, and nothing else in it.

Made with `git worktree` under one folder that belongs to the benchmark; what a killed run left there is removed at the
next start. The working tree of the repository and its other worktrees are never touched. A worktree counts as there
only after its build has succeeded.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import git

from a3r import supervisor as sv
from a3r.bench.commits import History
from a3r.formats import sha256

SPARE_BYTES = 200 * 1024 * 1024
"""Left free beside a checkout: results, logs, a checkpoint."""
BUILD_LIMIT_S = 3600.0


class BuildError(RuntimeError):
    """A commit does not build; the message holds the command and the end of its output."""


class NoSpace(RuntimeError):
    """The disk has no room for a worktree."""


class Worktrees:
    """Worktrees of one repository in one folder. The caller holds the benchmark's lock."""

    def __init__(self, history: History, folder: Path) -> None:
        self.history = history
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, commit: str, patch: bytes = b"") -> Path:
        return self.folder / (f"{commit[:12]}-{sha256(patch)[:12]}" if patch else commit[:12])

    def ensure(self, commit: str, build: Callable[[Path], None], patch: bytes = b"") -> Path:
        """The built worktree of a commit.

        Args:
            build: builds the commit in the folder it is given, once.

        Raises:
            NoSpace: nothing is left behind.
            BuildError: nothing is left behind.
        """
        tree = self.path(commit, patch)
        if self._stamp(tree).exists() and (tree / ".git").exists():
            return tree
        self.remove(tree)
        self._check_space(commit)
        try:
            self._add(tree, commit, patch)
            build(tree)
            self._stamp(tree).touch()
        except BaseException:
            self.remove(tree)
            raise
        return tree

    def keep_only(self, trees: Iterable[Path]) -> None:
        """Remove every other worktree of this folder, those of killed runs included."""
        kept = set(trees)
        for tree in [p for p in self.folder.iterdir() if p.is_dir() and p not in kept]:
            self.remove(tree)

    def remove(self, tree: Path) -> None:
        self._stamp(tree).unlink(missing_ok=True)
        with contextlib.suppress(git.GitCommandError):
            # Twice --force: a run killed within `git worktree add` leaves its worktree locked.
            self.history.repo.git.worktree("remove", "--force", "--force", str(tree))
        shutil.rmtree(tree, ignore_errors=True)
        self.history.repo.git.worktree("prune")

    def _add(self, tree: Path, commit: str, patch: bytes) -> None:
        try:
            self.history.repo.git.worktree("add", "--detach", "--force", str(tree), commit)
        except git.GitCommandError as error:
            if "No space left" in str(error.stderr):
                raise NoSpace(
                    f"the disk filled up while checking out {commit[:12]}; free some, then run it again"
                ) from None
            raise BuildError(f"git worktree add {commit[:12]}: {str(error.stderr).strip()[-500:]}") from None
        if patch:
            done = subprocess.run(["git", "-C", str(tree), "apply", "-"], input=patch, capture_output=True, check=False)
            if done.returncode:
                raise BuildError(f"the patch does not apply to {commit[:12]}: {done.stderr.decode()[-500:]}")

    def _check_space(self, commit: str) -> None:
        needed = self.history.size(commit) + SPARE_BYTES
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise NoSpace(
                f"{self.folder} has {free / 2**20:.0f} MiB free and a worktree of {commit[:12]} needs "
                f"{needed / 2**20:.0f}; free some, or move --dir to another disk"
            )

    def _stamp(self, tree: Path) -> Path:
        return self.folder / f"{tree.name}.ready"


def run_build(argv: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
    """Run one build command.

    Raises:
        BuildError
    """
    words = " ".join(argv)
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=BUILD_LIMIT_S, check=False,
        )  # fmt: skip
    except OSError as error:
        raise BuildError(f"`{words}` could not start: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"`{words}` did not end within {BUILD_LIMIT_S:g} s") from None
    if done.returncode:
        found = sv.classify_text(done.stdout + done.stderr)
        if found and found[0] == "infra" and "No space" in found[1]:
            raise NoSpace(f"the disk filled up during `{words}`; free some, then run it again")
        end = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise BuildError(f"`{words}` ended with {done.returncode}: {end}")
