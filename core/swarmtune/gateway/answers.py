"""From sampled tokens to what a client is told: certain text while it streams, the whole message at the end.

What always holds: the whole message depends on the tokens alone, not on how they arrived, and begins with every text
that was given out before. So a streamed answer and an unstreamed one are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swarmtune.gateway.dialect import TokenLogprob
from swarmtune.gateway.dialects.chat import call_id
from swarmtune.rendering.renderer import Renderer
from swarmtune.types import Message

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
"""Where text like this begins, only the parsed whole tells content from reasoning and calls: held back until then."""


def certain_length(text: str, stops: Sequence[str]) -> tuple[int, bool]:
    """Characters of a growing text that can be given out, and whether a marker or stop string ends them.

    What may be the beginning of one, and blanks that may stand before one, are held back.
    """
    limit = plain_length(text, stops)
    ended = limit < len(text)
    if not ended:
        limit -= max((_begun(text, mark) for mark in (*MARKERS, *stops)), default=0)
    return len(text[:limit].rstrip()), ended


def plain_length(text: str, stops: Sequence[str]) -> int:
    """Characters before the first marker or stop string."""
    found = [at for mark in (*MARKERS, *stops) if (at := text.find(mark)) >= 0]
    return min(found, default=len(text))


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def cut_at(text: str, stop: str | None) -> str:
    at = text.find(stop) if stop else -1
    return text[:at] if at >= 0 else text


def opens_reasoning(renderer: Renderer) -> bool:
    """Whether this model's prompts end inside its thinking, so that an answer's first text is no content."""
    return renderer.parse(renderer.encode("thought")).reasoning is not None


def whole_message(
    parsed: Message, text: str, turn_id: str, stop: str | None, told_from: str, *, one_call: bool = False
) -> Message:
    """The assistant message that is delivered for a chat answer, its calls carrying ids that lead back to the turn.

    Args:
        parsed: what the renderer made of the tokens.
        text: the answer's decoded text.
        told_from: what of the text may be given out before it is whole; the message's content begins with it.
        one_call: the client takes one call at a time; further ones are not delivered.
    """
    content, reasoning = cut_at(parsed.content, stop), parsed.reasoning
    if not content.startswith(told_from.rstrip()):
        content, reasoning = (told_from if parsed.tool_calls else cut_at(text, stop)), None
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
    """What all calls of one model share: whether answers begin inside thinking, and token texts, decoded once each."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.opens_reasoning = opens_reasoning(renderer)
        self._texts: dict[int, str] = {}

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
