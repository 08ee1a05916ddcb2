"""Generated episodes: forests of calls with forks, sub-agents, retries, rewrites and lost answers.

A script says for each call which earlier call it follows and how; `play` runs it against a tracker in any order that
keeps causes before effects. Answers and logprobs belong to the script, so two orders sample the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hypothesis import strategies as st
from tiny_models import tiny_tokenizer

from swarmtune.tracker import CallRecord, Tracker
from swarmtune.types import FinishReason, Message, Reply, ToolCall, ToolSpec

SYSTEMS = ("", "you act", "you plan")
TOOLS = ((), (ToolSpec("look", "Looks."),), (ToolSpec("look", "Looks."), ToolSpec("go", "Goes.")))
CONTEXTS = ("go on", "the answer", " in the inn", "ans\n\nans", "")
MODEL = "tiny"

Follow = Literal["start", "continue", "again", "edit", "drop_turn", "compact"]
Echo = Literal["ids", "text", "trimmed", "no_reasoning", "rewritten_arguments", "edited"]


@dataclass(frozen=True)
class Step:
    """One call of a script."""

    parent: int | None
    """Index of the call whose conversation this one takes up."""
    follow: Follow
    echo: Echo
    """How the client sends the parent's answer back."""
    context: tuple[tuple[str, str], ...]
    """(role, content) of the new messages."""
    system: int
    tools: int
    answer: str
    scramble: bool
    """Sampled ids are a split that the tokenizer would not choose."""
    ends: bool
    """Stopped by the end token, not by length."""
    delivered: bool
    where: int


FOLLOWS: tuple[Follow, ...] = (*("continue",) * 7, "again", "edit", "drop_turn", "compact")
ECHOES: tuple[Echo, ...] = (*("ids",) * 4, "text", "trimmed", "no_reasoning", "rewritten_arguments", "edited")
ROLES = ("user", "tool", "tool", "assistant")
TEXTS = ("the answer", " answers\n\n", "in the inn", "7", "")
THOUGHTS = ("", "", "<think>\nhm\n</think>\n\n", "<think>\nthe other\n</think>\n\n")
CALL = '\n<tool_call>\n{"name": "look", "arguments": {"b":1, "a": [2]}}\n</tool_call>'


def scripts(*, most: int = 40, unique: bool = True) -> st.SearchStrategy[list[Step]]:
    """Up to `most` calls; `unique` gives every answer another text."""
    lengths = st.integers(1, most)
    seeds = lengths.flatmap(lambda n: st.lists(st.integers(0, 2**48 - 1), min_size=n, max_size=n))
    return seeds.map(lambda numbers: [_step(index, number, unique) for index, number in enumerate(numbers)])


def _step(index: int, number: int, unique: bool) -> Step:
    """A step out of one number, digit by digit: quick to draw, and it shrinks to the plainest step."""
    digits = _Digits(number)
    starts = index == 0 or digits.take(6) == 5
    parent = None if starts else max(0, index - 1 - digits.take(6))
    return Step(
        parent=parent,
        follow="start" if parent is None else digits.choose(FOLLOWS),
        echo=digits.choose(ECHOES),
        context=tuple((digits.choose(ROLES), digits.choose(CONTEXTS)) for _ in range(1 + digits.take(2))),
        system=digits.take(3),
        tools=digits.take(3),
        answer=digits.choose(THOUGHTS)
        + digits.choose(TEXTS)
        + digits.choose(("", "", "", CALL))
        + (f" #{index}" if unique else ""),
        scramble=digits.take(2) == 1,
        ends=digits.take(5) != 4,
        delivered=digits.take(10) != 9,
        where=digits.take(8),
    )


class _Digits:
    def __init__(self, number: int) -> None:
        self._number = number

    def take(self, base: int) -> int:
        self._number, digit = divmod(self._number, base)
        return digit

    def choose(self, options: Sequence[Any]) -> Any:
        return options[self.take(len(options))]


@dataclass
class Played:
    tracker: Tracker
    calls: list[CallRecord]
    """By step."""
    prompts: list[list[int]]
    """By step."""


