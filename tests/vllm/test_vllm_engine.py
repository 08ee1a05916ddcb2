"""The engine vllm over stand-ins: routing, weights, deaths, refusals. Rules, by number:

1. Calls of one episode go to one server; a first call goes to the least loaded one.
2. No token is lost, doubled or mislabelled, whatever dies or changes while it is generated.
3. A server answers nothing until it has the current weights.
4. A generation fails only when a server that is well fails it again and again, or servers die of it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable

import pytest
from conftest import make_config, tensors
from stand_in import StandIn

from swarmtune.backend import ContextOverflow, GenerateFailed, RequestRefused, StartFailed
from swarmtune.engines import vllm, vllm_replicas
from swarmtune.engines.vllm import VllmEngine
from swarmtune.types import FinishReason, GenerateChunk, GenerateRequest, SamplingParams

PROMPT = list(range(10))
SAFETY_S = 30.0


def request(episode: str = "", tokens: int = 8, *, lane="train", **sampling) -> GenerateRequest:
    return GenerateRequest("r", PROMPT, SamplingParams(max_tokens=tokens, **sampling), episode_id=episode, lane=lane)


async def ask(engine: VllmEngine, *args, **sampling) -> list[GenerateChunk]:
    async with asyncio.timeout(SAFETY_S):
        return [chunk async for chunk in engine.generate(request(*args, **sampling))]


def tokens(chunks: list[GenerateChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def assert_true(chunks: list[GenerateChunk], count: int) -> None:
    """Rule 2: the stand-in's tokens say what they are."""
    said = tokens(chunks)
    assert [token % 1000 for token in said] == list(range(len(PROMPT), len(PROMPT) + count))
    assert [token // 1000 for token in said] == [chunk.weight_version for chunk in chunks for _ in chunk.token_ids]
    assert len([p for chunk in chunks for p in chunk.logprobs]) == count


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SAFETY_S):
        while not condition():  # noqa: ASYNC110 - a stand-in sets no events
            await asyncio.sleep(0.005)


async def start_stream(engine: VllmEngine, *args, **sampling) -> tuple[AsyncIterator[GenerateChunk], asyncio.Task]:
    """A generation that is under way, and the task that collects it."""
    chunks: list[GenerateChunk] = []

    async def collect() -> list[GenerateChunk]:
        async for chunk in engine.generate(request(*args, **sampling)):
            chunks.append(chunk)
        return chunks

    task = asyncio.create_task(collect())
    await until(lambda: chunks)
    return chunks, task


async def test_answer_is_streamed_with_its_logprobs_and_version(make_engine):
    chunks = await ask(await make_engine(StandIn()))
    assert_true(chunks, 8)
    assert len(chunks) == 8
    assert [c.finish_reason for c in chunks] == [None] * 7 + [FinishReason.LENGTH]


async def test_calls_of_an_episode_stay_together_and_first_calls_spread(make_engine):
    servers = [StandIn("a"), StandIn("b")]
    engine = await make_engine(*servers)
    for server in servers:
        server.gate.clear()
        server.bodies.clear()
    streams = [await start_stream(engine, f"episode {i}") for i in range(4)]
    assert [len(server.bodies) for server in servers] == [2, 2]
    for server in servers:
        server.gate.set()
    for _, task in streams:
        assert_true(await task, 8)
    homes = [await home_of(engine, servers, f"episode {i}") for i in range(4)]
    neighbour = next(i for i in range(1, 4) if homes[i] is homes[0])
    homes[0].gate.clear()
    _, task = await start_stream(engine, f"episode {neighbour}")
    assert await home_of(engine, servers, "episode 0") is homes[0], "although the other one has nothing to do"
    homes[0].gate.set()
    await task


async def home_of(engine: VllmEngine, servers: list[StandIn], episode: str) -> StandIn:
    """The server that answers a short call of the episode."""
    for server in servers:
        server.bodies.clear()
    assert_true(await ask(engine, episode, 2), 2)
    (home,) = [server for server in servers if server.bodies]
    return home


