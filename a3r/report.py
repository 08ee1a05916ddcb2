"""Reports of a study: report.json, from which report.md, report.html and the rest are rendered, and `verify`.

Every number is a `Number` with the addresses of its sources: `run:metric@selector` for a run's value,
`run#attempt:field` for a field of an attempt's record. A report carries no time of writing and no path of
its machine, so the same study gives the same bytes; `verify` builds it again from the run records and compares.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jinja2
from pydantic import Field, ValidationError

from a3r import analysis
from a3r.analysis import conclude, exclusion, number, select, value_of
from a3r.formats import Part, Scalar, sha256
from a3r.goal import At, GoalLock
from a3r.leader import ArmRow, Decision, History, Number, Plan, Verdict, parse_step
from a3r.results import FailureClass, Observation, RunRecord, RunStatus, TamperedError, observe
from a3r.statistics import FUNCTIONS
from a3r.strictyaml import FormatError, load_strict

REPORT, STAGE_REPORT, MANIFEST = "report.json", "report.json", "sha256.json"


class Figure(Part):
    name: str
    caption: str


class StageArm(Part):
    name: str
    purpose: str
    seeds: list[int]
    blueprint: str | None


class StagePlan(Part):
    """A stage as it was registered."""

    stage: int
    title: str
    hash: str
    reasoning: str
    look: int | None
    arms: list[StageArm]
    rules: list[str]
    warnings: list[str]
    deviations: list[str]


class RunRow(Part):
    """One run: its accepted attempt, its value, or why it has none."""

    run: str
    arm: str
    seed: int
    stage: int
    attempt: int | None
    status: str
    excluded: str
    """Empty when the run is an observation."""
    detail: str
    value: Number | None
    results: dict[str, str]
    """Attempt → sha256 of its result.json, all attempts."""


class BudgetLine(Part):
    name: str
    used: Number
    limit: float | None
    unit: str


class Report(Part):
    """report.json."""

    schema_: Literal["a3r/report/v1"] = Field(default="a3r/report/v1", alias="schema")
    title: str
    question: str
    lock_hash: str
    compiled_by: str
    assumptions: list[str]
    looks: list[int]
    alpha: float
    decision: Decision
    stages: list[StagePlan]
    runs: list[RunRow]
    failures: dict[str, int]
    budget: list[BudgetLine]
    provenance: dict[str, str]
    figures: list[Figure]
    reproduce: str


class StageReport(Part):
    """stages/NN/report.json: what a stage showed."""

    schema_: Literal["a3r/stage-report/v1"] = Field(default="a3r/stage-report/v1", alias="schema")
    stage: int
    title: str
    reasoning: str
    plan_hash: str
    look: int | None
    table: list[ArmRow]
    noise: Number | None
    warnings: list[str]
    deviations: list[str]


# --- what a report is made of ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """A study's files, read."""

    directory: Path
    lock: GoalLock
    history: History
    records: Mapping[tuple[str, int], RunRecord] = field(default_factory=dict)
    """(run, attempt) → record."""
    digests: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """(run, attempt) → sha256 of result.json."""
    overruled: frozenset[str] = frozenset()
    """Runs whose record does not count: the journal says otherwise (cancelled, replaced)."""

    def accepted(self, run: str) -> int | None:
        """The attempt a run's value comes from: the first completed or diverged one, else the last."""
        if run in self.overruled:
            return None
        mine = sorted(attempt for name, attempt in self.records if name == run)
        ended = [a for a in mine if self.records[run, a].status in {RunStatus.COMPLETED, RunStatus.DIVERGED}]
        return (ended[0] if ended else mine[-1]) if mine else None

    def value(self, address: str) -> float:
        """The number at an address.

        Raises:
            KeyError: no such run, metric or field.
        """
        run, _, rest = address.partition(":")
        name, hash_, attempt = run.partition("#")
        if hash_:
            return float(_field_of(self.records[name, int(attempt)], rest))
        observation = next((o for o in self.history.observations if o.run == run), None)
        found = None if observation is None else self._value_at(observation, rest)
        if found is None:
            raise KeyError(address)
        return found

    def _value_at(self, observation: Observation, rest: str) -> float | None:
        criterion = self.lock.goal.question.criterion
        if rest == criterion.address():
            return value_of(observation, criterion, self.lock.goal)
        metric, _, selector = rest.rpartition("@")
        return select(observation.series.get(metric, ()), _at(selector))

    def recompute(self, found: Number) -> float | None:
        x, y = [self.value(a) for a in found.src], [self.value(a) for a in found.ref]
        return FUNCTIONS[found.fn](x, y, found.params)


