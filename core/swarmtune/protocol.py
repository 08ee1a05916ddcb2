"""What client and server say to each other: states, codes, wire models, routes.

Routes (JSON; control and client routes carry `Authorization: Bearer <key>` where the server has keys):

    GET  /v1/status?while=booting&wait_s=30  → ServerStatus     long poll: returns once the state is another one
    POST /v1/start          StartRequest     → ServerStatus     at once, in state booting; 409 config_conflict with the
                                                                differences when another configuration is running
    POST /v1/stop                            → ServerStatus     stops training, saves a checkpoint, state offline
    POST /v1/shutdown                        → {}               ends the server process
    GET  /v1/config                          → resolved TrainConfig
    POST /v1/episodes       ClaimRequest     → EpisodeGrant     503 with retry_after_s while not rolling; 409 finished
    GET  /v1/episodes/{id}                   → EpisodeView
    POST /v1/episodes/{id}/heartbeat         → EpisodeView
    POST /v1/episodes/{id}/end    EndRequest → EndResult
    POST /v1/episodes/{id}/abort  AbortRequest → EpisodeView
    GET  /v1/episodes/{id}/merge             → merge report
    GET  /v1/pool?after=k&wait_s=30          → PoolView         why training has not started; a long poll with `after`:
                                                                returns once a step later than k is being collected
    GET  /v1/clients                         → list[ClientView]
    POST /v1/clients        RegisterRequest  → ClientView
    DELETE /v1/clients/{name}                → {}               goodbye: no one waits for this client any more
    POST /v1/clients/{name}/heartbeat        → ClientView
    POST /v1/clients/{name}/agree AgreeRequest → ClientView
    POST /v1/warmup         WarmupRequest    → WarmupView       supervised steps on given conversations
    GET  /v1/warmup/{id}?after=n&wait_s=30   → WarmupView       long poll: once more than n of its steps are done
    GET  /v1/steps?after=k&wait_s=30         → list[StepRecord] long poll: once step > k exists, or [] at the limit
    GET  /v1/events?after=seq                  server-sent events, `id:` is the sequence number, data an Event
    GET  /v1/checkpoints                     → list[CheckpointView]
    POST /v1/checkpoints                     → CheckpointView   save now
    POST /v1/export         ExportRequest    → ExportView       weights of a checkpoint as a Hugging Face folder
    GET  /v1/evaluations?name=               → list[EvaluationRecord]
    POST /v1/evaluations    EvaluationRequest → EvaluationRecord      begin one; it belongs to one weight version
    GET  /v1/evaluations/{id}                → EvaluationRecord
    POST /v1/evaluations/{id}/finish EvaluationOutcome → EvaluationRecord
    *    /v1/chat/completions, /v1/responses, /v1/messages, /v1/completions, /v1/models
                                                                the model, with an episode's key
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class EngineState(StrEnum):
    OFFLINE = "offline"
    BOOTING = "booting"
    ROLLING = "rolling"
    ROLLING_POST = "rolling_post"
    WEIGHT_SYNCING = "weight_syncing"
    FAILED = "failed"
    STOPPING = "stopping"


class IllegalTransition(RuntimeError):
    """A state change that is not in the table."""


TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.OFFLINE: frozenset({EngineState.BOOTING, EngineState.STOPPING}),
    EngineState.BOOTING: frozenset({EngineState.ROLLING, EngineState.FAILED, EngineState.STOPPING}),
    EngineState.ROLLING: frozenset(
        {EngineState.ROLLING_POST, EngineState.BOOTING, EngineState.FAILED, EngineState.STOPPING}
    ),
    EngineState.ROLLING_POST: frozenset(
        {
            EngineState.WEIGHT_SYNCING,
            EngineState.ROLLING,
            EngineState.BOOTING,
            EngineState.FAILED,
            EngineState.STOPPING,
        }
    ),
    EngineState.WEIGHT_SYNCING: frozenset(
        {EngineState.ROLLING, EngineState.BOOTING, EngineState.FAILED, EngineState.STOPPING}
    ),
    EngineState.FAILED: frozenset({EngineState.BOOTING, EngineState.STOPPING}),
    EngineState.STOPPING: frozenset({EngineState.OFFLINE}),
}
"""BOOTING out of a running state is the recovery of a lost engine process from its last checkpoint. ROLLING out of
ROLLING_POST: the policy stopped being met during the drain (a client joined that has not agreed). With batching.overlap
a step trains in ROLLING: calls are answered and episodes claimed all the time, and `training_step` names the step."""


class Code(StrEnum):
    """Machine-readable reason of a refusal or an outcome. Clients branch on these, never on sentences."""

    BAD_REQUEST = "bad_request"
    BAD_CONFIG = "bad_config"
    CONFIG_CONFLICT = "config_conflict"
    UNKNOWN_MODEL = "unknown_model"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    NOT_STARTED = "not_started"
    NOT_ROLLING = "not_rolling"
    FINISHED = "finished"
    """max_steps is reached: no further training episode will be claimed."""
    START_FAILED = "start_failed"
    TOO_MANY_EPISODES = "too_many_episodes"
    SHARE_FULL = "share_full"
    UNKNOWN_EPISODE = "unknown_episode"
    EPISODE_OVER = "episode_over"
    EPISODE_EXPIRED = "episode_expired"
    END_CONFLICT = "end_conflict"
    BAD_REWARD = "bad_reward"
    NO_CALLS = "no_calls"
    STALE = "stale"
    CONSERVATION = "conservation_violated"
    UNKNOWN_CLIENT = "unknown_client"
    UNKNOWN_EVALUATION = "unknown_evaluation"
    VERSION_PASSED = "version_passed"
    """The weights an evaluation belongs to have been replaced."""
    STEP_MISMATCH = "step_mismatch"
    CONTEXT_LENGTH = "context_length_exceeded"
    TEMPLATE_REFUSED = "template_refused"
    UNSUPPORTED = "unsupported_parameter"
    UNKNOWN_RESPONSE = "previous_response_not_found"
    ENGINE_LOST = "engine_lost"
    NO_SPACE = "no_space"
    STOPPING = "stopping"
    UPDATE_FAILED = "update_failed"
    """An update raised: its batch was not trained."""
    INTERNAL = "internal"


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorBody(BaseModel):
    """Body of every refusal on control routes: `{"error": {…}}`. The model routes use their dialect's own form."""

    code: Code
    message: str
    """What is wrong and what to do about it."""
    retry_after_s: float | None = None
    details: dict[str, Any] = Field(default_factory=dict)


