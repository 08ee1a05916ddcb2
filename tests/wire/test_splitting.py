"""Whatever an answer says and however it arrives: what a stream told, and the rest of it, is the whole message."""

from __future__ import annotations

import asyncio
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from swarmtune.gateway.answers import AnswerTexts
from swarmtune.gateway.calls import Choice, Exchange
from swarmtune.gateway.dialect import Delta, ModelCall
from swarmtune.rendering.generic import GenericRenderer
from swarmtune.rendering.known import KnownRenderer
from swarmtune.rendering.template import ChatTemplate
from swarmtune.rendering.tokenizer import Tokenizer
from swarmtune.tracker import Tracker
from swarmtune.types import FinishReason, Message, SamplingParams, ToolSpec

OPENING = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TEMPLATES = {"plain": f"{OPENING}<|im_start|>assistant\n", "thinker": f"{OPENING}<|im_start|>assistant\n<think>\n"}
GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
FRAGMENTS = [
    *(
        GOOD,
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        "<tool_call>",
        "</tool_call>",
        '{"name": "add"}',
    ),
    *("<think>", "</think>", "<thin", "</", "<", "<|im_start|>", "<function", "```json\n{}\n```", "STOP", "ST", "OP"),
    *(" ", "\n", "\n\n", "\t", "text", "é日✓", "and more", "  ", "a"),
]
TOOLS = (ToolSpec("add", "", {"type": "object"}),)


@cache
def tokenizer() -> Tokenizer:
    """A token a byte, with the marks of the Qwen family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={text: at for at, text in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    fast.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in marks])
    return Tokenizer(fast, {"eos_token": "<|im_end|>", "unk_token": None})


@cache
def renderer_named(name: str) -> Any:
    if name == "qwen3":
        pytest.importorskip("renderers")
        return KnownRenderer(tokenizer(), "qwen3")
    return GenericRenderer(tokenizer(), ChatTemplate(TEMPLATES[name], {}), name=name)


@cache
def texts_of(name: str) -> AnswerTexts:
    return AnswerTexts(renderer_named(name))


def stream(name: str, text: str, cuts: list[int], call: ModelCall, stops: tuple[str, ...]) -> tuple[Delta, Message]:
    """Everything that was told of an answer before its end, put together, and its whole message."""
    renderer, texts = renderer_named(name), texts_of(name)
    turn = Tracker("e", renderer).prepare(call.messages, call.tools)
    choice = Choice(turn, SamplingParams(9, stop=stops), texts.splitter(stops, raw=False))
    run = cast(Any, SimpleNamespace(renderer=renderer))
    exchange = Exchange(cast(Any, None), run, cast(Any, None), cast(Any, None), call, cast(Any, None), [choice], texts)
    told: list[Delta] = []

    async def speak(index: int, delta: Delta) -> None:
        told.append(delta)

    ids, growing = renderer.encode(text), renderer.stream()
    edges = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})

    async def push_all() -> None:
        for start, end in pairwise(edges):
            choice.token_ids += ids[start:end]
            await exchange._tell(0, choice, growing.push(ids[start:end]), speak)

    asyncio.run(push_all())
    choice.finish_reason = FinishReason.STOP
    choice.stop_string = next((stop for stop in stops if text.endswith(stop)), None)
    message = exchange._message(choice, renderer.decode(choice.token_ids))
    put = Delta("".join(d.content for d in told), "".join(d.reasoning for d in told), sum((d.calls for d in told), ()))
    return put, message


def cut_by_stop(text: str, stops: tuple[str, ...]) -> str:
    """As an engine gives it: it ends with the first stop string."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


@pytest.mark.parametrize("name", ["plain", "thinker", "qwen3"])
@pytest.mark.parametrize("tools", [TOOLS, ()], ids=["tools", "no tools"])
@settings(max_examples=120, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=9),
    cuts=st.lists(st.integers(0, 200), max_size=40) | st.just(list(range(400))),
    stops=st.sampled_from([(), ("STOP",), ("\n",)]),
    parallel=st.booleans(),
)
def test_what_was_told_begins_the_whole_message(name, tools, fragments, cuts, stops, parallel):
    call = ModelCall("chat", "m", (Message("user", "u"),), tools=tools, parallel_tool_calls=parallel)
    told, message = stream(name, cut_by_stop("".join(fragments), stops), cuts, call, stops)
    assert message.content.startswith(told.content)
    assert (message.reasoning or "").startswith(told.reasoning)
    assert message.tool_calls[: len(told.calls)] == told.calls
    if told.calls:
        assert told.content == message.content and told.reasoning == (message.reasoning or "")
    assert all(stop not in message.content for stop in stops) or message.tool_calls


@pytest.mark.parametrize("name", ["plain", "thinker", "qwen3"])
@pytest.mark.parametrize("after", ["</think> so", "<tool_call>", f"<tool_call>{{no}}</tool_call>{GOOD}", f" so {GOOD}"])
def test_a_call_that_was_told_stays_whatever_comes_after_it(name, after):
    call = ModelCall("chat", "m", (Message("user", "u"),), tools=TOOLS)
    opening = "hm</think>\n" if name == "thinker" else ""
    told, message = stream(name, f"{opening}Let me see. {GOOD}{after}", list(range(400)), call, ())
    assert told.calls[0] == message.tool_calls[0]
    assert told.content == message.content == "Let me see."
