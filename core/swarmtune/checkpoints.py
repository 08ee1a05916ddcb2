"""Checkpoints of a run on disk: found, judged, removed, and branched from. Needs no server and no torch.

    <run>/checkpoints/step-000005/      complete: a backend writes beside its place and renames
                     /.partial-…        of an interrupted save; .retired-… and .removed-… of interrupted renames

What always holds: a folder with a step's name is complete, for a checkpoint is renamed before its files are removed;
the newest checkpoint and the best ones are never removed to make room; a branch copies nothing out of the run it comes
from but its history up to the step, and changes nothing there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmtune.config import CheckpointConfig, ConfigError, TrainConfig
from swarmtune.journal import (
    BatchPlanned,
    BatchTrained,
    CheckpointRemoved,
    CheckpointSaved,
    Entry,
    EvaluationWritten,
    History,
    Journal,
    JournalError,
    MetaSet,
    read_history,
)
from swarmtune.protocol import CheckpointView, EvaluationRecord, KeptFor, StepRecord

FOLDER = "checkpoints"
ORIGIN_KEY = "origin"
"""In a journal's meta: {"run", "step"} that a branch comes from."""
EVALUATION_PREFIX = "eval/"
"""checkpoint.best_by: before the name of an evaluation, whose mean is then meant."""

_STEP = re.compile(r"step-(\d{6,})\Z")
_RETIRED, _REMOVED = ".retired-", ".removed-"

Score = Callable[[int], float | None]
"""Step → what its checkpoint is judged by; None while nothing is known."""


class CheckpointError(Exception):
    """A checkpoint or run that cannot be used as asked; the message says what there is instead."""


# -- folders


def folder_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:06d}"


def find(run: Path) -> dict[int, Path]:
    """Step → complete checkpoint of the run in this folder, in order of step."""
    found = {}
    for path in (run / FOLDER).glob("step-*"):
        if (match := _STEP.match(path.name)) and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def describe(step: int, path: Path) -> CheckpointView:
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return CheckpointView(step=step, path=str(path), at=path.stat().st_mtime, bytes=size)


def sweep(run: Path) -> None:
    """Clear what interrupted saves and removals left. For the one process that has the run.

    A checkpoint that was being replaced, its successor not yet in place, is put back.
    """
    for path in sorted((run / FOLDER).glob(".*")):
        if path.name.startswith(_RETIRED):
            place = path.with_name(path.name.removeprefix(_RETIRED))
            if not place.exists():
                path.rename(place)
                continue
        shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint; interrupted, nothing is left under its name. One that is gone already is fine.

    Raises:
        OSError: it cannot be renamed; it is intact.
    """
    gone = path.with_name(f"{_REMOVED}{path.name}")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


# -- which to keep


def kept(steps: Iterable[int], *, keep_last: int, keep_best: int, score: Score) -> dict[int, list[KeptFor]]:
    """Of these checkpoints, by step, those worth keeping, and why. Of equal scores the earlier one is better."""
    ordered = sorted(steps)
    reasons: dict[int, list[KeptFor]] = {step: ["last"] for step in ordered[max(0, len(ordered) - keep_last) :]}
    judged = [(value, -step) for step in ordered if (value := score(step)) is not None]
    for _, negative in sorted(judged, reverse=True)[:keep_best]:
        reasons.setdefault(-negative, []).append("best")
    return dict(sorted(reasons.items()))


def score_by(metric: str, records: Sequence[StepRecord], evaluations: Iterable[EvaluationRecord]) -> Score:
    """What a checkpoint is judged by: an evaluation's mean under its weights, or a metric of the step after it.

    The batch of a step was sampled with the weights before it, so the reward that the weights of step 5 earned is in
    the record of step 6.
    """
    if metric.startswith(EVALUATION_PREFIX):
        name = metric.removeprefix(EVALUATION_PREFIX)
        means = {e.weight_version: e.mean.value for e in evaluations if e.name == name and e.mean is not None}
        return means.get
    values = {record.step - 1: record.metrics[metric] for record in records if metric in record.metrics}
    return values.get


def judged(
    views: Sequence[CheckpointView],
    config: CheckpointConfig,
    records: Sequence[StepRecord],
    evaluations: Iterable[EvaluationRecord],
) -> list[CheckpointView]:
    """The same checkpoints with their scores, and what each is kept for."""
    score = score_by(config.best_by, records, evaluations)
    reasons = kept((v.step for v in views), keep_last=config.keep_last, keep_best=config.keep_best, score=score)
    return [v.model_copy(update={"score": score(v.step), "kept": reasons.get(v.step, [])}) for v in views]


# -- runs without their server


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What the files of a run say. A live server may go on with it meanwhile."""

    folder: Path
    config: TrainConfig
    history: History

    @classmethod
    def read(cls, folder: Path) -> StoredRun:
        """Raises:
        CheckpointError: no run is there, or its files cannot be read.
        """
        if not (folder / "journal.db").is_file():
            raise CheckpointError(f"{folder}: no journal.db is there; name a run's folder, such as …/runs/0001")
        try:
            history = read_history(folder / "journal.db")
            return cls(folder, TrainConfig.from_dict(history.config), history)
        except (JournalError, ConfigError) as error:
            raise CheckpointError(f"{folder}: {error}") from error

    def checkpoints(self) -> list[CheckpointView]:
        """Those on disk, in order of step, with scores."""
        known = {view.step: view for view in self.history.checkpoints}
        views = [
            known[step].model_copy(update={"path": str(path)}) if step in known else describe(step, path)
            for step, path in find(self.folder).items()
        ]
        return judged(views, self.config.checkpoint, self.history.steps, self.history.evaluations)

    def checkpoint(self, step: int | None) -> CheckpointView:
        """That of a step; the last one where `step` is None.

        Raises:
            CheckpointError: there is none; names those there are.
        """
        views = self.checkpoints()
        for view in reversed(views):
            if step is None or view.step == step:
                return view
        there = ", ".join(str(v.step) for v in views) or "none"
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{self.folder}: {wanted}; there are: {there}")


