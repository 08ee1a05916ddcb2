"""Measures commits, judges them, and measures again where the judgement asks for it. Holds no state of its own.

Everything known is in the result files: a session that was killed and one that goes on differ in nothing but the work
left. Runs of several commits are interleaved, so that a slow spell of the machine hits each alike.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from a3r import supervisor as sv
from a3r.bench.bisect import Located, Observation, locate, posterior
from a3r.bench.commits import CommitError, History, Selection
from a3r.bench.environments import Environments, plain_variables
from a3r.bench.measure import Ground, Measurer
from a3r.bench.store import Key, Result, Results
from a3r.bench.suites import LoadedSuite, Metric, Task
from a3r.bench.verdicts import Alarm, Change, Finding, Outcome, Point, Reruns, Rules, confirm, judge
from a3r.bench.worktrees import BuildError, NoSpace, Worktrees, run_build
from a3r.formats import sha256

BLOCK = 6
"""Commits whose runs are interleaved, and whose worktrees exist at once."""
CONFIRM_SEEDS, BISECT_SEEDS = 10_000, 1_000_000
PROBE = 2
"""Runs of a commit that the bisection asks for at a time."""

Say = Callable[[str], None]


class Exit(IntEnum):
    """What a command says to the shell."""

    FINE = 0
    REGRESSION = 1
    NOT_MEASURED = 2
    UNDECIDED = 3


@dataclass(frozen=True)
class Series:
    """One metric of one task over the measured commits, with its findings."""

    suite: LoadedSuite
    task: Task
    name: str
    points: tuple[Point, ...]
    findings: tuple[Finding, ...]

    @property
    def metric(self) -> Metric:
        return self.task.metrics[self.name]

    @property
    def rules(self) -> Rules:
        return self.metric.rules(self.suite.suite.looks(self.task))

    def finding(self, commit: str) -> Finding | None:
        return next((f for f in self.findings if f.commit == commit), None)


@dataclass(frozen=True)
class Verdict:
    """What is known of one wanted commit over all its suites."""

    commit: str
    exit: Exit
    reasons: tuple[str, ...]
    confirmed: tuple[tuple[Series, Finding], ...] = ()
    """Confirmed changes, improvements among them."""


@dataclass
class Summary:
    """What a session came to."""

    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def exit(self) -> Exit:
        codes = {v.exit for v in self.verdicts}
        return next((c for c in (Exit.REGRESSION, Exit.NOT_MEASURED, Exit.UNDECIDED) if c in codes), Exit.FINE)


class Session:
    """One project's commits and suites. The caller holds the folder's lock."""

    def __init__(
        self,
        history: History,
        results: Results,
        suites: Sequence[LoadedSuite],
        measurer: Measurer | None = None,
        say: Say = lambda _: None,
    ) -> None:
        self.history = history
        self.results = results
        self.suites = list(suites)
        self.measurer = measurer or Measurer(results)
        self.say = say
        self.worktrees = Worktrees(history, results.work / "worktrees")
        self.variables = plain_variables(dict(os.environ))
        self.environments = Environments(history, results.work / "environments", self.variables)
        self._patches: dict[str, bytes] = {}
        """Name of a dirty tree's code → its patch."""
        self._measured: set[str] = set()
        """Commits that this session has run."""

    # -- the whole

    def run(self, selection: Selection, patch: bytes = b"") -> Summary:
        """Measure and judge commits of one history, oldest first.

        Args:
            patch: changes on top of the newest wanted commit, measured in its place.
        """
        wanted = list(selection.wanted)
        if patch:
            dirty = f"{wanted[-1]}+{sha256(patch)[:12]}"
            self._patches[dirty] = patch
            wanted[-1] = dirty
        self.measurer.tidy()
        self._forget_full_disks(selection.history)
        try:
            for loaded in self.suites:
                for commits in self._blocks(loaded, wanted, selection.history):
                    self._measure_screen(loaded, commits)
                    self._settle(loaded, selection.history, commits)
                    self.worktrees.keep_only(())
        finally:
            self.worktrees.keep_only(())
        return Summary([self._verdict(commit, selection.history, wanted) for commit in wanted])

    def _forget_full_disks(self, commits: Sequence[str]) -> None:
        """A disk that was full says nothing about a commit: try again."""
        for loaded in self.suites:
            for commit in set(self.results.commits(loaded.id)) & set(commits):
                if any(r.status == "no_space" for r in self.results.of(loaded.id, commit)):
                    self.results.discard_failures(loaded.id, commit)

    def _blocks(self, loaded: LoadedSuite, wanted: Sequence[str], history: Sequence[str]) -> Iterator[list[str]]:
        """Wanted commits as those that stand for them, in parts that are measured together; where the first of them
        has nothing before it to be compared with, its predecessor comes along."""
        if not wanted:
            return
        standing = list(dict.fromkeys(self.representative(loaded, c, history) for c in wanted))
        first = history.index(standing[0].partition("+")[0]) + ("+" in standing[0])
        if not any(self.complete(loaded, c) for c in history[:first]) and first > 0:
            before = self.representative(loaded, history[first - 1], history)
            standing = list(dict.fromkeys([before, *standing]))
        for start in range(0, len(standing), BLOCK):
            yield standing[start : start + BLOCK]

    def representative(self, loaded: LoadedSuite, commit: str, history: Sequence[str]) -> str:
        """The first commit of the stretch with the same code: its results stand for the others."""
        if "+" in commit:
            return commit
        hidden = loaded.suite.unchanged_by
        at = history.index(commit)
        while at > 0 and self.history.code_key(history[at - 1], hidden) == self.history.code_key(history[at], hidden):
            at -= 1
        return history[at]

    # -- measuring

    def complete(self, loaded: LoadedSuite, commit: str) -> bool:
        """Whether every planned run of a commit has a valid result."""
        return all(
            (result := self.results.get(self._key(loaded, commit, task, "screen", i))) is not None
            and result.status == "ok"
            for task in loaded.suite.tasks
            for i in range(loaded.suite.planned(task))
        )

    def settled(self, loaded: LoadedSuite, commit: str) -> bool:
        """Whether nothing is left to run: complete, or known not to be measurable."""
        return self.complete(loaded, commit) or bool(self.failures(loaded, commit))

    def failures(self, loaded: LoadedSuite, commit: str) -> list[Result]:
        return [r for r in self.results.of(loaded.id, commit) if r.status != "ok" and r.purpose == "screen"]

    def _key(self, loaded: LoadedSuite, commit: str, task: Task, purpose: str, number: int) -> Key:
        return Key(loaded.id, commit, task.name, purpose, number)

    def _measure_screen(self, loaded: LoadedSuite, commits: Sequence[str]) -> None:
        """All planned runs, a round at a time over all commits, every second round backwards."""
        rounds = max(loaded.suite.planned(t) for t in loaded.suite.tasks)
        for number in range(rounds):
            for commit in commits if number % 2 == 0 else reversed(commits):
                for task in loaded.suite.tasks:
                    if number < loaded.suite.planned(task):
                        seed = loaded.suite.seed_base + number
                        self._measure(loaded, self._key(loaded, commit, task, "screen", number), seed)

    def _measure(self, loaded: LoadedSuite, key: Key, seed: int) -> Result:
        """One run; a commit that cannot be made ready gets a result that says so."""
        known = self.results.get(key) or next(
            (r for r in self.results.of(key.suite, key.commit) if r.status in ("no_build", "no_space")), None
        )
        if known is not None:
            return known
        where = f"{loaded.name}/{key.task} {short(key.commit)} {key.purpose.partition('-')[0]} {key.number}"
        try:
            ground = self._ground(loaded, key.commit)
        except (BuildError, NoSpace) as error:
            self.say(f"{where}: {error}")
            return self._unmeasurable(key, seed, error)
        result = self.measurer.measure(key, loaded, seed, ground)
        self._measured.add(key.commit)
        shown = ", ".join(f"{n} {v:.4g}" for n, v in result.metrics.items()) or result.detail
        self.say(f"{where}: {result.status}  {shown}  ({result.wall_s:.1f} s)")
        return result

    def _unmeasurable(self, key: Key, seed: int, error: Exception) -> Result:
        result = Result(
            suite=key.suite,
            commit=key.commit,
            task=key.task,
            purpose=key.purpose,
            number=key.number,
            seed=seed,
            status="no_space" if isinstance(error, NoSpace) else "no_build",
            detail=str(error),
            machine=self.results.machine,
            environment="none",
        )
        self.results.put(result)
        return result

    def _ground(self, loaded: LoadedSuite, commit: str) -> Ground:
        """The commit's files, built, and its interpreter."""
        sha = commit.partition("+")[0]
        patch = self._patches.get(commit, b"")
        wanted = loaded.suite.environment

        def build(tree: Path) -> None:
            python = str(self.environments.interpreter(sha, tree, wanted).python)
            path = os.pathsep.join(str(tree / part) for part in loaded.suite.pythonpath)
            for argv in loaded.suite.build:
                words = [python if word == "{python}" else word for word in argv]
                run_build(words, tree, self.variables | {"PYTHONPATH": path})

        tree = self.worktrees.ensure(sha, build, patch)
        interpreter = self.environments.interpreter(sha, tree, wanted)
        return Ground(commit, tree, interpreter, patch.decode("utf-8", "replace") or None)

    # -- judging

    def series(self, loaded: LoadedSuite, history: Sequence[str], dirty: Sequence[str] = ()) -> list[Series]:
        """Every metric of a suite over the complete commits of a history, judged with the reruns there are."""
        measured = set(self.results.commits(loaded.id))
        commits = [c for c in [*history, *dirty] if c in measured and self.complete(loaded, c)]
        found = []
        for task in loaded.suite.tasks:
            for name, metric in task.metrics.items():
                points = tuple(Point(c, self._values(loaded, c, task, name)) for c in commits)
                rules = metric.rules(loaded.suite.looks(task))
                findings = judge(points, lambda a, t=task, n=name: self.reruns(loaded, t, n, a), rules)
                found.append(Series(loaded, task, name, points, tuple(findings)))
        return found

    def _values(self, loaded: LoadedSuite, commit: str, task: Task, metric: str) -> tuple[float, ...]:
        keys = [self._key(loaded, commit, task, "screen", i) for i in range(loaded.suite.planned(task))]
        return tuple(r.metrics[metric] for k in keys if (r := self.results.get(k)) is not None)

    def reruns(self, loaded: LoadedSuite, task: Task, metric: str, alarm: Alarm) -> Reruns:
        """The fresh values of an alarm's pair that there are, without gaps."""
        purpose = pair("confirm", alarm.head, alarm.base)
        head, base = (self._fresh(loaded, c, task, purpose, metric) for c in (alarm.head, alarm.base))
        after = ((alarm.head, len(head)), (alarm.base, len(base)))
        failed = any(self.results.get(self._key(loaded, c, task, purpose, n)) is not None for c, n in after)
        return Reruns(head, base, failed)

    def _fresh(self, loaded: LoadedSuite, commit: str, task: Task, purpose: str, metric: str) -> tuple[float, ...]:
        values: list[float] = []
        while True:
            result = self.results.get(self._key(loaded, commit, task, purpose, len(values)))
            if result is None or result.status != "ok":
                return tuple(values)
            values.append(result.metrics[metric])

    def _settle(self, loaded: LoadedSuite, history: Sequence[str], commits: Sequence[str]) -> None:
        """Make the reruns that findings wait for, until none waits or they cannot be made."""
        dirty = [c for c in commits if "+" in c]
        tried: set[tuple[str, str, str, int]] = set()
        while True:
            waiting = {
                (s.task.name, f.commit, f.base or "", f.needs)
                for s in self.series(loaded, history, dirty)
                for f in s.findings
                if f.outcome is Outcome.PENDING
            } - tried
            if not waiting:
                return
            for name, head, base, needs in sorted(waiting):
                tried.add((name, head, base, needs))
                self._rerun(loaded, loaded.suite.task(name), head, base, needs)

    def _rerun(self, loaded: LoadedSuite, task: Task, head: str, base: str, count: int) -> None:
        """Fresh runs of head and base in turns; stops at the first that cannot be made."""
        purpose = pair("confirm", head, base)
        seeds = loaded.suite.seed_base + CONFIRM_SEEDS + _offset(purpose)
        for number in range(count):
            for commit in (head, base) if number % 2 == 0 else (base, head):
                result = self._measure(loaded, self._key(loaded, commit, task, purpose, number), seeds + number)
                if result.status != "ok":
                    return

    # -- verdicts

    def _verdict(self, commit: str, history: Sequence[str], wanted: Sequence[str]) -> Verdict:
        """A commit without code of its own has the verdict of the one that stands for it, where that is news."""
        reasons: list[str] = []
        confirmed: list[tuple[Series, Finding]] = []
        codes: set[Exit] = set()
        for loaded in self.suites:
            standing = self.representative(loaded, commit, history)
            if failures := self.failures(loaded, standing):
                codes.add(Exit.NOT_MEASURED)
                reasons.append(f"{loaded.name}: {failures[0].status}: {failures[0].detail.splitlines()[0]}")
                continue
            if not self.complete(loaded, standing):
                codes.add(Exit.NOT_MEASURED)
                reasons.append(f"{loaded.name}: fewer samples than planned")
                continue
            if standing != commit:
                reasons.append(f"{loaded.name}: same code as {short(standing)}, not measured again")
                if standing in wanted or standing not in self._measured:
                    continue
            for series in self.series(loaded, history, [commit] if "+" in commit else ()):
                finding = series.finding(standing)
                codes.add(exit_of(finding))
                if finding is not None and finding.outcome is Outcome.CONFIRMED:
                    confirmed.append((series, finding))
                reasons += describe(series, finding)
        code = next((c for c in (Exit.REGRESSION, Exit.NOT_MEASURED, Exit.UNDECIDED) if c in codes), Exit.FINE)
        return Verdict(commit, code, tuple(reasons), tuple(confirmed))

    def compare_fresh(self, series: Series, base: str, head: str, change: Change) -> Finding:
        """Judge two commits by fresh runs of both, as a confirmation does."""
        alarm = Alarm(head, base, change, "screen")
        while True:
            finding = confirm(alarm, self.reruns(series.suite, series.task, series.name, alarm), series.rules)
            if finding.outcome is not Outcome.PENDING:
                return finding
            self._rerun(series.suite, series.task, head, base, finding.needs)
            again = confirm(alarm, self.reruns(series.suite, series.task, series.name, alarm), series.rules)
            if again.needs == finding.needs:
                return again

    # -- where a change came from

    def between(self, loaded: LoadedSuite, base: str, head: str) -> list[str]:
        """Commits from base to head whose code differs from their predecessor's, both ends included.

        Raises:
            CommitError: base is not on head's first-parent history.
        """
        history = self.history.first_parents(head)
        if base not in history or base == head:
            raise CommitError(f"{short(base)} is not before {short(head)} on its first-parent history; swap them?")
        hidden = loaded.suite.unchanged_by
        part = history[history.index(base) :]
        keys = [self.history.code_key(c, hidden) for c in part]
        return [c for i, c in enumerate(part) if i == 0 or keys[i] != keys[i - 1]]

    def suspect(self, series: Series, finding: Finding) -> tuple[str, float]:
        """The likeliest commit by what is measured already, and its probability; only a bisection settles it."""
        if finding.base is None or finding.change is None or "+" in finding.commit:
            return finding.commit, 1.0
        commits = self.between(series.suite, finding.base, finding.commit)
        if len(commits) <= 2:
            return finding.commit, 1.0
        known = self._known_values(series, commits, finding)
        known += [
            (commits.index(p.commit), series.rules.worse(v))
            for p in series.points
            if p.commit in commits
            for v in p.values
        ]
        chances = posterior(known, len(commits), finding.change)
        best = max(range(len(commits)), key=chances.__getitem__)
        return commits[best], chances[best]

    def bisect(self, series: Series, finding: Finding) -> tuple[str, Located]:
        """The commit of a confirmed change, by fresh runs. Commits that cannot be measured are left out.

        Raises:
            CommitError: too few runs of the ends could be made.
        """
        loaded, base, change = series.suite, finding.base, finding.change
        if base is None or change is None:
            raise CommitError(f"{short(finding.commit)} has no confirmed change; give two commits")
        commits = self.between(loaded, base, finding.commit)
        purpose = pair("bisect", finding.commit, base)
        try:
            while True:
                skipped: list[str] = []
                found = self._bisect_once(series, finding, commits, purpose, skipped)
                if found is not None:
                    return commits[found.position], found
                commits = [c for c in commits if c not in skipped]
        finally:
            self.worktrees.keep_only(())

    def _bisect_once(
        self, series: Series, finding: Finding, commits: list[str], purpose: str, skipped: list[str]
    ) -> Located | None:
        """None after a commit that cannot be measured, which is added to `skipped`."""
        assert finding.change is not None
        counts: dict[int, int] = {}

        def measure(position: int) -> list[float]:
            start = counts.get(position, 0)
            counts[position] = start + PROBE
            values = [self._probe(series, commits[position], purpose, n) for n in range(start, start + PROBE)]
            if None in values:
                skipped.append(commits[position])
                raise _Skipped
            return [v for v in values if v is not None]

        known = self._known_values(series, commits, finding)
        for end in (0, len(commits) - 1):
            while sum(i == end for i, _ in known) < series.rules.looks[0]:
                try:
                    known += [(end, v) for v in measure(end)]
                except _Skipped:
                    raise CommitError(f"{short(commits[end])} could not be measured, and it is an end") from None
        try:
            return locate(len(commits), known, measure, finding.change)
        except _Skipped:
            return None

    def _probe(self, series: Series, commit: str, purpose: str, number: int) -> float | None:
        loaded, task = series.suite, series.task
        seed = loaded.suite.seed_base + BISECT_SEEDS + _offset(purpose) + number
        result = self._measure(loaded, self._key(loaded, commit, task, purpose, number), seed)
        return series.rules.worse(result.metrics[series.name]) if result.status == "ok" else None

    def _known_values(self, series: Series, commits: Sequence[str], finding: Finding) -> list[Observation]:
        """The confirmation's values of both ends."""
        assert finding.change is not None
        alarm = Alarm(finding.commit, finding.base or "", finding.change, "screen")
        reruns = self.reruns(series.suite, series.task, series.name, alarm)
        worse = series.rules.worse
        return [(0, worse(v)) for v in reruns.base] + [(len(commits) - 1, worse(v)) for v in reruns.head]


