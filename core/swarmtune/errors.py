"""What a swarm client raises: one class per thing worth catching, each with the server's code and sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmtune.protocol import Code, EndResult, ErrorBody


class SwarmError(Exception):
    """A refusal by the server, or no server at all."""

    def __init__(
        self,
        message: str,
        *,
        code: Code | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        """The server's reason; None when no server answered in its own form."""
        self.status = status
        """HTTP status of the refusal."""
        self.retry_after_s = retry_after_s
        self.details = dict(details or {})


class ServerUnreachable(SwarmError):
    """Nothing answers at the address, for longer than the client's patience."""


class BadConfig(SwarmError):
    """The configuration cannot be used; the message names key, problem and fix, one per line."""


class ConfigConflict(SwarmError):
    """Another configuration is already running; `differences` maps each key to (running, asked for)."""

    @property
    def differences(self) -> dict[str, tuple[Any, Any]]:
        found = self.details.get("differences", {})
        return {key: (pair[0], pair[1]) for key, pair in found.items()}


class StartFailed(SwarmError):
    """The server could not bring the model up; `log_tail` holds the engine's last lines."""

    @property
    def log_tail(self) -> str:
        return str(self.details.get("log_tail") or "")


class NotStarted(SwarmError):
    """The server runs but has no model: call `start` first."""


class NotRolling(SwarmError):
    """No episode can be claimed now (weights change, too many are open, the client's share is full); later it can."""


class WeightsReplaced(SwarmError):
    """The weights an evaluation belongs to are no longer in use."""


class TrainingFinished(SwarmError):
    """The server has done its `max_steps`."""


class AccessDenied(SwarmError):
    """No key, a wrong one, or one without the capability."""


class EpisodeGone(SwarmError):
    """The episode is unknown, over or expired: it can be neither called nor ended."""


class EndConflict(SwarmError):
    """The episode was ended already, with another submission."""


class BadReward(SwarmError):
    """The reward is not a finite number. The episode is still open."""


class UnknownClient(SwarmError):
    """The client's name is not registered."""


class StepMismatch(SwarmError):
    """The agreement names another step than the one being collected."""


class EndedInPart(SwarmError):
    """The end of an episode on several servers did not reach all of them; `outcomes` says who has its reward.

    Each reward was given once or not at all. Ending the episode again sends only what is missing.
    """

    def __init__(self, task_id: str, outcomes: Mapping[str, EndResult | SwarmError | None]) -> None:
        self.task_id = task_id
        self.outcomes = dict(outcomes)
        """Role → the server's answer; or why there is none; or None where the role was aborted on purpose."""
        taken = ", ".join(f"{role} ({r.outcome})" for role, r in self.ended.items()) or "nobody"
        missing = "; ".join(f"{role}: {type(error).__name__}: {error}" for role, error in self.failed.items())
        super().__init__(f"the rewards of task {task_id!r} were taken by {taken}, but not by {missing}")

    @property
    def ended(self) -> dict[str, EndResult]:
        """Role → answer of the servers that took their reward."""
        return {role: outcome for role, outcome in self.outcomes.items() if isinstance(outcome, EndResult)}

    @property
    def failed(self) -> dict[str, SwarmError]:
        """Role → why its server did not take the reward."""
        return {role: outcome for role, outcome in self.outcomes.items() if isinstance(outcome, SwarmError)}


class TrainingFailed(SwarmError):
    """The training loop gave up: within one step too many tasks could not be run. The cause is chained."""


_CLASS_OF: dict[Code, type[SwarmError]] = {
    Code.BAD_CONFIG: BadConfig,
    Code.UNKNOWN_MODEL: BadConfig,
    Code.CONFIG_CONFLICT: ConfigConflict,
    Code.START_FAILED: StartFailed,
    Code.NOT_STARTED: NotStarted,
    Code.NOT_ROLLING: NotRolling,
    Code.TOO_MANY_EPISODES: NotRolling,
    Code.SHARE_FULL: NotRolling,
    Code.ENGINE_LOST: NotRolling,
    Code.FINISHED: TrainingFinished,
    Code.VERSION_PASSED: WeightsReplaced,
    Code.UNAUTHORIZED: AccessDenied,
    Code.FORBIDDEN: AccessDenied,
    Code.UNKNOWN_EPISODE: EpisodeGone,
    Code.EPISODE_OVER: EpisodeGone,
    Code.EPISODE_EXPIRED: EpisodeGone,
    Code.END_CONFLICT: EndConflict,
    Code.BAD_REWARD: BadReward,
    Code.UNKNOWN_CLIENT: UnknownClient,
    Code.STEP_MISMATCH: StepMismatch,
}


def error_of(body: ErrorBody, status: int) -> SwarmError:
    """The exception for a refusal."""
    kind = _CLASS_OF.get(body.code, SwarmError)
    return kind(body.message, code=body.code, status=status, retry_after_s=body.retry_after_s, details=body.details)
