"""One run of one task at one commit, under a supervisor, turned into a Result.

A run that a killed benchmark has left is taken up again: finished, its result is taken; alive, it is waited for; dead
or never begun, it is fenced and started anew. So a run counts once, whatever was killed. A run is invalid when a
package under test came from outside the commit's worktree.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a3r import supervisor as sv
from a3r.analysis import select
from a3r.bench.environments import Interpreter
from a3r.bench.store import Key, Result, Results
from a3r.bench.suites import LoadedSuite, Metric, Task
from a3r.blueprint import Blueprint, Code
from a3r.executor import Handle, Life
from a3r.executors.local import LocalExecutor
from a3r.hosts import Host, local_host
from a3r.ledger import NoFreePort, can_bind, candidate_ports
from a3r.results import FailureClass, Observation, RunRecord, RunStatus, TamperedError, observe
from a3r.worker import Assignment, Failure, Retry
from a3r.workers.recipe import RecipeWorker, secrets_of

ORIGIN_HOOK = Path(__file__).with_name("origin")
ORIGINS = "origins.jsonl"
SPAWN_GRACE_S = 30.0
SLOT_WAIT_S = 3600.0
"""How long a run waits for studies on this machine to free its slots."""


def reached(point: str) -> None:
    """A named point of a measurement; tests replace this function to die there."""


@dataclass(frozen=True)
class Ground:
    """A commit made ready: its files and its interpreter."""

    commit: str
    tree: Path
    interpreter: Interpreter
    patch: str | None = None


class Measurer:
    """Runs samples one after the other; each has the machine's slots to itself."""

    def __init__(self, results: Results, host: Host | None = None, tick_s: float = 0.25) -> None:
        self.results = results
        self.host = host or local_host()
        self.tick_s = tick_s
        self.folder = results.work / "attempts"
        self.executor = LocalExecutor(self.folder, view=False)

    def measure(self, key: Key, loaded: LoadedSuite, seed: int, ground: Ground) -> Result:
        """The result of a run: the stored one, that of a run left behind, or a new one."""
        stored = self.results.get(key)
        if stored is not None:
            return stored
        task = loaded.suite.task(key.task)
        folder = self.attempts_of(key)
        failures: dict[FailureClass, int] = {}
        load = os.getloadavg()
        number, record = self._take_up(folder)
        while True:
            if record is None:
                number += 1
                record = self._attempt(key, loaded, task, seed, ground, folder, number)
            again = self._again(record, task.blueprint, folder / str(number), failures)
            if again is None:
                break
            time.sleep(again)
            record = None
        reached("finished")
        result = self._result(key, loaded, task, seed, ground, record, folder / str(number), number, load)
        self.results.put(result)
        reached("stored")
        if result.status == "ok":
            shutil.rmtree(folder, ignore_errors=True)
        return result

    def attempts_of(self, key: Key) -> Path:
        return self.folder / key.suite / key.commit / key.name

    def tidy(self) -> None:
        """Wait for runs that a killed benchmark left alive, so that nothing else is measured beside them, and remove
        what is stored already."""
        for folder in sorted(self.folder.glob("*/*/*")):
            suite, commit, name = folder.relative_to(self.folder).parts
            task, purpose, number = name.rsplit(".", 2)
            stored = self.results.get(Key(suite, commit, task, purpose, int(number)))
            for attempt in [int(p.name) for p in folder.iterdir() if p.name.isdigit()]:
                handle = self._handle(folder, attempt)
                if self.executor.look(handle).life is Life.ALIVE:
                    self._await(handle)
            if stored is not None and stored.status == "ok":
                shutil.rmtree(folder, ignore_errors=True)

    # -- taking up and starting

    def _take_up(self, folder: Path) -> tuple[int, RunRecord | None]:
        """(number of the last attempt left by an earlier process, its record if it ended by itself)."""
        numbers = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []
        for number in numbers:
            handle = self._handle(folder, number)
            record = self._await(handle) if self.executor.look(handle).life is not Life.UNBORN else None
            if record is not None and record.status is not RunStatus.CANCELLED:
                return number, record
            self._fence(handle)
        return (numbers[-1] if numbers else 0), None

    def _handle(self, folder: Path, number: int) -> Handle:
        directory = folder / str(number)
        launch = sv.read_json(directory / "launch.json") or {}
        return Handle(folder.name, number, launch.get("nonce", "never started"), directory, self.host)

    def _attempt(
        self, key: Key, loaded: LoadedSuite, task: Task, seed: int, ground: Ground, folder: Path, number: int
    ) -> RunRecord | None:
        directory = folder / str(number)
        blueprint = self._blueprint(loaded, task.blueprint, ground, directory)
        gpus = blueprint.resources.gpus
        slots = self.host.slot_names("gpu")[:gpus] if gpus else self.host.slot_names("cpu")
        names = blueprint.resources.ports
        job = Assignment(
            campaign="bench", run=f"{key.task}/s{seed}", arm=key.task, seed=seed, replicate=0, attempt=number,
            nonce=secrets.token_hex(8), epoch=1, blueprint=blueprint, host=self.host, slots=tuple(slots),
            ports=dict(zip(names, free_ports(len(names)), strict=True)), run_dir=folder / f"run{number}",
            attempt_dir=directory, queued_at=time.time(),
        )  # fmt: skip
        worker = RecipeWorker(self.folder, ground.tree, tick_s=self.tick_s)
        for name, data in loaded.harness.items():
            path = directory / "harness" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        job.run_dir.mkdir(parents=True, exist_ok=True)
        worker.prepare(job, {})
        launch = json.loads((directory / "launch.json").read_text()) | {"lock_wait_s": SLOT_WAIT_S}
        sv.replace_file(directory / "launch.json", json.dumps(launch, indent=1, sort_keys=True) + "\n")
        reached("prepared")
        handle = self._handle(folder, number)
        self.executor.start(handle, secrets_of(blueprint))
        reached("started")
        return self._await(handle)

    def _blueprint(self, loaded: LoadedSuite, blueprint: Blueprint, ground: Ground, directory: Path) -> Blueprint:
        """The task's blueprint for one worktree and interpreter. Nothing is resumed: a sample is a whole run."""
        python = str(ground.interpreter.python)
        path = [str(ORIGIN_HOOK)] if loaded.suite.modules else []
        path += [str((ground.tree / part).resolve()) for part in loaded.suite.pythonpath]
        variables = blueprint.env.variables | {"PYTHONPATH": os.pathsep.join(path)}
        if loaded.suite.modules:
            variables |= {
                "A3R_BENCH_MODULES": ",".join(loaded.suite.modules),
                "A3R_BENCH_ORIGINS": str(directory / ORIGINS),
            }
        processes = [
            p.model_copy(update={"argv": [python if a == "{python}" else a for a in p.argv]})
            for p in blueprint.processes
        ]
        env = blueprint.env.model_copy(update={"variables": variables})
        return blueprint.model_copy(
            update={
                "processes": processes,
                "env": env,
                "code": Code(),
                "checkpoint": None,
                "id": blueprint.computed_id(),
            }
        )

    def _await(self, handle: Handle) -> RunRecord | None:
        """The record of a started attempt; None when it died or never came to life."""
        born_by = time.monotonic() + SPAWN_GRACE_S
        try:
            while True:
                sight = self.executor.look(handle)
                if sight.life is Life.FINISHED:
                    return RunRecord.model_validate_json(json.dumps(sight.result))
                if sight.life in (Life.DEAD, Life.REBOOTED):
                    break
                if sight.life is Life.UNBORN and time.monotonic() > born_by:
                    break
                time.sleep(min(self.tick_s, 0.1))
        except KeyboardInterrupt:
            (handle.directory / "stop").write_text("the benchmark was interrupted")
            raise
        self._fence(handle)
        return RunRecord.read(path) if (path := handle.directory / "result.json").exists() else None

    def _fence(self, handle: Handle) -> None:
        if not self.executor.fence(handle):
            raise RuntimeError(f"processes of {handle.directory} do not die; end them, then run it again")

    def _again(
        self, record: RunRecord | None, blueprint: Blueprint, directory: Path, failures: dict[FailureClass, int]
    ) -> float | None:
        """Seconds after which a failed attempt is made again; None: what there is stands."""
        if record is not None and record.status in (RunStatus.COMPLETED, RunStatus.DIVERGED):
            return None
        kind = FailureClass.LOST if record is None else record.failure_class or FailureClass.LOST
        detail = record.failure_detail if record else "its supervisor died"
        failure = Failure("", "", 0, 1, kind, detail, blueprint, directory, dict(failures))
        reaction = RecipeWorker(self.folder, self.folder).react(failure)
        failures[kind] = failures.get(kind, 0) + 1
        return reaction.after_s if isinstance(reaction, Retry) else None

    # -- results

    def _result(
        self, key: Key, loaded: LoadedSuite, task: Task, seed: int, ground: Ground, record: RunRecord | None,
        directory: Path, number: int, load: tuple[float, float, float],
    ) -> Result:  # fmt: skip
        facts: dict[str, Any] = {
            "suite": key.suite, "commit": key.commit, "task": key.task, "purpose": key.purpose, "number": key.number,
            "seed": seed, "machine": self.results.machine, "environment": ground.interpreter.key, "attempts": number,
            "patch": ground.patch, "load": load, "ended": time.time(),
        }  # fmt: skip
        if record is None:
            return Result(**facts, status="failed", detail="lost: its supervisor died again and again")
        facts |= {"versions": record.provenance.versions, "wall_s": record.usage.wall_s}
        origins, wrong = check_origins(directory / ORIGINS, ground.tree, loaded.suite.modules)
        facts["modules"] = origins
        if record.status is not RunStatus.COMPLETED:
            kind = record.failure_class.value if record.failure_class else record.status.value.lower()
            return Result(**facts, status="failed", detail=f"{kind}: {record.failure_detail}")
        if wrong:
            return Result(**facts, status="invalid", detail=wrong)
        try:
            observation = observe(record, directory)
        except TamperedError as error:
            return Result(**facts, status="invalid", detail=str(error))
        values = {name: value_of(name, metric, observation, record) for name, metric in task.metrics.items()}
        missing = sorted(name for name, value in values.items() if value is None)
        if missing:
            where = task.metrics[missing[0]].at.selector()
            return Result(**facts, status="failed", detail=f"no value of {missing[0]} at {where}")
        known = {name: value for name, value in values.items() if value is not None}
        curves = {
            name: list(series)
            for name, metric in task.metrics.items()
            if len(series := observation.series.get(metric.source or name, ())) > 1
        }
        return Result(**facts, status="ok", metrics=known, curves=curves)


