"""What merging guarantees, on generated episodes of up to 40 calls.

These rules decide training: to change one is a decision, not a fix.

1. Every sampled token of a call that may train has loss mask 1 in exactly one sample, with its own logprob and weight
   version.
2. The rows are those of Algorithm 1 as published, given the same timelines in merge order, token for token.
3. The number of rows is that of Algorithm 1 in whatever order the calls were collected.
4. The result does not depend on how independent calls interleaved.
5. A prompt begins with the whole context, as sampled, of the turn that it goes on from.
6. Under `token`, and under `text` wherever `context_exact` is 1, the tokens before an answer are the prompt that it was
   sampled after; where `context_exact` is 0 they are not.
7. A call that was not delivered, or was discarded, or is beside the main conversation, has loss mask 0 everywhere.
8. `prepare` changes nothing.
9. Equal answers to one prompt all train.
10. `text` never gives more rows than `token`, and `token` never more than there are calls.
11. With `as_sampled`, nothing that a template strips starts a branch.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import merge_timelines
from tiny_models import tiny_renderer

from scripts import orders, play, scripts
from swarmtune.merger import calls_to_train, check_conservation, merge, merge_order
from swarmtune.tracker import BreakReason, Tracker

profile = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
templates = st.sampled_from(["chatml", "thinking", "reordering", "merging_tools"])
policies = st.sampled_from(["token", "text"])
histories = st.sampled_from(["as_templated", "as_sampled"])


def tracker_for(template, history="as_templated"):
    return Tracker("episode", tiny_renderer(template), history=history)


def rows(samples):
    return sorted(
        (s.token_ids, s.loss_mask, s.logprobs, s.weight_versions, s.context_exact or [1] * len(s.token_ids))
        for s in samples
    )


@settings(profile, max_examples=500)
@given(scripts(), templates, histories)
def test_rows_are_those_of_algorithm_1(script, template, history):
    tracker = play(script, tracker_for(template, history)).tracker
    timelines = {timeline.call_id: timeline for timeline in tracker.timelines()}
    collected = [call.turn_id for call in calls_to_train(tracker, include_side_calls=True)]
    for match in ("token", "text"):
        samples = merge(tracker, match=match, include_side_calls=True).samples
        order = merge_order(tracker, match=match, include_side_calls=True)
        assert sorted(order) == sorted(collected)
        expected = merge_timelines([timelines[turn_id] for turn_id in order], match)
        for field in ("token_ids", "loss_mask", "logprobs", "weight_versions"):
            got = [getattr(sample, field) for sample in samples]
            assert got == [[x for block in t.blocks for x in getattr(block, field)] for t in expected], (match, field)
        assert len(merge_timelines([timelines[turn_id] for turn_id in collected], match)) == len(samples)


@settings(profile, max_examples=500)
@given(scripts(unique=False), templates, histories, st.booleans())
def test_every_sampled_token_trains_exactly_once(script, template, history, side):
    played = play(script, tracker_for(template, history))
    for match in ("token", "text"):
        result = merge(played.tracker, match=match, include_side_calls=side)
        check_conservation(played.tracker, result.samples, include_side_calls=side)
        trained = [turn_id for sample in result.samples for turn_id in sample.call_ids]
        allowed = [
            call.turn_id
            for call in played.tracker.calls
            if call.delivered
            and call.discarded is None
            and call.sampled_tokens
            and (side or not played.tracker.is_side(call.profile, resumes=call.resumes))
        ]
        assert sorted(trained) == sorted(allowed)
        assert result.report.calls + sum(result.report.left_out.values()) == len(played.tracker.calls)
        assert result.report.rows["text"] <= result.report.rows["token"] <= result.report.rows["none"]


@settings(profile, max_examples=150)
@given(scripts(), templates, histories, policies)
def test_context_exact_says_whether_an_answer_follows_the_prompt_it_was_sampled_after(script, template, history, match):
    played = play(script, tracker_for(template, history))
    prompt_of = {call.turn_id: prompt for call, prompt in zip(played.calls, played.prompts, strict=True)}
    for sample in merge(played.tracker, match=match, include_side_calls=True).samples:
        exact = sample.context_exact or [1] * len(sample.token_ids)
        assert match == "text" or all(exact)
        position = 0
        for turn_id in sample.call_ids:
            call = played.tracker.call(turn_id)
            position = sample.loss_mask.index(1, position)
            assert (sample.token_ids[:position] == prompt_of[turn_id]) == bool(exact[position])
            position += call.sampled_tokens


@settings(profile, max_examples=150)
@given(st.data(), scripts(most=16), templates, histories, policies)
def test_the_result_does_not_depend_on_how_calls_interleaved(data, script, template, history, match):
    script = [step if step.delivered else type(step)(**{**vars(step), "delivered": True}) for step in script]
    one = play(script, tracker_for(template, history)).tracker
    other = play(script, tracker_for(template, history), data.draw(orders(script))).tracker
    assert rows(merge(one, match=match, include_side_calls=True).samples) == rows(
        merge(other, match=match, include_side_calls=True).samples
    )


@settings(profile, max_examples=150)
@given(scripts(unique=False), templates, histories)
def test_a_prompt_begins_with_the_context_that_was_really_sampled(script, template, history):
    tracker = tracker_for(template, history)
    seen = []

    def prepare(messages, tools=(), **options):
        before = (len(tracker.calls), dict(tracker._nodes), tracker.memory_bytes())
        turn = Tracker.prepare(tracker, messages, tools, **options)
        assert before == (len(tracker.calls), dict(tracker._nodes), tracker.memory_bytes())
        assert turn.prompt == Tracker.prepare(tracker, messages, tools, **options).prompt
        if turn.parent is not None:
            context = turn.parent.node.context()
            seen.append(turn.prompt[: len(context)] == context)
        return turn

    tracker.prepare = prepare  # type: ignore[method-assign]
    play(script, tracker)
    assert all(seen)


@settings(profile, max_examples=100)
@given(scripts(), st.sampled_from(["thinking", "reordering"]))
def test_as_sampled_never_branches_for_what_a_template_strips(script, template):
    played = play(script, tracker_for(template, "as_sampled"))
    assert not [call for call in played.calls if call.break_reason is BreakReason.TEMPLATE_STRIP and call.break_from]


@pytest.mark.parametrize("match", ["token", "text"])
def test_an_empty_episode_gives_no_rows(match):
    result = merge(tracker_for("chatml"), match=match)
    assert result.samples == [] and result.report.ratio == 1.0
