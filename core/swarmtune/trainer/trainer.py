"""The trainer: one batch of finished episodes in, one update of policy and critic with veRL out.

Owns the master weights (fp32), the optimizers and the step number of one model, and with gae of its critic. `update`
either finishes or leaves weights, optimizers and step as they were before it; where it cannot (an error after the first
of several optimizer steps) it raises HalfUpdated and refuses further updates and saves. Knows nothing of HTTP, pools or
engines: `weights` hands the tensors out. Every method blocks; one thread at a time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.utils import tensordict_utils as tu

from swarmtune.config import ConfigError, TrainConfig
from swarmtune.trainer import checkpoint
from swarmtune.trainer.adapter import write_adapter
from swarmtune.trainer.advantages import check_estimator
from swarmtune.trainer.batch import MicroBatch, Row, Rows, build_rows, micro_batches, split_by_episode
from swarmtune.trainer.critic import build_critic, critic_lr_at
from swarmtune.trainer.losses import TEACH, PolicyObjective, actor_config, check_loss
from swarmtune.trainer.metrics import (
    Tally,
    batch_metrics,
    critic_metrics,
    judged_metrics,
    optimizer_metrics,
    policy_metrics,
    row_metrics,
)
from swarmtune.trainer.prepare import needs_reference, prepare
from swarmtune.trainer.schedule import lr_at
from swarmtune.trainer.tracking import Tracker
from swarmtune.trainer.worker import Workers, WorkersLost, build_worker, shares_prefixes
from swarmtune.types import TrainBatch

log = logging.getLogger(__name__)

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: fp32 weight and two moments."""
EARLIER = {"ranks": 1, "critic": None}
"""What is true of a checkpoint that does not say it."""
CRITIC = "critic"
"""Folder of the critic's files in a checkpoint."""


