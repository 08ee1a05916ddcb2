"""Whole games over the wire, a training step of both agents, and the checker on the honest and the hacked reward."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from a3r.client.check import Options, Verdict, check_project, run_child
from swarmtune.rehearsal import Outage, Rehearsal
from tests.who_is_the_spy.spy_parts import EXAMPLE, ROOT, agents, house, static_endpoint, train

TASK = agents.make_tasks(agents.GameParameters(), 0)[0]


@pytest.fixture(scope="module")
def stage() -> Iterator[Rehearsal]:
    with Rehearsal() as running:
        yield running


def test_civilians_who_know_the_words_win_a_game_against_the_static_endpoint(stage: Rehearsal) -> None:
    played = stage.play(agents.agent_roll, TASK, house.reply, seed=1)
    assert played.error is None and played.reward == 1.0
    assert played.metrics["vote/against_other_side"] == 1.0 and played.metrics["vote/by_lot"] == 0.0
    assert len(played.turns) == 6, "three civilians described and voted; the spy played elsewhere"
    assert all(turn.messages[0]["content"].startswith("You are ") for turn in played.turns)


def test_silent_civilians_play_on_by_rule_and_it_is_counted(stage: Rehearsal) -> None:
    played = stage.play(agents.agent_roll, TASK, lambda messages: "", seed=1)
    assert played.error is None and played.reward in (0.0, 1.0)
    assert played.metrics["describe/forfeited"] == played.metrics["vote/by_lot"] == 1.0


def test_a_failing_endpoint_of_either_side_aborts_the_episode(stage: Rehearsal, monkeypatch) -> None:
    def fail(messages: object) -> str:
        raise Outage("rehearsed")

    assert stage.play(agents.agent_roll, TASK, fail, seed=1).error is not None
    monkeypatch.setenv(agents.OPPONENT_URL, "http://127.0.0.1:9/v1")
    assert "Connection" in type(stage.play(agents.agent_roll, TASK, house.reply, seed=1).error).__name__


def test_votes_may_be_tool_calls(stage: Rehearsal) -> None:
    def calls_the_tool(messages: list[dict[str, str]]) -> str:
        said = house.reply(messages)
        if not house.names_asked_for(messages[-1]["content"]):
            return said
        return f"<tool_call>\n{json.dumps({'name': 'vote', 'arguments': {'name': said}})}\n</tool_call>"

    task = TASK | {"game": TASK["game"] | {"tools": True, "answer_tokens": 64}}
    played = stage.play(agents.agent_roll, task, calls_the_tool, seed=1)
    assert played.error is None and played.metrics["vote/by_lot"] == 0.0, played


def test_the_static_endpoint_refuses_what_it_cannot_play() -> None:
    import httpx

    with static_endpoint.StaticEndpoint() as endpoint:
        for body in ("no json", "{}", '{"messages": []}', '{"messages": [{"role": "user", "content": "hello"}]}'):
            assert httpx.post(f"{endpoint.url}/chat/completions", content=body).status_code == 400


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "core"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


SCRIPTED = ["engine.kind=scripted", "model=tiny", "batch_tasks=2", "repeats=2"]


def test_one_training_step_of_agent_roll(tmp_path: Path) -> None:
    sets = [part for setting in SCRIPTED for part in ("--set", setting)]
    done = run_example(str(EXAMPLE / "train.py"), "--steps", "1", "--out", str(tmp_path), *sets)
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert {"reward/mean", "client/describe/forfeited", "client/vote/by_lot"} <= set(metrics)
    assert not metrics.get("merge/left_out_side"), "all civilians are trained"
    assert metrics["batch/rows"] == 8, "four episodes of two civilians, a row each"
    assert (tmp_path / "reward.png").stat().st_size > 1000


def test_mocked_games_warm_the_model_up_and_leave_a_step_for_the_games(tmp_path: Path) -> None:
    settings = [*SCRIPTED, "task.warm_up_steps=5", "task.warm_up_batch=4"]
    sets = [part for setting in settings for part in ("--set", setting)]
    done = run_example(str(EXAMPLE / "train.py"), "--steps", "3", "--out", str(tmp_path), *sets)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("sft/conversations") for row in rows] == [4.0, 4.0, None]
    assert "reward/mean" in rows[2]


def test_one_training_step_of_agent_roll_adv_on_two_servers(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    keys = dict(setting.split("=") for setting in SCRIPTED)
    config.write_text(json.dumps(keys | {"batch_tasks": 2, "repeats": 2}))
    done = run_example(
        str(EXAMPLE / "train_adversarial.py"), "--config", str(config), "--steps", "1", "--out", str(tmp_path / "out")
    )
    assert done.returncode == 0, done.stderr
    rates = {
        side: json.loads((tmp_path / "out" / f"{side}.jsonl").read_text().splitlines()[0])["reward/mean"]
        for side in ("civilian", "spy")
    }
    assert rates["civilian"] + rates["spy"] == pytest.approx(1.0), "one side's win is the other's loss"
    assert (tmp_path / "out" / "win_rate.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_honest_game_passes_the_checker() -> None:
    report = check_project(EXAMPLE, Options(limit_s=120.0, episodes=8))
    assert report.ok, report.as_dict()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("patched", [False, True])
def test_parroting_is_refused_and_its_patch_is_accepted(patched: bool, tmp_path: Path) -> None:
    copy = tmp_path / "who_is_the_spy"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if patched:
        subprocess.run(["git", "apply", "parroting/fix.patch"], cwd=copy, check=True, capture_output=True)
    child = run_child("play", (copy / "parroting").resolve(), Options(limit_s=120.0, episodes=16))
    stubs = next(r for r in child.records if r["kind"] == "end" and r["check"] == "stubs")
    if patched:
        assert stubs["verdict"] == Verdict.PASS, stubs
    else:
        assert stubs["verdict"] == Verdict.FAIL and "won without understanding" in stubs["sentence"]
        assert "model: " in stubs["details"]["transcript"]


def test_the_gpu_configuration_is_one() -> None:
    config = train.SCRIPT.resolve(yaml.safe_load((EXAMPLE / "gpu.yaml").read_text()))
    assert config.model == "Qwen/Qwen2.5-7B-Instruct" and config.batch_tasks == 16 and config.task.spies == 2
