"""The trainer: one batch of finished episodes in, one policy update with veRL out.

Owns the master weights (fp32), the optimizer and the step number of one model. `update` either finishes or leaves
weights, optimizer and step as they were before it; where it cannot (an error after the first of several optimizer
steps) it raises HalfUpdated and refuses further updates and saves. Knows nothing of HTTP, pools or engines: `weights`
hands the tensors out. Every method blocks; one thread at a time.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.utils import tensordict_utils as tu

from swarmtune.config import ConfigError, TrainConfig
from swarmtune.trainer import checkpoint
from swarmtune.trainer.adapter import write_adapter
from swarmtune.trainer.advantages import check_estimator, episode_advantages
from swarmtune.trainer.batch import MicroBatch, Row, build_rows, micro_batches, split_by_episode
from swarmtune.trainer.losses import PolicyObjective, actor_config, check_loss
from swarmtune.trainer.schedule import lr_at
from swarmtune.trainer.tracking import Tracker
from swarmtune.trainer.worker import Workers, WorkersLost, build_worker, shares_prefixes
from swarmtune.types import FinishedEpisode, TrainBatch

log = logging.getLogger(__name__)

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: fp32 weight and two moments."""


class HalfUpdated(RuntimeError):
    """The update failed after an optimizer step: the weights are no step's weights. Start from the last checkpoint."""