def _field_of(record: RunRecord, path: str) -> Any:
    value: Any = record
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _at(selector: str) -> At:
    if selector.startswith("step="):
        return At(step=int(selector.removeprefix("step=")))
    if selector.startswith("last"):
        count, _, stat = selector.removeprefix("last").partition(".")
        return At.model_validate({"last_k": int(count), "stat": stat})
    return At()


def read_records(directory: Path) -> tuple[dict[tuple[str, int], RunRecord], dict[tuple[str, int], str]]:
    """Every attempt's record under runs/.

    Raises:
        TamperedError: a result.json that is not a record, or lies at another run's place.
    """
    records: dict[tuple[str, int], RunRecord] = {}
    digests: dict[tuple[str, int], str] = {}
    for path in sorted((directory / "runs").glob("**/attempts/*/result.json")):
        data = path.read_bytes()
        try:
            record = RunRecord.model_validate_json(data)
        except ValidationError as error:
            raise TamperedError(f"{path}: not a run record ({error.error_count()} problems); restore it") from None
        place = path.parent.parent.parent.relative_to(directory / "runs").as_posix()
        if place != record.run or path.parent.name != str(record.attempt):
            raise TamperedError(f"{path}: says it is {record.run} attempt {record.attempt}; restore the original file")
        records[record.run, record.attempt] = record
        digests[record.run, record.attempt] = sha256(data)
    return records, digests


def read_evidence(directory: Path, decided: Sequence[Observation] | None = None) -> Evidence:
    """A finished study from its files alone.

    Args:
        decided: the store's observations; they add runs that left no record (cancelled, never started) and overrule
            records of runs that the store does not count as ended well.

    Raises:
        TamperedError: a file is missing or was changed.
    """
    try:
        lock = GoalLock.from_yaml((directory / "goal.lock.yaml").read_text(), str(directory / "goal.lock.yaml"))
    except FileNotFoundError:
        raise TamperedError(f"{directory}: no goal.lock.yaml; give a study's directory") from None
    except FormatError as error:
        raise TamperedError(str(error)) from None
    plans = tuple(read_plan(path) for path in sorted((directory / "stages").glob("*/plan.yaml")))
    records, digests = read_records(directory)
    bare = Evidence(directory, lock, History(plans), records, digests)
    stage_of = {(arm.name, seed): p.stage for p in reversed(plans) for arm in p.arms for seed in arm.seeds}
    seen: list[Observation] = []
    for run in sorted({run for run, _ in records}):
        attempt = bare.accepted(run)
        if attempt is None:
            continue
        record = records[run, attempt]
        folder = directory / "runs" / run / "attempts" / str(attempt)
        seen.append(observe(record, folder, stage_of.get((record.arm, record.seed), 0)))
    status = {o.run: o.status for o in seen}
    good = {RunStatus.COMPLETED, RunStatus.DIVERGED}
    over = [o for o in decided or () if o.status not in good and status.get(o.run, RunStatus.COMPLETED) in good]
    names = frozenset(o.run for o in over)
    seen = sorted([*(o for o in seen if o.run not in names), *over], key=lambda o: (o.stage, o.arm, o.seed))
    return Evidence(directory, lock, History(plans, tuple(seen)), records, digests, names)


