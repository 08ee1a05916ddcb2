"""The vocabulary: messages, turns, blocks, timelines, samples. Plain values; no I/O, no torch.

Names follow the AgentJet paper (arXiv 2606.04484, section 3.4): a *block* is one message with its author and tokens, a
*timeline* is the ordered blocks of one model call, a *sample* is a merged timeline, one row of training data.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Author = Literal["llm", "env", "user"]
MatchPolicy = Literal["text", "token"]
Lane = Literal["train", "evaluate"]
"""Generations of one lane never take the places of the other."""


class FinishReason(StrEnum):
    """Why a generation ended, before a dialect renames it."""

    STOP = "stop"
    """An end-of-turn token or a stop string."""
    LENGTH = "length"
    """The token limit."""
    ABORTED = "aborted"
    """Cancelled by us: client gone, server stopping."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON text exactly as the model wrote it (or as the client echoed it)."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments."""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One canonical chat message: what every dialect is translated to before anything else looks at it."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """On a tool message: the call it answers."""
    reasoning: str | None = None
    """Thinking of an assistant turn, without its markers; None when absent or dropped by the client."""
    name: str | None = None
    turn_id: str | None = None
    """On an assistant message: our own id for the turn, where the dialect carried one back to us."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What the engine is asked to do; every field already resolved and clamped."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0
    """Alternatives reported per position; the sampled token's own logprob always is."""
    ignore_eos: bool = False
    grammar: str | None = None
    """What the answer's text must obey: Lark as `llguidance` reads it, `%json {…}` for a JSON schema. Only for engines
    whose `BackendInfo.constrains` says so."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    request_id: str
    prompt_token_ids: list[int] | array[int]
    """An int32 array is sent on without a copy per token; nobody changes it."""
    sampling: SamplingParams
    episode_id: str = ""
    """Routing hint: calls of one episode prefer the replica that has their prefix cached."""
    lane: Lane = "train"
    """Whose places it may take."""


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """Newly sampled tokens of one request. The last chunk has a finish_reason (and may carry no tokens)."""

    token_ids: list[int]
    logprobs: list[float]
    """log p of each token under softmax(logits / temperature), before top_p and top_k cut it; temperature 0 counts
    as 1. The trainer computes the same quantity, so their difference is the mismatch between engine and trainer."""
    weight_version: int
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    """The stop string that ended the generation; its tokens are included in token_ids, the gateway cuts the text."""
    top_logprobs: list[dict[int, float]] | None = None
    """Per position {token id: logprob}, only when asked for."""


@dataclass(slots=True)
class Reply:
    """One whole generation, as the tracker commits it."""

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    """Per token: the weight version that sampled it."""
    finish_reason: FinishReason
    text: str = ""
    """Decoded text as the model wrote it, special tokens left out."""
    message: Message | None = None
    """The parsed assistant message (content, reasoning, tool calls) that was delivered."""
    stop_string: str | None = None
    """The stop string that ended it."""


@dataclass(slots=True)
class Block:
    """One message of a timeline. All lists have one entry per token: shape (T,)."""

    author: Author
    text: str
    token_ids: list[int]
    logprobs: list[float]
    """0.0 where the token was not sampled."""
    loss_mask: list[int]
    """1 exactly where the token was sampled by the model that is trained."""
    weight_versions: list[int]
    """-1 where the token was not sampled."""


@dataclass(slots=True)
class Timeline:
    """The blocks of one model call: its prompt and its answer."""

    call_id: str
    blocks: list[Block]


@dataclass(slots=True)
class Sample:
    """A merged timeline: one training row. All lists have shape (T,), T = prompt + everything after it."""

    sample_id: str
    episode_id: str
    task_id: str
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    context_exact: list[int] | None = None
    """1 where the training context equals the one the token was sampled in; None means everywhere (match: token)."""
    temperature: float = 1.0
    """Of the row's sampled tokens; what the trainer divides the logits by."""
    call_ids: list[str] = field(default_factory=list)
    """The calls merged into this row, oldest first."""
    parent_id: str | None = None
    """The sample this one forked from, for trainers that share prefixes."""


@dataclass(slots=True)
class FinishedEpisode:
    """An episode the pool may train on: one reward, one or more samples."""

    episode_id: str
    task_id: str
    reward: float
    samples: list[Sample]
    metrics: dict[str, float] = field(default_factory=dict)
    client: str | None = None
    """Registered client that ran it, for shares and reports."""
    weight_version: int = 0
    """Weight version at claim."""

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(s.loss_mask) for s in self.samples)


@dataclass(slots=True)
class TrainBatch:
    """What one step trains on. `step` is the step it produces: 1 for the first update."""

    step: int
    episodes: list[FinishedEpisode]
    supervised_lr: float | None = None
    """Set in a supervised step: the episodes are given conversations, one row each, learned with this learning rate;
    their rewards mean nothing."""


@dataclass(slots=True)
class StepResult:
    step: int
    weight_version: int
    metrics: dict[str, float]
    """Flat, named as veRL names them where veRL has a name: actor/pg_loss, actor/grad_norm, actor/lr, …"""
