"""Checks a client project by playing it in child processes, and says of each check what to change.

What it promises: the project's code runs in children only, in bounded time, with bounded output, without network unless
allowed, and leaves no process behind; each check gets a verdict, also where the project hangs, floods its output or
ends its process. Starts nothing on a GPU and needs no model.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from a3r.client.project import TRAIN

CHECKS: Mapping[str, str] = {
    "imports": "train.py can be imported, quietly, and has one Script",
    "light": "no GPU library is imported",
    "tasks": "tasks are named, enough, and follow from the seed",
    "episode": "one episode is played to its end on the scripted engine",
    "reward": "every answer gets a finite number",
    "seeded": "the same seed and answers give the same reward, in every process",
    "aborts": "a failing endpoint aborts the episode",
    "stubs": "empty, constant and copied answers earn no more than random ones",
    "learnable": "better answers earn more",
    "training": "train.py does one step on the scripted engine",
}
MOST_OUTPUT = 8_000_000
"""Bytes a child may print before it is ended."""
SHOWN_OUTPUT = 400
"""Characters of what it printed that a sentence quotes."""
TOTAL = 40
"""A whole child may take so many times the limit of one episode."""


class NotAProject(Exception):
    """There is nothing to check; the message says what is missing."""


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    SKIPPED = "skipped"
    """What it needs failed."""


@dataclass(frozen=True, slots=True)
class Result:
    check: str
    verdict: Verdict
    sentence: str
    """What was found; of a failure, what to change."""
    details: dict[str, Any] = field(default_factory=dict)
    """`transcript`: the episode that shows it."""


@dataclass(frozen=True, slots=True)
class Options:
    limit_s: float = 30.0
    """For importing, and for one episode."""
    episodes: int = 64
    """Episodes per policy."""
    network: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    folder: str
    results: list[Result]

    @property
    def ok(self) -> bool:
        return all(result.verdict is Verdict.PASS for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        return {"folder": self.folder, "ok": self.ok, "checks": [asdict(result) for result in self.results]}


def check_project(folder: Path, options: Options | None = None) -> Report:
    """Make every check of one project.

    Raises:
        NotAProject: no such folder, or no train.py in it.
    """
    options = options or Options()
    if not folder.is_dir():
        raise NotAProject(f"{folder}: no such folder; `a3r client new NAME` writes a project")
    if not (folder / TRAIN).is_file():
        raise NotAProject(f"{folder}: has no {TRAIN}, the file with the project's Script; see docs/clients.md")
    folder = folder.resolve()
    child = run_child("play", folder, options)
    results = {result.check: result for result in _results(child, options)}
    mine = next((record for record in child.records if record["kind"] == "played"), None)
    if mine and results["seeded"].verdict is Verdict.PASS:
        results["seeded"] = _compared(folder, options, mine)
    reached = results.get("reward")
    if reached and reached.verdict is Verdict.PASS:
        results["training"] = _trained(folder, options)
    return Report(str(folder), [results.get(name) or _skipped(name) for name in CHECKS])


def _skipped(name: str) -> Result:
    return Result(name, Verdict.SKIPPED, "an earlier check failed")


# ---- one child each --------------------------------------------------------------------------------------------------


def _results(child: Child, options: Options) -> Iterator[Result]:
    """The checks of the playing child. One that never came to its end says where it was."""
    running, imported = None, False
    for record in child.records:
        if record["kind"] == "begin":
            running = record["check"]
        elif record["kind"] == "end":
            running = None
            result = Result(record["check"], Verdict(record["verdict"]), record["sentence"], record["details"])
            if result.check == "reward" and result.verdict is Verdict.FAIL and child.printed:
                result = replace(result, sentence=f"{result.sentence}; it printed {child.quoted}")
            imported |= result.check == "imports"
            yield result
    if running is not None or not imported:
        name = running or "imports"
        yield Result(name, Verdict.FAIL, _ended_in(name, child, options))


def _ended_in(check: str, child: Child, options: Options) -> str:
    what = CHECKS[check]
    if child.flooded:
        return f"printed more than {MOST_OUTPUT // 1_000_000} MB ({child.quoted}): print less, or log at level debug"
    if any(record["kind"] == "blocked" for record in child.records):
        return (
            f"an async rollout, or a function of checks.py, blocked the event loop for {options.limit_s:g} s: await "
            "what takes time, make the rollout a plain function, bound the loop"
        )
    if child.late and check == "imports":
        return f"importing train.py was not over after {options.limit_s:g} s: move the work into functions"
    if child.late:
        return f"not over in time, while it was to show that {what}: bound loops and requests, or give --limit more"
    return (
        f"the process ended with status {child.status}, while it was to show that {what}: remove os._exit and what "
        f"kills the process; it printed {child.quoted}"
    )


def _compared(folder: Path, options: Options, mine: Mapping[str, Any]) -> Result:
    """The verdict on seeds with a second process, in which sets and hashes come in another order."""
    child = run_child("replay", folder, options)
    theirs = next((record for record in child.records if record["kind"] == "replayed"), None)
    if theirs is None:
        return Result("seeded", Verdict.FAIL, f"a second process did not come to its end: {child.quoted}")
    if theirs["tasks"] != mine["tasks"]:
        return Result(
            "seeded",
            Verdict.FAIL,
            "the same seed gives other tasks in another process: sort sets before drawing from them, and use no "
            "hash(), clock or object address",
        )
    if theirs["rewards"] != mine["rewards"]:
        return Result(
            "seeded",
            Verdict.FAIL,
            f"the same seed and answers earned {mine['rewards']} in one process and {theirs['rewards']} in another: "
            "draw from random.Random(episode.seed), and use no hash(), clock or set order",
        )
    again = f"{len(mine['rewards'])} episodes earned the same again, in a second process too"
    return Result("seeded", Verdict.PASS, again)


def _trained(folder: Path, options: Options) -> Result:
    child = run_child("train", folder, options)
    if child.late:
        return Result("training", Verdict.FAIL, "train.py was not over in time with one step of four episodes")
    if child.status != 0:
        return Result("training", Verdict.FAIL, f"train.py --steps 1 ended with status {child.status}: {child.quoted}")
    return Result("training", Verdict.PASS, "one step by train.py's own command line, on scripted answers")


# ---- children --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Child:
    """A child process that is over."""

    records: list[dict[str, Any]]
    status: int | None
    late: bool
    flooded: bool
    printed: str
    """The end of its standard output and error."""

    @property
    def quoted(self) -> str:
        text = " ".join(self.printed.split())
        return repr(text if len(text) <= SHOWN_OUTPUT else f"…{text[-SHOWN_OUTPUT:]}") if text else "nothing"


def run_child(mode: str, folder: Path, options: Options) -> Child:
    """Run one mode of the probe to its end, or end it: when it is late, or prints too much."""
    with tempfile.TemporaryDirectory(prefix="client-check-") as scratch:
        records = Path(scratch) / "records.jsonl"
        command = [sys.executable, "-m", "a3r.client.probe", mode, str(folder), str(records)]
        command += ["--limit", str(options.limit_s), "--episodes", str(options.episodes)]
        command += ["--network"] if options.network else []
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(mode),
            start_new_session=True,
        )
        assert process.stdout is not None
        output = _Output(process.stdout)
        try:
            late = _wait(process, output, records, options)
        finally:  # also when Ctrl-C ends the check: the child has a session of its own and does not hear it
            _end_group(process)
        output.join()
        return Child(_rows(records), process.returncode, late, output.flooded, output.tail)


def _environment(mode: str) -> dict[str, str]:
    ours = os.pathsep.join(str(path) for path in _roots())
    theirs = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": f"{ours}{os.pathsep}{theirs}" if theirs else ours,
        "PYTHONHASHSEED": "1" if mode == "replay" else "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _roots() -> list[Path]:
    """Where the two packages were imported from."""
    import a3r
    import swarmtune

    return [Path(str(module.__file__)).resolve().parent.parent for module in (a3r, swarmtune)]


def _wait(process: subprocess.Popen[bytes], output: _Output, records: Path, options: Options) -> bool:
    """Until the child is over or must be ended; whether it was late."""
    began = time.monotonic()
    imported = False
    while process.poll() is None:
        spent = time.monotonic() - began
        imported = imported or _has_imported(records)
        if output.flooded:
            return False
        if spent > options.limit_s * TOTAL or (not imported and spent > options.limit_s + _STARTING_S):
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    return False


_STARTING_S = 20.0
"""What Python and the rehearsal's server may take on a busy machine before a project is imported."""


def _has_imported(records: Path) -> bool:
    return records.is_file() and b'"kind": "end"' in records.read_bytes()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """What the project itself started goes too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rows(records: Path) -> list[dict[str, Any]]:
    if not records.is_file():
        return []
    whole = records.read_bytes().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


class _Output:
    """Reads a child's output as it comes, and keeps its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._kept = b""
        self._count = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def flooded(self) -> bool:
        return self._count > MOST_OUTPUT

    @property
    def tail(self) -> str:
        return self._kept.decode(errors="replace")

    def join(self) -> None:
        self._thread.join(5.0)

    def _read(self) -> None:
        while chunk := os.read(self._stream.fileno(), 65536):
            self._count += len(chunk)
            self._kept = (self._kept + chunk)[-4000:]
