"""The evaluation lane of a run: which evaluations are open, whose weights each judges, and when a step waits for one.

Owns the records of evaluations. What always holds: an evaluation belongs to one weight version, given when it begins;
it holds back only the step that would replace these weights, for a bounded time, and only while somebody works on it.
No I/O, no HTTP; seconds come from the `clock`.

Why a step waits instead of the evaluation keeping the old weights: no engine here holds two sets of weights at once,
and a second copy would cost every server the memory of a model for the minutes in which somebody evaluates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from swarmtune.config import EvaluationConfig
from swarmtune.episodes import Episode
from swarmtune.protocol import Code, EvaluationOutcome, EvaluationRecord, EvaluationRequest

Clock = Callable[[], float]
"""Monotonic seconds."""

IDLE_S = 10.0
"""An evaluation without an open episode and without a sign of its client for so long holds no step."""


ABANDONED_S = 120.0
"""One without an open episode and without a sign of its client for so long is told as abandoned."""


class LaneError(Exception):
    """A request about an evaluation that cannot be carried out: `code`, and a message that says how to fix it."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class EvaluationLane:
    def __init__(self, config: EvaluationConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._records: dict[str, EvaluationRecord] = {}
        self._seen: dict[str, float] = {}
        """Open evaluation → clock seconds of the last sign of its client."""

    # -- records

    def restore(self, records: Iterable[EvaluationRecord]) -> None:
        """What a journal remembers. Those that were open go on: their client may be there still."""
        for record in records:
            self.put(record)

    def records(self, name: str | None = None) -> list[EvaluationRecord]:
        """In order of weight version, then of their beginning."""
        found = [r for r in self._records.values() if name is None or r.name == name]
        return sorted(found, key=lambda r: (r.weight_version, r.began_at))

    def get(self, evaluation_id: str) -> EvaluationRecord:
        """Raises:
        LaneError: unknown_evaluation
        """
        record = self._records.get(evaluation_id)
        if record is None:
            raise LaneError(
                Code.UNKNOWN_EVALUATION, f"no evaluation {evaluation_id!r} here; begin it with POST /v1/evaluations"
            )
        return record

    def prepare(self, request: EvaluationRequest, *, weight_version: int) -> EvaluationRecord:
        """The record an evaluation would begin with; of a repeated request, the one there is. Changes nothing.

        Raises:
            LaneError: version_passed, when the weights asked for have been replaced.
        """
        known = self._records.get(request.evaluation_id)
        if known is not None:
            return known
        version = weight_version if request.weight_version is None else request.weight_version
        if version < weight_version:
            raise LaneError(
                Code.VERSION_PASSED,
                f"the weights of step {version} have been replaced by those of step {weight_version}; to evaluate a "
                "checkpoint, serve it in a data folder of its own: swarmtune serve --from-run RUN --from-step "
                f"{version} --data-dir DIR",
            )
        hold_s = self._config.hold_sync_s if request.hold_sync_s is None else request.hold_sync_s
        return EvaluationRecord(
            evaluation_id=request.evaluation_id,
            name=request.name,
            weight_version=version,
            state="open",
            began_at=time.time(),
            tasks=request.tasks,
            k=request.k,
            sampling=request.sampling,
            hold_sync_s=hold_s,
        )

    def outcome(self, evaluation_id: str, outcome: EvaluationOutcome) -> EvaluationRecord:
        """The record with what was found. Changes nothing.

        Raises:
            LaneError: unknown_evaluation
        """
        found = outcome.model_dump() | {"state": "finished", "ended_at": time.time()}
        return EvaluationRecord.model_validate(self.get(evaluation_id).model_dump() | found)

    def put(self, record: EvaluationRecord) -> None:
        """Take in a record that is on disk."""
        self._records[record.evaluation_id] = record
        if record.state == "open":
            self._seen[record.evaluation_id] = self._clock()
        else:
            self._seen.pop(record.evaluation_id, None)

    # -- holding

    def seen(self, evaluation_id: str | None) -> None:
        """A sign of an evaluation's client."""
        record = self._records.get(evaluation_id) if evaluation_id is not None else None
        if record is not None and record.state != "finished":
            self.put(record.model_copy(update={"state": "open", "ended_at": None}))

    def abandoned(self, episodes: Iterable[Episode]) -> list[EvaluationRecord]:
        """The records of those that nobody works on any more. Changes nothing. `episodes`: the open ones of the run."""
        busy = {e.evaluation_id for e in episodes}
        now = self._clock()
        left = {"state": "abandoned", "ended_at": time.time()}
        return [
            self._records[evaluation_id].model_copy(update=left)
            for evaluation_id, seen in self._seen.items()
            if evaluation_id not in busy and now - seen > ABANDONED_S
        ]

    def reached(self, weight_version: int) -> None:
        """These weights are in use: who waited for them gets the time to begin."""
        for evaluation_id in list(self._seen):
            if self._records[evaluation_id].weight_version == weight_version:
                self.seen(evaluation_id)

    def hold_s(self, weight_version: int, episodes: Sequence[Episode]) -> float:
        """How long the step that replaces these weights is to wait, from when it could begin; 0.0 when for nothing.

        `episodes`: the open ones of the run. An evaluation episode that belongs to no evaluation counts by itself.
        """
        held = [self._config.hold_sync_s for e in episodes if self._is_loose(e, weight_version)]
        held += [self._records[i].hold_sync_s for i in self._at_work(episodes, weight_version)]
        return max(held, default=0.0)

    def versions_in_use(self, episodes: Iterable[Episode]) -> set[int]:
        """Weight versions that some evaluation still asks for."""
        return {self._records[i].weight_version for i in self._at_work(episodes)}

    def _is_loose(self, episode: Episode, weight_version: int) -> bool:
        return episode.kind == "evaluate" and episode.evaluation_id is None and episode.weight_version == weight_version

    def _at_work(self, episodes: Iterable[Episode], weight_version: int | None = None) -> list[str]:
        busy = {e.evaluation_id for e in episodes}
        now = self._clock()
        return [
            evaluation_id
            for evaluation_id, seen in self._seen.items()
            if (weight_version is None or self._records[evaluation_id].weight_version == weight_version)
            and (evaluation_id in busy or now - seen <= IDLE_S)
        ]