class StartRequest(_Wire):
    config: dict[str, Any]
    """A TrainConfig, nested or with dotted keys."""
    from_step: int | None = Field(default=None, ge=0)
    """Begin a new run at this checkpoint of an earlier one, which stays as it is."""
    from_run: str | None = Field(default=None, min_length=1)
    """from_step: the earlier run, by name (`0001`) or folder on the server's machine; None is the last one."""


class ServerStatus(_Wire):
    server_id: str
    """New with every server process."""
    version: str
    state: EngineState
    step: int = 0
    training_step: int | None = None
    """The step that is being trained now. With batching.overlap the state is `rolling` meanwhile."""
    weight_version: int = 0
    model: str | None = None
    context_length: int | None = None
    open_episodes: int = 0
    pooled_episodes: int = 0
    clients: int = 0
    uptime_s: float = 0.0
    run_dir: str | None = None
    reason: str | None = None
    """In state failed: why."""
    log_tail: str | None = None
    """In state failed: the last lines of the engine's log."""


EpisodeKind = Literal["train", "evaluate"]

MAX_LEASE_S = 7 * 24 * 3600.0
"""Longest lease that can be asked for: an episode whose client vanished is given up some day."""
MAX_REASON = 1000
"""Characters of an abort's reason that are kept."""


