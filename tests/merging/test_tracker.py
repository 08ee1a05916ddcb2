"""The tracker: whose turn an assistant message is, what is a retry, what may train, and why branches start."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tiny_models import tiny_renderer, tiny_tokenizer

from swarmtune.merger import ConservationViolated, check_conservation, merge
from swarmtune.rendering.renderer import TemplateRefused
from swarmtune.tracker import BreakReason, Tracker
from swarmtune.types import FinishReason, Message, Reply, ToolCall, ToolSpec

SYSTEM, USER = Message("system", "be brief"), Message("user", "what is in the inn")
MORE = Message("user", "and more")
LOOK = (ToolSpec("look", "Looks."),)
CALL = '<think>\nhm\n</think>\n\nso\n<tool_call>\n{"name": "look", "arguments": {"b":1,  "a": [2]}}\n</tool_call>'


@pytest.fixture
def tracker():
    return Tracker("episode", tiny_renderer("reordering"))


def ask(
    tracker,
    messages,
    text,
    *,
    tools=(),
    retry=False,
    delivered=True,
    finish=FinishReason.STOP,
    version=0,
    temperature=1.0,
):
    """One call: the turn, its record, and the message that the client got."""
    turn = tracker.prepare(messages, tools, retry=retry)
    ids = tiny_tokenizer().encode(text + ("<|im_end|>" if finish is FinishReason.STOP else ""))
    message = tracker.renderer.parse(ids, tools)
    calls = tuple(ToolCall(f"call-{turn.turn_id}-{i}", c.name, c.arguments) for i, c in enumerate(message.tool_calls))
    message = replace(message, tool_calls=calls, turn_id=turn.turn_id)
    reply = Reply(ids, [-0.25] * len(ids), [version] * len(ids), finish, text, message)
    record = tracker.commit(turn, reply, delivered=delivered, temperature=temperature)
    return turn, record, message


def said(tracker, turn):
    return tracker.renderer.decode(turn.prompt, special=True)


def anonymous(message, **changes):
    """A message as a client sends it that keeps none of our ids."""
    calls = tuple(replace(call, id=f"mine-{i}") for i, call in enumerate(message.tool_calls))
    return replace(message, turn_id=None, tool_calls=calls, **changes)


def test_a_conversation_goes_on_from_the_sampled_ids(tracker):
    odd = [i for c in "in the inn" for i in tiny_tokenizer().encode(c)]
    turn = tracker.prepare([USER])
    tracker.commit(turn, Reply(odd, [0.0] * len(odd), [0] * len(odd), FinishReason.LENGTH, "in the inn"))
    after = tracker.prepare([USER, Message("assistant", "in the inn"), MORE])
    assert after.prompt_token_ids[: len(turn.prompt)] == turn.prompt_token_ids
    assert after.prompt_token_ids[len(turn.prompt) :][: len(odd)] == odd
    assert said(tracker, after).endswith(
        "in the inn<|im_end|>\n<|im_start|>user\nand more<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("how", "change"),
    [
        ("ids", lambda m: m),
        ("ids", lambda m: replace(m, turn_id=None)),
        ("ids", lambda m: replace(m, tool_calls=(replace(m.tool_calls[0], arguments='{"a":[2],"b":1}'),))),
        ("ids", lambda m: replace(m, content="")),
        ("text", anonymous),
        ("loose", lambda m: anonymous(m, content="  so\n")),
    ],
)
def test_an_own_turn_is_recognised_and_continued(tracker, how, change):
    _, record, message = ask(tracker, [USER], CALL, tools=LOOK)
    after = tracker.prepare([USER, change(message), Message("tool", "red")], LOOK)
    assert (after.recognised_by, after.parent) == (how, record)


def test_reordered_arguments_without_ids_are_recognised_loosely(tracker):
    _, record, message = ask(tracker, [USER], CALL, tools=LOOK)
    echoed = anonymous(message)
    echoed = replace(echoed, tool_calls=(replace(echoed.tool_calls[0], arguments='{"a": [2], "b": 1}'),))
    after = tracker.prepare([USER, echoed, Message("tool", "red")], LOOK)
    assert (after.recognised_by, after.parent) == ("loose", record)


def test_the_client_decides_whether_the_prompt_shows_the_reasoning():
    for history, shown in (("as_templated", False), ("as_sampled", True)):
        tracker = Tracker("episode", tiny_renderer("reordering"), history=history)
        _, _, message = ask(tracker, [USER], CALL, tools=LOOK)
        turn, record, _ = ask(tracker, [USER, anonymous(message, reasoning=None), MORE], "7", tools=LOOK)
        assert turn.recognised_by == "loose"
        assert ("<think>" in said(tracker, turn)) is shown
        assert record.break_reason == (None if shown else BreakReason.TEMPLATE_STRIP)


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (BreakReason.EDITED_HISTORY, lambda m: replace(m, content="so not")),
        (
            BreakReason.TOOL_ARGUMENT_REWRITE,
            lambda m: replace(m, tool_calls=(replace(m.tool_calls[0], arguments='{"a": [3]}'),)),
        ),
    ],
)
def test_an_edited_answer_forks_and_is_context(tracker, reason, change):
    first = ask(tracker, [USER], CALL, tools=LOOK)
    turn, record, _ = ask(tracker, [USER, change(first[2]), Message("tool", "red")], "7", tools=LOOK)
    assert turn.parent is None and record.break_reason == reason and record.break_from is first[1]
    result = merge(tracker, match="text")
    assert [sample.call_ids for sample in result.samples] == [[first[1].turn_id], [record.turn_id]] or [
        sample.call_ids for sample in result.samples
    ] == [[record.turn_id], [first[1].turn_id]]
    row = next(s for s in result.samples if record.turn_id in s.call_ids)
    assert sum(row.loss_mask) == record.sampled_tokens


def test_an_assistant_message_that_no_model_wrote_is_never_trained(tracker):
    made_up = Message("assistant", "Got it. Thanks for the context!")
    _, record, _ = ask(tracker, [USER, made_up, MORE], "7")
    (sample,) = merge(tracker).samples
    trained = [i for i, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert trained == record.sampled_ids().tolist()
    assert [block.author for block in tracker.timelines()[0].blocks] == ["user", "env", "user", "llm"]


def test_an_undelivered_answer_is_delivered_again_whatever_else_the_request_says(tracker):
    _, record, message = ask(tracker, [USER], CALL, tools=LOOK, delivered=False)
    again = tracker.prepare([USER], LOOK)
    assert again.redelivery is not None and again.turn_id == record.turn_id
    assert again.redelivery.message == message
    assert merge(tracker).report.left_out == {"undelivered": 1}
    tracker.mark_delivered(again.turn_id)
    assert merge(tracker).report.left_out == {} and record.undelivered is None
    assert tracker.prepare([USER], LOOK).redelivery is None


def test_a_retry_of_a_delivered_answer_gets_it_again_with_its_ids(tracker):
    _, record, message = ask(tracker, [USER], CALL, tools=LOOK)
    again = tracker.prepare([USER], LOOK, retry=True)
    assert again.redelivery is not None
    assert (again.redelivery.message, again.redelivery.token_ids) == (message, record.sampled_ids().tolist())
    assert again.redelivery.logprobs == record.logprobs.tolist()


def test_a_retry_of_an_answer_that_a_stop_string_had_cut_replaces_it(tracker):
    turn = tracker.prepare([USER])
    ids = tiny_tokenizer().encode("7 END")
    cut = Message("assistant", "7 ", turn_id=turn.turn_id)
    tracker.commit(turn, Reply(ids, [-1.0] * len(ids), [0] * len(ids), FinishReason.STOP, "7 END", cut))
    again = tracker.prepare([USER], retry=True)
    assert again.redelivery is None and again.turn_id != turn.turn_id
    tracker.commit(again, Reply(ids, [-1.0] * len(ids), [0] * len(ids), FinishReason.STOP, "7 END", cut))
    result = merge(tracker)
    assert result.report.left_out == {"retried": 1}
    assert [sample.call_ids for sample in result.samples] == [[again.turn_id]]


def test_the_same_conversation_after_a_whole_delivery_is_a_new_sample(tracker):
    ask(tracker, [USER], "7")
    turn, record, _ = ask(tracker, [USER], "7")
    assert turn.redelivery is None and record.break_reason == BreakReason.RETRY
    assert len(merge(tracker, match="text").samples) == 2


def test_a_cancelled_generation_is_neither_delivered_again_nor_trained(tracker):
    _, record, _ = ask(tracker, [USER], "half", delivered=False, finish=FinishReason.ABORTED)
    assert tracker.prepare([USER]).redelivery is None
    tracker.discard(record, "client gone")
    tracker.discard(record, "client gone")
    unsent = tracker.prepare([USER])
    tracker.discard(unsent, "client gone")
    result = merge(tracker)
    assert result.samples == [] and result.report.left_out == {"client gone": 2}
    check_conservation(tracker, result.samples)


def test_an_answer_that_comes_back_was_delivered(tracker):
    _, record, message = ask(tracker, [USER], "7", delivered=False)
    ask(tracker, [USER, message, MORE], "8")
    assert record.delivered and len(merge(tracker).samples[0].call_ids) == 2


def test_a_title_call_is_a_side_call_whichever_came_first(tracker):
    title, _, _ = ask(tracker, [Message("system", "make a title"), USER], "Inns")
    main, _, message = ask(tracker, [SYSTEM, USER], CALL, tools=LOOK)
    _, later, _ = ask(tracker, [SYSTEM, USER, message, Message("tool", "red")], "7", tools=LOOK)
    memory = tracker.prepare([Message("system", "remember"), USER, message, MORE], (*LOOK, ToolSpec("keep")))
    assert (main.side, memory.side) == (False, True)
    result = merge(tracker)
    assert result.report.left_out == {"side": 1} and result.report.breaks == []
    assert [sample.call_ids for sample in result.samples] == [[main.turn_id, later.turn_id]]
    assert any(title.turn_id in s.call_ids for s in merge(tracker, include_side_calls=True).samples)


def test_a_system_prompt_that_changes_in_mid_conversation_does_not_make_a_side_call(tracker):
    _, _, message = ask(tracker, [SYSTEM, USER], CALL, tools=LOOK)
    turn, _, _ = ask(tracker, [Message("system", "it is noon"), USER, message, Message("tool", "red")], "7", tools=LOOK)
    assert not turn.side


def test_a_conversation_that_goes_on_without_its_tools_is_no_side_call(tracker):
    _, call, message = ask(tracker, [SYSTEM, USER], CALL, tools=LOOK)
    turn, last, _ = ask(tracker, [SYSTEM, USER, message, Message("tool", "red")], "7")
    assert not turn.side
    result = merge(tracker)
    assert result.report.left_out == {} and {i for s in result.samples for i in s.call_ids} == {
        call.turn_id,
        last.turn_id,
    }


def break_reasons(tracker):
    return [call.break_reason for call in tracker.calls]


def test_breaks_are_named():
    tracker = Tracker("episode", tiny_renderer("thinking"))
    _, _, first = ask(tracker, [SYSTEM, USER], CALL, tools=LOOK)
    result = Message("tool", "red")
    _, _, second = ask(tracker, [SYSTEM, USER, first, result], "7", tools=LOOK)
    ask(tracker, [SYSTEM, USER, first, result, second, MORE], "8", tools=LOOK)
    ask(tracker, [SYSTEM, USER, first, Message("tool", "blue")], "9", tools=LOOK)
    ask(tracker, [SYSTEM, Message("user", "so far: red")], "10", tools=LOOK)
    ask(tracker, [Message("system", "other"), USER], "11")
    assert break_reasons(tracker) == [
        None,
        None,
        BreakReason.TEMPLATE_STRIP,
        BreakReason.EDITED_HISTORY,
        BreakReason.COMPACTION,
        BreakReason.SUB_AGENT,
    ]
    breaks = merge(tracker, match="text", include_side_calls=True).report.breaks
    assert breaks[0].before.startswith("<think>\nhm") and not breaks[0].now.startswith("<think>")


def test_a_raw_prompt_continues_an_own_answer_and_says_when_text_was_split_otherwise(tracker):
    encode = tiny_tokenizer().encode
    turn = tracker.prepare_tokens(encode("count: "))
    odd = [i for c in "in the inn" for i in encode(c)]
    record = tracker.commit(turn, Reply(odd, [0.0] * len(odd), [0] * len(odd), FinishReason.LENGTH, "in the inn"))
    on = tracker.prepare_tokens([*turn.prompt, *odd, *encode(" and")])
    assert on.parent is record
    resplit = tracker.prepare_tokens(encode("count: in the inn and"))
    assert resplit.parent is None
    late = tracker.commit(resplit, Reply(encode("x"), [0.0], [0], FinishReason.LENGTH, "x"))
    assert late.break_reason == BreakReason.RESPLIT
    assert tracker.prepare_tokens(turn.prompt, retry=True).redelivery is not None


def test_a_template_strip_forks_where_the_thinking_was_and_text_merges_it():
    tracker = Tracker("episode", tiny_renderer("thinking"))
    _, _, first = ask(tracker, [USER], "<think>\nhm\n</think>\n\n7", version=1)
    turn, _, _ = ask(tracker, [USER, first, MORE], "8", version=2)
    assert "<think>" not in said(tracker, turn)
    assert len(merge(tracker, match="token").samples) == 2
    (sample,) = merge(tracker, match="text").samples
    assert tracker.renderer.decode(sample.token_ids).count("<think>") == 1
    assert sample.context_exact is not None and {
        version: exact
        for version, exact in zip(sample.weight_versions, sample.context_exact, strict=True)
        if version > 0
    } == {1: 1, 2: 0}
    report = merge(tracker, match="text").report
    assert report.inexact_tokens == 2 and report.rows == {"none": 2, "token": 2, "text": 1}
    json.dumps(report.to_dict())


def test_a_fork_names_the_sample_that_has_the_trunk(tracker):
    _, _, first = ask(tracker, [USER], "7")
    ask(tracker, [USER, first, MORE], "a long answer")
    ask(tracker, [USER, first, Message("user", "else")], "b")
    samples = merge(tracker).samples
    short, long = sorted(samples, key=lambda s: len(s.call_ids))
    assert (long.parent_id, short.parent_id) == (None, long.sample_id)


def test_a_row_of_several_temperatures_takes_the_most_frequent_and_is_counted(tracker):
    _, _, first = ask(tracker, [USER], "a long answer", temperature=0.7)
    ask(tracker, [USER, first, MORE], "b", temperature=1.0)
    result = merge(tracker)
    assert (result.samples[0].temperature, result.report.mixed_temperature_rows) == (0.7, 1)


def test_a_refused_conversation_leaves_no_trace():
    tracker = Tracker("episode", tiny_renderer("alternating"))
    _, _, first = ask(tracker, [USER], "7")
    before = tracker.memory_bytes()
    with pytest.raises(TemplateRefused, match="must alternate"):
        tracker.prepare([USER, first, MORE, MORE])
    assert tracker.memory_bytes() == before


def test_overlapping_calls_share_what_they_have_in_common(tracker):
    one, two = tracker.prepare([SYSTEM, USER]), tracker.prepare([SYSTEM, USER])
    ids = tiny_tokenizer().encode("7")
    records = [tracker.commit(t, Reply(ids, [-1.0], [0], FinishReason.LENGTH, "7")) for t in (one, two)]
    assert records[0].node.parent is records[1].node.parent
    assert [record.break_reason for record in records] == [None, BreakReason.RETRY]


def test_a_reply_without_one_logprob_and_version_per_token_is_refused(tracker):
    with pytest.raises(ValueError, match="1 tokens, 0 logprobs, 1 weight versions"):
        tracker.commit(tracker.prepare([USER]), Reply([1], [], [0], FinishReason.STOP))
    assert tracker.calls == []


@pytest.mark.parametrize(
    ("what", "spoil"),
    [
        ("token ids", lambda s: replace(s, token_ids=[*s.token_ids[:-1], 0])),
        ("logprobs", lambda s: replace(s, logprobs=[*s.logprobs[:-1], -9.0])),
        ("weight versions", lambda s: replace(s, weight_versions=[*s.weight_versions[:-1], 9])),
        ("token ids", lambda s: replace(s, loss_mask=[*s.loss_mask[:-1], 0])),
        ("differ in length", lambda s: replace(s, loss_mask=s.loss_mask[:-1])),
        ("trains twice", lambda s: replace(s, call_ids=[*s.call_ids, *s.call_ids])),
        ("in no sample", lambda s: None),
    ],
)
def test_conservation_names_what_is_wrong(tracker, what, spoil):
    ask(tracker, [USER], "7")
    (sample,) = merge(tracker).samples
    check_conservation(tracker, [sample])
    spoiled = spoil(sample)
    with pytest.raises(ConservationViolated, match=what):
        check_conservation(tracker, [spoiled] if spoiled else [])


def test_memory_is_bounded_per_token_and_per_call(tracker):
    messages = [SYSTEM, USER]
    for turn in range(60):
        _, _, message = ask(tracker, messages, f"{turn} " + "in the inn " * 40)
        messages = [*messages, message, Message("user", f"{turn} " + "go on " * 50)]
    stored = sum(len(node.tokens) for node in tracker.calls[-1].node.path())
    assert tracker.memory_bytes() <= 10 * stored + 2048 * len(tracker.calls)