async def test_answer_goes_on_elsewhere_when_its_server_dies(make_engine):
    servers = [StandIn("a"), StandIn("b")]
    engine = await make_engine(*servers)
    for server in servers:
        server.gate.clear()
    _, task = await start_stream(engine, "episode")
    home, other = sorted(servers, key=lambda s: -s.running)
    other.gate.set()
    await home.die()
    assert_true(await task, 8)
    await until(lambda: home.starts == 2 and home.weights == 0)


async def test_answer_waits_for_the_only_server_to_come_back_with_the_current_weights(make_engine):
    server = StandIn()
    engine = await make_engine(server)
    await engine.load_weights(tensors, version=3)
    await engine.resume()
    server.gate.clear()
    _, task = await start_stream(engine)
    server.broken_starts = 1
    await server.die()
    await until(lambda: server.starts == 3)
    server.gate.set()
    chunks = await task
    assert_true(chunks, 8)
    assert {chunk.weight_version for chunk in chunks} == {3}


async def test_held_answer_goes_on_under_the_new_weights(make_engine):
    server = StandIn()
    engine = await make_engine(server)
    server.gate.clear()
    _, task = await start_stream(engine)
    await engine.pause(drain_s=0.01)
    await engine.load_weights(tensors, version=1)
    server.gate.set()
    await asyncio.sleep(0.02)
    assert not task.done()
    await engine.resume()
    chunks = await task
    assert_true(chunks, 8)
    assert [c.weight_version for c in chunks] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert server.bodies[-1]["sampling_params"]["max_tokens"] == 6, "more might not fit the context"


async def test_answer_may_finish_while_the_engine_drains_and_none_begins(make_engine):
    server = StandIn()
    engine = await make_engine(server)
    server.gate.clear()
    _, running = await start_stream(engine)
    pausing = asyncio.create_task(engine.pause(drain_s=SAFETY_S))
    await asyncio.sleep(0)
    asked = len(server.bodies)
    later = asyncio.create_task(ask(engine))
    server.gate.set()
    assert_true(await running, 8)
    await pausing
    assert len(server.bodies) == asked and not later.done()
    await engine.resume()
    assert_true(await later, 8)


async def test_consumer_that_takes_nothing_does_not_hold_up_a_weight_sync(make_engine):
    server = StandIn()
    engine = await make_engine(server)
    server.gate.clear()
    stream = engine.generate(request())
    first = await anext(stream)
    async with asyncio.timeout(SAFETY_S):
        await engine.pause(drain_s=0.01)
        await engine.load_weights(tensors, version=1)
        await engine.resume()
    server.gate.set()
    assert_true([first] + [chunk async for chunk in stream], 8)


async def test_server_that_dies_in_a_weight_sync_gets_the_weights_when_it_is_back(make_engine):
    servers = [StandIn("a"), StandIn("b")]
    engine = await make_engine(*servers)
    servers[0].dies_in_reload = True
    await engine.pause(drain_s=0.0)
    async with asyncio.timeout(SAFETY_S):
        await engine.load_weights(tensors, version=1)
    await engine.resume()
    assert_true(await ask(engine), 8)
    await until(lambda: servers[0].starts == 2 and servers[0].weights == 1)


async def test_only_server_that_dies_in_a_weight_sync_is_waited_for(make_engine):
    server = StandIn()
    engine = await make_engine(server)
    server.dies_in_reload = True
    await engine.pause(drain_s=0.0)
    async with asyncio.timeout(SAFETY_S):
        await engine.load_weights(tensors, version=1)
    assert (server.starts, server.weights) == (2, 1)
    await engine.resume()
    assert {c.weight_version for c in await ask(engine)} == {1}


async def test_weights_are_read_while_paused_and_nothing_computed_before_is_kept(make_engine, tmp_path):
    server = StandIn()
    await make_engine(server)
    assert server.calls == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    assert [f.name for f in (tmp_path / "vllm-weights").iterdir()] == ["0"]


async def test_weights_that_a_server_does_not_take_end_the_engine(make_engine):
    server = StandIn()
    engine = await make_engine(server)
    server.refuse_weights = True
    await engine.pause(drain_s=0.0)
    with pytest.raises(ValueError, match="no such weights"):
        await engine.load_weights(tensors, version=1)