def read_plan(path: Path) -> Plan:
    """A stage's plan, checked against its hash.

    Raises:
        TamperedError: changed since it was registered.
    """
    try:
        data = load_strict(path.read_text(), str(path)).data
        plan = parse_step(data)
    except (FormatError, ValidationError) as error:
        raise TamperedError(f"{path}: not a plan ({error}); restore it") from None
    if not isinstance(plan, Plan) or data.get("hash") != plan.hash:
        raise TamperedError(f"{path}: changed since it was registered; restore it")
    return plan


# --- building --------------------------------------------------------------------------------------------------------


def build(evidence: Evidence, decision: Decision) -> Report:
    lock, history = evidence.lock, evidence.history
    question = lock.goal.question
    rows = [_run_row(evidence, o) for o in history.observations]
    failures: dict[str, int] = {}
    for row in rows:
        if row.excluded:
            failures[row.excluded] = failures.get(row.excluded, 0) + 1
    return Report(
        title=lock.goal.title,
        question=f"{question.type} {question.factor} over {', '.join(map(str, question.levels))}; {_bar(lock)}",
        lock_hash=lock.hash,
        compiled_by=lock.compiled_by,
        assumptions=lock.assumptions,
        looks=lock.goal.stats.looks,
        alpha=lock.goal.stats.alpha,
        decision=decision,
        stages=[_stage_plan(plan) for plan in history.plans],
        runs=rows,
        failures=dict(sorted(failures.items())),
        budget=_budget(evidence),
        provenance=_provenance(evidence),
        figures=[Figure(name=name, caption=caption) for name, caption in CAPTIONS.items()],
        reproduce=_reproduce(evidence),
    )


def _bar(lock: GoalLock) -> str:
    question = lock.goal.question
    if question.type.endswith("still"):
        return f"a level passes with {analysis.bar_words(question.criterion)}"
    return f"by {question.criterion.address()}, {question.criterion.better} is better"


def _run_row(evidence: Evidence, observation: Observation) -> RunRow:
    criterion = evidence.lock.goal.question.criterion
    value = value_of(observation, criterion, evidence.lock.goal)
    attempt = evidence.accepted(observation.run)
    one = analysis.Sample(
        observation.arm, (observation.seed,), () if value is None else (value,),
        () if value is None else (f"{observation.run}:{criterion.address()}",),
    )  # fmt: skip
    return RunRow(
        run=observation.run,
        arm=observation.arm,
        seed=observation.seed,
        stage=observation.stage,
        attempt=attempt,
        status=observation.status.value,
        excluded="" if value is not None else exclusion(observation),
        detail=observation.failure_detail,
        value=None if value is None else number("value", one),
        results={str(a): digest for (run, a), digest in sorted(evidence.digests.items()) if run == observation.run},
    )


def _stage_plan(plan: Plan) -> StagePlan:
    return StagePlan(
        stage=plan.stage,
        title=plan.title,
        hash=plan.hash,
        reasoning=plan.reasoning,
        look=plan.look,
        arms=[
            StageArm(name=a.name, purpose=a.purpose.value, seeds=a.seeds, blueprint=a.blueprint.id) for a in plan.arms
        ],
        rules=[_rule_words(rule) for rule in plan.rules],
        warnings=plan.warnings,
        deviations=plan.deviations,
    )


def _rule_words(rule: Any) -> str:
    if rule.else_ is not None:
        return f"otherwise {rule.else_.mark}: {rule.else_.next}"
    return f"if {rule.if_} then {rule.then.mark}: {rule.then.next}"


