"""The engine verl down to veRL's actors: what is asked of them, and what is made of their answers.

veRL's LLMServerClient and CheckpointEngineManager are the real ones; servers, router and ranks are stand-ins.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError
from verl_actors import Recorded, output

from swarmtune.backend import ContextOverflow, GenerateFailed, RequestRefused, StartFailed
from swarmtune.config import ConfigError, TrainConfig
from swarmtune.engines import verl_cluster
from swarmtune.engines.process import ProcessBackend
from swarmtune.engines.verl import VerlEngine
from swarmtune.engines.vllm import ModelFacts
from swarmtune.trainer.worker import WorkersLost
from swarmtune.types import FinishReason, GenerateChunk, GenerateRequest, SamplingParams

Make = Callable[..., TrainConfig]
EOS = 99
FACTS = ModelFacts(
    vocabulary=100, context_length=64, eos_token_ids=frozenset([EOS]), decode=lambda tokens: "".join(map(chr, tokens))
)


class Rig:
    """An engine over recorded actors."""

    def __init__(self, config: TrainConfig, settings: Any) -> None:
        self.recorded = Recorded(config, settings, loop=asyncio.get_running_loop())
        self.ended: list[str] = []
        self.threads = ThreadPoolExecutor(max_workers=1)
        self.engine = VerlEngine(config, FACTS, self.recorded.cluster, self.threads, end_process=self.ended.append)

    @property
    def server(self):
        return self.recorded.server

    @property
    def calls(self):
        return self.recorded.calls

    async def started(self) -> Rig:
        await self.engine.load_weights(lambda: (), version=0)
        self.calls.clear()
        return self

    async def all(self, request: GenerateRequest) -> list[GenerateChunk]:
        return [chunk async for chunk in self.engine.generate(request)]


@pytest.fixture
async def rig(config: Make, settings: Any) -> AsyncIterator[Rig]:
    made = Rig(config(), settings)
    yield await made.started()
    made.threads.shutdown()


def request(number: int = 0, *, prompt: list[int] | None = None, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**({"max_tokens": 8} | sampling))
    return GenerateRequest(f"r{number}", prompt or [1, 2, 3], params, episode_id="episode-1")


def generates(rig: Rig) -> list[tuple]:
    return [call for call in rig.calls if call[0] == "generate"]


async def until(predicate: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not predicate():  # noqa: ASYNC110 - a recorder has no event
            await asyncio.sleep(0.001)


async def test_an_answer_has_its_tokens_logprobs_version_and_reason(rig: Rig):
    rig.server.answers = [output([5, 6, EOS], step=7)]
    (chunk,) = await rig.all(request(temperature=0.7, seed=11))
    assert chunk == GenerateChunk([5, 6, EOS], [-0.5, -0.6, -EOS / 10], 7, FinishReason.STOP)
    (_, _, prompt, params) = generates(rig)[0]
    assert prompt == [1, 2, 3]
    assert params == {
        "max_tokens": 8,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs": True,
        "stop_token_ids": [EOS],
        "ignore_eos": True,
        "seed": 11,
    }


async def test_an_answer_that_reaches_its_limit_says_so(rig: Rig):
    rig.server.answers = [output([5, 6])]
    (chunk,) = await rig.all(request(max_tokens=2))
    assert chunk.finish_reason == FinishReason.LENGTH


async def test_a_stop_string_ends_the_answer_where_it_is_complete(rig: Rig):
    rig.server.answers = [output([ord(c) for c in "ab!c"])]
    (chunk,) = await rig.all(request(stop=("b!",)))
    assert chunk.token_ids == [ord(c) for c in "ab!"]
    assert (chunk.stop_string, chunk.finish_reason) == ("b!", FinishReason.STOP)
    assert len(chunk.logprobs) == 3


async def test_turns_of_an_episode_go_to_one_server_by_the_routers_session(rig: Rig):
    rig.server.answers = [output([EOS]), output([EOS])]
    await rig.all(request(1))
    await rig.all(request(2))
    assert [call for call in rig.calls if call[0] == "acquire"] == [("acquire", "episode-1")] * 2
    names = [call[1] for call in generates(rig)]
    assert len(set(names)) == 2
    await until(lambda: rig.recorded.names().count("release") == 2)


async def test_a_client_that_hangs_up_aborts_its_request_and_no_other(rig: Rig):
    other = asyncio.create_task(rig.all(request(1)))
    gone = asyncio.create_task(rig.all(request(2)))
    await until(lambda: len(generates(rig)) == 2)
    gone.cancel()
    await asyncio.wait([gone])
    (aborted,) = [call for call in rig.calls if call[0] == "abort_request"]
    assert aborted[1].startswith("r2-")
    assert aborted[2] is False
    assert not other.done()
    other.cancel()
    await asyncio.wait([other])


async def test_an_update_cuts_answers_off_and_they_go_on_under_the_new_weights(rig: Rig):
    rig.server.answers = [output([5, 6], reason="aborted", step=0)]
    rig.server.step = 0
    running = asyncio.create_task(rig.all(request()))
    await until(lambda: len(generates(rig)) == 2)  # the first attempt was cut off at once, the second waits
    rig.calls.clear()
    await rig.engine.pause(drain_s=0.0)
    assert rig.recorded.names() == ["abort_all", "release", "sleep"]
    await rig.engine.load_weights(lambda: (), version=1)
    assert rig.recorded.names()[3:] == ["update_weights"]
    assert rig.calls[3] == ("update_weights", 1, "naive")
    assert rig.engine.weight_version == 1
    await asyncio.sleep(0)
    assert not generates(rig)
    rig.server.answers = [output([7, EOS], step=1)]
    await rig.engine.resume()
    chunks = await running
    assert [(c.token_ids, c.weight_version, c.finish_reason) for c in chunks] == [
        ([5, 6], 0, None),
        ([7, EOS], 1, FinishReason.STOP),
    ]
    (_, _, prompt, params) = generates(rig)[0]
    assert prompt == [1, 2, 3, 5, 6]
    assert params["max_tokens"] == 6
    assert "resume_generation" in rig.recorded.names()


async def test_a_paused_engine_lets_running_answers_finish_within_the_drain(rig: Rig):
    running = asyncio.create_task(rig.all(request()))
    await until(lambda: generates(rig))
    pausing = asyncio.create_task(rig.engine.pause(drain_s=30.0))
    await asyncio.sleep(0)
    assert "abort_all" not in rig.recorded.names()
    running.cancel()
    await asyncio.wait([running])
    await pausing


async def test_after_an_update_that_failed_colocated_replicas_get_their_weights_back(rig: Rig):
    await rig.engine.pause(drain_s=0.0)
    rig.calls.clear()
    await rig.engine.resume()
    assert rig.calls == [("update_weights", 0, "naive"), ("resume_generation",)]


async def test_replicas_on_their_own_gpus_never_sleep(config: Make, settings: Any):
    made = Rig(config(**{"engine.verl.placement": "separate"}), settings)
    await made.started()
    await made.engine.pause(drain_s=0.0)
    await made.engine.resume()
    assert made.recorded.names() == ["abort_all", "resume_generation"]


@pytest.mark.parametrize(
    ("sampling", "kind", "message"),
    [
        ({"max_tokens": 500}, ContextOverflow, "context of 64"),
        ({"grammar": "start: x"}, RequestRefused, "send no grammar"),
        ({"top_p": 0.9}, RequestRefused, "set sampling.top_p to 1"),
        ({"top_k": 5}, RequestRefused, "sampling.top_k to 0"),
        ({"top_logprobs": 2}, RequestRefused, "no top_logprobs"),
    ],
)
async def test_what_cannot_be_served_or_recorded_truly_is_refused(rig: Rig, sampling: dict, kind: type, message: str):
    with pytest.raises(kind, match=message):
        await rig.all(request(**sampling))
    assert not rig.calls


async def test_a_replica_that_raises_fails_its_request_and_goes_on(rig: Rig):
    rig.server.answers = [RayTaskError("generate", "Traceback\nValueError: no", ValueError("no")), output([EOS])]
    with pytest.raises(GenerateFailed, match="RayTaskError"):
        await rig.all(request(1))
    assert not rig.ended
    assert (await rig.all(request(2)))[0].token_ids == [EOS]


async def test_a_replica_that_died_ends_the_process(rig: Rig):
    rig.server.answers = [ActorDiedError()]
    with pytest.raises(GenerateFailed):
        await rig.all(request())
    assert len(rig.ended) == 1


async def test_tokens_without_logprobs_are_no_answer(rig: Rig):
    without = output([5, EOS])
    without.log_probs = None
    rig.server.answers = [without]
    with pytest.raises(GenerateFailed, match="2 tokens and 0 logprobs"):
        await rig.all(request())


async def test_weights_that_could_not_be_handed_over_are_an_error(rig: Rig):
    await rig.engine.pause(drain_s=0.0)
    rig.recorded.group.fails = ray.exceptions.RaySystemError("NCCL is gone")
    with pytest.raises(WorkersLost, match="NCCL is gone"):
        await rig.engine.load_weights(lambda: (), version=1)
    assert rig.recorded.cluster.is_lost
    with pytest.raises(WorkersLost):
        rig.recorded.cluster.call("call", ["policy"])


async def test_closing_aborts_what_runs_and_ends_the_cluster_once(rig: Rig):
    running = asyncio.create_task(rig.all(request()))
    await until(lambda: generates(rig))
    await rig.engine.close()
    await rig.engine.close()
    assert "abort_request" in rig.recorded.names()
    assert rig.recorded.closed == 1
    running.cancel()
    await asyncio.wait([running])


# -- machines that cannot


def test_a_machine_without_a_gpu_is_told_what_to_do(config: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(StartFailed, match=r"needs NVIDIA GPUs.*ray.address.*engine.kind vllm or hf"):
        verl_cluster.check_machine(config())


def test_too_few_gpus_are_counted(config: Make):
    separate = config(**{"engine.verl.placement": "separate", "engine.verl.rollout_gpus_per_node": 4}).engine.verl
    with pytest.raises(StartFailed, match="takes 5 GPUs and 4 are there"):
        verl_cluster.check_gpus(separate, 4)
    verl_cluster.check_gpus(separate, 5)


def test_a_missing_inference_package_is_named(config: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartFailed, match=r"'sglang' is not installed; pip install 'verl\[sglang\]"):
        verl_cluster.check_machine(config(**{"engine.verl.rollout": "sglang"}))


async def test_the_server_hears_why_it_did_not_start(config: Make, tmp_path: Path):
    from swarmtune import models

    backend = ProcessBackend()
    try:
        with pytest.raises(StartFailed, match="needs NVIDIA GPUs"):
            await backend.start(config(model=str(models.resolve("tiny"))), work_dir=tmp_path, resume=None)
    finally:
        await backend.stop()


async def test_an_unknown_override_is_found_before_anything_starts(config: Make, tmp_path: Path):
    wrong = config(**{"engine.verl.overrides": {"actor_rollout_ref.rollout.gpu_memory_utilisation": 0.4}})
    with pytest.raises(ConfigError, match=r"did you mean 'actor_rollout_ref.rollout.gpu_memory_utilization'"):
        verl_cluster.open_cluster(wrong, tmp_path, context_length=64, work_dir=tmp_path)