async def test_answer_by_other_weights_than_given_fails_and_its_server_gets_them_again(make_engine):
    server = StandIn()
    engine = await make_engine(server)
    server.mislabel = True
    with pytest.raises(GenerateFailed, match="step-99"):
        await ask(engine)
    assert_true(await ask(engine), 8)
    assert server.starts == 2


async def test_server_that_fails_now_and_then_is_asked_again(make_engine, monkeypatch):
    monkeypatch.setattr(vllm, "RETRY_S", 0.01)
    server = StandIn()
    engine = await make_engine(server)
    server.failing = vllm.MAX_FAILURES - 1
    assert_true(await ask(engine), 8)
    server.failing = vllm.MAX_FAILURES
    with pytest.raises(GenerateFailed, match="EngineCore"):
        await ask(engine)
    assert_true(await ask(engine), 8)
    assert server.starts == 1


async def test_request_that_kills_servers_fails_in_the_end(make_engine):
    server = StandIn()
    engine = await make_engine(server)
    server.poison = 5
    with pytest.raises(GenerateFailed, match="3 vLLM servers died"):
        await ask(engine, "", 5)
    assert_true(await ask(engine), 8)


async def test_closing_the_iterator_hangs_up_on_the_server(make_engine):
    server = StandIn()
    engine = await make_engine(server)
    server.gate.clear()
    stream = engine.generate(request())
    await anext(stream)
    await stream.aclose()
    await until(lambda: server.hung_up == 1 and server.running == 0)


async def test_constrained_answer_comes_whole_and_begins_anew_when_cut_off(make_engine):
    server = StandIn()
    engine = await make_engine(server)
    server.gate.clear()
    task = asyncio.create_task(ask(engine, grammar="start: TEXT"))
    await until(lambda: server.running)
    await engine.pause(drain_s=0.01)
    await engine.load_weights(tensors, version=1)
    server.gate.set()
    await engine.resume()
    chunks = await task
    assert_true(chunks, 8)
    assert {c.weight_version for c in chunks} == {1}
    assert [b["sampling_params"]["structured_outputs"] for b in server.bodies[-2:]] == [{"grammar": "start: TEXT"}] * 2


async def test_answer_ends_with_the_token_that_completes_a_stop_string(make_engine):
    engine = await make_engine(StandIn())
    chunks = await ask(engine, stop=("<13><14>", "<99>"))
    assert_true(chunks, 5)
    assert (chunks[-1].finish_reason, chunks[-1].stop_string) == (FinishReason.STOP, "<13><14>")


async def test_end_tokens_are_the_models_own_and_the_requests(make_engine):
    server = StandIn()
    engine = await make_engine(server)
    chunks = await ask(engine, stop_token_ids=(12,))
    assert_true(chunks, 3)
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert server.bodies[-1]["sampling_params"]["stop_token_ids"] == [12, 99_999]
    await ask(engine, ignore_eos=True)
    assert server.bodies[-1]["sampling_params"]["stop_token_ids"] == []


async def test_requests_that_cannot_be_served_reach_no_server(make_engine):
    server = StandIn()
    engine = await make_engine(server)
    asked = len(server.bodies)
    with pytest.raises(ContextOverflow, match="4096"):
        await ask(engine, "", 4096)
    with pytest.raises(RequestRefused, match="top_p"):
        await ask(engine, top_p=0.0)
    assert len(server.bodies) == asked


async def test_attached_server_that_ignores_the_temperature_gets_temperature_one_alone(make_engine):
    server = StandIn()
    server.logprobs = "plain"
    engine = await make_engine(server)
    assert not engine.constrains
    assert_true(await ask(engine, temperature=1.0, top_p=0.5), 8)
    with pytest.raises(RequestRefused, match="vllm_launch"):
        await ask(engine, temperature=0.7)
    with pytest.raises(RequestRefused, match="grammar"):
        await ask(engine, grammar="start: TEXT")


