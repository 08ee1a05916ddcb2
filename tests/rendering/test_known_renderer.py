"""Families of the library `renderers` under our contract, on a tokenizer that has their special tokens."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from tiny_models import TEMPLATES, tiny_tokenizer

pytest.importorskip("renderers")

from swarmtune.rendering.generic import GenericRenderer
from swarmtune.rendering.known import KnownRenderer, family_of
from swarmtune.rendering.load import load_renderer
from swarmtune.rendering.renderer import TemplateRefused
from swarmtune.types import Message, ToolCall, ToolSpec

SYSTEM = Message("system", "be brief")
USER, ANSWER = Message("user", "hello there"), Message("assistant", "hi")
LOOK = [ToolSpec("look", "Looks.", {"type": "object"})]


@pytest.fixture(scope="module")
def renderer():
    return KnownRenderer(tiny_tokenizer(), "qwen3")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "Qwen" / "Qwen3-0.6B"
    path.mkdir(parents=True)
    tiny_tokenizer()._fast.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATES["thinking"])
    return path


def test_it_continues_from_the_sampled_ids_with_spans(renderer):
    prompt = renderer.render([USER])
    prefix = prompt.token_ids + renderer.encode("hi<|im_end|>")
    added = renderer.extend(prefix, [USER, ANSWER], [Message("tool", "red"), Message("tool", "blue")], LOOK)
    assert added is not None
    texts = [renderer.decode(added.token_ids[slice(*span)], special=True) for span in added.spans]
    assert "red" in texts[0] and "blue" in texts[1]
    assert renderer.decode(added.token_ids[added.spans[-1][1] :], special=True) == "<|im_start|>assistant\n"


def test_keep_continues_where_the_family_would_rewrite(renderer):
    prefix = renderer.render([USER]).token_ids + renderer.encode("<think>\nhm\n</think>\n\nhi<|im_end|>")
    thought = replace(ANSWER, reasoning="hm")
    assert renderer.extend(prefix, [USER, thought], [USER]) is None
    added = renderer.extend(prefix, [USER, thought], [USER], keep=True)
    assert added is not None
    text = renderer.decode(added.token_ids, special=True)
    assert text == "\n<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_cut_off_by_length_is_closed(renderer):
    prefix = renderer.render([USER], LOOK).token_ids + renderer.encode("hi")
    added = renderer.extend(prefix, [USER, ANSWER], [Message("tool", "red")], LOOK)
    assert added is not None and renderer.decode(added.token_ids, special=True).startswith("<|im_end|>\n")


def test_an_assistant_message_ends_with_its_end_token(renderer):
    rendered = renderer.render([USER, ANSWER, USER])
    texts = [renderer.decode(rendered.token_ids[slice(*span)], special=True) for span in rendered.spans]
    assert texts[1].endswith("hi<|im_end|>") and texts[2].startswith("\n<|im_start|>user")


def test_calls_keep_the_models_spelling_and_broken_ones_stay_text(renderer):
    call = '<tool_call>\n{"name": "look", "arguments": {"b":1,  "a": 2}}\n</tool_call>'
    message = renderer.parse(renderer.encode(f"<think>\nhm\n</think>\n\nso\n{call}<|im_end|>"), LOOK)
    assert message.tool_calls == (ToolCall("", "look", '{"b":1,  "a": 2}'),)
    assert (message.reasoning or "").strip() == "hm" and message.content.strip() == "so"
    broken = renderer.parse(renderer.encode("so\n<tool_call>\n{no}\n</tool_call><|im_end|>"), LOOK)
    assert broken.tool_calls == () and "<tool_call>\n{no}\n</tool_call>" in broken.content


def test_what_the_family_does_not_take_is_a_refusal(renderer):
    with pytest.raises(TemplateRefused):
        renderer.render([])


def test_the_family_is_told_by_the_hub_id(folder, tmp_path):
    assert family_of(folder) == "qwen3"
    assert load_renderer(folder).name == "qwen3"
    assert isinstance(load_renderer(folder, "generic"), GenericRenderer)
    cached = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "abc"
    assert family_of(cached) == "qwen3"
    assert family_of(tmp_path / "mine") is None


def test_an_unknown_family_names_the_known_ones(folder):
    with pytest.raises(ValueError, match=r"unknown renderer 'qwen99'; known: generic, .*qwen3"):
        load_renderer(folder, "qwen99")


def test_a_family_that_the_tokenizer_does_not_fit_says_so(folder):
    with pytest.raises(ValueError, match=r"'llama-3' does not fit this model's tokenizer"):
        load_renderer(folder, "llama-3")


def test_loading_a_renderer_imports_neither_torch_nor_transformers(folder):
    code = (
        "import sys; from swarmtune.rendering.load import load_renderer; "
        f"load_renderer({str(folder)!r}); load_renderer({str(folder)!r}, 'generic'); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    import swarmtune

    source = str(__import__("pathlib").Path(swarmtune.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": source}, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_later_system_message_is_the_users_in_a_family_that_takes_one_only_at_the_beginning():
    refusing = KnownRenderer(tiny_tokenizer(), "nemotron-3")
    rendered = refusing.render([SYSTEM, USER, SYSTEM, USER])
    text = refusing.decode(rendered.token_ids, special=True)
    assert text.count("<|im_start|>system") == 1 and text.count("<|im_start|>user") == 3
