"""Speed and size of tracking and merging, against the straightforward Algorithm 1 where there is one.

    python benchmarks/merging.py [--model smollm2-135m] [--repetitions 5]

Every figure is the median of the repetitions, in CPU time: nothing here waits. Conversations use the model's own
tokenizer and chat template; answers are random tokens with random logprobs. What "tracker" costs is `prepare` and
`commit`: parsing the request's JSON is the gateway's. The oracle is the one of the tests, given the same timelines
(building them is not counted).
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "merging"))

import orjson
from oracle import merge_timelines

from swarmtune import models
from swarmtune.merger import check_conservation, merge, merge_order
from swarmtune.rendering.load import load_renderer
from swarmtune.rendering.renderer import Renderer
from swarmtune.tracker import Tracker
from swarmtune.types import FinishReason, Message, Reply, ToolSpec

TOOLS = [
    ToolSpec(f"tool_{i}", "Does what its name says. " * 8, {"type": "object", "properties": {"x": {"type": "string"}}})
    for i in range(10)
]


_ELSEWHERE = bytearray(16 * 1024 * 1024)


class Conversation:
    """An agent's loop: a system prompt, a task, then answers and tool results in turn."""

    def __init__(self, renderer: Renderer, *, answer_tokens: int, result_words: int, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._renderer = renderer
        self._answer_tokens = answer_tokens
        self._result_words = result_words
        self.tracker = Tracker("episode", renderer)
        self.messages = [Message("system", "You act. " * 40), Message("user", "Do the task.")]

    def turn(self) -> float:
        """One call; returns what the tracker cost, in seconds."""
        ids = [self._draw.randrange(1000, 40000) for _ in range(self._answer_tokens)]
        logprobs = [-self._draw.random() for _ in ids]
        text = self._renderer.decode(ids)
        messages = _received(self.messages)
        _work_on_something_else()
        start = time.thread_time()
        turn = self.tracker.prepare(messages, TOOLS)
        prepared = time.thread_time() - start
        message = Message("assistant", text, turn_id=turn.turn_id)
        reply = Reply(ids, logprobs, [3] * len(ids), FinishReason.LENGTH, text, message)
        start = time.thread_time()
        self.tracker.commit(turn, reply)
        cost = prepared + time.thread_time() - start
        result = " ".join(str(self._draw.randrange(10**6)) for _ in range(self._result_words))
        self.messages += [message, Message("user", result)]
        return cost


def _received(messages: list[Message]) -> list[Message]:
    """The same messages as new objects, as a request brings them."""
    contents = orjson.loads(orjson.dumps([message.content for message in messages]))
    return [replace(message, content=content) for message, content in zip(messages, contents, strict=True)]


def _work_on_something_else() -> None:
    """Leave the processor's caches as a busy gateway does between two calls of one episode."""
    bytes(_ELSEWHERE)


def timed(work: Callable[[], object], repetitions: int) -> float:
    """Median milliseconds."""
    seconds = []
    for _ in range(repetitions):
        gc.collect()
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds) * 1000


def linear(renderer: Renderer, turns: int, tokens: int) -> Conversation:
    """A conversation without forks of about `tokens` tokens."""
    per_turn = tokens // turns
    conversation = Conversation(renderer, answer_tokens=per_turn // 3, result_words=per_turn // 9)
    for _ in range(turns):
        conversation.turn()
    return conversation


def show_merging(renderer: Renderer, repetitions: int) -> None:
    tracker = linear(renderer, 100, 50_000).tracker
    result = merge(tracker, match="text")
    check_conservation(tracker, result.samples)
    report = result.report
    print(f"merge 100 turns / {report.tokens['text']:,} tokens:", end=" ")
    print(f"{timed(lambda: merge(tracker, match='text'), repetitions):.2f} ms (limit 10)", end=", ")
    print(f"check {timed(lambda: check_conservation(tracker, result.samples), repetitions):.2f} ms")
    print(f"  unmerged {report.tokens['none']:,} tokens, merged {report.tokens['text']:,}: {report.ratio:.1f}x")


def show_oracle(renderer: Renderer, repetitions: int) -> None:
    tracker = linear(renderer, 200, 64_000).tracker
    timelines = {timeline.call_id: timeline for timeline in tracker.timelines()}
    for match in ("token", "text"):
        ordered = [timelines[turn_id] for turn_id in merge_order(tracker, match=match)]
        (expected,) = merge_timelines(ordered, match)
        (sample,) = merge(tracker, match=match).samples
        assert sample.token_ids == [token for block in expected.blocks for token in block.token_ids]
        ours = timed(lambda match=match: merge(tracker, match=match), repetitions)
        theirs = timed(lambda match=match, ordered=ordered: merge_timelines(ordered, match), repetitions)
        print(f"merge 200 turns / 64k tokens, {match}: ours {ours:.2f} ms, Algorithm 1 {theirs:.2f} ms:", end=" ")
        print(f"{theirs / ours:.1f}x faster (at least 3)")


def show_growth(renderer: Renderer, repetitions: int) -> None:
    costs: dict[int, list[float]] = {5: [], 50: [], 100: [], 200: []}
    memory = per_token = 0.0
    for repetition in range(max(3, repetitions)):
        conversation = Conversation(renderer, answer_tokens=105, result_words=30, seed=repetition)
        spent = [conversation.turn() * 1000 for _ in range(203)]
        for turn, seen in costs.items():
            seen.append(statistics.median(spent[turn - 3 : turn + 3]))
        tracker = conversation.tracker
        tokens = tracker.calls[-1].node.length
        memory = tracker.memory_bytes()
        per_token = (memory - 2048 * len(tracker.calls)) / tokens
    medians = {turn: statistics.median(seen) for turn, seen in costs.items()}
    print(f"tracker per call, conversation of {tokens:,} tokens:", end=" ")
    print(", ".join(f"turn {turn} {cost:.3f} ms" for turn, cost in medians.items()), end=" ")
    print(f"= {medians[200] / medians[5]:.2f}x (limit 2)")
    calls = len(tracker.calls)
    print(
        f"memory: {memory / tokens:.1f} bytes per token in all; beyond 2 kB a call {per_token:.1f} (limit 10)", end="; "
    )
    print(f"{memory / calls:,.0f} bytes per call of {tokens / calls:,.0f} tokens")
    materialised = tracker.prepare(conversation.messages, TOOLS)
    print(f"  prompt as a list of ints, on demand: {timed(lambda: materialised.prompt_token_ids, repetitions):.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    renderer = load_renderer(models.resolve(args.model))
    show_merging(renderer, args.repetitions)
    show_oracle(renderer, args.repetitions)
    show_growth(renderer, args.repetitions)


if __name__ == "__main__":
    main()