class HalfUpdated(RuntimeError):
    """The update failed after an optimizer step: the weights are no step's weights. Start from the last checkpoint."""


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
        self._critic: Workers | None = None
        self._kl_coef = config.algorithm.kl_in_reward.kl_coef if config.algorithm.kl_in_reward else None
        """The next step's; `adaptive` moves it."""
        self._taken = 0
        """Optimizer steps of the update under way."""
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
        if self._config.critic is not None:
            self._critic = build_critic(self._config, self._model_path, work_dir=self._work_dir)
        if state is not None and resume is not None:
            self._load(resume, state)
        if needs_reference(algorithm) and self._config.lora is None:
            self._reference = build_worker(self._config, self._model_path, trained=False, work_dir=self._work_dir)
        self._tracker = Tracker(self._config, self._work_dir)
        return self._step

    def _load(self, resume: Path, state: dict[str, Any]) -> None:
        self._check_same_model(state, resume)
        # The critic first: each brings its random state, and the policy's is the one that goes on.
        if self._critic is not None:
            self._critic.load_checkpoint(resume / CRITIC)
        self._model.load_checkpoint(resume)
        self._step = int(state["step"])
        self._kl_coef = state.get("kl_coef", self._kl_coef)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Train on `batch`; afterwards `step == batch.step`. Metrics carry veRL's names.

        A batch with `supervised_lr` holds given conversations: the tokens under their masks are learned with veRL's
        supervised loss, reported as `sft/loss`, in one optimizer step; the critic stays as it is.

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
        built = build_rows(batch.episodes, max_length=self._context_length())
        metrics = self._teach(batch, built) if batch.supervised_lr is not None else self._reinforce(batch, built)
        metrics["tokens/no_context"] = built.no_context
        metrics["tokens/over_context"] = built.over_context
        self._step = batch.step
        metrics["s/update"] = seconds = time.perf_counter() - began
        metrics["perf/tokens_per_s"] = metrics["tokens"] / max(1e-9, seconds)
        return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}

    def _reinforce(self, batch: TrainBatch, built: Rows) -> dict[str, float]:
        """One step of reinforcement learning."""
        began = time.perf_counter()
        metrics = batch_metrics(batch.episodes, built.rows)
        with self._all_or_nothing(batch.step):
            prepared = prepare(batch.episodes, built.rows, self._config.algorithm, self, self._kl_coef)
            metrics |= prepared.metrics | judged_metrics(prepared.rows)
            metrics["s/prepare"] = time.perf_counter() - began
            if self._critic is not None and prepared.rows:
                metrics |= self._train_critic(prepared.rows, batch.step)
            warms_up = self._config.critic is not None and batch.step <= self._config.critic.warmup_steps
            metrics["actor/lr"] = lr_at(batch.step, self._config.optim)
            metrics["actor/skipped_zero_advantage"] = float(prepared.nothing)
            metrics["actor/skipped_critic_warmup"] = float(warms_up)
            if not prepared.nothing and not warms_up:
                metrics |= self._train_policy(prepared.rows, batch.step)
        self._kl_coef = prepared.kl_coef
        return metrics

    def _teach(self, batch: TrainBatch, built: Rows) -> dict[str, float]:
        """One supervised step on given conversations."""
        assert batch.supervised_lr is not None
        metrics = row_metrics(built.rows) | {"actor/lr": batch.supervised_lr}
        if not built.rows:
            raise ValueError(f"step {batch.step}: no conversation has a token to learn within the model's context")
        tally = Tally()
        with self._all_or_nothing(batch.step):
            micros = self._micro_batches(self._model, built.rows, range(len(built.rows)), loss_agg="token-mean")
            for micro in micros:
                tu.assign_non_tensor(micro.data, **{TEACH: True})
            self._accumulate(self._model, micros, tally)
            self._take_step(self._model, self._policy_settings(batch.supervised_lr), tally)
        metrics["sft/loss"] = tally.sums["loss"]
        return metrics | {"tokens/computed": tally.computed_tokens} | optimizer_metrics("actor", tally)

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
        if self._critic is not None:
            needed += self._critic.sizes.trained * BYTES_PER_PARAMETER
        state: dict[str, Any] = {"step": self._step, "model": self._fingerprint()}
        if self._kl_coef is not None:
            state["kl_coef"] = self._kl_coef
        checkpoint.write(path, state, self._save_models, needed_bytes=int(needed * 1.05) + (16 << 20))

    def _save_models(self, folder: Path) -> None:
        self._model.save_checkpoint(folder, self._step)
        if self._critic is not None:
            (folder / CRITIC).mkdir()
            self._critic.save_checkpoint(folder / CRITIC, self._step)

    def track(self, metrics: dict[str, float], step: int) -> None:
        """Send a step's metrics to the configured tracking backends (TensorBoard, W&B, SwanLab, console)."""
        if self._tracker is not None:
            self._tracker.log(metrics, step)

    def close(self) -> None:
        """Finish tracking and release the model. Idempotent."""
        if self._tracker is not None:
            self._tracker.close()
        for workers in (self._worker, self._reference, self._critic):
            if workers is not None:
                workers.close()
        self._tracker = self._worker = self._reference = self._critic = None

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

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be loaded."""
        lora = self._config.lora
        return {
            "type": self._model.hf_config.model_type,
            "parameters": self.parameters,
            "lora": lora.model_dump() if lora else None,
            "ranks": self._model.ranks,
            "critic": self._critic.sizes.parameters if self._critic is not None else None,
        }

    def _check_same_model(self, state: dict[str, Any], resume: Path) -> None:
        mine, found = self._fingerprint(), state["model"]
        other = [name for name, value in mine.items() if found.get(name, EARLIER.get(name)) != value]
        if other:
            told = "; ".join(f"{name}: checkpoint {found.get(name)}, configuration {mine[name]}" for name in other)
            raise ConfigError(
                f"{resume}: the checkpoint is of another model ({told}); resume with the same model, lora and "
                "ray.processes"
            )

    # Passes.

    def _micro_batches(
        self, model: Workers, rows: Sequence[Row], indices: Iterable[int], *, loss_agg: str | None = None
    ) -> list[MicroBatch]:
        return micro_batches(
            rows,
            list(indices),
            tokens=self._config.trainer.tokens_per_micro_batch,
            loss_agg=loss_agg or self._config.algorithm.loss_agg,
            share_prefixes=shares_prefixes(model.hf_config),
            entropy_grad=self._config.algorithm.entropy_coef > 0,
            ranks=model.ranks,
        )

    @contextmanager
    def _all_or_nothing(self, step: int) -> Iterator[None]:
        """An error in the block leaves the weights as they were, or marks them as no step's."""
        self._taken = 0
        try:
            yield
        except WorkersLost as error:
            self._broken = True
            raise HalfUpdated(f"step {step}: {error}") from error
        except BaseException as error:
            for model in (self._model, self._critic):
                if model is not None:
                    model.optimizer_zero_grad()
            if self._taken:
                self._broken = True
                raise HalfUpdated(f"step {step}: failed after {self._taken} optimizer steps: {error}") from error
            raise

    def _train_policy(self, rows: list[Row], step: int) -> dict[str, float]:
        """All optimizer steps of the policy."""
        algorithm, tally = self._config.algorithm, Tally()
        rng = np.random.default_rng([self._config.seed, step])
        settings = self._policy_settings(lr_at(step, self._config.optim))
        for _ in range(algorithm.epochs):
            for indices in split_by_episode(rows, algorithm.mini_batches, rng):
                micros = self._micro_batches(self._model, rows, indices)
                self._accumulate(self._model, micros, tally, compared=rows if tally.steps == 0 else None)
                self._take_step(self._model, settings, tally)
        return policy_metrics(tally, self._config) | {"tokens/computed": tally.computed_tokens}

    def _train_critic(self, rows: list[Row], step: int) -> dict[str, float]:
        """All optimizer steps of the critic."""
        assert self._critic is not None and self._config.critic is not None
        config, tally = self._config.critic, Tally()
        rng = np.random.default_rng([self._config.seed, step, 1])
        lr = critic_lr_at(step, config)
        for _ in range(config.epochs):
            for indices in split_by_episode(rows, config.mini_batches, rng):
                micros = self._micro_batches(self._critic, rows, indices, loss_agg="token-mean")
                self._accumulate(self._critic, micros, tally)
                self._take_step(
                    self._critic, {"lr": lr, "weight_decay": config.weight_decay, "betas": config.betas}, tally
                )
        return critic_metrics(tally) | {"critic/lr": lr}

    def _accumulate(
        self, model: Workers, micros: Sequence[MicroBatch], tally: Tally, *, compared: Sequence[Row] | None = None
    ) -> None:
        """Gradients of one mini-batch. `compared`: all rows, where their log-probabilities are held against the
        rollout's."""
        model.optimizer_zero_grad()
        outputs = model.forward_backward([micro.data for micro in micros])
        for number, (micro, output) in enumerate(zip(micros, outputs, strict=True)):
            if number % model.ranks == 0:
                tally.add(output)
            tally.computed_tokens += micro.computed_tokens
            if compared is not None and micro.rows:
                tally.diffs += _comparable([compared[i] for i in micro.rows], output["log_probs"])

    def _policy_settings(self, lr: float) -> dict[str, Any]:
        """All of them each time: a loaded optimizer brings the settings it was saved with."""
        optim = self._config.optim
        return {"lr": lr, "weight_decay": optim.weight_decay, "betas": optim.betas}

    def _take_step(self, model: Workers, settings: dict[str, Any], tally: Tally) -> None:
        norm = model.optimizer_step(settings)
        self._taken += 1
        if math.isfinite(norm):
            tally.grad_norms.append(norm)
        else:
            tally.skipped += 1
            log.warning("gradient not finite, optimizer step skipped", extra={"step": self._step + 1})

    # What `prepare` asks.

    def logprobs(self, rows: Sequence[Row], *, reference: bool = False) -> list[torch.Tensor]:
        """Per row (T,) log-probabilities of its tokens under the mask, 0 elsewhere; without gradient.

        `reference`: of the start model, which with LoRA is the model without its adapter.
        """
        if reference and self._reference is not None:
            return self._infer(self._reference, rows, "log_probs")
        return self._infer(self._model, rows, "log_probs", no_lora_adapter=reference)

    def sums_of_squares(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Per row (T,) sums of squared probabilities over the vocabulary, 0 off the mask; without gradient."""
        return self._infer(self._model, rows, "sum_pi_squared", calculate_sum_pi_squared=True)

    def values(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Per row (T,) the critic's values of the state before each token, 0 off the mask; without gradient."""
        assert self._critic is not None
        return self._infer(self._critic, rows, "values")

    def _infer(self, model: Workers, rows: Sequence[Row], name: str, **asked: bool) -> list[torch.Tensor]:
        found: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        if not rows:
            return found
        micros = self._micro_batches(model, rows, range(len(rows)))
        for micro in micros:
            tu.assign_non_tensor(micro.data, compute_loss=False, **asked)
        outputs = model.infer_batch([micro.data for micro in micros])
        for micro, output in zip(micros, outputs, strict=True):
            if micro.rows:
                rows_of: Any = output[name]
                for i, values in zip(micro.rows, rows_of.unbind(), strict=True):
                    found[i] = _shift(values)
        return found


def _shift(values: torch.Tensor) -> torch.Tensor:
    """(T,) entries belonging to the next token → entries belonging to their own; the first is 0."""
    return torch.cat([values.new_zeros(1), values[:-1]]).float()


def _comparable(rows: Sequence[Row], log_probs: torch.Tensor) -> list[torch.Tensor]:
    """Per row (2, n): rollout and trainer log-probabilities of the tokens sampled in exactly this context."""
    pairs = []
    for row, values in zip(rows, log_probs.unbind(), strict=True):
        kept = row.loss_mask & row.exact
        pairs.append(torch.stack([row.rollout_logprobs[kept], _shift(values)[kept]]))
    return pairs
