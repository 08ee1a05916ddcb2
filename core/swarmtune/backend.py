"""The one interface between the server process and whatever holds the model.

A backend generates and trains. The server owns everything else: episodes, pool, journal, HTTP. Two implementations:
`engines.process.ProcessBackend` (an engine process with weights, optimizer and embedded engine) and
`engines.scripted.ScriptedBackend` (scripted answers and a pretend update: tests, and clients without torch).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarmtune.config import TrainConfig
from swarmtune.types import GenerateChunk, GenerateRequest, StepResult, TrainBatch


class BackendError(Exception):
    """Base of what a backend raises."""


class StartFailed(BackendError):
    """The model could not be brought up; `log_tail` holds the last lines the engine process wrote."""

    def __init__(self, reason: str, log_tail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.log_tail = log_tail


class BackendLost(BackendError):
    """The engine process died under a call. The server restarts it from the last checkpoint."""


class UpdateFailed(BackendError):
    """The update raised; weights are as they were before it or the backend is lost, never half-updated."""


class RequestRefused(BackendError):
    """This request cannot be served as asked; others are unaffected. The message says how to fix it."""


class ContextOverflow(RequestRefused):
    """Prompt plus max_tokens do not fit the context."""


class GenerateFailed(BackendError):
    """The engine raised while generating, and goes on; nothing of this generation may be trained."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What the server learns from a started backend."""

    model_path: Path
    """Folder with tokenizer.json, tokenizer_config.json and config.json: the gateway's renderer loads it."""
    model_name: str
    context_length: int
    """Tokens of prompt plus answer that fit."""
    weight_version: int
    """Equals the step of the checkpoint loaded; 0 for a fresh model."""
    parameters: int = 0
    constrains: bool = False
    """Whether `SamplingParams.grammar` is obeyed."""


class Backend(Protocol):
    async def start(self, config: TrainConfig, *, work_dir: Path, resume: Path | None) -> BackendInfo:
        """Bring the model up, from the checkpoint folder `resume` where given.

        Raises:
            StartFailed: with the reason and the log's tail; the backend may be started again.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Stream one generation; closing the iterator cancels it. Waits while weights change.

        Raises:
            BackendLost: the engine died; nothing of this generation may be trained.
            RequestRefused, ContextOverflow, GenerateFailed
        """
        ...

    async def train(self, batch: TrainBatch) -> StepResult:
        """One update on `batch`, then the engine has the new weights and weight_version == batch.step.

        Raises:
            UpdateFailed, BackendLost
        """
        ...

    async def save(self, path: Path) -> None:
        """Write a checkpoint (weights, optimizer, schedule, RNG, step) to `path`, atomically: complete or absent.

        Raises:
            OSError: no space, not writable. The previous checkpoint is intact.
        """
        ...

    async def wait_lost(self) -> str:
        """Return the reason once the backend is lost; never returns while it is well."""
        ...

    async def stop(self, *, grace_s: float = 10.0) -> None:
        """Stop and leave no process behind, within about `grace_s`. Idempotent."""
        ...
