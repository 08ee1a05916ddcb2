"""What a run leaves behind: `result.json` (RunRecord) and its metric files, and the leader's view of it (Observation).

A record is written once, by the supervisor, after everything of the attempt has ended; nothing edits it afterwards, and
`sha256` of the files it names makes a later edit visible. A failure is not an observation: only `COMPLETED` runs (and
`DIVERGED` ones where the goal says so) enter statistics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from a3r.formats import sha256

Series = tuple[tuple[int, float], ...]
"""(step, value) in step order."""


class RunStatus(StrEnum):
    """A run's state; those in `TERMINAL` never change again."""

    DECLARED = "DECLARED"
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    RETRY_WAIT = "RETRY_WAIT"
    COMPLETED = "COMPLETED"
    DIVERGED = "DIVERGED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    SUPERSEDED = "SUPERSEDED"


TERMINAL = frozenset(
    {RunStatus.COMPLETED, RunStatus.DIVERGED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.SUPERSEDED}
)


class FailureClass(StrEnum):
    """Whose fault a failed attempt was; A3R's reaction to each is the worker's table."""

    INFRA = "infra"
    OOM = "oom"
    CONFIG = "config"
    CODE = "code"
    EXTERNAL_DEP = "external_dep"
    STALLED = "stalled"
    TIMEOUT = "timeout"
    DIVERGED = "diverged"
    LOST = "lost"
    FABRICATED = "fabricated"
    UNKNOWN = "unknown"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Exit(_Record):
    code: int | None = None
    signal: int | None = None


class Times(_Record):
    """Wall-clock seconds since the epoch, for display; durations are in `usage`."""

    queued: float | None = None
    started: float | None = None
    first_step: float | None = None
    ended: float | None = None


class Usage(_Record):
    wall_s: float = 0.0
    """From start to end of this attempt, by a clock that does not jump."""
    slot_s: float = 0.0
    gpu_s: float = 0.0
    peak_gpu_mem_gb: float | None = None
    llm_tokens: int = 0
    usd: float = 0.0


class Provenance(_Record):
    """Enough to run it again."""

    commit: str | None = None
    dirty: bool | None = None
    patch_sha256: str | None = None
    config_sha256: str | None = None
    resolved_config_sha256: str | None = None
    seed: int | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    """Package name → version, `python` among them."""
    model_sha256: str | None = None
    data_sha256: str | None = None
    host: str | None = None
    boot_id: str | None = None
    gpus: tuple[str, ...] = ()
    a3r_version: str | None = None
    extra: dict[str, str] = Field(default_factory=dict)


class EvalMetric(_Record):
    """One number measured outside the training curve."""

    value: float
    n_items: int | None = None
    n_samples: int | None = None


class RunRecord(_Record):
    """result.json of one attempt."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["a3r/result/v1"] = Field(default="a3r/result/v1", alias="schema")
    run: str
    """`<arm>/s<seed>`, with `.r<replicate>` when a replicate was asked for."""
    arm: str
    blueprint: str
    """The blueprint's id."""
    seed: int
    replicate: int = 0
    attempt: int = Field(default=1, ge=1)
    nonce: str
    status: RunStatus
    failure_class: FailureClass | None = None
    failure_detail: str = ""
    """One sentence of evidence: the rule that fired, the last error line."""
    exit: Exit = Exit()
    steps: int = Field(default=0, ge=0)
    resumed_from: int | None = None
    times: Times = Times()
    usage: Usage = Usage()
    provenance: Provenance = Provenance()
    metrics: dict[str, EvalMetric] = Field(default_factory=dict)
    """From eval.json."""
    files: dict[str, str] = Field(default_factory=dict)
    """File name inside the attempt directory → sha256 of its bytes: metrics.jsonl, eval.json, resolved_config.json."""

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        return cls.model_validate_json(path.read_text())


@dataclass(frozen=True)
class Observation:
    """The leader's and the report's view of one finished run (its accepted attempt)."""

    run: str
    arm: str
    blueprint: str
    seed: int
    status: RunStatus
    failure_class: FailureClass | None = None
    failure_detail: str = ""
    series: Mapping[str, Series] = field(default_factory=dict)
    """Metric name → its curve; empty for runs that did not complete."""
    evals: Mapping[str, float] = field(default_factory=dict)
    wall_s: float = 0.0
    stage: int = 0
    """The stage that asked for the run first."""


class TamperedError(ValueError):
    """A file no longer has the bytes its record vouches for."""


def observe(record: RunRecord, attempt_dir: Path, stage: int = 0) -> Observation:
    """Read a record's metric files, checking their hashes.

    Raises:
        TamperedError: a named file is missing or has other bytes than when the run ended.
    """
    for name, digest in record.files.items():
        path = attempt_dir / name
        if not path.is_file():
            raise TamperedError(f"{path}: missing, but result.json names it; restore it or remove the run")
        if sha256(path.read_bytes()) != digest:
            raise TamperedError(f"{path}: changed since the run ended; restore the original bytes")
    series: dict[str, Series] = {}
    if record.status in {RunStatus.COMPLETED, RunStatus.DIVERGED} and "metrics.jsonl" in record.files:
        series = read_series(attempt_dir / "metrics.jsonl")
    return Observation(
        run=record.run,
        arm=record.arm,
        blueprint=record.blueprint,
        seed=record.seed,
        status=record.status,
        failure_class=record.failure_class,
        failure_detail=record.failure_detail,
        series=series,
        evals={name: m.value for name, m in sorted(record.metrics.items())},
        wall_s=record.usage.wall_s,
        stage=stage,
    )


def read_series(path: Path, step_key: str = "step") -> dict[str, Series]:
    """Curves of metrics.jsonl; a step written twice (a resumed run) keeps its last row; a torn last line is skipped."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get(step_key), int):
            by_step[row[step_key]] = row
    names = sorted({name for row in by_step.values() for name in row if name != step_key})
    return {
        name: tuple((step, float(row[name])) for step, row in sorted(by_step.items()) if _is_number(row.get(name)))
        for name in names
        if any(_is_number(row.get(name)) for row in by_step.values())
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
