"""Attempts that a supervisor runs: real processes, real signals, no leader."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from a3r import supervisor as sv

PATIENCE_S = 20.0


def until(condition: Callable[[], Any], what: str = "condition") -> Any:
    """Poll until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {PATIENCE_S:g} s: {what}")


@dataclass
class Attempt:
    """One attempt directory."""

    dir: Path
    nonce: str

    def start(self) -> None:
        """As the local executor does it."""
        with open(self.dir / "supervisor.log", "ab") as log:
            subprocess.run(
                [sys.executable, "-S", "-E", sv.__file__, str(self.dir)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={"PATH": "/usr/bin:/bin", sv.MARKER: self.nonce},
                check=True, start_new_session=True,
            )  # fmt: skip

    def result(self) -> dict[str, Any]:
        return until(lambda: sv.read_json(self.dir / "result.json"), f"result; {self.log()}")

    def run(self) -> dict[str, Any]:
        self.start()
        return self.result()

    def log(self) -> str:
        return sv.tail(self.dir / "supervisor.log")

    def claim(self) -> dict[str, Any]:
        return until(lambda: sv.read_json(self.dir / "claim"), "claim")

    def gone(self) -> bool:
        """Whether everything of it ends soon, the supervisor included."""
        return until(lambda: not sv.marked_processes(self.nonce), "nothing of the attempt is alive")


@dataclass
class Maker:
    base: Path
    made: list[Attempt]

    def __call__(self, main: str, *, helpers: dict[str, Any] | None = None, **launch: Any) -> Attempt:
        """An attempt whose main process is a Python program in which `row(step, **values)` writes a metrics row.

        Args:
            helpers: name → {"code": …, "ready": …}; the main process needs them all.
        """
        directory = self.base / f"attempt{len(self.made)}"
        directory.mkdir()
        nonce = f"nonce-{self.base.name}-{len(self.made)}"
        prelude = textwrap.dedent(
            f"""
            import json, os, sys, time
            OUT = {str(directory)!r}
            def row(step, **values):
                with open(OUT + "/metrics.jsonl", "a") as f:
                    f.write(json.dumps({{"step": step, "reward/mean": 0.5}} | values) + "\\n")
            def put(name, data):
                with open(OUT + "/" + name, "w") as f:
                    json.dump(data, f)
            """
        )
        program = directory / "client.py"
        program.write_text(prelude + textwrap.dedent(main))
        processes = [
            {"name": name, "argv": [sys.executable, "-S", "-E", "-c", h["code"]], "ready": h.get("ready")}
            for name, h in (helpers or {}).items()
        ]
        argv = [sys.executable, "-S", "-E", str(program)]
        processes.append({"name": "client", "argv": argv, "main": True, "needs": list(helpers or {})})
        raw = {
            "run": "arm/s1", "arm": "arm", "blueprint": "sha256:0", "seed": 1, "replicate": 0, "attempt": 1,
            "nonce": nonce, "locks": [], "processes": processes, "tick_s": 0.02,
            "timeouts": {"first_step_s": 15, "stall_s": 15, "max_s": 30, "grace_s": 0.5},
        }  # fmt: skip
        (directory / "launch.json").write_text(json.dumps(raw | launch))
        self.made.append(Attempt(directory, nonce))
        return self.made[-1]


@pytest.fixture
def attempt(tmp_path: Path):
    """Makes attempts; whatever one of them leaves alive is killed at the end."""
    maker = Maker(tmp_path, [])
    yield maker
    for made in maker.made:
        sv.kill_marked(made.nonce)
