"""From sampled tokens to what a client is told: certain text while it streams, the whole message at the end.

What always holds: the whole message depends on the tokens alone, not on how they arrived, and begins with everything
that was given out before. So a streamed answer and an unstreamed one are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import lru_cache

from swarmtune.gateway.dialect import ModelCall, TokenLogprob
from swarmtune.gateway.dialects.chat import call_id
from swarmtune.gateway.grammar import PROBE, grammar_of
from swarmtune.rendering.renderer import Renderer
from swarmtune.types import Message, ToolSpec

MARKERS = (
    "<think",
    "</think",
    "<tool_call",
    "<function",
    "<invoke",
    "<|",
    "<｜",
    "[TOOL",
    "functools[",
    '{"name"',
    '{"function"',
    "```json",
)
"""Where text like this begins, only the parsed whole tells content from calls: held back until then."""

_THINK, _END_THINK, _END_CALL = "<think>", "</think>", "</tool_call>"
_CHANNEL_TOKENS = ("<|channel|>", "<|channel>")
"""Models that have one of these write thinking and content in channels, whose names are text like any other."""


class _Part(Enum):
    START = 0
    """Nothing but blanks, or half of an opening mark."""
    REASONING = 1
    GAP = 2
    """Line ends between thinking and content."""
    CONTENT = 3
    HELD = 4
    """A marker or a stop string was met: the rest waits for the whole."""


class Splitter:
    """Tells of an answer's growing text what is certain, reasoning and content apart.

    Blanks that may stand before a marker or at the end are held back, and so is what may be the beginning of a mark.

    Args:
        stops: strings that end the answer.
        in_reasoning: the prompt opened the thinking.
        raw: there is neither thinking nor a call in this text.
        silent: give out nothing before the whole.
    """

    def __init__(
        self, stops: Sequence[str] = (), *, in_reasoning: bool = False, raw: bool = False, silent: bool = False
    ) -> None:
        self._stops = tuple(stops)
        self._marks = self._stops if raw else (*MARKERS, *self._stops)
        self._raw = raw
        self._opens_with = _Part.REASONING if in_reasoning else _Part.CONTENT
        self._part = _Part.HELD if silent else _Part.CONTENT if raw else _Part.START
        self._thought = False
        """Some reasoning was given out."""
        self.rest = ""
        """Text that was not given out."""

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning and content that have become certain with `text`."""
        self.rest += text
        if self._part is _Part.START:
            self._leave_start()
        reasoning = self._take_reasoning() if self._part is _Part.REASONING else ""
        if self._part is _Part.GAP:
            self.rest = self.rest.lstrip("\n")
            self._part = _Part.CONTENT if self.rest else _Part.GAP
        content = self._take_content() if self._part is _Part.CONTENT else ""
        return reasoning, content

    @property
    def at_end_of_call(self) -> bool:
        """Whether the text so far ends with a call's closing mark."""
        return self._part is _Part.HELD and self.rest[-len(_END_CALL) - 4 :].rstrip().endswith(_END_CALL)

    def _leave_start(self) -> None:
        text = self.rest.lstrip()
        if text.startswith(_THINK):
            self.rest = text.removeprefix(_THINK)
            self._part = _Part.REASONING
        elif not _THINK.startswith(text):
            self._part = self._opens_with

    def _take_reasoning(self) -> str:
        if not self._thought:
            self.rest = self.rest.lstrip()
        marks = (_END_THINK, *self._stops)
        limit = _first(self.rest, marks)
        if limit == len(self.rest):
            taken = self._take(limit - _begun(self.rest, marks))
        else:
            ended = self.rest.startswith(_END_THINK, limit)
            after = self.rest[limit + len(_END_THINK) :]
            taken = self._take(limit)
            self._part = _Part.GAP if ended else _Part.HELD
            self.rest = after if ended else self.rest
        self._thought = self._thought or bool(taken)
        return taken

    def _take_content(self) -> str:
        limit = _first(self.rest, self._marks)
        if limit < len(self.rest):
            self._part = _Part.HELD
        else:
            limit -= _begun(self.rest, self._marks)
        return self._take(limit, blanks=self._raw)

    def _take(self, limit: int, *, blanks: bool = False) -> str:
        """Remove what is certain of the first `limit` characters from the rest: without blanks at the end."""
        taken = self.rest[:limit] if blanks else self.rest[:limit].rstrip()
        self.rest = self.rest[len(taken) :]
        return taken