def _budget(evidence: Evidence) -> list[BudgetLine]:
    budget = evidence.lock.goal.budget
    gpu_limit = None if budget.gpu_h is None else budget.gpu_h * 3600
    lines = [
        _budget_line(evidence, "attempts", "attempt", "n", None, ""),
        _budget_line(evidence, "time of all attempts", "usage.wall_s", "sum", None, " s"),
    ]
    if gpu_limit is not None or any(r.usage.gpu_s for r in evidence.records.values()):
        lines.append(_budget_line(evidence, "GPU time", "usage.gpu_s", "sum", gpu_limit, " s"))
    runs = _number_of(evidence, "attempt", "n", first_only=True)
    return [BudgetLine(name="runs", used=runs, limit=budget.runs, unit=""), *lines]


def _budget_line(evidence: Evidence, name: str, path: str, fn: str, limit: float | None, unit: str) -> BudgetLine:
    return BudgetLine(name=name, used=_number_of(evidence, path, fn), limit=limit, unit=unit)


def _number_of(evidence: Evidence, path: str, fn: str, first_only: bool = False) -> Number:
    keys = [key for key in sorted(evidence.records) if not first_only or key[1] == evidence.accepted(key[0])]
    values = [float(_field_of(evidence.records[key], path)) for key in keys]
    return Number(v=FUNCTIONS[fn](values, (), {}), fn=fn, src=[f"{run}#{attempt}:{path}" for run, attempt in keys])


def _provenance(evidence: Evidence) -> dict[str, str]:
    """What the runs say they ran on; several values are listed."""
    found: dict[str, set[str]] = {}

    def note(name: str, value: object) -> None:
        if value not in (None, ""):
            found.setdefault(name, set()).add(str(value).lower() if isinstance(value, bool) else str(value))

    for record in evidence.records.values():
        p = record.provenance
        for name in ("commit", "dirty", "patch_sha256", "model_sha256", "data_sha256", "host", "a3r_version"):
            note(name, getattr(p, name))
        for gpu in p.gpus:
            note("gpus", gpu)
        for package, version in p.versions.items():
            note(f"version of {package}", version)
    out = {name: ", ".join(sorted(values)) for name, values in sorted(found.items())}
    seeds = sorted({o.seed for o in evidence.history.observations})
    return out | {"seeds": _seed_words(seeds), "goal": evidence.lock.source_sha256}


def _reproduce(evidence: Evidence) -> str:
    commits = sorted({r.provenance.commit for r in evidence.records.values() if r.provenance.commit})
    checkout = f"git checkout {commits[0]} && " if len(commits) == 1 else ""
    return f"{checkout}a3r research goal.md"


def build_stage(lock: GoalLock, history: History, index: int) -> StageReport:
    """What stage `index` showed, from the observations of a history."""
    plan = history.plans[index]
    kind = lock.goal.question.type
    rows: list[ArmRow] = []
    if plan.look is not None and kind.endswith("still"):
        rows = analysis.judge(lock, history, index)
    elif plan.look is not None and kind == "best":
        rows = analysis.judge_best(lock, history, index)[1]
    elif plan.look is not None and kind == "compare":
        rows = analysis.judge_compare(lock, history, index)
    elif plan.look is not None:
        rows = analysis.judge_effect(lock, history, index)[0]
    shown = {row.arm for row in rows}
    rows += [_plain_row(lock, history, plan, arm) for arm in plan.arms if arm.name not in shown]
    return StageReport(
        stage=plan.stage,
        title=plan.title,
        reasoning=plan.reasoning,
        plan_hash=plan.hash,
        look=plan.look,
        table=rows,
        noise=analysis.noise(lock, history)[1],
        warnings=plan.warnings,
        deviations=plan.deviations,
    )


def _plain_row(lock: GoalLock, history: History, plan: Plan, arm: Any) -> ArmRow:
    own = analysis.sample(lock.goal, history, arm.name, arm.seeds)
    return ArmRow(
        arm=arm.name, level=arm.level, cell=arm.cell, mark=arm.purpose.value, rule="no verdict at this stage",
        look=plan.look, planned=len(arm.seeds), numbers=analysis.describe(own, lock.goal.stats.alpha),
        excluded=dict(own.missing),
    )  # fmt: skip


# --- words -----------------------------------------------------------------------------------------------------------