class _Skipped(Exception):
    """A commit in the middle of a bisection cannot be measured."""


def exit_of(finding: Finding | None) -> Exit:
    """A missing finding is one that an undecided earlier one stands in the way of."""
    if finding is None or finding.outcome in (Outcome.PENDING, Outcome.UNCONFIRMED):
        return Exit.NOT_MEASURED
    if finding.outcome is Outcome.CONFIRMED:
        return Exit.REGRESSION if finding.change is Change.REGRESSION else Exit.FINE
    return Exit.UNDECIDED if finding.outcome in (Outcome.UNDECIDED, Outcome.BASELINE) else Exit.FINE


def describe(series: Series, finding: Finding | None) -> list[str]:
    """Why a metric keeps a commit from being plainly fine; empty when it is."""
    where = f"{series.suite.name}/{series.task.name} {series.name}"
    if finding is None:
        return [f"{where}: waits for the reruns of an earlier commit"]
    if finding.outcome is Outcome.FINE:
        return []
    if finding.outcome is Outcome.BASELINE:
        return [f"{where}: the first of its history, nothing to compare it with"]
    if finding.outcome in (Outcome.PENDING, Outcome.UNCONFIRMED):
        return [f"{where}: marked as {finding.change}; its reruns could not be made"]
    return [f"{where}: {finding.change} {finding.outcome} by reruns, {effect_words(series, finding)}"]


