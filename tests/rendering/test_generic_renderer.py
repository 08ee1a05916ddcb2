"""The fallback renderer: any chat template, continued from sampled ids."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from tiny_models import TEMPLATES, tiny_renderer, tiny_tokenizer

from swarmtune.rendering.generic import GenericRenderer
from swarmtune.rendering.renderer import TemplateRefused
from swarmtune.rendering.template import ChatTemplate
from swarmtune.types import Message, ToolCall, ToolSpec

SYSTEM, USER = Message("system", "be brief"), Message("user", "hello there")
ANSWER = Message("assistant", "hi")
LOOK = ToolSpec("look", "Looks.", {"type": "object"})
CALL = Message("assistant", "", tool_calls=(ToolCall("c1", "look", '{"b": 1, "a": 2}'), ToolCall("c2", "look", "{}")))
RESULTS = [Message("tool", "red", tool_call_id="c1"), Message("tool", "blue", tool_call_id="c2")]


def whole_text(renderer, ids):
    return renderer.decode(ids, special=True)


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n not in ("alternating", "counting")])
def test_continuing_gives_the_text_that_the_template_gives_for_the_whole(name):
    renderer = tiny_renderer(name)
    prompt = renderer.render([SYSTEM, USER])
    sampled = renderer.encode("hi") + list(renderer.stop_token_ids if name != "plain" else renderer.encode(""))
    new = [Message("user", "more"), Message("user", "and more")]
    added = renderer.extend(prompt.token_ids + sampled, [SYSTEM, USER, ANSWER], new)
    assert added is not None
    got = whole_text(renderer, prompt.token_ids + sampled + added.token_ids)
    assert got == whole_text(renderer, renderer.render([SYSTEM, USER, ANSWER, *new]).token_ids)


@pytest.mark.parametrize("name", ["chatml", "thinking", "merging_tools"])
def test_an_answer_cut_off_by_length_is_closed_before_the_next_message(name):
    renderer = tiny_renderer(name)
    prompt = renderer.render([USER])
    added = renderer.extend(prompt.token_ids + renderer.encode("hi"), [USER, ANSWER], [USER])
    assert added is not None
    assert whole_text(renderer, added.token_ids).startswith("<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize("name", ["chatml", "thinking", "reordering", "merging_tools"])
def test_spans_cover_the_tokens_in_order_and_say_whose_they_are(name):
    renderer = tiny_renderer(name)
    messages = [SYSTEM, USER, ANSWER, Message("user", "why")]
    rendered = renderer.render(messages)
    assert [start for start, _ in rendered.spans] == [0, *[end for _, end in rendered.spans[:-1]]]
    texts = [whole_text(renderer, rendered.token_ids[start:end]) for start, end in rendered.spans]
    assert [message.content in text for message, text in zip(messages, texts, strict=True)] == [True] * 4
    assert texts[2].endswith("<|im_end|>") and texts[3].startswith("\n")
    assert whole_text(renderer, rendered.token_ids[rendered.spans[-1][1] :]) == "<|im_start|>assistant\n"


def test_a_template_that_strips_thinking_does_not_continue_past_a_user_message():
    renderer = tiny_renderer("thinking")
    thought = replace(ANSWER, reasoning="the user greets")
    prefix = renderer.render([USER]).token_ids + renderer.encode("<think>\nthe user greets\n</think>\n\nhi<|im_end|>")
    assert renderer.extend(prefix, [USER, thought], [USER]) is None
    tool = renderer.extend(prefix, [USER, thought], [Message("tool", "red")])
    assert tool is not None and whole_text(renderer, tool.token_ids).startswith("\n<|im_start|>tool\nred<|im_end|>")


def test_thinking_of_an_earlier_turn_that_a_new_message_strips_is_noticed():
    renderer = tiny_renderer("thinking")
    loop = [USER, replace(CALL, reasoning="look first"), *RESULTS] * 1
    history = [*loop, CALL, *RESULTS, ANSWER]
    assert renderer.extend(renderer.encode("hi<|im_end|>"), history, [USER], [LOOK]) is None
    assert renderer.extend(renderer.encode("hi<|im_end|>"), history, [USER], [LOOK], keep=True) is not None


def test_keep_goes_on_whatever_the_template_would_strip():
    renderer = tiny_renderer("thinking")
    thought = replace(ANSWER, reasoning="the user greets")
    added = renderer.extend(renderer.encode("hi<|im_end|>"), [USER, thought], [USER], keep=True)
    assert added is not None
    assert whole_text(renderer, added.token_ids) == "\n<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"


def test_a_prompt_can_be_continued_with_an_answer_shown_otherwise():
    renderer = tiny_renderer("thinking")
    prompt = renderer.render([USER])
    added = renderer.extend(prompt.token_ids, [USER], [replace(ANSWER, reasoning="gone"), USER])
    assert added is not None
    whole = renderer.render([USER, ANSWER, USER])
    assert whole_text(renderer, prompt.token_ids + added.token_ids) == whole_text(renderer, whole.token_ids)
    assert whole_text(renderer, added.token_ids[slice(*added.spans[0])]) == "hi<|im_end|>"


def test_a_template_that_rewrites_everything_never_continues():
    renderer = tiny_renderer("counting")
    prompt = renderer.render([USER])
    assert renderer.extend(prompt.token_ids + renderer.encode("hi<|im_end|>"), [USER, ANSWER], [USER]) is None


def test_a_template_that_numbers_messages_is_rendered_in_full():
    assert not tiny_renderer("indexed")._condenses
    assert all(tiny_renderer(name)._condenses for name in ("chatml", "thinking", "merging_tools", "one_system"))


def test_tool_arguments_that_the_template_reorders_do_not_stop_a_continuation():
    renderer = tiny_renderer("reordering")
    sampled = renderer.encode('<tool_call>\n{"name": "look", "arguments": {"b":1,"a":2}}\n</tool_call><|im_end|>')
    prompt = renderer.render([USER], [LOOK])
    call = renderer.parse(sampled, [LOOK])
    added = renderer.extend(prompt.token_ids + sampled, [USER, call], [Message("tool", "red")], [LOOK])
    assert added is not None
    assert whole_text(renderer, added.token_ids) == "\n<|im_start|>tool\nred<|im_end|>\n<|im_start|>assistant\n"


def test_consecutive_tool_messages_that_the_template_merges_continue_as_one_turn():
    renderer = tiny_renderer("merging_tools")
    added = renderer.extend(renderer.encode("x<|im_end|>"), [USER, CALL], RESULTS, [LOOK])
    assert added is not None
    first, second = "\n<tool_response>\nred\n</tool_response>", "\n<tool_response>\nblue\n</tool_response>"
    expected = f"\n<|im_start|>user{first}{second}<|im_end|>\n"
    assert whole_text(renderer, added.token_ids) == f"{expected}<|im_start|>assistant\n"
    assert [whole_text(renderer, added.token_ids[slice(*span)]) for span in added.spans] == [
        expected[: expected.index("\n<tool_response>\nblue")],
        expected[expected.index("\n<tool_response>\nblue") :],
    ]


def test_a_refusal_carries_the_templates_words():
    renderer = tiny_renderer("alternating")
    with pytest.raises(TemplateRefused, match="Roles must alternate"):
        renderer.render([USER, USER])
    with pytest.raises(TemplateRefused, match="Roles must alternate"):
        renderer.extend(renderer.encode("hi<|im_end|>"), [USER, ANSWER], [ANSWER])


def test_a_later_system_message_is_the_users_where_the_template_takes_one_only_at_the_beginning():
    renderer = tiny_renderer("one_system")
    prompt = renderer.render([SYSTEM, SYSTEM, USER])
    assert whole_text(renderer, prompt.token_ids).startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nbe brief<|im_end|>\n<|im_start|>user\nhello there"
    )
    sampled = [*renderer.encode("hi"), *renderer.stop_token_ids]
    added = renderer.extend(prompt.token_ids + sampled, [SYSTEM, SYSTEM, USER, ANSWER], [SYSTEM])
    assert added is not None
    assert whole_text(renderer, added.token_ids).startswith("\n<|im_start|>user\nbe brief<|im_end|>")


def test_tools_reach_a_model_whose_template_knows_none():
    text = whole_text(renderer := tiny_renderer("chatml"), renderer.render([SYSTEM, USER], [LOOK]).token_ids)
    assert text.startswith("<|im_start|>system\nbe brief\n\n# Tools") and '"name": "look"' in text
    history = [USER, CALL, *RESULTS]
    text = whole_text(renderer, renderer.render(history, [LOOK]).token_ids)
    assert '<tool_call>\n{"name": "look", "arguments": {"b": 1, "a": 2}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\nred\n</tool_response>\n<tool_response>\nblue" in text


def test_tools_go_into_the_user_message_where_the_template_takes_no_system_message():
    renderer = tiny_renderer("alternating")
    text = whole_text(renderer, renderer.render([USER], [LOOK]).token_ids)
    assert text.startswith("<|im_start|>user\n# Tools") and text.endswith(
        "hello there<|im_end|>\n<|im_start|>assistant\n"
    )
    history = [USER, CALL, *RESULTS]
    assert renderer.extend(renderer.encode("x<|im_end|>"), history[:2], history[2:], [LOOK]) is not None


def test_an_answer_is_parsed_into_reasoning_content_and_calls_as_the_model_spelled_them():
    renderer = tiny_renderer("thinking")
    text = (
        '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {"b":1,  "a": [2]}}\n</tool_call>'
    )
    message = renderer.parse(renderer.encode(text + "<|im_end|>"), [LOOK])
    assert message == Message(
        "assistant", "I look.", tool_calls=(ToolCall("", "look", '{"b":1,  "a": [2]}'),), reasoning="hm"
    )


@pytest.mark.parametrize(
    "block", ["<tool_call>{not json}</tool_call>", '<tool_call>{"arguments": {}}</tool_call>', "<tool_call>"]
)
def test_a_malformed_tool_call_stays_in_the_content(block):
    renderer = tiny_renderer("thinking")
    message = renderer.parse(renderer.encode(f"so: {block}<|im_end|>"), [LOOK])
    assert message == Message("assistant", f"so: {block}")


def test_tool_call_text_is_plain_text_when_no_tools_were_offered():
    renderer = tiny_renderer("thinking")
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    assert renderer.parse(renderer.encode(text + "<|im_end|>")) == Message("assistant", text)


def test_thinking_that_never_ended_is_all_reasoning():
    renderer = tiny_renderer("thinking")
    assert renderer.parse(renderer.encode("<think>\non and on")) == Message("assistant", "", reasoning="on and on")


def test_a_prompt_that_opens_the_thinking_is_known_when_the_answer_is_parsed():
    template = TEMPLATES["chatml"].replace("assistant\\n", "assistant\\n<think>\\n")
    renderer = GenericRenderer(tiny_tokenizer(), ChatTemplate(template, {}))
    ids = renderer.encode("hm\n</think>\n\nhi<|im_end|>")
    assert renderer.parse(ids) == Message("assistant", "hi", reasoning="hm")
    assert renderer.parse(renderer.encode("hm")) == Message("assistant", "", reasoning="hm")


@pytest.mark.parametrize("text", ["héllo 🙂 wörld 你好", "\ufffd", "answers\n\nthere", "🙂", ""])
def test_streamed_text_never_splits_a_character_and_adds_up(text):
    stream = tiny_tokenizer().stream()
    ids = tiny_tokenizer().encode(text)
    pieces = [stream.push([i]) for i in ids]
    assert "".join([*pieces, stream.finish()]) == text
    assert text == "\ufffd" or not any("\ufffd" in piece for piece in pieces)


def test_streamed_text_of_broken_bytes_equals_the_decoded_text():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("a🙂b")[:3] + tokenizer.encode("x") + tokenizer.encode("é")[:1]
    stream = tokenizer.stream()
    assert "".join([*(stream.push([i]) for i in ids), stream.finish()]) == tokenizer.decode(ids)


def test_special_tokens_are_left_out_of_text_and_markers_are_not():
    renderer = tiny_renderer("thinking")
    ids = renderer.encode("<|im_start|>a<think>b<|im_end|>")
    assert renderer.decode(ids) == "a<think>b"
    assert renderer.decode(ids, special=True) == "<|im_start|>a<think>b<|im_end|>"


def test_a_model_folder_without_tokenizer_or_template_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        GenericRenderer.load(tmp_path)
    tiny_tokenizer()._fast.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(FileNotFoundError, match="no chat template"):
        GenericRenderer.load(tmp_path)


def test_a_model_folder_is_loaded_with_its_end_tokens(tmp_path):
    tiny_tokenizer()._fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}", "eos_token": "e"}')
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    renderer = GenericRenderer.load(tmp_path)
    assert renderer.stop_token_ids == (7, 9, tiny_tokenizer().id_of("<|im_end|>"))


def test_templates_render_as_transformers_renders_them():
    transformers = pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    assert transformers is sys.modules["transformers"]
    source = (
        "  {% for m in messages %}\n{{ m.content | tojson }}{% generation %}{{ m.role }}{% endgeneration %}\n"
        "    {%- if loop.first %}{% continue %}{% endif %}\n{{ tools | tojson(indent=1) }}{% endfor %}\n"
    )
    tools = [LOOK]
    ours = ChatTemplate(source, {}).text([SYSTEM, Message("user", "<é>")], tools)
    theirs, _ = render_jinja_template(
        conversations=[[{"role": "system", "content": "be brief"}, {"role": "user", "content": "<é>"}]],
        tools=[
            {
                "type": "function",
                "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
            }
        ],
        chat_template=source,
    )
    assert ours == theirs[0]
