"""TrainConfig: one typed model for a training. Defaults live here and nowhere else; unknown keys are errors.

A client sends it, the server resolves it, the resolved copy is saved with the run. `TrainConfig.from_dict` turns a
wrong key into a sentence that names the nearest right one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from swarmtune.types import MatchPolicy

BatchPolicy = Literal[
    "episode_count", "task_count", "nonzero_variance_task_count", "all_clients_agree", "any_client_agrees"
]


BASELINE_METRIC = "reward_baseline"
"""algorithm.advantage remax: the metric of an episode that holds the reward of the task's greedy answer."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names key, problem and fix, one per line."""


def _as_tuple(value: Any) -> Any:
    """JSON and YAML have lists where a fixed number of values is meant."""
    return tuple(value) if isinstance(value, list) else value


_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


class _Part(BaseModel):
    """Strict: True is no number, "8" is no integer."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _yaml_exponent(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML readers of version 1.1 give `2e-5` as text; what a person wrote there is a number."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, str) and _EXPONENT.fullmatch(value) and float in _types(field.annotation):
            return float(value)
        return value


class SamplingConfig(_Part):
    """Defaults for every episode; an episode may override them at claim, a request may ask for its own."""

    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    max_tokens: int = Field(default=512, ge=1)
    """Upper bound of one answer; a request's own limit is clamped to it and to what fits the context."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    pinned: bool = False
    """True: a request's own temperature, top_p, top_k, stop and seed are recorded but not used."""


class BatchingConfig(_Part):
    """When a step starts (paper section 3.3, C1-C5)."""

    policy: BatchPolicy = "task_count"
    drain_s: float = Field(default=120.0, ge=0.0)
    """How long `rolling_post` lets running episodes finish."""
    stragglers: Literal["carry", "expire"] = "carry"
    """What happens to episodes still running at the drain deadline: carried into the next step, or expired."""
    overlap: bool = False
    """True: while a step trains, episodes go on and new ones are claimed for the next. Nothing is drained, and what is
    sampled meanwhile is one weight version old: algorithm.rollout_correction is per token unless given."""
    max_staleness: int = Field(default=4, ge=0)
    """Finished episodes claimed more than this many weight versions ago are rejected as stale."""
    quorum: float = Field(default=1.0, gt=0.0, le=1.0)
    """all_clients_agree: the share of live registered clients that must agree."""
    agree_deadline_s: float | None = Field(default=None, gt=0.0)
    """all_clients_agree: train with what is there this long after the first agreement; None waits for all."""
    client_timeout_s: float = Field(default=60.0, gt=0.0)
    """A registered client without a heartbeat for this long no longer counts."""
    episode_lease_s: float = Field(default=900.0, gt=0.0)
    """An episode with neither a call nor a heartbeat for this long expires."""
    heartbeat_lease_s: float = Field(default=60.0, gt=0.0)
    """The same where the claim promised heartbeats, as SwarmClient's do: a client that was killed frees its places so
    soon. The shorter of the two counts."""
    max_open_episodes: int = Field(default=512, ge=1)


Betas = Annotated[
    tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]], BeforeValidator(_as_tuple)
]
"""AdamW's decay rates of first and second moment."""