def effect_words(series: Series, finding: Finding) -> str:
    unit = f" {series.metric.unit}" if series.metric.unit else ""
    if finding.effect is None:
        return "no reruns"
    interval = f" [{finding.low:+.3g}, {finding.high:+.3g}]" if finding.low is not None else ""
    return f"{finding.effect:+.3g}{unit}{interval} against {short(finding.base or '')}"


def pair(purpose: str, head: str, base: str) -> str:
    return f"{purpose}-{head.partition('+')[0][:12]}{_patch_part(head)}-{base[:12]}"


def _patch_part(commit: str) -> str:
    return commit[commit.index("+") :] if "+" in commit else ""


def short(commit: str) -> str:
    sha, plus, patch = commit.partition("+")
    return sha[:9] + plus + patch[:6]


def _offset(purpose: str) -> int:
    """Seeds of one confirmation differ from those of every other, at every size of suite."""
    return int(hashlib.sha256(purpose.encode()).hexdigest()[:6], 16) % 9000 * 100


def incident_path(results: Results, series: Series, finding: Finding) -> Path:
    name = f"{series.suite.id}.{series.task.name}.{series.name.replace('/', '_')}.{finding.commit[:12]}.json"
    return results.folder / "incidents" / results.machine / name


def note_bisection(results: Results, series: Series, finding: Finding, commit: str, located: Located) -> None:
    """Keep the answer of a bisection beside the results."""
    path = incident_path(results, series, finding)
    path.parent.mkdir(parents=True, exist_ok=True)
    sv.replace_file(
        path,
        sv.result_text(
            {
                "schema": "a3r/bench-incident/v1", "commit": commit, "probability": located.probability,
                "runs": located.runs, "sure": located.sure, "head": finding.commit, "base": finding.base,
            }
        ),
    )  # fmt: skip


def noted_bisection(results: Results, series: Series, finding: Finding) -> Mapping[str, object] | None:
    return sv.read_json(incident_path(results, series, finding))
