"""The interpreter a commit runs with: one environment for all commits whose locked packages are the same.

Commits that lock what this checkout locks run in the environment that a3r itself runs in. Others get an environment of
their own, made by the suite's commands, kept and shared by its key.
"""

from __future__ import annotations

import platform
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from a3r.bench.commits import History
from a3r.bench.suites import Environment
from a3r.bench.worktrees import BuildError, run_build
from a3r.executors.local import looks_secret
from a3r.formats import canonical, sha256

DEPENDENCY_TABLES = ("requires-python", "dependencies", "optional-dependencies")


@dataclass(frozen=True)
class Interpreter:
    python: Path
    key: str
    """Hash of what is locked; `current` when nothing is."""


class Environments:
    """Environments of one repository's commits in one folder. The caller holds the benchmark's lock."""

    def __init__(self, history: History, folder: Path, variables: dict[str, str]) -> None:
        self.history = history
        self.folder = folder.resolve()
        self.variables = variables
        """Environment variables of the commands that make an environment."""

    def interpreter(self, commit: str, tree: Path, wanted: Environment) -> Interpreter:
        """The interpreter of a commit, made if need be.

        Raises:
            BuildError: it cannot be made.
        """
        if not wanted.lock:
            return Interpreter(Path(sys.executable), "current")
        key = locked_key({name: self.history.file(commit, name) for name in wanted.lock})
        if key == self._own_key(wanted.lock):
            return Interpreter(Path(sys.executable), key)
        if not wanted.create:
            raise BuildError(
                f"{commit[:12]} locks other packages than this checkout ({', '.join(wanted.lock)}); give the suite "
                "environment.create commands, or check out a commit with the same ones"
            )
        return Interpreter(self._made(key, tree, wanted), key)

    def _own_key(self, names: list[str]) -> str:
        files = {name: self.history.root / name for name in names}
        return locked_key({name: path.read_bytes() if path.is_file() else None for name, path in files.items()})

    def _made(self, key: str, tree: Path, wanted: Environment) -> Path:
        recipe = sha256(canonical({"key": key, "create": wanted.create, "python": platform.python_version()}))
        folder = self.folder / recipe[:12]
        python = folder / "bin" / "python"
        if (folder / ".ready").exists():
            return python
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            for argv in wanted.create:
                words = [w.replace("{env}", str(folder)).replace("{tree}", str(tree)) for w in argv]
                run_build([w.replace("{python}", sys.executable) for w in words], tree, self.variables)
            if not python.exists():
                raise BuildError(f"environment.create left no {python.relative_to(self.folder)}; make it with venv")
            (folder / ".ready").touch()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return python


def locked_key(files: dict[str, bytes | None]) -> str:
    """Hash of what some files lock; of a pyproject.toml only the dependencies count."""
    return sha256(canonical({name: sha256(_locked(name, data)) for name, data in sorted(files.items())}))


def _locked(name: str, data: bytes | None) -> bytes:
    if data is None or Path(name).name != "pyproject.toml":
        return data or b""
    try:
        project = tomllib.loads(data.decode()).get("project", {})
    except ValueError:
        return data
    return canonical({table: project.get(table) for table in DEPENDENCY_TABLES}).encode()


def plain_variables(environment: dict[str, str]) -> dict[str, str]:
    """Environment variables without secrets, for commands of the code under test."""
    return {name: value for name, value in environment.items() if not looks_secret(name)}