class RolloutCorrectionConfig(_Part):
    """What is done where engine and trainer give a token other log-probabilities. Keys and defaults are veRL's."""

    rollout_is: Literal["token", "sequence"] | None = "sequence"
    """Importance weights trainer / engine per token or per row; None measures only."""
    rollout_is_threshold: float | str = 2.0
    """A number truncates the weights there (TIS); "0.5_5.0" sets those outside to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Rejection: one or several of token_k1…k3, seq_sum_k1…k3, seq_mean_k1…k3, seq_max_k2, seq_max_k3, by commas."""
    rollout_rs_threshold: float | str | None = None
    """One for all, or one for each of `rollout_rs`, by commas: k1 takes "lower_upper" ratios, the others a bound."""
    bypass_mode: bool = False
    """True: the engine's log-probabilities are the old ones, and correction and rejection follow the policy as it
    changes. False: the trainer's own before the first optimizer step are."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """bypass_mode: `ppo_clip` lets the ratio correct, `reinforce` is weight · advantage · log p."""

    @model_validator(mode="after")
    def _combination(self) -> Self:
        if (self.rollout_rs is None) != (self.rollout_rs_threshold is None):
            raise ValueError("rollout_rs and rollout_rs_threshold: give both, or neither")
        return self


class KlInRewardConfig(_Part):
    """A KL penalty on each sampled token's reward. Keys are those of veRL's kl_penalty and kl_ctrl."""

    kl_coef: float = Field(default=0.001, gt=0.0)
    """At the start; `adaptive` moves it."""
    kl_penalty: str = "kl"
    """Estimator per token, as `algorithm.kl_type`."""
    type: Literal["fixed", "adaptive"] = "fixed"
    target_kl: float = Field(default=0.1, gt=0.0)
    """adaptive: where the coefficient steers the mean KL of a token to (arXiv 1909.08593)."""
    horizon: int = Field(default=10_000, ge=1)
    """adaptive: episodes over which it does."""


class OverlongConfig(_Part):
    """DAPO's soft punishment of long answers (arXiv 2503.14476), on the sampled tokens of an episode. veRL's keys."""

    max_resp_len: int = Field(ge=1)
    """Sampled tokens at which the whole penalty is reached."""
    len: int = Field(ge=1)
    """The last so many tokens before it, over which the penalty grows from 0."""
    penalty_factor: float = Field(default=1.0, gt=0.0)

    @model_validator(mode="after")
    def _combination(self) -> Self:
        if self.len > self.max_resp_len:
            raise ValueError(f"len: {self.len} is more than max_resp_len {self.max_resp_len}; lower it")
        return self


class CriticConfig(_Part):
    """The value model of `algorithm.advantage: gae`: all its weights are trained, with or without `lora`."""

    model: str | None = None
    """What it starts from, with a fresh value head: a catalogue name or local folder with the policy's tokenizer. None:
    the policy's start model."""
    lr: float = Field(default=1e-5, gt=0.0)
    warmup_steps: int = Field(default=0, ge=0)
    """The first so many steps train the critic alone (veRL's critic_warmup)."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Linear warm-up of its learning rate, which is constant after that."""
    value_clip: float = Field(default=0.5, gt=0.0)
    """How far a value counts as moved from what it was before the step (veRL's cliprange_value)."""
    epochs: int = Field(default=1, ge=1)
    mini_batches: int = Field(default=1, ge=1)
    weight_decay: float = Field(default=0.0, ge=0.0)
    betas: Betas = (0.9, 0.999)
    grad_clip: float = Field(default=1.0, gt=0.0)


class AlgorithmConfig(_Part):
    """How rewards become a gradient; names are veRL's."""

    advantage: str = "grpo"
    """Any of veRL's advantage estimators; `gae` needs the section `critic`."""
    norm_adv_by_std: bool = True
    """grpo: divide by the group's standard deviation; False is Dr.GRPO's form."""
    policy_loss: str = "vanilla"
    """Any of veRL's policy losses: vanilla, gspo, clip_cov, …"""
    clip_ratio_low: float = Field(default=0.2, ge=0.0)
    clip_ratio_high: float = Field(default=0.2, ge=0.0)
    clip_ratio_c: float = Field(default=3.0, gt=1.0)
    loss_agg: Literal["episode-mean", "token-mean"] = "episode-mean"
    """episode-mean: each episode weighs the same however many rows and tokens it has; token-mean: each token does."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL loss to the reference model (the start model); 0 keeps no reference in memory."""
    kl_type: str = "low_var_kl"
    kl_in_reward: KlInRewardConfig | None = None
    """None: no KL penalty in the rewards."""
    overlong: OverlongConfig | None = None
    """None: an episode's length costs nothing."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    dro_beta: float | None = Field(default=None, gt=0.0)
    """policy_loss dro: weight of the quadratic penalty."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    epochs: int = Field(default=1, ge=1)
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch; rows are split by episode."""
    rollout_correction: RolloutCorrectionConfig | None = None
    """None: the ratio is taken against the engine's log-probabilities, nothing else is done."""


