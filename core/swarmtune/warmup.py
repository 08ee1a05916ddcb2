"""Supervised warm-up: given conversations become rows, and steps learn them a batch at a time. No I/O, no torch.

A warm-up is fixed once it is accepted: which conversations each of its steps learns follows from its seed alone, so a
step that is trained again learns the same. Every assistant message is taught, its end token included; everything else
is context. A message is taught in the context in which the model would be asked for it: where the chat template shows
earlier answers otherwise than they were given (thinking stripped), the conversation becomes several rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmtune.gateway.dialect import Refused
from swarmtune.gateway.dialects.chat import ChatDialect
from swarmtune.rendering.renderer import Renderer, TemplateRefused
from swarmtune.types import FinishedEpisode, Message, Sample, ToolSpec, TrainBatch

TASK = "warmup"
"""task_id of every given conversation."""


class BadConversation(ValueError):
    """A conversation that cannot be taught; the message names its index and the field."""


@dataclass(slots=True)
class Warmup:
    warmup_id: str
    steps: int
    batch_size: int
    lr: float
    seed: int
    conversations: list[FinishedEpisode]
    """One episode per conversation, its rows under `samples`; empty once nothing of it can be trained again."""
    planned: int = 0
    """Steps of it that were given a number."""
    done: list[int] = field(default_factory=list)
    """Numbers of the steps that are trained, in order."""
    failed: str | None = None
    """Why the rest of it will not be trained."""

    @property
    def waits(self) -> bool:
        """Whether it has steps that were not begun."""
        return self.failed is None and self.planned < self.steps

    @property
    def size(self) -> int:
        return min(self.batch_size, len(self.conversations))

    def batch(self, position: int, step: int) -> TrainBatch:
        """Its step number `position` (from 0) as the training's `step`."""
        chosen = self._order(position)
        episodes = [
            FinishedEpisode(f"{self.warmup_id}/{position}/{index}", TASK, 0.0, self.conversations[index].samples)
            for index in chosen
        ]
        return TrainBatch(step, episodes, supervised_lr=self.lr)

    def _order(self, position: int) -> list[int]:
        """Conversations of a step: each once in random order, then again in another one, none twice in a step."""
        drawn, waiting, chosen = self._rounds(), list[int](), list[int]()
        for _ in range(position + 1):
            chosen, waiting = waiting[: self.size], waiting[self.size :]
            while len(chosen) < self.size:
                index = next(drawn)
                (waiting if index in chosen else chosen).append(index)
        return chosen

    def _rounds(self) -> Iterator[int]:
        visit = 0
        while True:
            order = list(range(len(self.conversations)))
            random.Random(f"{self.seed}/{visit}").shuffle(order)
            yield from order
            visit += 1


def render_conversations(given: Sequence[Any], renderer: Renderer, *, context_length: int) -> list[FinishedEpisode]:
    """Rows of each conversation: `{"messages": […], "tools": […]}`, or the list of messages alone, in OpenAI's form.

    Raises:
        BadConversation: names the first wrong one.
    """
    return [_render(item, index, renderer, context_length) for index, item in enumerate(given)]


def _render(item: Any, index: int, renderer: Renderer, context_length: int) -> FinishedEpisode:
    where = f"conversations[{index}]"
    messages, tools = _read(item, where)
    name = f"c{index}"
    try:
        rows = _rows(messages, tools, renderer)
    except TemplateRefused as error:
        raise BadConversation(f"{where}.messages: the model's chat template refuses them: {error}") from None
    longest = max(len(ids) for ids, _ in rows)
    if longest > context_length:
        raise BadConversation(
            f"{where}.messages: {longest} tokens, and the context has {context_length}; shorten it, or raise "
            "engine.context_length"
        )
    return FinishedEpisode(
        name, TASK, 0.0, [_sample(f"{name}-{at}", name, ids, mask) for at, (ids, mask) in enumerate(rows)]
    )


def _read(item: Any, where: str) -> tuple[tuple[Message, ...], tuple[ToolSpec, ...]]:
    """Canonical messages and tools."""
    body = {"messages": item} if isinstance(item, list) else item
    if not isinstance(body, dict):
        raise BadConversation(f'{where}: must be {{"messages": […]}} or a list of messages, not {type(item).__name__}')
    if unknown := sorted(body.keys() - {"messages", "tools"}):
        raise BadConversation(f"{where}.{unknown[0]}: unknown field; a conversation has messages and tools")
    try:
        call = ChatDialect().decode(body, {})
    except Refused as refusal:
        raise BadConversation(f"{where}.{refusal.param}: {refusal.message}") from None
    taught = [m for m in call.messages if m.role == "assistant"]
    if not taught:
        raise BadConversation(f"{where}.messages: no assistant message, so there is nothing to learn; add one")
    for at, message in enumerate(call.messages):
        if message.role == "assistant" and not (message.content or message.tool_calls or message.reasoning):
            raise BadConversation(f"{where}.messages[{at}].content: the assistant says nothing; leave such answers out")
    return call.messages, call.tools


def _rows(
    messages: Sequence[Message], tools: Sequence[ToolSpec], renderer: Renderer
) -> list[tuple[list[int], list[int]]]:
    """(token ids, loss mask) of each row."""
    rows: list[tuple[list[int], list[int]]] = []
    for at, message in enumerate(messages):
        if message.role != "assistant":
            continue
        asked = renderer.render(messages[:at], tools).token_ids
        said = renderer.render(messages[: at + 1], tools, generation_prompt=False)
        start, end = said.spans[at]
        begin = max(start, _common(asked, said.token_ids))
        end = _after_end_token(said.token_ids, begin, end, renderer.stop_token_ids)
        ids = said.token_ids[:end]
        if rows and ids[: len(rows[-1][0])] == rows[-1][0]:
            earlier = rows.pop()[1]
        else:
            earlier = []
        rows.append((ids, earlier + [0] * (begin - len(earlier)) + [1] * (end - begin)))
    return rows


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _after_end_token(ids: Sequence[int], begin: int, end: int, stops: Sequence[int]) -> int:
    """Where an answer that begins at `begin` is over: after its last end token, what the template adds left out."""
    return next((i + 1 for i in range(end - 1, begin - 1, -1) if ids[i] in stops), end)


def _sample(sample_id: str, name: str, ids: list[int], mask: list[int]) -> Sample:
    return Sample(
        sample_id=sample_id,
        episode_id=name,
        task_id=TASK,
        token_ids=ids,
        loss_mask=mask,
        logprobs=[0.0] * len(ids),
        weight_versions=[-1] * len(ids),
    )