def play(script: Sequence[Step], tracker: Tracker, order: Sequence[int] | None = None) -> Played:
    conversations: dict[int, list[Message]] = {}
    asked: dict[int, tuple[ToolSpec, ...]] = {}
    calls: dict[int, CallRecord] = {}
    prompts: dict[int, list[int]] = {}
    replies: dict[int, Message] = {}
    for index in order if order is not None else range(len(script)):
        step = script[index]
        messages, tools = _request(step, conversations, asked, replies)
        turn = tracker.prepare(messages, tools)
        if turn.redelivery is not None:  # the client asks again for an answer that it did not get: sample it anew
            tracker.discard(tracker.call(turn.turn_id), "not delivered")
            turn = tracker.prepare(messages, tools)
        reply = _reply(step, index, tracker, turn.turn_id, tools)
        calls[index] = tracker.commit(turn, reply, delivered=step.delivered, temperature=1.0)
        conversations[index], asked[index], prompts[index] = messages, tools, turn.prompt_token_ids
        assert reply.message is not None
        replies[index] = reply.message
    return Played(tracker, [calls[i] for i in range(len(script))], [prompts[i] for i in range(len(script))])


def _request(
    step: Step,
    conversations: dict[int, list[Message]],
    asked: dict[int, tuple[ToolSpec, ...]],
    replies: dict[int, Message],
) -> tuple[list[Message], tuple[ToolSpec, ...]]:
    new = [Message(role, content, tool_call_id="x" if role == "tool" else None) for role, content in step.context]  # type: ignore[arg-type]
    if step.parent is None:
        system = [Message("system", SYSTEMS[step.system])] if step.system else []
        return [*system, Message("user", f"task {step.where % 2}"), *new], TOOLS[step.tools]
    before, tools = conversations[step.parent], asked[step.parent]
    if step.follow == "again":
        return before, tools
    if step.follow == "compact":
        return [m for m in before[:1] if m.role == "system"] + [Message("user", "so far: nothing")], tools
    if step.follow == "drop_turn" and len(before) > 3:
        before = [*before[:1], *before[3:]]
    if step.follow == "edit":
        at = step.where % len(before)
        before = [*before[:at], replace(before[at], content=before[at].content + " edited"), *before[at + 1 :]]
    return [*before, _echoed(replies[step.parent], step.echo), *new], tools


def _echoed(answer: Message, echo: Echo) -> Message:
    if echo == "ids":
        return answer
    anonymous = replace(
        answer,
        turn_id=None,
        tool_calls=tuple(replace(call, id=f"client-{i}") for i, call in enumerate(answer.tool_calls)),
    )
    if echo == "trimmed":
        return replace(anonymous, content=answer.content.strip())
    if echo == "no_reasoning":
        return replace(answer, reasoning=None)
    if echo == "rewritten_arguments":
        return replace(answer, tool_calls=tuple(replace(c, arguments='{"a":[2],"b":1}') for c in answer.tool_calls))
    if echo == "edited":
        return replace(answer, content=answer.content + " or not")
    return anonymous


def _reply(step: Step, index: int, tracker: Tracker, turn_id: str, tools: Sequence[ToolSpec]) -> Reply:
    tokenizer = tiny_tokenizer()
    ids = [i for c in step.answer for i in tokenizer.encode(c)] if step.scramble else tokenizer.encode(step.answer)
    if step.ends:
        ids = [*ids, *tokenizer.encode("<|im_end|>")]
    message = tracker.renderer.parse(ids, tools)
    calls = tuple(ToolCall(f"{turn_id}-{i}", c.name, c.arguments) for i, c in enumerate(message.tool_calls))
    return Reply(
        ids,
        [-(index + 1) - position / 1024 for position in range(len(ids))],
        [index // 3] * len(ids),
        FinishReason.STOP if step.ends else FinishReason.LENGTH,
        tracker.renderer.decode(ids),
        replace(message, tool_calls=calls, turn_id=turn_id),
    )


@st.composite
def orders(draw: st.DrawFn, script: Sequence[Step]) -> list[int]:
    """Another order of the same calls, causes before effects."""
    left = set(range(len(script)))
    out: list[int] = []
    while left:
        ready = sorted(i for i in left if script[i].parent not in left)
        chosen = draw(st.sampled_from(ready))
        out.append(chosen)
        left.remove(chosen)
    return out