class OptimConfig(_Part):
    lr: float = Field(default=1e-6, gt=0.0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    total_steps: int | None = Field(default=None, ge=1)
    """Length of the schedule; needed by cosine and linear."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    betas: Betas = (0.9, 0.999)
    grad_clip: float = Field(default=1.0, gt=0.0)

    @model_validator(mode="after")
    def _combination(self) -> Self:
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps: {self.warmup_steps} leaves nothing of the schedule's total_steps {self.total_steps}; "
                "lower the one or raise the other"
            )
        return self


class LoraConfig(_Part):
    rank: int = Field(default=8, ge=1)
    alpha: int = Field(default=16, ge=1)
    targets: str | list[str] = "all-linear"


class VllmConfig(_Part):
    """engine.kind vllm: the vLLM servers that generate."""

    python: str | None = None
    """Interpreter that has vLLM; None takes $A3R_VLLM_PYTHON, else .venv-vllm of this checkout (scripts/vllm-cpu)."""
    urls: list[str] = Field(default_factory=list)
    """Attach to these running servers instead of starting any. They must see this machine's files."""
    replicas: int = Field(default=1, ge=1)
    """Servers to start."""
    devices: list[str] = Field(default_factory=list)
    """CUDA_VISIBLE_DEVICES of each replica in turn; empty leaves the choice to CUDA."""
    dtype: Literal["bf16", "fp32"] | None = None
    """None takes trainer.dtype."""
    lora: Literal["adapter", "merged"] = "adapter"
    """With lora: hand over the adapter alone, or all weights with the adapter merged into them."""
    sync: Literal["files", "ipc"] = "files"
    """How weights get there: safetensors and reload_weights, or vLLM's transfer through shared GPU memory."""
    args: list[str] = Field(default_factory=list)
    """Further arguments of the server; they come last and so win."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment of the server."""
    start_s: float = Field(default=900.0, gt=0.0)
    """How long a server may take until it answers."""


class VerlConfig(_Part):
    """engine.kind verl: training and generation by veRL's hybrid engine on GPUs (docs/gpus.md)."""

    rollout: Literal["vllm", "sglang"] = "vllm"
    placement: Literal["colocated", "separate"] = "colocated"
    """Generation on the trainer's GPUs in turn with it, or on GPUs of its own."""
    nodes: int = Field(default=1, ge=1)
    gpus_per_node: int = Field(default=1, ge=1)
    """The trainer's."""
    rollout_nodes: int = Field(default=1, ge=1)
    rollout_gpus_per_node: int = Field(default=1, ge=1)
    """separate: those that generate."""
    tensor_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    """A replica of the model spans tensor_parallel × pipeline_parallel GPUs."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Share of a GPU's memory that generation may take."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Any key of veRL's, dotted: {"actor_rollout_ref.rollout.enforce_eager": true}. They win."""

    @property
    def generating_gpus(self) -> int:
        if self.placement == "colocated":
            return self.nodes * self.gpus_per_node
        return self.rollout_nodes * self.rollout_gpus_per_node

    @model_validator(mode="after")
    def _combination(self) -> Self:
        replica = self.tensor_parallel * self.pipeline_parallel
        if self.generating_gpus % replica:
            raise ValueError(
                f"tensor_parallel × pipeline_parallel: replicas of {replica} GPUs do not fill {self.generating_gpus}; "
                "change either"
            )
        return self


class EngineConfig(_Part):
    """Where answers come from and how big it may get."""

    kind: Literal["hf", "vllm", "verl", "scripted"] = "hf"
    max_batch: int = Field(default=64, ge=1)
    """Requests generated together; more wait."""
    context_length: int = Field(default=2048, ge=16)
    """Prompt plus answer, in tokens; at most what the model was made for."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads of the engine process; None takes all cores."""
    script: str | None = None
    """scripted: `module:function`, a callable (messages, request index) -> text; None echoes."""
    script_tokens_per_s: float | None = Field(default=None, gt=0.0)
    """scripted: pace of one answer; None gives each answer at once."""
    script_update_s: float = Field(default=0.0, ge=0.0)
    """scripted: how long the pretend update takes."""
    vllm: VllmConfig = VllmConfig()
    verl: VerlConfig = VerlConfig()


class TrainerConfig(_Part):
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Compute dtype of trainer and embedded engine; master weights and optimizer state are fp32."""
    tokens_per_micro_batch: int = Field(default=4096, ge=64)
    """Rows are packed into micro-batches up to this many tokens; a longer row is a micro-batch of its own."""
    gradient_checkpointing: bool = False


class RayConfig(_Part):
    """The trainer as a Ray worker group: one model over several processes (docs/gpus.md)."""

    processes: int = Field(default=2, ge=1)
    """Ranks. The weights are sharded over them and each batch is spread by tokens."""
    nodes: int = Field(default=1, ge=1)
    """Machines the ranks are spread over evenly."""
    address: str | None = None
    """None starts Ray on this machine for this training alone; "auto" or `host:port` joins a cluster."""
    object_store_mb: int = Field(default=256, ge=80)
    """Shared memory that a Ray started here may take."""

    @model_validator(mode="after")
    def _combination(self) -> Self:
        if self.processes % self.nodes:
            raise ValueError(f"processes: {self.processes} do not spread evenly over {self.nodes} nodes; change either")
        return self


class CheckpointConfig(_Part):
    every_steps: int = Field(default=5, ge=0)
    """0 writes one only at stop."""
    keep_last: int = Field(default=2, ge=1)
    """The newest so many are kept."""
    keep_best: int = Field(default=0, ge=0)
    """Besides them the best so many by `best_by`; of equal ones the earlier."""
    best_by: str = Field(default="reward/mean", min_length=1)
    """`eval/NAME`: mean of the evaluation NAME under a checkpoint's weights. Else a metric of the step after the
    checkpoint's, whose batch these weights sampled. Higher is better."""


class EvaluationConfig(_Part):
    """The lane beside training in which evaluation episodes run."""

    slots: int = Field(default=16, ge=0)
    """So many evaluation episodes may be open, and so many of their generations run, in places of their own: training
    cannot take them, and they take none of training's. 0: evaluations take places as training episodes do."""
    hold_sync_s: float = Field(default=60.0, ge=0.0)
    """How long a step waits for the evaluation of the weights it replaces, at most."""


class TrackingConfig(_Part):
    backends: list[Literal["tensorboard", "wandb", "swanlab", "console"]] = Field(default_factory=list)
    """Besides metrics.jsonl, which is always written."""
    project: str = "swarmtune"
    name: str | None = None


class TrainConfig(_Part):
    """Everything the server needs to train."""

    model: str
    """A name from the catalogue (`smollm2-135m`, `tiny`), a local Hugging Face folder, or a hub id."""
    batch_tasks: int = Field(default=8, ge=1)
    """B of the paper: tasks per step."""
    repeats: int = Field(default=8, ge=1)
    """N of the paper: episodes per task."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    match: MatchPolicy = "text"
    history: Literal["as_templated", "as_sampled"] = "as_templated"
    """When a chat template strips earlier thinking: follow it (a new branch) or keep what was sampled (one branch)."""
    train_side_calls: bool = False
    """Train conversations that were not the episode's main one (titles, summaries)."""
    max_steps: int | None = Field(default=None, ge=1)
    """The server stops claiming after this many steps; None is endless."""
    sampling: SamplingConfig = SamplingConfig()
    batching: BatchingConfig = BatchingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    critic: CriticConfig | None = None
    """The value model; only with `algorithm.advantage: gae`."""
    lora: LoraConfig | None = None
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    ray: RayConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _correct_what_overlaps(cls, data: Any) -> Any:
        """Tokens sampled while a step trains are from the weights before it: corrected, unless that is given."""
        if not isinstance(data, Mapping):
            return data
        batching, algorithm = data.get("batching"), data.get("algorithm", {})
        given = batching.get("overlap") if isinstance(batching, Mapping) else getattr(batching, "overlap", None)
        if given is not True:
            return data
        correction = RolloutCorrectionConfig(rollout_is="token")
        if isinstance(algorithm, AlgorithmConfig) and "rollout_correction" not in algorithm.model_fields_set:
            return {**data, "algorithm": algorithm.model_copy(update={"rollout_correction": correction})}
        if isinstance(algorithm, Mapping) and "rollout_correction" not in algorithm:
            return {**data, "algorithm": {**algorithm, "rollout_correction": correction}}
        return data

    @model_validator(mode="after")
    def _combination(self) -> Self:
        if self.algorithm.advantage in {"grpo", "rloo"} and self.repeats < 2:
            raise ValueError(
                f"repeats: {self.repeats} with algorithm.advantage {self.algorithm.advantage!r} gives every episode "
                "advantage 0; set repeats to 2 or more, or take 'reinforce_plus_plus'"
            )
        if self.batching.policy == "nonzero_variance_task_count" and self.repeats < 2:
            raise ValueError(
                f"repeats: {self.repeats} with batching.policy 'nonzero_variance_task_count' never gives a task two "
                "different rewards, so that no step would start; set repeats to 2 or more, or take 'task_count'"
            )
        if self.batching.overlap and self.batching.max_staleness < 1:
            raise ValueError(
                "batching.max_staleness: 0 with batching.overlap drops all that is sampled during an update; set it to "
                "1 or more"
            )
        if self.batching.overlap and self.engine.kind == "verl" and self.engine.verl.placement == "colocated":
            raise ValueError(
                "batching.overlap: with engine.verl.placement colocated the GPUs generate and train in turn; take "
                "placement separate, or leave overlap out"
            )
        if self.sampling.max_tokens >= self.engine.context_length:
            raise ValueError(
                f"sampling.max_tokens: {self.sampling.max_tokens} leaves no room for a prompt in "
                f"engine.context_length {self.engine.context_length}; lower the one or raise the other"
            )
        if self.optim.schedule != "constant" and self.optim.total_steps is None:
            raise ValueError(f"optim.total_steps: the {self.optim.schedule} schedule needs its length; set it")
        if (self.algorithm.advantage == "gae") != (self.critic is not None):
            raise ValueError(
                "critic: algorithm.advantage 'gae' and the section critic belong together; give both (critic.lr is a "
                "good beginning), or neither"
            )
        if self.algorithm.mini_batches > self.batch_tasks * self.repeats:
            raise ValueError("algorithm.mini_batches: more mini-batches than episodes in a batch; lower it")
        if self.critic is not None and self.critic.mini_batches > self.batch_tasks * self.repeats:
            raise ValueError("critic.mini_batches: more mini-batches than episodes in a batch; lower it")
        if self.critic is not None and self.max_steps is not None and self.critic.warmup_steps >= self.max_steps:
            raise ValueError(
                f"critic.warmup_steps: {self.critic.warmup_steps} of max_steps {self.max_steps} train the critic only, "
                "so that the model never learns; lower the one or raise the other"
            )
        return self

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Validate nested or dotted keys (`{"optim.lr": 1e-5}`).

        Raises:
            ConfigError: one line per problem: key, what is wrong, the nearest known key.
        """
        try:
            return cls.model_validate(nest(data))
        except ValidationError as error:
            raise ConfigError("\n".join(explain(error, cls))) from None

    def differences(self, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
        """Dotted key → (self, other) where the two differ."""
        mine, theirs = dict(flatten(self.model_dump())), dict(flatten(other.model_dump()))
        return {k: (mine.get(k), theirs.get(k)) for k in sorted(mine | theirs) if mine.get(k) != theirs.get(k)}


def nest(data: Mapping[str, Any]) -> dict[str, Any]:
    """`{"optim.lr": 1}` → `{"optim": {"lr": 1}}`; nested mappings are merged in."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        if not isinstance(key, str):
            raise ConfigError(f"{key!r}: a key is text, such as 'optim.lr'")
        *parents, leaf = key.split(".")
        where = out
        for parent in parents:
            where = where.setdefault(parent, {})
            if not isinstance(where, dict):
                raise ConfigError(f"{key}: {parent!r} is given both as a value and as a section")
        value = nest(value) if isinstance(value, Mapping) else value
        if isinstance(value, dict) and isinstance(where.get(leaf), dict):
            where[leaf] = where[leaf] | value
        else:
            where[leaf] = value
    return out


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted leaf keys a configuration model takes."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        part = next((t for t in _types(info.annotation) if isinstance(t, type) and issubclass(t, BaseModel)), None)
        keys += known_keys(part, f"{prefix}{name}.") if part else [f"{prefix}{name}"]
    return keys


def _types(annotation: Any) -> list[Any]:
    args = getattr(annotation, "__args__", None)
    return list(args) if args and not isinstance(annotation, type) else [annotation]


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One sentence per problem, with the nearest known key where a key is unknown."""
    keys = known_keys(model)
    lines = []
    for item in error.errors():
        where = ".".join(str(p) for p in item["loc"])
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(where, keys, n=1, cutoff=0.5) or [
                k for k in keys if k.rsplit(".", 1)[-1] == where.rsplit(".", 1)[-1]
            ]
            hint = (
                f"; did you mean {near[0]!r}?"
                if near
                else f"; known: {', '.join(sorted({k.split('.')[0] for k in keys}))}"
            )
            lines.append(f"{where}: unknown key{hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            got = f" (got {item['input']!r})" if where and item["type"] != "missing" else ""
            lines.append(f"{where}: {message}{got}" if where else message)
    return lines