async def test_attached_server_whose_logprobs_are_of_the_cut_distribution_is_refused(make_engine):
    server = StandIn()
    server.logprobs = "cut"
    with pytest.raises(StartFailed, match="logprobs-mode"):
        await make_engine(server)


async def test_server_that_dies_of_its_first_tokens_fails_the_start_and_says_what_to_do(make_engine):
    server = StandIn()
    server.poison = 1
    with pytest.raises(StartFailed, match=r"first tokens: .*engine\.kind to hf"):
        await make_engine(server)


async def test_server_that_does_not_start_fails_the_start_and_the_others_are_ended(make_engine):
    servers = [StandIn("a"), StandIn("b")]
    servers[1].broken_starts = 1
    with pytest.raises(StartFailed, match="b does not start"):
        await make_engine(*servers)
    assert servers[0]._runner is None


async def test_engine_ends_its_process_when_no_server_comes_up_again(make_engine):
    reasons: list[str] = []
    server = StandIn()
    await make_engine(server, end_process=reasons.append)
    server.broken_starts = vllm_replicas.MAX_FAILURES
    await server.die()
    await until(lambda: reasons)
    assert reasons == ["stand-in does not start"]


async def test_adapter_of_each_version_has_a_name_of_its_own_and_the_base_stays(make_engine):
    server = StandIn()
    engine = await make_engine(server, start=False, lora={"rank": 4})
    assert engine.takes_adapter
    seen = []
    for version in (0, 1, 2):
        await engine.pause(drain_s=0.0)
        await engine.load_adapter(lambda folder: (folder / "adapter").touch(), version=version)
        await engine.resume()
        assert_true(await ask(engine), 8)
        seen.append(server.bodies[-1]["model"])
        assert list(server.adapters.values()) == [version]
    assert len(set(seen)) == 3
    assert "/collective_rpc" not in server.calls and "/pause" not in server.calls


async def test_two_engines_share_a_server_with_an_adapter_each(make_engine):
    server = StandIn()
    first = await make_engine(server, start=False, lora={"rank": 4})
    second = await make_engine(Shared(server), start=False, lora={"rank": 4})
    for engine, version in ((first, 0), (second, 0), (second, 5), (first, 1)):
        await engine.pause(drain_s=0.0)
        await engine.load_adapter(lambda folder: (folder / "adapter").touch(), version=version)
        await engine.resume()
    assert {c.weight_version for c in await ask(first)} == {1}
    assert {c.weight_version for c in await ask(second)} == {5}
    assert sorted(server.adapters.values()) == [1, 5]


class Shared(StandIn):
    """Another engine's view of a stand-in that is up."""

    def __init__(self, server: StandIn) -> None:
        super().__init__(server.name)
        self._server = server

    async def come_up(self):
        return vllm.VllmClient(self._server.url)


async def test_evaluation_has_places_that_training_cannot_take(make_engine):
    server = StandIn()
    engine = await make_engine(server, **{"engine.max_batch": 1, "evaluation.slots": 1})
    server.gate.clear()
    _, training = await start_stream(engine)
    waiting = asyncio.create_task(ask(engine))
    _, evaluation = await start_stream(engine, lane="evaluate")
    assert server.running == 2 and not waiting.done()
    server.gate.set()
    for task in (training, evaluation, waiting):
        assert_true(await task, 8)


def test_configuration_reaches_the_command_line():
    from pathlib import Path

    from swarmtune.engines.vllm_server import server_arguments, server_environment

    config = make_config(
        **{"engine.max_batch": 7, "evaluation.slots": 2, "lora.rank": 12, "engine.vllm.args": ["--max-model-len", "99"]}
    )
    line = server_arguments(config, Path("folder"), context_length=512)
    pairs = dict(itertools.pairwise(line))
    assert pairs["--model"] == "folder" and pairs["--dtype"] == "float32" and pairs["--max-num-seqs"] == "9"
    assert pairs["--max-lora-rank"] == "16" and line[-2:] == ["--max-model-len", "99"]
    assert server_environment(config, "3")["CUDA_VISIBLE_DEVICES"] == "3"
    assert server_environment(config, None)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