class ClaimRequest(_Wire):
    task_id: str = Field(min_length=1, max_length=512)
    kind: EpisodeKind = "train"
    client: str | None = None
    """A registered client's name; its share applies."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Overrides of SamplingConfig for this episode."""
    lease_s: float | None = Field(None, gt=0, le=MAX_LEASE_S)
    """None takes the configuration's: heartbeat_lease_s where heartbeats are promised, else episode_lease_s."""
    heartbeats: bool = False
    """The client will send heartbeats, several in each lease, for as long as the episode is open."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Makes sampling repeatable: a call that asks for no seed of its own gets one derived from this and its position in
    the episode (0 for the first call). None leaves such calls unseeded."""
    evaluation_id: str | None = Field(default=None, min_length=1, max_length=128)
    """kind evaluate: the evaluation it is an episode of."""
    claim_id: str | None = Field(None, min_length=1, max_length=128)
    """Idempotency key: the same claim_id gets the same episode again."""
    wait_s: float = Field(0.0, ge=0.0, le=120.0)
    """Wait this long for the server to be rolling instead of being refused."""


class EpisodeGrant(_Wire):
    episode_id: str
    api_key: str
    base_url: str
    """For OpenAI-style clients, ends in /v1."""
    anthropic_base_url: str
    """For Anthropic-style clients, without /v1."""
    weight_version: int
    step: int
    """The step this episode would count for: current step + 1."""
    context_length: int
    lease_s: float


class EpisodeState(StrEnum):
    CLAIMED = "claimed"
    ENDED = "ended"
    ABORTED = "aborted"
    EXPIRED = "expired"


class EpisodeView(_Wire):
    episode_id: str
    task_id: str
    kind: EpisodeKind
    state: EpisodeState
    reason: str | None = None
    reward: float | None = None
    calls: int = 0
    late_calls: int = 0
    """Calls that came after it was over; they were refused."""
    sampled_tokens: int = 0
    weight_version: int = 0
    lease_left_s: float | None = None


class EndRequest(_Wire):
    reward: Any
    """A finite number; anything else is refused with bad_reward."""
    metrics: dict[str, float] = Field(default_factory=dict)
    submission_id: str = Field(min_length=1, max_length=128)
    """Idempotency key: the same id gets the same answer, another one a conflict."""


class EndResult(_Wire):
    episode_id: str
    outcome: Literal["admitted", "rejected", "evaluated"]
    code: Code | None = None
    """Why it was rejected."""
    message: str | None = None
    samples: int = 0
    sampled_tokens: int = 0
    weight_versions: list[int] = Field(default_factory=list)
    """Of the weights that sampled its tokens, all of them, in order."""


class AbortRequest(_Wire):
    reason: Annotated[str, AfterValidator(lambda text: text[:MAX_REASON])] = ""
    """Kept with the episode and told in the event log, up to MAX_REASON characters."""


class RegisterRequest(_Wire):
    name: str = Field(min_length=1, max_length=128)
    share: int | None = Field(None, ge=1)
    """Tasks of each batch that are this client's; claims for more wait."""


class ClientView(_Wire):
    name: str
    share: int | None
    alive: bool
    agreed_step: int | None
    heartbeat_age_s: float


class AgreeRequest(_Wire):
    step: int
    """The step that may start: the server's current step + 1."""


class Condition(_Wire):
    """One unmet or met condition of the batching policy, in numbers."""

    name: str
    have: float
    need: float
    met: bool
    detail: str = ""


class PoolView(_Wire):
    policy: str
    step: int
    """The step being collected."""
    ready: bool
    conditions: list[Condition]
    explanation: str
    """One sentence: what training waits for."""
    eta_s: float | None = None
    """From the rate of the last admissions; None when nothing is moving."""
    episodes: int = 0
    tasks: int = 0
    tasks_complete: int = 0
    tasks_with_variance: int = 0
    open_episodes: int = 0


