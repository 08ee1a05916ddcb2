"""`swarmtune checkpoints …` and `swarmtune evaluations`, against run folders and a running server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from checkpoint_parts import step, steps_on_disk
from click.testing import Result
from typer.testing import CliRunner

from swarmtune.cli import app
from swarmtune.protocol import EvaluationOutcome, EvaluationRequest, Spread
from swarmtune.testing import LocalServer

KEEP = {"checkpoint.keep_last": 9}


def swarmtune(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture
async def left_run(tmp_path: Path, model: str) -> Path:
    """A run of three steps whose server is gone."""
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot(**KEEP)
        for rewards in ((0.0, 0.2), (0.0, 1.0), (0.0, 0.4)):
            await step(local, rewards)
    return tmp_path / "data" / "runs" / "0001"


async def test_list_shows_the_checkpoints_of_a_run_without_its_server(left_run: Path) -> None:
    listed = swarmtune("checkpoints", "list", str(left_run.parents[1]))
    assert listed.exit_code == 0, listed.output
    rows = [line.split()[:4] for line in listed.output.splitlines()]
    assert rows == [
        ["step", "MB", "reward/mean", "kept"],
        ["1", "0.0", "0.5", "last"],
        ["2", "0.0", "0.2", "last"],
        ["3", "0.0", "–", "last"],
    ]
    told = json.loads(swarmtune("checkpoints", "list", str(left_run), "--json").output)
    assert [(v["step"], v["score"]) for v in told] == [(1, 0.5), (2, 0.2), (3, None)]
    assert all(Path(v["path"]).is_dir() for v in told)


async def test_list_and_save_ask_a_running_server(tmp_path: Path, model: str) -> None:
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot(**KEEP, **{"checkpoint.every_steps": 0})
        await step(local)
        saved = await asyncio.to_thread(swarmtune, "checkpoints", "save", "--url", local.url)
        assert (saved.exit_code, saved.output.split(":")[0]) == (0, "step 1"), saved.output
        listed = await asyncio.to_thread(swarmtune, "checkpoints", "list", "--url", local.url, "--json")
        assert [v["step"] for v in json.loads(listed.output)] == [1]
        assert steps_on_disk(tmp_path / "data" / "runs" / "0001") == [1]


async def test_a_run_can_be_listed_while_its_server_writes_it(tmp_path: Path, model: str) -> None:
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot(**KEEP)
        await step(local)
        listed = await asyncio.to_thread(swarmtune, "checkpoints", "list", str(tmp_path), "--json")
        assert [v["step"] for v in json.loads(listed.output)] == [1]
        assert await step(local) == 2


async def test_prune_keeps_what_it_is_told_and_the_run_goes_on(left_run: Path, model: str) -> None:
    dry = swarmtune("checkpoints", "prune", str(left_run), "--keep-best", "1", "--dry-run")
    assert (dry.exit_code, steps_on_disk(left_run)) == (0, [1, 2, 3])
    assert "would remove 2; left: 1, 3" in dry.output
    done = swarmtune("checkpoints", "prune", str(left_run), "--keep-best", "1")
    assert (done.exit_code, steps_on_disk(left_run)) == (0, [1, 3]), done.output
    async with LocalServer(left_run.parents[1], model) as local:
        await local.server.status_when(leaves="booting", wait_s=30)
        assert [v.step for v in local.server.checkpoints()] == [1, 3]
        assert await step(local) == 4


async def test_prune_takes_every_run_below_a_folder(left_run: Path) -> None:
    done = swarmtune("checkpoints", "prune", str(left_run.parents[2]), "--all")
    assert (done.exit_code, steps_on_disk(left_run)) == (0, []), done.output
    assert done.output.splitlines()[-1].endswith("MB freed")


async def test_prune_leaves_a_live_run_alone(tmp_path: Path, model: str) -> None:
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot(**KEEP)
        await step(local)
        await step(local)
        done = await asyncio.to_thread(swarmtune, "checkpoints", "prune", str(tmp_path))
        assert done.exit_code == 1 and "live server" in done.output
        assert steps_on_disk(tmp_path / "data" / "runs" / "0001") == [1, 2]


async def test_prune_of_everything_must_be_said(left_run: Path) -> None:
    refused = swarmtune("checkpoints", "prune", str(left_run), "--keep-last", "0")
    assert (refused.exit_code, steps_on_disk(left_run)) == (2, [1, 2, 3])


async def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal.db").write_text("of something else")
    refused = swarmtune("checkpoints", "list", str(tmp_path))
    assert refused.exit_code == 1 and "no run of a swarm server is there" in refused.output


async def test_the_table_of_evaluations_has_a_line_for_each(tmp_path: Path, model: str) -> None:
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot()
        await local.server.begin_evaluation(EvaluationRequest(evaluation_id="a", name="test", tasks=2, k=2))
        mean, passed = Spread(value=0.5, low=0.25, high=0.75), {1: Spread(value=0.5), 2: Spread(value=0.75)}
        outcome = EvaluationOutcome(episodes=3, failed=1, mean=mean, pass_at=passed)
        await local.server.finish_evaluation("a", outcome)
        await local.server.begin_evaluation(EvaluationRequest(evaluation_id="b", name="later", tasks=2, k=2))
        await local.server.begin_evaluation(EvaluationRequest(evaluation_id="c", name="many", tasks=2, k=9))
        many = EvaluationOutcome(episodes=18, mean=mean, pass_at={k: Spread(value=k / 10) for k in range(1, 10)})
        await local.server.finish_evaluation("c", many)
        await local.server.begin_evaluation(EvaluationRequest(evaluation_id="d", name="none", tasks=2, k=1))
        await local.server.finish_evaluation("d", EvaluationOutcome(episodes=0, failed=2))
        shown = await asyncio.to_thread(swarmtune, "evaluations", "--url", local.url)
        told = await asyncio.to_thread(swarmtune, "evaluations", "--url", local.url, "--name", "test", "--json")
    lines = [" ".join(line.split()) for line in shown.output.splitlines()]
    assert lines[1] == "0 test 0.500 0.250 … 0.750 @1 0.500 @2 0.750 3 1 failed"
    assert lines[2].startswith("0 later runs")
    assert lines[3] == "0 many 0.500 0.250 … 0.750 @1 0.100 @2 0.200 @4 0.400 @8 0.800 @9 0.900 18"
    assert lines[4] == "0 none – 0 2 failed"
    assert [(r["name"], r["mean"]["value"]) for r in json.loads(told.output)] == [("test", 0.5)]
