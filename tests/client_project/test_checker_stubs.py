"""Rewards that can be won without understanding are refused with the transcript; honest ones are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from a3r.client.probe import Checks, Failed, Player, Records
from a3r.client.project import Project
from a3r.client.verdicts import ALPHA, EPISODES, MARGIN, compare
from swarmtune.script import Script

SDK = openai.OpenAI(api_key="each episode has its own", max_retries=0)
PROMPT = "Which is larger, {a} or {b}? Write it as <answer>number</answer>."


def tasks(parameters: Any, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    pairs = [rng.sample(range(10, 100), 2) for _ in range(40)]
    return [{"task_id": f"{i}", "a": a, "b": b, "larger": str(max(a, b))} for i, (a, b) in enumerate(pairs)]


def random_answer(task: dict[str, Any], messages: Any, rng: random.Random) -> str:
    return f"<answer>{rng.choice([task['a'], task['b']])}</answer>"


def good_answer(task: dict[str, Any], messages: Any) -> str:
    return f"<answer>{task['larger']}</answer>"


def checks_of(
    reward: Callable[[str, dict[str, Any]], float],
    player: Player,
    tmp_path: Path,
    *,
    declared: bool = True,
    answer_tokens: int = 64,
) -> Checks:
    """The checks of a client with this reward, its tasks made."""

    def rollout(task: dict[str, Any], episode: Any) -> float:
        llm = SDK.with_options(base_url=episode.base_url, api_key=episode.api_key)
        messages: Any = [{"role": "user", "content": PROMPT.format(**task)}]
        said = llm.chat.completions.create(model="m", messages=messages, max_tokens=answer_tokens)
        return reward(said.choices[0].message.content or "", task)

    script = Script(name="larger", tasks=tasks, rollout=rollout, defaults={"model": "tiny"})
    project = Project(
        tmp_path, script, script.resolve({}), random_answer if declared else None, good_answer if declared else None
    )
    checks = Checks(lambda: project, Records(tmp_path / "records.jsonl"), player, 48)
    checks.imports()
    checks.tasks()
    return checks


def honest(said: str, task: dict[str, Any]) -> float:
    return float(said.strip() == f"<answer>{task['larger']}</answer>")


def copying_wins_the_first(said: str, task: dict[str, Any]) -> float:
    return float(task["larger"] in said) if int(task["task_id"]) < 4 else honest(said, task)


def honest_and_brief(said: str, task: dict[str, Any]) -> float:
    return honest(said, task) - 0.001 * len(said)


def long(said: str, task: dict[str, Any]) -> float:
    return len(said) / 100


def brief(said: str, task: dict[str, Any]) -> float:
    return honest(said, task) - 0.05 * len(said)


def form_only(said: str, task: dict[str, Any]) -> float:
    return float("<answer>" in said and "</answer>" in said)


def form_counts_most(said: str, task: dict[str, Any]) -> float:
    return 0.8 * form_only(said, task) + 0.2 * honest(said, task)


def contains(said: str, task: dict[str, Any]) -> float:
    return float(task["larger"] in said)


def anything(said: str, task: dict[str, Any]) -> float:
    return 1.0


@pytest.mark.parametrize("reward", [honest_and_brief, form_counts_most, copying_wins_the_first])
def test_a_reward_that_is_honest_in_the_main_passes(reward, player: Player, tmp_path: Path) -> None:
    checks = checks_of(reward, player, tmp_path)
    assert "stub policies earn no more" in checks.stubs()
    assert "good answers earn" in checks.learnable()


@pytest.mark.parametrize("declared", [True, False])
def test_an_honest_reward_passes_with_and_without_a_baseline_of_its_own(
    declared: bool, player: Player, tmp_path: Path
) -> None:
    assert "stub policies earn no more" in checks_of(honest, player, tmp_path, declared=declared).stubs()


@pytest.mark.parametrize(
    ("reward", "winner"),
    [
        (long, "a long constant"),
        (brief, "empty"),
        (contains, "copy of the prompt"),
    ],
)
def test_a_reward_that_a_stub_wins_is_refused_with_its_transcript(
    reward, winner: str, player: Player, tmp_path: Path
) -> None:
    with pytest.raises(Failed, match="won without understanding") as refused:
        checks_of(reward, player, tmp_path).stubs()
    assert any(name.startswith(winner) for name in refused.value.details["won"])
    transcript = refused.value.details["transcript"]
    assert "Which is larger" in transcript and "random baseline, the same task and seed" in transcript


def test_a_copy_wins_also_where_the_limit_of_an_answer_cuts_the_prompt_before_the_choices(
    player: Player, tmp_path: Path
) -> None:
    with pytest.raises(Failed, match="won without understanding") as refused:
        checks_of(contains, player, tmp_path, answer_tokens=6).stubs()
    assert refused.value.details["won"] == ["copy of what is particular to the prompt"]


@pytest.mark.parametrize("reward", [form_only, contains, long])
def test_it_is_refused_without_a_declared_baseline_too(reward, player: Player, tmp_path: Path) -> None:
    with pytest.raises(Failed, match="won without understanding"):
        checks_of(reward, player, tmp_path, declared=False).stubs()


@pytest.mark.parametrize("reward", [anything, form_only])
def test_a_reward_that_cannot_tell_good_answers_from_random_ones_is_refused(
    reward, player: Player, tmp_path: Path
) -> None:
    with pytest.raises(Failed, match="the reward must tell them apart"):
        checks_of(reward, player, tmp_path).learnable()


def test_a_reward_that_raises_for_some_late_task_is_found(player: Player, tmp_path: Path) -> None:
    def breaks_late(said: str, task: dict[str, Any]) -> float:
        return honest(said, task) / (int(task["task_id"]) - 39)

    with pytest.raises(Failed, match=r"raised ZeroDivisionError.*task '39'"):
        checks_of(breaks_late, player, tmp_path).stubs()


def test_a_constant_reward_without_a_good_answer_is_refused(player: Player, tmp_path: Path) -> None:
    checks = checks_of(anything, player, tmp_path, declared=False)
    checks.stubs()
    with pytest.raises(Failed, match="the same whatever was answered"):
        checks.learnable()


# ---- the statistics --------------------------------------------------------------------------------------------------

COMPARED = 15


def refused(rng: random.Random, stub: float, baseline: float) -> bool:
    """Whether any of the stubs, all of which succeed with chance `stub`, is refused against a `baseline` of 0/1."""
    against = [float(rng.random() < baseline) for _ in range(EPISODES)]
    return any(
        compare(
            [float(rng.random() < stub) for _ in range(EPISODES)], against, to_win=1.0 - baseline, comparisons=COMPARED
        ).wins
        for _ in range(COMPARED)
    )


@pytest.mark.parametrize(("stub", "baseline"), [(0.5, 0.5), (0.1, 0.05), (0.3, 0.25), (0.02, 0.0)])
def test_stubs_as_good_as_chance_are_seldom_refused(stub: float, baseline: float) -> None:
    rng = random.Random(1)
    assert sum(refused(rng, stub, baseline) for _ in range(200)) / 200 <= ALPHA


@pytest.mark.parametrize(("stub", "baseline"), [(1.0, 0.5), (0.6, 0.1), (0.5, 0.0)])
def test_a_stub_that_wins_half_of_what_there_is_to_win_is_found(stub: float, baseline: float) -> None:
    rng = random.Random(2)
    assert sum(refused(rng, stub, baseline) for _ in range(100)) / 100 >= 0.99


def test_the_margin_is_a_share_of_what_there_is_to_win() -> None:
    ahead = compare([0.05] * 20, [0.0] * 20, to_win=1.0, comparisons=1)
    assert not ahead.wins and ahead.margin == MARGIN
    assert compare([0.05] * 20, [0.0] * 20, to_win=0.2, comparisons=1).wins