class WarmupRequest(_Wire):
    """Supervised steps on given conversations, in the same run."""

    warmup_id: str = Field(min_length=1, max_length=128)
    """Idempotency key: the same id is the same warm-up, however often it is sent."""
    conversations: list[Any] = Field(min_length=1)
    """Each `{"messages": […], "tools": […]}` or a list of messages, in OpenAI's form; assistant messages are taught."""
    steps: int = Field(ge=1, le=100_000)
    batch_size: int = Field(8, ge=1)
    """Conversations per step; all of them where there are fewer."""
    lr: float | None = Field(None, gt=0, allow_inf_nan=False)
    """None takes the configuration's optim.lr. It is constant."""
    seed: int = 0
    """Of the order of the conversations."""


class WarmupView(_Wire):
    warmup_id: str
    steps: int
    batch_size: int
    lr: float
    done: list[int]
    """Numbers of its steps that are trained, in order."""
    failed: str | None = None
    """Why the rest of it will not be trained."""


class StepRecord(_Wire):
    step: int
    weight_version: int
    ended_at: float
    """Unix time, seconds."""
    metrics: dict[str, float]


class Event(_Wire):
    seq: int
    at: float
    """Unix time, seconds."""
    kind: str
    """state, step, episode, client, checkpoint, engine, warning"""
    data: dict[str, Any]


KeptFor = Literal["last", "best"]


class CheckpointView(_Wire):
    step: int
    path: str
    at: float
    """Unix time, seconds."""
    bytes: int
    score: float | None = None
    """Value of checkpoint.best_by; None while it is not known."""
    kept: list[KeptFor] = Field(default_factory=list)
    """Why it will not be removed to make room."""


class ExportRequest(_Wire):
    path: str = Field(min_length=1)
    """Absolute, on the server's machine; what is there already is not touched."""
    step: int | None = Field(default=None, ge=0)
    """A checkpoint's; None saves the current weights and takes those."""
    adapter: bool = False
    """The LoRA adapter by itself as a peft folder, instead of merged weights."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """None: trainer.dtype, and so exactly the weights that answered."""


class ExportView(_Wire):
    path: str
    step: int
    bytes: int


class Spread(_Wire):
    """A value with its 95 % confidence interval; None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None


class EvaluationRequest(_Wire):
    evaluation_id: str = Field(min_length=1, max_length=128)
    """Idempotency key."""
    name: str = Field(default="evaluation", min_length=1, max_length=128)
    weight_version: int | None = Field(default=None, ge=0)
    """The weights to evaluate: the current ones (None), or later ones, whose claims wait until they are there."""
    tasks: int = Field(ge=1)
    k: int = Field(ge=1)
    """Episodes per task."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    hold_sync_s: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """Instead of evaluation.hold_sync_s."""


class EvaluationOutcome(_Wire):
    """What an evaluation found. `mean` and `pass_at` are over the episodes sampled by its weights alone."""

    episodes: int = Field(ge=0)
    failed: int = Field(default=0, ge=0)
    """Episodes that raised."""
    mixed: int = Field(default=0, ge=0)
    """Episodes during which the weights changed; in no number."""
    skipped: int = Field(default=0, ge=0)
    """Episodes not run because the weights had been replaced."""
    mean: Spread | None = None
    pass_at: dict[int, Spread] = Field(default_factory=dict)


class EvaluationRecord(EvaluationOutcome):
    """A row of the table of evaluations."""

    evaluation_id: str
    name: str
    weight_version: int
    state: Literal["open", "finished", "abandoned"]
    """abandoned: nobody has worked on it for a while. It is open again when somebody does."""
    began_at: float
    """Unix time, seconds."""
    ended_at: float | None = None
    tasks: int
    k: int
    sampling: dict[str, Any] = Field(default_factory=dict)
    hold_sync_s: float
    episodes: int = 0
    """Those in the numbers."""