def runs_under(place: Path) -> list[Path]:
    """The run folders that `place` is or holds, at any depth, in order of name.

    Raises:
        CheckpointError: none.
    """
    found = sorted(
        {journal.parent for journal in [place / "journal.db", *place.rglob("journal.db")] if is_run(journal)}
    )
    if not found:
        raise CheckpointError(f"{place}: no run of a swarm server is there; name a run's folder, or one above it")
    return found


def is_run(journal: Path) -> bool:
    """Studies keep a journal.db of their own; a run has its configuration beside it."""
    return journal.is_file() and (journal.parent / "config.json").is_file()


def newest_run(place: Path) -> Path:
    """The last of the runs that `place` is or holds.

    Raises:
        CheckpointError: none.
    """
    return runs_under(place)[-1]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What pruning a run removed, or would."""

    folder: Path
    removed: list[CheckpointView]
    left: list[CheckpointView]

    @property
    def freed(self) -> int:
        """Bytes."""
        return sum(view.bytes for view in self.removed)


def prune(folder: Path, *, keep_last: int, keep_best: int, dry: bool = False) -> Pruned:
    """Remove the checkpoints of a run beyond these. With none left the run can be read, but not gone on with.

    Raises:
        CheckpointError: a live server has the run; or its files cannot be read.
        OSError: a checkpoint cannot be removed.
    """
    run = StoredRun.read(folder)
    views = run.checkpoints()
    score = score_by(run.config.checkpoint.best_by, run.history.steps, run.history.evaluations)
    reasons = kept((v.step for v in views), keep_last=keep_last, keep_best=keep_best, score=score)
    removed = [v for v in views if v.step not in reasons]
    if removed and not dry:
        with _held(folder) as journal:
            sweep(folder)
            for view in removed:
                remove(Path(view.path))
            journal.write_now(*(CheckpointRemoved(view.step) for view in removed))
    return Pruned(folder, removed, [v for v in views if v.step in reasons])


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[Journal]:
    """The run's journal, which no live server may have."""
    try:
        journal = Journal.open(folder / "journal.db")
    except JournalError as error:
        raise CheckpointError(str(error)) from error
    try:
        yield journal
    finally:
        journal.close()


# -- branches


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a new run begins: at a step of another one, whose later steps stay where they are."""

    source: StoredRun
    view: CheckpointView

    @classmethod
    def of(cls, folder: Path, step: int) -> Branch:
        """Raises:
        CheckpointError: no such run or checkpoint.
        """
        source = StoredRun.read(folder)
        return cls(source, source.checkpoint(step))

    @property
    def origin(self) -> dict[str, object]:
        return {"run": str(self.source.folder.resolve()), "step": self.view.step}

    def copy_into(self, folder: Path, journal: Journal) -> None:
        """Checkpoint, step records and evaluations up to the step. Episodes that waited in the pool are not copied:
        they belong to the run that collected them.

        Raises:
            OSError, JournalError
        """
        step = self.view.step
        target = folder_of(folder, step)
        link_or_copy(Path(self.view.path), target)
        entries: list[Entry] = [MetaSet(ORIGIN_KEY, self.origin)]
        for record in self.source.history.steps:
            if record.step <= step:
                entries += [BatchPlanned(record.step, ()), BatchTrained(record)]
        entries += [EvaluationWritten(e) for e in self.source.history.evaluations if e.weight_version <= step]
        entries.append(CheckpointSaved(describe(step, target)))
        journal.write_now(*entries)
        metrics = self.source.folder / "metrics.jsonl"
        if metrics.is_file():
            shutil.copyfile(metrics, folder / "metrics.jsonl")


def link_or_copy(source: Path, target: Path) -> None:
    """A folder again, complete or absent: hard links where the file system has them, for checkpoints never change.

    Raises:
        OSError
    """
    partial = target.with_name(f".partial-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(source, partial, copy_function=_link_or_copy_file)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(target)


def _link_or_copy_file(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another device, or a file system without links
        shutil.copy2(source, target)


def table(views: Sequence[CheckpointView], metric: str) -> list[tuple[str, ...]]:
    """Rows for people: step, size, score, kept for, path. The first one is the head."""
    rows: list[tuple[str, ...]] = [("step", "MB", metric, "kept", "path")]
    for v in views:
        score = "–" if v.score is None else f"{v.score:.4g}"
        rows.append((str(v.step), f"{v.bytes / 1e6:.1f}", score, "+".join(v.kept) or "–", v.path))
    return rows
