"""Supervised warm-up through the server: given conversations are learned in ordinary steps of the run.

Rules:
1. The assistant's tokens are taught, its end token included, each in the context the model would be asked in.
2. Which conversations a step learns follows from the seed alone; a step that is trained again learns the same.
3. Each step is planned on disk before it is trained, and counts once, whatever is killed.
4. A warm-up id is one warm-up, however often it is sent.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarmtune.backend import UpdateFailed
from swarmtune.client import AsyncSwarmClient
from swarmtune.errors import SwarmError, TrainingFailed, TrainingFinished
from swarmtune.protocol import EngineState, WarmupRequest
from swarmtune.rendering.load import load_renderer
from swarmtune.testing import LocalServer, chatml_model
from swarmtune.warmup import Warmup, render_conversations

ASK = {"role": "user", "content": "hi"}
SAY = {"role": "assistant", "content": "yo"}
THINKING = (
    "{% for m in messages %}{% set text = m['content'] if loop.last or m['role'] != 'assistant' else "
    "m['content'].split('|')[-1] %}{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Strips what an earlier answer has before a bar."""


def conversations(count: int) -> list[Any]:
    return [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n}"}]}
        for n in range(count)
    ]


def request(count: int = 4, **fields: Any) -> WarmupRequest:
    return WarmupRequest.model_validate(
        {"warmup_id": "w", "conversations": conversations(count), "steps": 3, "batch_size": 2} | fields
    )


@pytest.fixture
def renderer(tmp_path: Path):
    return load_renderer(chatml_model(tmp_path / "plain"))


def taught(renderer, rows) -> list[str]:
    """The text under each row's mask."""
    return [
        renderer.decode([t for t, m in zip(r.token_ids, r.loss_mask, strict=True) if m], special=True) for r in rows
    ]


async def done(local: LocalServer, steps: int, warmup_id: str = "w") -> list[int]:
    async with asyncio.timeout(30):
        while True:
            view = await local.server.warmup_when(warmup_id, after=steps - 1, wait_s=5)
            if len(view.done) >= steps:
                return view.done


async def step_events(local: LocalServer, count: int) -> list[dict[str, Any]]:
    """The data of so many step events, once they are there."""
    async with asyncio.timeout(30):
        while True:
            found = [e.data for e in await local.server.events.after(0) if e.kind == "step"]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.01)


def test_every_answer_is_taught_with_its_end_token_and_nothing_else(renderer):
    (made,) = render_conversations([[ASK, SAY, ASK, SAY | {"content": "bye"}]], renderer, context_length=500)
    (row,) = made.samples
    assert taught(renderer, [row]) == ["yo<|im_end|>bye<|im_end|>"]
    prompt = renderer.decode(row.token_ids[: row.loss_mask.index(1)], special=True)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_shows_earlier_answers_otherwise_gives_a_row_per_answer(tmp_path: Path):
    renderer = load_renderer(chatml_model(tmp_path / "thinking", THINKING))
    said = [ASK, SAY | {"content": "hm|yo"}, ASK, SAY | {"content": "ha|bye"}]
    (made,) = render_conversations([said], renderer, context_length=500)
    assert taught(renderer, made.samples) == ["hm|yo<|im_end|>", "ha|bye<|im_end|>"]
    assert "assistant\nyo<|im_end|>" in renderer.decode(made.samples[1].token_ids, special=True)


def test_each_conversation_comes_once_a_round_and_none_twice_in_a_step(renderer):
    made = render_conversations(conversations(5), renderer, context_length=500)
    warmup = Warmup("w", steps=10, batch_size=3, lr=1e-3, seed=1, conversations=made)
    drawn = [[e.episode_id.split("/")[2] for e in warmup.batch(k, k + 1).episodes] for k in range(10)]
    assert all(len(set(step)) == 3 for step in drawn)
    assert {sum(step.count(str(n)) for step in drawn) for n in range(5)} == {6}
    assert warmup.batch(7, 9).episodes[0].episode_id == warmup.batch(7, 8).episodes[0].episode_id


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([ASK], r"conversations\[1\]\.messages: no assistant message"),
        ({"messages": [ASK, {"role": "robot", "content": "x"}]}, r"conversations\[1\]\.messages\[1\]\.role: .*robot"),
        ({"messages": [ASK, {"role": "assistant", "content": ""}]}, r"conversations\[1\]\.messages\[1\]\.content"),
        ({"messages": [ASK, {"role": "assistant", "content": 3}]}, r"conversations\[1\]\.messages\[1\]\.content"),
        ({"message": [ASK]}, r"conversations\[1\]\.message: unknown field"),
        ("hi", r"conversations\[1\]: must be"),
        ([ASK, SAY | {"content": "x" * 5000}], r"conversations\[1\]\.messages: .* tokens, and the context has"),
    ],
)
async def test_a_conversation_that_cannot_be_taught_is_named_by_index_and_field(local, wrong: Any, told: str):
    await local.boot()
    async with AsyncSwarmClient(local.url) as swarm:
        with pytest.raises(SwarmError, match=told) as caught:
            await swarm.warm_up([[ASK, SAY], wrong], steps=1)
    assert caught.value.code == "bad_request"
    assert local.server.status().step == 0