COLUMNS = ("mean", "sd", "median", "ci_low", "ci_high", "diff", "diff_low", "diff_high", "p")


def show(found: Number | None) -> str:
    """Four significant digits; whole counts as they are."""
    if found is None or found.v is None:
        return "n/a"
    if found.fn == "n":
        return str(int(found.v))
    return f"{found.v:.4g}"


def _seed_words(seeds: Sequence[int]) -> str:
    """`1000-1002, 1100`."""
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _cell_words(cell: Mapping[str, Scalar]) -> str:
    return ", ".join(f"{key} {value}" for key, value in cell.items())


def _where(found: Number) -> str:
    return f"{found.fn} of {len(found.src)} values" + (f" against {len(found.ref)}" if found.ref else "")


def headline_words(decision: Decision) -> str:
    """The answer's value, and what choosing it had shown."""
    headline, selected = decision.headline, decision.selected
    if headline is None:
        return ""
    if headline.fn == "paired":
        return f"Difference, paired by seed: {show(headline)} over {len(headline.src)} pairs."
    chose = f"; {show(selected)} on the {len(selected.src)} seeds that chose it" if selected is not None else ""
    return f"Its value on {len(headline.src)} fresh seeds: {show(headline)}{chose}."


def _environment(html: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(num=show, seeds=_seed_words, cell=_cell_words, where=_where)
    return environment


def _context(report: Report) -> dict[str, Any]:
    used = {name for row in report.decision.table for name in row.numbers}
    return {
        "r": report,
        "columns": [c for c in COLUMNS if c in used],
        "headline_words": headline_words(report.decision),
        "sensitive": [row for row in report.decision.table if row.robust is not None],
    }


def render_markdown(report: Report) -> str:
    return _environment(html=False).get_template("report.md.j2").render(_context(report))


def render_html(report: Report, figures: Mapping[str, str]) -> str:
    """One file with everything in it; `figures` are SVG texts by name."""
    inline = {name: svg[svg.index("<svg") :] for name, svg in figures.items()}
    return _environment(html=True).get_template("report.html.j2").render(_context(report) | {"svg": inline})


def render_stage(stage: StageReport) -> str:
    return _environment(html=False).get_template("stage.md.j2").render(s=stage)


def render_csv(evidence: Evidence) -> str:
    """A line per run and step: run, arm, factor levels, seed, stage, status, step, metric values."""
    lock = evidence.lock
    names = sorted({name for o in evidence.history.observations for name in o.series})
    factors = [lock.goal.question.factor, *(m.factor for m in lock.goal.question.moderators)]
    levels = {arm.name: {factors[0]: arm.level, **arm.cell} for plan in evidence.history.plans for arm in plan.arms}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "arm", *factors, "seed", "stage", "status", "excluded", "value", "step", *names])
    for o in evidence.history.observations:
        value = value_of(o, lock.goal.question.criterion, lock.goal)
        head = [o.run, o.arm, *(levels.get(o.arm, {}).get(f, "") for f in factors), o.seed, o.stage, o.status.value]
        head += ["" if value is not None else exclusion(o), "" if value is None else repr(value)]
        curves = {name: dict(points) for name, points in o.series.items()}
        steps = sorted({step for points in curves.values() for step in points})
        for step in steps or [""]:
            cells = [repr(curves[n][step]) if n in curves and step in curves[n] else "" for n in names]
            writer.writerow([*head, step, *cells])
    return out.getvalue()


# --- writing ---------------------------------------------------------------------------------------------------------

CAPTIONS = {
    "curves.svg": "Learning curves: mean over seeds, band from the lowest to the highest seed.",
    "ladder.svg": "Verdict ladder: every seed, the mean and its interval; colour is the mark, dashed is the bar.",
    "cost.svg": "Cost: time of all attempts by stage, failed attempts apart.",
}


def stage_json(stage: StageReport) -> str:
    return stage.model_dump_json(by_alias=True, indent=1) + "\n"


