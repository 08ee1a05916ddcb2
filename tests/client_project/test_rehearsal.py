"""The rehearsal: whole episodes in one process, each answered by its own function."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from swarmtune.rehearsal import BYTES_PER_TOKEN, Outage, Rehearsal

SDK = openai.OpenAI(api_key="each episode has its own", max_retries=0)
ASYNC_TASK = {"task_id": "async"}


def ask(episode: Any, question: str, max_tokens: int = 16) -> str:
    llm = SDK.with_options(base_url=episode.base_url, api_key=episode.api_key)
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    return (
        llm.chat.completions.create(model="m", messages=messages, max_tokens=max_tokens).choices[0].message.content
        or ""
    )


def length(task: str, episode: Any) -> tuple[float, dict[str, float]]:
    return float(len(ask(episode, f"{task}?"))), {"seed": float(episode.seed)}


def test_an_episode_has_its_reward_metrics_and_turns(stage: Rehearsal) -> None:
    played = stage.play(length, "a", lambda messages: "yes", seed=7)
    assert (played.reward, played.metrics, played.error) == (3.0, {"seed": 7.0}, None)
    (turn,) = played.turns
    assert [message["content"] for message in turn.messages] == ["Be brief.", "a?"] and turn.answer == "yes"


def test_episodes_at_the_same_time_are_answered_by_their_own_functions(stage: Rehearsal) -> None:
    parts = [(f"t{i}", lambda messages, i=i: "x" * i, i) for i in range(1, 20)]
    assert [played.reward for played in stage.play_all(length, parts)] == [float(i) for i in range(1, 20)]


def test_an_answer_is_cut_at_the_calls_limit(stage: Rehearsal) -> None:
    played = stage.play(length, "a", lambda messages: "x" * 1000)
    assert played.reward == 16 * BYTES_PER_TOKEN == len(played.turns[0].answer)


def test_a_rollout_may_end_its_episode_itself(stage: Rehearsal) -> None:
    def ends(task: str, episode: Any) -> None:
        ask(episode, "well?")
        episode.end(0.25)

    assert stage.play(ends, "a", lambda messages: "so").reward == 0.25


async def async_rollout(task: Any, episode: Any) -> float:
    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as llm:
        reply = await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "well?"}])
    return float(reply.choices[0].message.content == "so")


def test_a_rollout_may_be_async(stage: Rehearsal) -> None:
    assert stage.play(async_rollout, ASYNC_TASK, lambda messages: "so").reward == 1.0


def test_an_outage_reaches_the_agent_as_a_failing_call(stage: Rehearsal) -> None:
    def fail(messages: object) -> str:
        raise Outage("rehearsed")

    played = stage.play(length, "a", fail)
    assert isinstance(played.error, openai.InternalServerError) and played.reward is None


@pytest.mark.parametrize("reward", [[1.0], "1", float("nan"), None])
def test_what_is_no_reward_is_an_error_of_the_episode(reward: Any, stage: Rehearsal) -> None:
    played = stage.play(lambda task, episode: reward, "a", lambda messages: "")
    assert played.error is not None


def test_a_rollout_that_hangs_is_given_up(stage: Rehearsal) -> None:
    hang = threading.Event()
    played = stage.play(lambda task, episode: hang.wait(60.0), "a", lambda messages: "", timeout_s=0.2)
    hang.set()
    assert isinstance(played.error, TimeoutError)


def test_a_rehearsal_plays_inside_its_block_only() -> None:
    with pytest.raises(RuntimeError, match="inside its block"):
        Rehearsal().play(length, "a", lambda messages: "")
