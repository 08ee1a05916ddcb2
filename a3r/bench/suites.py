"""suite.yaml: what a benchmark measures. A suite is blueprints with metrics; any project's suite has this form.

A suite's id is the hash of everything that decides its numbers, so results of an edited suite do not mix with earlier
ones. Its thresholds are not part of the id: they can be judged anew over the same results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from a3r.bench.verdicts import Rules
from a3r.blueprint import Blueprint, read_text
from a3r.formats import Part, canonical, dump, nearest_hint, parse_model, sha256
from a3r.goal import At
from a3r.strictyaml import FormatError, Problem, load_strict

SHIPPED = Path("blueprints") / "suites"
Noise = Literal["low", "high"]

BUILT_IN = ("run/wall_s", "run/cpu_s", "run/peak_rss_mib")
"""Sources every run has: seconds from start to end, CPU seconds of all its processes, memory of its processes."""

LOOKS: dict[Noise, tuple[int, ...]] = {"low": (4, 8), "high": (4, 8)}
SAMPLES: dict[Noise, int] = {"low": 2, "high": 2}


class Metric(Part):
    """One number of a run and how it is judged."""

    source: str | None = None
    """Its name in metrics.jsonl or eval.json; None: the metric's own."""
    at: At = At()
    """Which part of a curve is the value."""
    direction: Literal["higher", "lower"]
    """Which way is better."""
    min_effect: float = Field(gt=0)
    """Smaller changes are of no interest; in the metric's unit, or a share of the baseline when `relative`."""
    relative: bool = False
    noise: Noise = "low"
    """low: timings and memory; high: rewards, whose seeds differ by chance."""
    unit: str = ""

    def rules(self, looks: tuple[int, ...]) -> Rules:
        return Rules(better=self.direction, min_effect=self.min_effect, relative=self.relative, looks=looks)


class Task(Part):
    """A blueprint and the metrics taken from its runs."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")
    blueprint: Blueprint
    metrics: dict[str, Metric] = Field(min_length=1)

    @model_validator(mode="after")
    def _metrics_are_written(self) -> Self:
        known = {*self.blueprint.metrics.required, *BUILT_IN}
        for name, metric in self.metrics.items():
            source = metric.source or name
            if source not in known:
                hint = nearest_hint(source, sorted(known))
                raise ValueError(
                    f"metric {source!r} is none of the blueprint's metrics.required; {hint} Add it there, or correct it"
                )
        return self

    @property
    def noise(self) -> Noise:
        """The task's noise is that of its noisiest metric."""
        return "high" if any(m.noise == "high" for m in self.metrics.values()) else "low"


class Environment(Part):
    """How a commit gets the packages it needs."""

    lock: list[str] = Field(default_factory=list)
    """Files that decide the packages. As long as they are unchanged, commits share one environment; of pyproject.toml
    only the dependencies count. Empty: every commit runs in the environment of `a3r` itself."""
    create: list[list[str]] = Field(default_factory=list)
    """Commands that make an environment in `{env}` for the commit in `{tree}`; `{env}/bin/python` runs it then."""


class Suite(Part):
    schema_: Literal["a3r/suite/v1"] = Field(default="a3r/suite/v1", alias="schema")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")
    about: str = ""
    samples: int | None = Field(default=None, ge=1)
    """Planned runs per commit and task; None: by the noise of the task."""
    reruns: list[int] | None = Field(default=None, min_length=1)
    """Runs of head and of base each after which a confirmation may decide; None: 4, then 8."""
    seed_base: int = Field(default=1, ge=0)
    modules: list[str] = Field(default_factory=list)
    """Packages that must be loaded from the commit's worktree; a run that loads them from elsewhere is invalid."""
    pythonpath: list[str] = Field(default_factory=lambda: ["."])
    """Folders of the worktree that are put on PYTHONPATH."""
    harness: list[str] = Field(default_factory=list)
    """Files, beside the suite, that every commit is measured with: copied to `{attempt_dir}/harness/`."""
    build: list[list[str]] = Field(default_factory=list)
    """Commands that build a commit, run in its worktree with `{python}`; a failure means that it does not build."""
    unchanged_by: list[str] = Field(default_factory=lambda: ["*.md", "docs/**"])
    """Patterns of paths that cannot change a result: a commit that touches nothing else is not measured again."""
    environment: Environment = Environment()
    tasks: list[Task] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [t.name for t in self.tasks]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"two tasks are called {twice[0]!r}; rename one")
        if self.reruns is not None and (sorted(set(self.reruns)) != self.reruns or self.reruns[0] < 2):
            raise ValueError("reruns must grow, from 2 at least; write [4, 8]")
        return self

    def task(self, name: str) -> Task:
        return next(t for t in self.tasks if t.name == name)

    def planned(self, task: Task) -> int:
        """Runs per commit that a verdict needs."""
        return self.samples or SAMPLES[task.noise]

    def looks(self, task: Task) -> tuple[int, ...]:
        return tuple(self.reruns) if self.reruns else LOOKS[task.noise]