@dataclass(slots=True)
class _Tally:
    """Sums over one update."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    grad_norms: list[float] = field(default_factory=list)
    """Of the optimizer steps that were taken."""
    skipped: int = 0
    """Optimizer steps not taken because the gradient was not finite."""
    computed_tokens: int = 0
    diffs: list[torch.Tensor] = field(default_factory=list)
    """Pairs (2, n) of rollout and trainer log-probabilities, before the first optimizer step."""

    def per_token(self, name: str, by: str = "targets") -> float:
        return self.sums[name] / max(1.0, self.sums[by])


class Trainer:
    """Trains the model in `model_path` (a Hugging Face folder) as `config` says."""

    def __init__(self, config: TrainConfig, model_path: Path, *, work_dir: Path) -> None:
        """Check the configuration; nothing is loaded yet.

        Args:
            work_dir: where tracking backends write.

        Raises:
            ConfigError: an estimator, loss or combination that cannot be trained, with the known names.
        """
        check_estimator(config.algorithm.advantage, config.repeats)
        check_loss(config.algorithm)
        self._config = config
        self._model_path = model_path
        self._work_dir = work_dir
        self._step = 0
        self._worker: Workers | None = None
        self._reference: Workers | None = None
        self._tracker: Tracker | None = None
        self._broken = False

    @property
    def step(self) -> int:
        """Step of the last update; 0 for a fresh model."""
        return self._step

    @property
    def parameters(self) -> int:
        """Number of parameters of the model, adapters left out."""
        return self._model.sizes.parameters

    def start(self, resume: Path | None = None) -> int:
        """Load model and optimizer, from the checkpoint folder `resume` where given; return its step, 0 when fresh.

        Raises:
            FileNotFoundError: `resume` is not a complete checkpoint.
            ConfigError: the checkpoint was written with another model or adapter, or a tracking package is missing.
        """
        state = checkpoint.read(resume) if resume is not None else None
        torch.manual_seed(self._config.seed)
        worker = build_worker(self._config, self._model_path, work_dir=self._work_dir)
        algorithm = self._config.algorithm
        worker.set_loss_fn(PolicyObjective(algorithm, actor_config(algorithm)))
        self._worker = worker
        if state is not None and resume is not None:
            self._check_same_model(state, resume)
            worker.load_checkpoint(resume)
            self._step = int(state["step"])
        if algorithm.kl_coef > 0 and self._config.lora is None:
            self._reference = build_worker(self._config, self._model_path, trained=False, work_dir=self._work_dir)
        self._tracker = Tracker(self._config, self._work_dir)
        return self._step

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Train on `batch`; afterwards `step == batch.step`. Metrics carry veRL's names.

        A batch from which nothing can be learned (every advantage 0, and neither KL nor entropy in the loss) leaves
        weights and optimizer untouched and reports `actor/skipped_zero_advantage`. A gradient that is not finite is not
        applied and reported as `actor/skipped_non_finite`.

        Raises:
            ValueError: the batch cannot be trained (no episodes, a baseline missing).
            HalfUpdated: an error after the first of several optimizer steps, in this update or an earlier one.
        """
        self._check_whole()
        if not batch.episodes:
            raise ValueError(f"step {batch.step}: a batch without episodes")
        began = time.perf_counter()
        advantages = episode_advantages(batch.episodes, self._config.algorithm)
        built = build_rows(batch.episodes, advantages, max_length=self._context_length())
        metrics = _batch_metrics(batch.episodes, built.rows)
        metrics["tokens/no_context"] = built.no_context
        metrics["tokens/over_context"] = built.over_context
        nothing = not built.rows or not (
            self._learns_without_advantage() or any(r.advantages.any() for r in built.rows)
        )
        metrics["actor/skipped_zero_advantage"] = float(nothing)
        metrics["actor/lr"] = lr_at(batch.step, self._config.optim)
        prepared = time.perf_counter()
        tally = _Tally()
        if not nothing:
            self._train(built.rows, batch.step, tally)
            metrics |= _tally_metrics(tally, self._config)
        self._step = batch.step
        ended = time.perf_counter()
        metrics |= {
            "s/prepare": prepared - began,
            "s/update": ended - began,
            "perf/tokens_per_s": metrics["tokens"] / max(1e-9, ended - began),
        }
        return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Current weights by Hugging Face name, fp32, adapters merged.

        A tensor may be the live one: copy it before the next is taken and write to none.
        """
        yield from self._model.weights()

    def save_adapter(self, folder: Path) -> None:
        """Write the LoRA adapter alone into an existing folder, as PEFT and vLLM load it.

        Raises:
            OSError
            RuntimeError: the model has no adapter.
        """
        if self._config.lora is None:
            raise RuntimeError("the model has no adapter: configure lora")
        write_adapter(folder, self._model.adapter(), self._config.lora, base=self._config.model)

    def save(self, path: Path) -> None:
        """Write a checkpoint folder `path` (weights, optimizer, RNG, step): complete or absent, also after a crash.

        Raises:
            OSError: not enough space or not writable; an existing checkpoint at `path` is intact.
            HalfUpdated: the weights are no step's weights.
        """
        self._check_whole()
        model = self._model
        needed = model.sizes.trained * BYTES_PER_PARAMETER + model.sizes.frozen * 4
        state = {"step": self._step, "model": self._fingerprint()}
        checkpoint.write(
            path,
            state,
            lambda folder: model.save_checkpoint(folder, self._step),
            needed_bytes=int(needed * 1.05) + (16 << 20),
        )

    def track(self, metrics: dict[str, float], step: int) -> None:
        """Send a step's metrics to the configured tracking backends (TensorBoard, W&B, SwanLab, console)."""
        if self._tracker is not None:
            self._tracker.log(metrics, step)

    def close(self) -> None:
        """Finish tracking and release the model. Idempotent."""
        if self._tracker is not None:
            self._tracker.close()
        for workers in (self._worker, self._reference):
            if workers is not None:
                workers.close()
        self._tracker = self._worker = self._reference = None

    @property
    def _model(self) -> Workers:
        if self._worker is None:
            raise RuntimeError("the trainer is not started: call start() first")
        return self._worker

    def _check_whole(self) -> None:
        if self._broken:
            raise HalfUpdated("an earlier update failed half-way; start again from the last checkpoint")

    def _context_length(self) -> int | None:
        return getattr(self._model.hf_config, "max_position_embeddings", None)

    def _learns_without_advantage(self) -> bool:
        return self._config.algorithm.kl_coef > 0 or self._config.algorithm.entropy_coef > 0

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be loaded."""
        lora = self._config.lora
        return {
            "type": self._model.hf_config.model_type,
            "parameters": self.parameters,
            "lora": lora.model_dump() if lora else None,
            "ranks": self._model.ranks,
        }

    def _check_same_model(self, state: dict[str, Any], resume: Path) -> None:
        mine = self._fingerprint()
        other = {k: v for k, v in state["model"].items() if v != mine[k]}
        if other:
            told = "; ".join(f"{k}: checkpoint {v}, configuration {mine[k]}" for k, v in other.items())
            raise ConfigError(
                f"{resume}: the checkpoint is of another model ({told}); resume with the same model, lora and ray.processes"
            )

    def _micro_batches(self, rows: list[Row], indices: Iterable[int]) -> list[MicroBatch]:
        return micro_batches(
            rows,
            list(indices),
            tokens=self._config.trainer.tokens_per_micro_batch,
            loss_agg=self._config.algorithm.loss_agg,
            share_prefixes=shares_prefixes(self._model.hf_config),
            entropy_grad=self._config.algorithm.entropy_coef > 0,
            ranks=self._model.ranks,
        )

    def _train(self, rows: list[Row], step: int, tally: _Tally) -> None:
        """All optimizer steps of one update."""
        algorithm = self._config.algorithm
        rng = np.random.default_rng([self._config.seed, step])
        taken = 0
        try:
            rows = self._with_fixed_logprobs(rows)
            for _ in range(algorithm.epochs):
                for indices in split_by_episode(rows, algorithm.mini_batches, rng):
                    self._accumulate(rows, indices, tally, before_first_step=taken == 0)
                    self._take_step(step, tally)
                    taken += 1
        except WorkersLost as error:
            self._broken = True
            raise HalfUpdated(f"step {step}: {error}") from error
        except BaseException as error:
            self._model.optimizer_zero_grad()
            if taken:
                self._broken = True
                raise HalfUpdated(f"step {step}: failed after {taken} optimizer steps: {error}") from error
            raise

    def _accumulate(self, rows: list[Row], indices: list[int], tally: _Tally, *, before_first_step: bool) -> None:
        """Gradients of one mini-batch."""
        model = self._model
        model.optimizer_zero_grad()
        micros = self._micro_batches(rows, indices)
        outputs = model.forward_backward([micro.data for micro in micros])
        for number, (micro, output) in enumerate(zip(micros, outputs, strict=True)):
            if number % model.ranks == 0:
                for name, value in tu.get(output, "metrics").items():
                    if name in _SUMMED or name.startswith(("actor/pg_", "actor/ppo_")):
                        tally.sums[name] += float(np.sum(value))
            tally.computed_tokens += micro.computed_tokens
            if before_first_step and micro.rows:
                tally.diffs += _comparable([rows[i] for i in micro.rows], output["log_probs"])

    def _take_step(self, step: int, tally: _Tally) -> None:
        optim = self._config.optim
        # All of them each time: a loaded optimizer brings the settings it was saved with.
        settings = {"lr": lr_at(step, optim), "weight_decay": optim.weight_decay, "betas": optim.betas}
        norm = self._model.optimizer_step(settings)
        if math.isfinite(norm):
            tally.grad_norms.append(norm)
        else:
            tally.skipped += 1
            log.warning("gradient not finite, optimizer step skipped", extra={"step": step})

    def _with_fixed_logprobs(self, rows: list[Row]) -> list[Row]:
        """Rows with the log-probabilities that stay fixed during the update: the reference's, and our own old ones.

        Our own are computed only where several optimizer steps need a point of comparison that the rollout does not
        give; with a single step they are those of the step's own forward pass.
        """
        algorithm = self._config.algorithm
        if algorithm.kl_coef > 0:
            values = self._logprobs(rows, reference=True)
            rows = [replace(row, ref_logprobs=v) for row, v in zip(rows, values, strict=True)]
        if algorithm.epochs * algorithm.mini_batches == 1:
            return rows
        corrected = algorithm.rollout_correction is not None
        if not corrected and all(bool(row.exact[row.loss_mask].all()) for row in rows):
            return rows
        values = self._logprobs(rows, reference=False)
        return [
            replace(row, old_logprobs=v if corrected else torch.where(row.exact, row.rollout_logprobs, v))
            for row, v in zip(rows, values, strict=True)
        ]

    def _logprobs(self, rows: list[Row], *, reference: bool) -> list[torch.Tensor]:
        """Per row (T,) log-probabilities of its tokens under the mask, 0 elsewhere; without gradient."""
        worker = self._reference if reference and self._reference is not None else self._model
        values: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        micros = self._micro_batches(rows, range(len(rows)))
        for micro in micros:
            tu.assign_non_tensor(micro.data, compute_loss=False, no_lora_adapter=reference and self._reference is None)
        outputs = worker.infer_batch([micro.data for micro in micros])
        for micro, output in zip(micros, outputs, strict=True):
            if not micro.rows:
                continue
            for i, logprobs in zip(micro.rows, output["log_probs"].unbind(), strict=True):
                values[i] = _shift(logprobs)
        return values


_SUMMED = {
    "loss",
    "targets",
    "comparable",
    "actor/entropy",
    "actor/kl_loss",
    "rollout_corr/rollout_is_mean",
}


def _shift(logprobs: torch.Tensor) -> torch.Tensor:
    """(T,) entries belonging to the next token → entries belonging to their own; the first is 0."""
    return torch.cat([logprobs.new_zeros(1), logprobs[:-1]]).float()


def _comparable(rows: list[Row], log_probs: torch.Tensor) -> list[torch.Tensor]:
    """Per row (2, n): rollout and trainer log-probabilities of the tokens sampled in exactly this context."""
    pairs = []
    for row, values in zip(rows, log_probs.unbind(), strict=True):
        kept = row.loss_mask & row.exact
        pairs.append(torch.stack([row.rollout_logprobs[kept], _shift(values)[kept]]))
    return pairs


def _batch_metrics(episodes: list[FinishedEpisode], rows: list[Row]) -> dict[str, float]:
    rewards = torch.tensor([e.reward for e in episodes], dtype=torch.float64)
    advantages = torch.cat([row.advantages[row.loss_mask] for row in rows]) if rows else torch.zeros(1)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(unbiased=False)),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "critic/advantages/mean": float(advantages.mean()),
        "critic/advantages/min": float(advantages.min()),
        "critic/advantages/max": float(advantages.max()),
        "episodes": len(episodes),
        "tasks": len({e.task_id for e in episodes}),
        "rows": len(rows),
        "tokens": sum(len(row.tokens) for row in rows),
        "tokens/sampled": sum(row.targets for row in rows),
    }


def _tally_metrics(tally: _Tally, config: TrainConfig) -> dict[str, float]:
    steps = len(tally.grad_norms) + tally.skipped
    algorithm = config.algorithm
    metrics = {
        "actor/pg_loss": tally.sums["actor/pg_loss"] / steps,
        "actor/loss": tally.sums["loss"] / steps,
        "actor/entropy": tally.per_token("actor/entropy"),
        "actor/skipped_non_finite": tally.skipped,
        "actor/optimizer_steps": len(tally.grad_norms),
        "tokens/computed": tally.computed_tokens,
    }
    if tally.grad_norms:
        metrics["actor/grad_norm"] = sum(tally.grad_norms) / len(tally.grad_norms)
    for name in ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        if name in tally.sums:
            metrics[name] = tally.per_token(name)
    if algorithm.kl_coef > 0:
        metrics["actor/kl_loss"] = tally.sums["actor/kl_loss"] / steps
        metrics["actor/kl_coef"] = algorithm.kl_coef
    if algorithm.rollout_correction is not None:
        metrics["rollout_corr/rollout_is_mean"] = tally.per_token("rollout_corr/rollout_is_mean", "comparable")
    return metrics | _mismatch(tally.diffs)


def _mismatch(pairs: list[torch.Tensor]) -> dict[str, float]:
    """How far engine and trainer are apart on the sampled tokens, as log-probability and as probability."""
    both = torch.cat(pairs, dim=1) if pairs else torch.zeros(2, 0)
    if not both.shape[1]:
        return {}
    logprobs, probs = (both[0] - both[1]).abs(), (both[0].exp() - both[1].exp()).abs()
    return {
        "training/rollout_logprobs_diff_mean": float(logprobs.mean()),
        "training/rollout_logprobs_diff_max": float(logprobs.max()),
        "training/rollout_probs_diff_mean": float(probs.mean()),
        "training/rollout_probs_diff_max": float(probs.max()),
    }