def free_ports(count: int) -> list[int]:
    """Ports that can be bound now.

    Raises:
        NoFreePort
    """
    found: list[int] = []
    for port in candidate_ports() if count else ():
        if can_bind(port):
            found.append(port)
        if len(found) == count:
            return found
    if count:
        raise NoFreePort(f"{count} ports wanted, {len(found)} free")
    return found


def value_of(name: str, metric: Metric, observation: Observation, record: RunRecord) -> float | None:
    """A metric's value in one run: built in, measured at the end, or a part of its curve."""
    source = metric.source or name
    if source == "run/wall_s":
        return record.usage.wall_s
    if source == "run/cpu_s":
        return float(record.provenance.extra["cpu_s"])
    if source == "run/peak_rss_mib":
        return int(record.provenance.extra["peak_rss_bytes"]) / 2**20
    if source in observation.evals:
        return observation.evals[source]
    return select(observation.series.get(source, ()), metric.at)


def check_origins(file: Path, tree: Path, modules: Sequence[str]) -> tuple[dict[str, list[str]], str | None]:
    """(package → where processes loaded it from, what is wrong with that)."""
    found: dict[str, set[Path]] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        row: Mapping[str, Any] = json.loads(line)
        found.setdefault(row["module"], set()).add(Path(row["origin"]))
    root = tree.resolve()
    shown = {
        module: sorted(str(p.relative_to(root)) if p.is_relative_to(root) else str(p) for p in paths)
        for module, paths in sorted(found.items())
    }
    for module, paths in sorted(found.items()):
        outside = sorted(str(p) for p in paths if not p.is_relative_to(root))
        if outside:
            return shown, f"{module} was loaded from {outside[0]}, outside the commit's worktree; see pythonpath"
    if modules and not found:
        return shown, f"no process loaded {' or '.join(modules)} through the path; the run's code is not proven"
    return shown, None