def report_json(report: Report) -> str:
    return report.model_dump_json(by_alias=True, indent=1) + "\n"


def write_report(evidence: Evidence, decision: Decision) -> Path:
    """Write report/ of a study and return the path of report.html."""
    from a3r import figures

    report = build(evidence, decision)
    folder = evidence.directory / "report"
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    drawn = figures.draw(evidence, decision)
    files = {
        REPORT: report_json(report),
        "report.md": render_markdown(report),
        "report.html": render_html(report, drawn),
        "data.csv": render_csv(evidence),
        **{f"figures/{name}": svg for name, svg in drawn.items()},
    }
    for name, text in files.items():
        _put(folder / name, text)
    _put(folder / MANIFEST, json.dumps({name: sha256(text) for name, text in sorted(files.items())}, indent=1) + "\n")
    return folder / "report.html"


def _put(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.new")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


class StudyReporter:
    """Writes a study's stage reports and its final report; calling it again writes the same bytes."""

    def stage(self, campaign: Path, number: int, history: History) -> None:
        """stages/NN/report.json and report.md."""
        lock = GoalLock.from_yaml((campaign / "goal.lock.yaml").read_text())
        report = build_stage(lock, history, number)
        folder = campaign / "stages" / f"{number:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        _put(folder / STAGE_REPORT, stage_json(report))
        _put(folder / "report.md", render_stage(report))

    def final(self, campaign: Path, decision: Decision, history: History) -> Path | None:
        """report/; a decision without a table (the study was ended from outside) is completed from the runs."""
        evidence = read_evidence(campaign, history.observations)
        if not decision.table and evidence.history.plans:
            decision = conclude(evidence.lock, evidence.history, decision.notes)
        return write_report(evidence, decision)


# --- verifying -------------------------------------------------------------------------------------------------------


class VerifyError(ValueError):
    """The report and the run records do not agree; one line per mismatch."""


@dataclass(frozen=True)
class Verified:
    numbers: int
    runs: int


def verify(directory: Path) -> Verified:
    """Rebuild a report from the run records and compare it with what lies in report/.

    Args:
        directory: the study, or its report/.

    Raises:
        VerifyError: what differs, file by file and number by number.
    """
    campaign = directory.parent if (directory / REPORT).is_file() and directory.name == "report" else directory
    folder = campaign / "report"
    report = _read_report(folder / REPORT)
    try:
        decided = [_unrecorded(row) for row in report.runs if row.attempt is None]
        evidence = read_evidence(campaign, decided)
    except TamperedError as error:
        raise VerifyError(str(error)) from None
    wrong = [*_number_problems(evidence, report), *_verdict_problems(evidence, report.decision)]
    wrong += _rendering_problems(evidence, report, folder)
    wrong += _stage_problems(evidence)
    if wrong:
        raise VerifyError("\n".join(wrong))
    return Verified(sum(1 for _ in numbers_of(report)), len(report.runs))


def _read_report(path: Path) -> Report:
    try:
        return Report.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise VerifyError(f"{path}: no report; give the directory of a finished study") from None
    except (ValidationError, UnicodeDecodeError) as error:
        raise VerifyError(f"{path}: not a report any more ({str(error).splitlines()[0]})") from None


def _unrecorded(row: RunRow) -> Observation:
    known = row.excluded in {c.value for c in FailureClass}
    return Observation(
        run=row.run, arm=row.arm, blueprint="", seed=row.seed, status=RunStatus(row.status),
        failure_class=FailureClass(row.excluded) if known else None, failure_detail=row.detail, stage=row.stage,
    )  # fmt: skip


def numbers_of(model: Any, where: str = "") -> Iterator[tuple[str, Number]]:
    """Every Number in a model, with its place."""
    if isinstance(model, Number):
        yield where, model
    elif isinstance(model, Part):
        for name in type(model).model_fields:
            yield from numbers_of(getattr(model, name), f"{where}.{name}" if where else name)
    elif isinstance(model, Mapping):
        for key, value in model.items():
            yield from numbers_of(value, f"{where}[{key}]")
    elif isinstance(model, list | tuple):
        for i, value in enumerate(model):
            yield from numbers_of(value, f"{where}[{i}]")


def _number_problems(evidence: Evidence, report: Report) -> Iterator[str]:
    for where, found in numbers_of(report):
        try:
            again = evidence.recompute(found)
        except (KeyError, AttributeError, ValueError, TypeError) as error:
            yield f"report.json {where}: its source cannot be read ({error})"
            continue
        if again != found.v:
            yield f"report.json {where}: says {found.v}, the run records give {again}"


def _verdict_problems(evidence: Evidence, decision: Decision) -> Iterator[str]:
    """The verdict again, by the registered rules, from the run records."""
    if decision.verdict is Verdict.NOT_MEASURED and not evidence.history.plans:
        return
    again = conclude(evidence.lock, evidence.history)
    for name in ("verdict", "sentence", "level", "answers", "table", "headline", "selected", "tests", "next", "noise"):
        if getattr(again, name) != getattr(decision, name):
            yield f"report.json decision.{name}: is not what the run records and the registered rules give"
    lost = [note for note in again.notes if note not in decision.notes]
    if lost:
        yield f"report.json decision.notes: lacks {lost[0]!r}"


def _rendering_problems(evidence: Evidence, report: Report, folder: Path) -> Iterator[str]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        figures = {f.name: (folder / "figures" / f.name).read_text() for f in report.figures}
    except (OSError, ValueError) as error:
        yield f"{folder}: a file of the report cannot be read ({error})"
        return
    expected: dict[str, str] = {
        REPORT: report_json(build(evidence, report.decision)),
        "report.md": render_markdown(report),
        "report.html": _html_or_reason(report, figures),
        "data.csv": render_csv(evidence),
    }
    for name in sorted({*manifest, *expected, *(f"figures/{f}" for f in figures)}):
        path = folder / name
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
        if text is None:
            yield f"{name}: missing"
        elif name in expected and text != expected[name]:
            yield f"{name}: {_first_difference(text, expected[name])}"
        elif sha256(text) != manifest.get(name):
            yield f"{name}: its bytes are not those of {MANIFEST}"


def _stage_problems(evidence: Evidence) -> Iterator[str]:
    """The stages' own reports, from what was known when each stage ended."""
    for index, plan in enumerate(evidence.history.plans):
        folder = evidence.directory / "stages" / f"{index:02d}"
        if not (folder / STAGE_REPORT).is_file():
            continue
        known = tuple(o for o in evidence.history.observations if o.stage <= plan.stage)
        stage = build_stage(evidence.lock, History(evidence.history.plans[: index + 1], known), index)
        for name, expected in ((STAGE_REPORT, stage_json(stage)), ("report.md", render_stage(stage))):
            text = (folder / name).read_text(errors="replace") if (folder / name).is_file() else ""
            if text != expected:
                yield f"stages/{index:02d}/{name}: {_first_difference(text, expected)}"


def _html_or_reason(report: Report, figures: Mapping[str, str]) -> str:
    try:
        return render_html(report, figures)
    except ValueError:
        return "a figure is not SVG"


def _first_difference(text: str, expected: str) -> str:
    pairs: Iterable[tuple[int, tuple[str, str]]] = enumerate(
        zip([*text.splitlines(), ""], [*expected.splitlines(), ""], strict=False), 1
    )
    for line, (is_, should) in pairs:
        if is_ != should:
            same = next((i for i, (a, b) in enumerate(zip(is_, should, strict=False)) if a != b), 10**9)
            same = min(same, len(is_), len(should))
            near = slice(max(0, same - 20), same + 20)
            return f"line {line} says {is_[near]!r}, the run records give {should[near]!r}"
    return "differs in length from what the run records give"
