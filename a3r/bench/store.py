"""Results on disk: one JSON file per run, written once, in a folder that git or an object store can keep.

    results/<machine>/<suite id>/<commit>/<task>.<purpose>.<number>.json
    machines/<machine>.json

A file is complete or absent, and never changed. Equal names mean the same run, so a run that has a file is not run
again; what is missing is what is left to do. Also holds the lock that keeps two benchmarks off one folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from a3r import supervisor as sv
from a3r.formats import canonical, sha256
from a3r.hosts import visible_gpus

Status = Literal["ok", "failed", "invalid", "no_build", "no_space"]


@dataclass(frozen=True)
class Key:
    """One run: which code, which task, what for."""

    suite: str
    """The suite's id."""
    commit: str
    """Full hash, with `+<patch>` for a dirty tree."""
    task: str
    purpose: str
    """`screen`; or `confirm-<head>-<base>`, `bisect-<head>-<base>`."""
    number: int

    @property
    def name(self) -> str:
        return f"{self.task}.{self.purpose}.{self.number}"


class Result(BaseModel):
    """One run's file."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["a3r/bench-result/v1"] = Field(default="a3r/bench-result/v1", alias="schema")
    suite: str
    commit: str
    task: str
    purpose: str
    number: int
    seed: int
    status: Status
    detail: str = ""
    """Why it is not ok."""
    metrics: dict[str, float] = Field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = Field(default_factory=dict)
    """Of metrics that have more than one step."""
    machine: str
    environment: str
    """Key of the locked packages."""
    versions: dict[str, str] = Field(default_factory=dict)
    modules: dict[str, list[str]] = Field(default_factory=dict)
    """Package → where it was loaded from, relative to the worktree, or absolute when outside."""
    patch: str | None = None
    """The changes of a dirty tree."""
    attempts: int = 0
    wall_s: float = 0.0
    load: tuple[float, float, float] | None = None
    """Load averages of the machine when the run began."""
    ended: float = 0.0

    @property
    def key(self) -> Key:
        return Key(self.suite, self.commit, self.task, self.purpose, self.number)


class Busy(RuntimeError):
    """Another benchmark holds the folder."""


class Results:
    """The result files of one folder, as seen from one machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.machine = machine_key(machine_facts())
        self._known: dict[Key, Result] = {}
        self._read: set[tuple[str, str]] = set()

    @property
    def work(self) -> Path:
        """What may be deleted at any time that nothing is measured: worktrees, environments, attempts."""
        return self.folder / "work"

    def get(self, key: Key) -> Result | None:
        self._load(key.suite, key.commit)
        return self._known.get(key)

    def of(self, suite: str, commit: str) -> list[Result]:
        """Results of one commit, in the order of their names."""
        self._load(suite, commit)
        return sorted(
            (r for k, r in self._known.items() if (k.suite, k.commit) == (suite, commit)), key=lambda r: r.key.name
        )

    def commits(self, suite: str) -> list[str]:
        """Commits that have results of a suite."""
        folder = self.folder / "results" / self.machine / suite
        return sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []

    def put(self, result: Result) -> bool:
        """Write a result unless there is one. True: this call wrote it."""
        path = self._path(result.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._describe_machine()
        wrote = sv.write_once(path, result.model_dump(mode="json", by_alias=True))
        self._known[result.key] = Result.model_validate_json(path.read_text())
        return wrote

    def discard_failures(self, suite: str, commit: str) -> int:
        """Forget runs that could not be measured, so that they are tried again."""
        failed = [r for r in self.of(suite, commit) if r.status != "ok"]
        for result in failed:
            self._path(result.key).unlink()
            del self._known[result.key]
        return len(failed)

    def _path(self, key: Key) -> Path:
        return self.folder / "results" / self.machine / key.suite / key.commit / f"{key.name}.json"

    def _load(self, suite: str, commit: str) -> None:
        if (suite, commit) in self._read:
            return
        self._read.add((suite, commit))
        folder = self.folder / "results" / self.machine / suite / commit
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
            result = Result.model_validate_json(path.read_text())
            self._known[result.key] = result

    def _describe_machine(self) -> None:
        path = self.folder / "machines" / f"{self.machine}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            sv.write_once(path, machine_facts())

    @contextlib.contextmanager
    def exclusive(self, name: str = "bench") -> Iterator[None]:
        """Hold a lock of this folder: released by the death of its holder, never unlinked.

        Raises:
            Busy: names the holder's process.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 20, 0).decode() or "unknown"
                raise Busy(
                    f"{self.folder} is in use by another `a3r bench` (process {holder}); wait for it, or give --dir"
                ) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(fd)


def machine_facts() -> dict[str, Any]:
    """What of a machine decides how fast it is, and does not change with a boot or an update."""
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "arch": platform.machine(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "gpus": len(visible_gpus()),
    }


def machine_key(facts: Mapping[str, Any]) -> str:
    return f"{facts['cores']}core-{sha256(canonical(dict(facts)))[:8]}"
