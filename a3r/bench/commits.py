"""Which commits are meant, and whether two of them can differ in a result. Reads git, never writes.

The history is the first-parent one: what was on the branch after each merge. A commit that touches only files which
cannot change a result has its predecessor's code key and is not measured again.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import git


class CommitError(ValueError):
    """Commits that cannot be had; the message says what to do."""


@dataclass(frozen=True)
class Selection:
    """Commits to measure, and the history they are judged in."""

    wanted: tuple[str, ...]
    """Oldest first."""
    history: tuple[str, ...]
    """First-parent history up to the newest wanted one, oldest first."""


@dataclass(frozen=True)
class CommitInfo:
    sha: str
    subject: str
    author: str
    time: int
    """Committer time, seconds since the epoch."""


class History:
    """A repository's commits."""

    def __init__(self, root: Path) -> None:
        try:
            self.repo = git.Repo(root, search_parent_directories=True)
        except (git.InvalidGitRepositoryError, git.NoSuchPathError):
            raise CommitError(f"{root}: not inside a git repository; run it in one, or give --repo") from None
        self._keys: dict[tuple[str, tuple[str, ...]], str] = {}

    @property
    def root(self) -> Path:
        return Path(self.repo.working_tree_dir or self.repo.git_dir)

    def resolve(self, name: str) -> str:
        """A commit's full hash.

        Raises:
            CommitError: unknown; names what is near.
        """
        try:
            return str(self.repo.git.rev_parse("--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"))
        except git.GitCommandError:
            pass
        known = [r.name for r in self.repo.references]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see `git log`; a commit of a remote must be fetched first"
        shallow = " (this clone is shallow: `git fetch --unshallow`)" if self.is_shallow else ""
        raise CommitError(f"unknown commit {name!r}; {hint}{shallow}")

    @property
    def is_shallow(self) -> bool:
        return self.repo.git.rev_parse("--is-shallow-repository") == "true"

    def first_parents(self, tip: str, count: int | None = None) -> tuple[str, ...]:
        """First-parent history of a commit, oldest first."""
        limit = [f"--max-count={count}"] if count else []
        lines = self.repo.git.rev_list("--first-parent", "--reverse", *limit, tip)
        return tuple(lines.split())

    def select(self, spec: str, steps: int | None, measured: Callable[[str], bool], tip: str = "HEAD") -> Selection:
        """Commits by `HEAD`, `NEW`, `ALL`, `A..B` or a name; with `steps`, so many of them spread evenly.

        Args:
            tip: the newest commit for NEW and ALL.
            measured: whether a commit has complete results; NEW means those after the last such one.

        Raises:
            CommitError: unknown commits, none left, or a shallow clone whose history is needed.
        """
        needs_history = spec in ("ALL", "NEW") or ".." in spec
        if needs_history and self.is_shallow:
            raise CommitError(f"this clone is shallow, so {spec} is not all of it; run `git fetch --unshallow` first")
        if ".." in spec:
            first, _, last = spec.partition("..")
            first_sha = self.resolve(first)
            history = self.first_parents(self.resolve(last.lstrip(".") or "HEAD"))
            if first_sha not in history:
                raise CommitError(
                    f"{first} is not on the first-parent history of {last or 'HEAD'}; take a commit of it"
                )
            wanted = history[history.index(first_sha) + 1 :]
        else:
            history = self.first_parents(self.resolve(tip if spec in ("ALL", "NEW") else spec))
            wanted = history if spec == "ALL" else self._new(history, measured) if spec == "NEW" else history[-1:]
        if not wanted and spec != "NEW":
            raise CommitError(f"{spec} holds no commit; the first one is exclusive, as in git")
        return Selection(_spread(wanted, steps), history)

    def _new(self, history: Sequence[str], measured: Callable[[str], bool]) -> tuple[str, ...]:
        """Commits after the last measured one; without any, the newest."""
        for position in range(len(history) - 1, -1, -1):
            if measured(history[position]):
                return tuple(history[position + 1 :])
        return tuple(history[-1:])

    def info(self, sha: str) -> CommitInfo:
        commit = self.repo.commit(sha)
        return CommitInfo(sha, str(commit.summary), str(commit.author.name), int(commit.committed_date))

    def code_key(self, sha: str, unchanged_by: Sequence[str]) -> str:
        """Hash of all files of a commit but those that cannot change a result."""
        key = (sha, tuple(unchanged_by))
        if key not in self._keys:
            digest = hashlib.sha256()
            for entry in self.repo.git.ls_tree("-r", "-z", "--full-tree", sha).split("\0"):
                path = entry.partition("\t")[2]
                if entry and not any(matches(path, pattern) for pattern in unchanged_by):
                    digest.update(entry.encode() + b"\0")
            self._keys[key] = digest.hexdigest()
        return self._keys[key]

    def dirty_patch(self) -> bytes:
        """Changes of tracked files against HEAD, as a patch that `git apply` takes; empty in a clean tree."""
        if self.repo.bare or not self.repo.is_dirty(untracked_files=False):
            return b""
        text = self.repo.git.diff("HEAD", "--binary", strip_newline_in_stdout=False)
        return text.encode("utf-8", "surrogateescape")

    def file(self, sha: str, path: str) -> bytes | None:
        """A file's bytes at a commit; None when it has none."""
        try:
            blob = self.repo.commit(sha).tree / path
        except KeyError:
            return None
        return blob.data_stream.read()

    def size(self, sha: str) -> int:
        """Bytes that a checkout of a commit takes."""
        rows = self.repo.git.ls_tree("-r", "-l", "--full-tree", sha).splitlines()
        return sum(int(size) for row in rows if (size := row.split("\t")[0].split()[-1]).isdigit())


def matches(path: str, pattern: str) -> bool:
    """`*.md` by file name anywhere; `docs/**` by folder; else by the whole path."""
    if pattern.endswith("/**"):
        return path.startswith(pattern[:-2])
    name = path if "/" in pattern else path.rsplit("/", 1)[-1]
    return fnmatch.fnmatchcase(name, pattern)


def _spread(commits: Sequence[str], steps: int | None) -> tuple[str, ...]:
    """`steps` of them, evenly, the newest always among them."""
    if steps is None or steps >= len(commits):
        return tuple(commits)
    last = len(commits) - 1
    picked = {round(last * i / (steps - 1)) for i in range(steps)} if steps > 1 else {last}
    return tuple(commits[i] for i in sorted(picked))