def _first(text: str, marks: Sequence[str]) -> int:
    """Characters before the first of `marks`."""
    found = [at for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, default=len(text))


def _begun(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `marks`."""
    beginnings, longest = _beginnings(marks)
    for length in range(min(longest, len(text)), 0, -1):
        if text[-length:] in beginnings:
            return length
    return 0


@lru_cache(maxsize=64)
def _beginnings(marks: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """Every text that may become one of `marks`, and the length of the longest."""
    found = frozenset(mark[:length] for mark in marks for length in range(1, len(mark)))
    return found, max(map(len, found), default=0)


def cut_at(text: str, stop: str | None) -> str:
    at = text.find(stop) if stop else -1
    return text[:at] if at >= 0 else text


def whole_message(
    parsed: Message, text: str, turn_id: str, stop: str | None, splitter: Splitter, *, one_call: bool = False
) -> Message:
    """The assistant message that is delivered for a chat answer, its calls carrying ids that lead back to the turn.

    Args:
        parsed: what the renderer made of the tokens.
        text: the answer's decoded text.
        splitter: a new one of the kind that streams this answer; the message begins with what it may give out.
        one_call: the client takes one call at a time; further ones are not delivered.
    """
    told_reasoning, told = splitter.push(text)
    reasoning = cut_at(parsed.reasoning or "", stop).strip() or None
    content = cut_at(parsed.content, stop)
    if not (content.startswith(told) and (reasoning or "").startswith(told_reasoning)):
        reasoning = told_reasoning or None
        content = told if parsed.tool_calls else told + cut_at(splitter.rest, stop)
    calls = parsed.tool_calls[:1] if one_call else parsed.tool_calls
    return replace(
        parsed,
        role="assistant",
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(replace(call, id=call_id(turn_id, at)) for at, call in enumerate(calls)),
        turn_id=turn_id,
    )


class AnswerTexts:
    """What all calls of one model share: how its answers are split, and token texts, decoded once each."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self._in_reasoning = renderer.parse(renderer.encode("thought")).reasoning is not None
        opening = _END_THINK if self._in_reasoning else ""
        self._tagged_calls = bool(renderer.parse(renderer.encode(opening + PROBE), [ToolSpec("probe")]).tool_calls)
        self._silent = any(len(renderer.encode(mark)) == 1 for mark in _CHANNEL_TOKENS)
        self._texts: dict[int, str] = {}

    def splitter(self, stops: Sequence[str], *, raw: bool) -> Splitter:
        if raw:
            return Splitter(stops, raw=True)
        return Splitter(stops, in_reasoning=self._in_reasoning, silent=self._silent)

    def grammar(self, call: ModelCall) -> str | None:
        return grammar_of(call, in_reasoning=self._in_reasoning, tagged_calls=self._tagged_calls)

    def reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """How many tokens of an answer that thought were its thinking, the closing mark included."""
        low, high = 0, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            if _END_THINK in self.renderer.decode(token_ids[:middle]):
                high = middle
            else:
                low = middle + 1
        return low

    def text(self, token_id: int) -> str:
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self.renderer.decode([token_id], special=True)
        return found

    def entries(
        self, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[dict[int, float]] | None
    ) -> list[TokenLogprob]:
        alternatives = top or [{}] * len(token_ids)
        return [
            TokenLogprob(
                self.text(token),
                logprob,
                tuple((self.text(t), lp) for t, lp in sorted(others.items(), key=lambda pair: -pair[1])),
            )
            for token, logprob, others in zip(token_ids, logprobs, alternatives, strict=True)
        ]