@dataclass(frozen=True)
class LoadedSuite:
    """A suite with the files that belong to it."""

    suite: Suite
    path: Path
    harness: Mapping[str, bytes]
    """File name → bytes, read once: a change during a night does not change it."""
    id: str
    """`<name>-<12 hex digits>` of everything that decides a number."""

    @property
    def name(self) -> str:
        return self.suite.name

    def only(self, tasks: Collection[str]) -> LoadedSuite:
        """The suite with some of its tasks; its id stays, so results are shared."""
        kept = [t for t in self.suite.tasks if t.name in tasks]
        return replace(self, suite=self.suite.model_copy(update={"tasks": kept}))


def load_suite(path: Path) -> LoadedSuite:
    """Read a suite.

    Raises:
        FormatError: with line, problem and fix.
    """
    document = load_strict(read_text(path), str(path))
    suite = parse_model(Suite, document)
    harness: dict[str, bytes] = {}
    for name in suite.harness:
        try:
            harness[Path(name).name] = (path.parent / name).read_bytes()
        except OSError as error:
            problem = f"{name}: {error.strerror}"
            raise FormatError([Problem(document.where(("harness",)), problem, "paths are beside the suite")]) from None
    return LoadedSuite(suite, path, harness, f"{suite.name}-{_identity(suite, harness)[:12]}")


def _identity(suite: Suite, harness: Mapping[str, bytes]) -> str:
    essence: dict[str, Any] = {
        "tasks": {
            t.name: {
                "blueprint": t.blueprint.computed_id(),
                "env": dump(t.blueprint.env),
                "metrics": {n: [m.source or n, m.at.selector()] for n, m in t.metrics.items()},
            }
            for t in suite.tasks
        },
        "harness": {name: sha256(data) for name, data in harness.items()},
        "pythonpath": suite.pythonpath,
        "build": suite.build,
        "seed_base": suite.seed_base,
    }
    return sha256(canonical(essence))


def find_suites(named: list[str], root: Path) -> list[LoadedSuite]:
    """Suites by path, or by name among the shipped ones of a project; all of them when none is named.

    Raises:
        FormatError
    """
    folder = root / SHIPPED
    if not named:
        paths = sorted(folder.glob("*.yaml"))
        if not paths:
            raise FormatError([Problem(str(folder), "holds no suite", "give one with --suite FILE")])
        return [load_suite(p) for p in paths]
    return [load_suite(_path_of(name, folder)) for name in named]


def only_tasks(suites: list[LoadedSuite], tasks: list[str]) -> list[LoadedSuite]:
    """Suites with the named tasks only; all tasks when none is named.

    Raises:
        FormatError: a name that no suite has.
    """
    known = [t.name for s in suites for t in s.suite.tasks]
    for name in tasks:
        if name not in known:
            raise FormatError([Problem("--task", f"no task {name!r}", nearest_hint(name, known))])
    chosen = [s.only(tasks) for s in suites] if tasks else suites
    return [s for s in chosen if s.suite.tasks]


def _path_of(name: str, folder: Path) -> Path:
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return Path(name)
    path = folder / f"{name}.yaml"
    if path.is_file():
        return path
    known = sorted(p.stem for p in folder.glob("*.yaml"))
    hint = nearest_hint(name, known) if known else f"{folder} holds none"
    raise FormatError([Problem(name, "no such suite", f"{hint}; or give a file")])