async def test_warm_up_steps_are_steps_of_the_run_and_open_episodes_go_on(local):
    await local.boot()
    grant = await local.claim("open")
    async with AsyncSwarmClient(local.url) as swarm:
        records = await swarm.warm_up(conversations(4), steps=3, batch_size=2, lr=1e-3)
    assert [r.step for r in records] == [r.weight_version for r in records] == [1, 2, 3]
    assert all(r.metrics["sft/loss"] > 0 and r.metrics["sft/conversations"] == 2 for r in records)
    assert not any("reward/mean" in r.metrics for r in records)
    await local.chat(grant.api_key)
    assert (await local.end(grant.episode_id)).outcome == "admitted"
    told = await step_events(local, 3)
    assert [e["metrics"]["sft/loss"] for e in told] == [r.metrics["sft/loss"] for r in records]


async def test_the_same_id_is_the_same_warm_up(local):
    await local.boot()
    await asyncio.gather(*(local.server.warm_up(request()) for _ in range(5)))
    await done(local, 3)
    assert (await local.server.warm_up(request())).done == [1, 2, 3]
    assert len(local.backend.trained_episodes) == 6
    assert local.server.status().step == 3


async def test_no_room_under_max_steps_is_refused(local):
    await local.boot(max_steps=2)
    async with AsyncSwarmClient(local.url) as swarm:
        with pytest.raises(TrainingFinished, match="leaves 2 steps"):
            await swarm.warm_up(conversations(2), steps=3)


async def test_an_unknown_warm_up_is_not_found(local):
    await local.boot()
    async with local.http.get("/v1/warmup/none") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")


async def test_an_engine_lost_in_the_middle_trains_the_lost_steps_again_and_none_twice(local):
    await local.boot(**{"checkpoint.every_steps": 2, "engine.script_update_s": 0.05})
    await local.server.warm_up(request(count=5, steps=7))
    await done(local, 3)
    local.backend.lose("kill -9")
    assert await done(local, 7) == [1, 2, 3, 4, 5, 6, 7]
    assert_each_step_once(local)


async def test_a_server_killed_in_the_middle_goes_on_and_trains_none_twice(tmp_path: Path, model: str):
    first = LocalServer(tmp_path / "data", model)
    await first.open()
    await first.boot(**{"checkpoint.every_steps": 2, "engine.script_update_s": 0.05})
    await first.server.warm_up(request(count=5, steps=7))
    await done(first, 3)
    frozen = copied(tmp_path / "data", tmp_path / "killed")  # what kill -9 at this moment leaves
    await first.close()
    async with LocalServer(frozen, model) as second:
        await second.server.status_when(leaves=EngineState.BOOTING, wait_s=30)
        assert (await second.server.warm_up(request(count=5, steps=7))).steps == 7
        assert await done(second, 7) == [1, 2, 3, 4, 5, 6, 7]
        assert_each_step_once(second)


def assert_each_step_once(local: LocalServer) -> None:
    """The weights hold each step's conversations once, those and in that order which the warm-up's seed says."""
    warmup = local.server.live_run().warmups["w"]
    reread = Warmup("w", 7, 2, warmup.lr, 0, [None] * 5)  # type: ignore[list-item]
    expected = [f"w/{position}/{index}" for position in range(7) for index in reread._order(position)]
    assert local.backend.trained_episodes == expected


def copied(folder: Path, to: Path) -> Path:
    from shutil import copytree

    return copytree(folder, to)


async def test_a_failing_update_ends_the_warm_up_with_its_reason_and_the_training_goes_on(local):
    await local.boot()
    local.backend.fail_next("train", UpdateFailed("a token beyond the vocabulary"))
    async with AsyncSwarmClient(local.url) as swarm:
        with pytest.raises(TrainingFailed, match="after 0 of 2 steps: a token beyond the vocabulary"):
            await swarm.warm_up(conversations(2), steps=2)
        records = await swarm.warm_up(conversations(2), steps=2)
    assert [r.step for r in records] == [1, 2]
