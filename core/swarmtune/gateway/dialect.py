"""The dialect contract: one wire format of model calls ↔ the gateway's own words.

A dialect decodes a body into a `ModelCall`, and encodes answers, stream events and refusals in its API's own grammar.
It does no I/O, keeps no state between calls, and knows nothing of episodes, trackers or engines. A new wire format is
one file in `dialects/` and one line in `DIALECTS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from swarmtune.protocol import Code
from swarmtune.types import FinishReason, Message, ToolCall, ToolSpec

DEFAULT_RETRY_AFTER_S = 5.0
"""With a 429 or 503 that names no time: without the header some clients fall silent for minutes."""


class Refused(Exception):
    """The call is refused: which code, which HTTP status, and a sentence that says how to fix it."""

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        retry_after_s: float | None = None,
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.param = param
        """The field at fault."""
        self.retry_after_s = retry_after_s
        self.retry = retry
        """What `x-should-retry` tells the client; None leaves the header out."""

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        wait_s = self.retry_after_s
        if wait_s is None and self.status in (429, 503):
            wait_s = DEFAULT_RETRY_AFTER_S
        if wait_s is not None:
            headers["Retry-After"] = str(max(1, round(wait_s)))
        return headers


class PromptTooLong(Refused):
    """The prompt leaves no room for an answer. Each dialect has its own words for it, which its clients look for."""

    def __init__(self, prompt_tokens: int, maximum: int, *, param: str) -> None:
        super().__init__(
            Code.CONTEXT_LENGTH,
            f"This model's maximum context length is {maximum} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            param=param,
            retry=False,
        )
        self.prompt_tokens = prompt_tokens
        self.maximum = maximum


def unsupported(param: str, why: str) -> Refused:
    return Refused(Code.UNSUPPORTED, f"{param}: {why}", param=param, retry=False)


def malformed(param: str, why: str) -> Refused:
    return Refused(Code.BAD_REQUEST, f"{param}: {why}", param=param, retry=False)


def item_not_found(item_id: str, param: str) -> Refused:
    return Refused(
        Code.NOT_FOUND,
        f"Item with id '{item_id}' not found: it is not of this episode, or was made with store: false; "
        "send the item itself",
        status=404,
        param=param,
        retry=False,
    )


ToolChoice = Literal["auto", "none", "required"]


@dataclass(slots=True)
class SamplingAsked:
    """What the request itself asked for; None where it said nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def said(self) -> dict[str, Any]:
        """Only what the request said, for the turn's record."""
        pairs = {name: getattr(self, name) for name in self.__slots__}
        return {k: v for k, v in pairs.items() if v is not None and v is not False and v != ()}


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The answer is to be JSON that fits a schema."""

    schema: dict[str, Any]
    strict: bool
    """Refuse the call rather than answer without enforcing the schema."""
    param: str
    """The field that asks for it."""


@dataclass(frozen=True, slots=True)
class Quote:
    """Parts of an earlier answer that a request names by id where an assistant message would say them."""

    turn_id: str
    item_id: str
    """One of the ids named, for a refusal."""
    param: str
    """The field that names it."""
    reasoning: bool = False
    content: bool = False
    calls: frozenset[int] = frozenset()
    """Positions among the answer's tool calls."""

    def written_out(self, message: Message, said: Message) -> Message:
        """`message`, which holds what the request says itself, with the quoted parts of the answer `said`.

        Raises:
            Refused: the answer has no such call.
        """
        if self.calls and max(self.calls) >= len(said.tool_calls):
            raise item_not_found(self.item_id, self.param)
        own = {call.id: call for call in message.tool_calls}
        calls = [own.pop(c.id, c) for at, c in enumerate(said.tool_calls) if at in self.calls or c.id in own]
        return replace(
            message,
            content=said.content if self.content else message.content,
            reasoning=said.reasoning if self.reasoning else message.reasoning,
            tool_calls=(*calls, *own.values()),
        )


@dataclass(slots=True)
class ModelCall:
    """One request of a dialect, in the gateway's words."""

    dialect: str
    model: str
    messages: tuple[Message, ...] = ()
    """The canonical conversation; empty when `prompts` is given."""
    prompts: tuple[str | list[int], ...] = ()
    """Raw prompts (text or token ids), for dialects without messages."""
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    format: JsonFormat | None = None
    sampling: SamplingAsked = field(default_factory=SamplingAsked)
    n: int = 1
    """Answers per prompt."""
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    include_usage: bool = False
    """Streams only: whether the usage is asked for."""
    ignored: tuple[str, ...] = ()
    """Fields that were not understood, or that have no effect here."""
    retry_count: int = 0
    """What the client said in x-stainless-retry-count."""
    continues: str | None = None
    """Turn id of an earlier answer of this episode whose conversation goes before `messages` (previous_response_id)."""
    quotes: Mapping[int, Quote] = field(default_factory=dict)
    """Position in `messages` → the parts of an earlier answer of this episode that belong there."""
    keep: bool = False
    """Whether a later call may come back to this one's answer by its id."""
    instructions: int = 0
    """How many leading `messages` are instructions of this call only, not inherited by a call that continues it."""
    prefill: str | None = None
    """The field that asks to go on with the last message, an assistant's, rather than to answer it."""
    echo: dict[str, Any] = field(default_factory=dict)
    """Request fields that the dialect repeats in its answer."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    """Alternatives, most probable first."""


@dataclass(slots=True)
class Answer:
    """One whole delivered answer."""

    turn_id: str
    message: Message
    """Content, reasoning and tool calls with the ids given out."""
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that were continued rather than rendered."""
    reasoning_tokens: int = 0
    """Those of the completion that were thinking."""
    stop_string: str | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain of one answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    """Whole calls with their ids, after those told before; no content comes after the first."""
    logprobs: tuple[TokenLogprob, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs)


@dataclass(frozen=True, slots=True)
class CallInfo:
    """What every encoding of one call's answers repeats."""

    response_id: str
    """The first turn's id."""
    model: str
    created: int
    """Unix time, seconds."""
    prompt_tokens: int = 0
    """Of the first prompt, for dialects that say it before the answer."""
    cached_tokens: int = 0
    """Those of them that were continued rather than rendered."""


class StreamEncoder(Protocol):
    """Server-sent events of one call, as bytes to be written. `choice` counts answers over all prompts."""

    def delta(self, choice: int, delta: Delta) -> bytes: ...

    def finish(self, choice: int, answer: Answer) -> bytes:
        """The finish reason, once per choice; deltas have said everything else."""
        ...

    def close(self, answers: Sequence[Answer]) -> bytes:
        """Usage where asked, and the end mark."""
        ...

    def error(self, refusal: Refused) -> bytes:
        """A refusal in place of the rest of the stream; the connection is closed after it."""
        ...


class Dialect(Protocol):
    name: str

    def decode(self, body: dict[str, Any], headers: Mapping[str, str]) -> ModelCall:
        """Raises:
        Refused: malformed, or it asks for what would change the meaning and cannot be honoured.
        """
        ...

    def whole(self, call: ModelCall, info: CallInfo, answers: Sequence[Answer]) -> dict[str, Any]: ...

    def stream(self, call: ModelCall, info: CallInfo) -> StreamEncoder: ...

    def error(self, refusal: Refused) -> dict[str, Any]:
        """The body of a refusal."""
        ...
