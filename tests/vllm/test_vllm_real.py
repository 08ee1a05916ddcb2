"""The whole loop with the real vLLM on the CPU, from scripts/vllm-cpu: generate, train, sync, die, come back.

One training goes through the first half of this file, in its order; a second one, with LoRA and clients, through the
rest.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from swarmtune import SwarmClient, TrainConfig
from swarmtune.backend import StartFailed
from swarmtune.engines.process import ProcessBackend
from swarmtune.engines.vllm_server import find_interpreter
from swarmtune.local import LocalServer
from swarmtune.types import (
    FinishedEpisode,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    Sample,
    SamplingParams,
    TrainBatch,
)

try:
    INTERPRETER = find_interpreter(None)
except StartFailed as missing:
    pytest.skip(f"{missing}", allow_module_level=True)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [1, 2, 3, 4, 50, 60]
SAFETY_S = 600.0
LOGPROB_ERROR = 1e-4
"""Between vLLM and transformers in fp32; they add up in another order."""


def make_config(folder: Path, **keys: object) -> TrainConfig:
    base: dict[str, object] = {
        "model": str(folder),
        "engine.kind": "vllm",
        "engine.context_length": 2048,
        "engine.max_batch": 8,
        "engine.threads": 1,
        "engine.vllm.python": str(INTERPRETER),
        "trainer.dtype": "fp32",
        "optim.lr": 1e-2,
        "batch_tasks": 1,
        "repeats": 4,
        "sampling.max_tokens": 16,
    }
    return TrainConfig.from_dict(base | keys)


def vllm_processes(work_dir: Path) -> set[int]:
    """Every process of the servers that log into a folder, found by what their parents passed on to them."""
    ours = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            env = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if f"SWARMTUNE_TEST={work_dir}".encode() in env and state != "Z":
            ours.add(int(folder.name))
    return ours


def url_of(pid: int) -> str:
    """Where a started server listens."""
    line = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return f"http://127.0.0.1:{line[line.index('--port') + 1]}"


def api_server(work_dir: Path, number: int = 0) -> int:
    """Process id of the server that answers HTTP."""
    lines = (work_dir / f"vllm-{number}.log").read_text(errors="replace")
    return int(re.findall(r"APIServer pid=(\d+)", lines)[-1])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SAFETY_S):
        while not condition():  # noqa: ASYNC110 - other processes set no events
            await asyncio.sleep(0.05)


async def ask(backend: ProcessBackend, sampling: SamplingParams, name: str = "r") -> list[GenerateChunk]:
    async with asyncio.timeout(SAFETY_S):
        request = GenerateRequest(name, PROMPT, sampling, episode_id=name)
        return [chunk async for chunk in backend.generate(request)]


def tokens(chunks: list[GenerateChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def logprobs(chunks: list[GenerateChunk]) -> list[float]:
    return [value for chunk in chunks for value in chunk.logprobs]


def plain_logprobs(model: torch.nn.Module, said: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(n, V) of the positions that were sampled, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + said])).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


def load_plain(folder: Path, weights: Path | None = None) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if weights is not None:
        model.load_state_dict(load_file(weights / "model-00001.safetensors"), strict=False)
    return model


async def sample_batch(backend: ProcessBackend, step: int) -> TrainBatch:
    """Four sampled episodes of one task at two temperatures, cut by top_p, half of them rewarded."""
    wanted = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=t, top_p=0.9) for t in (1.0, 0.7, 1.0, 0.7)]
    answers = await asyncio.gather(*[ask(backend, s, f"{step}-{i}") for i, s in enumerate(wanted)])
    episodes = []
    for i, chunks in enumerate(answers):
        said, blank = tokens(chunks), len(PROMPT)
        sample = Sample(
            sample_id=f"s{i}",
            episode_id=f"e{i}",
            task_id="task",
            token_ids=PROMPT + said,
            loss_mask=[0] * blank + [1] * len(said),
            logprobs=[0.0] * blank + logprobs(chunks),
            weight_versions=[-1] * blank + [chunk.weight_version for chunk in chunks],
            temperature=wanted[i].temperature,
        )
        episodes.append(FinishedEpisode(f"e{i}", "task", float(i % 2), [sample]))
    return TrainBatch(step, episodes)


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(small_model, work_dir) -> AsyncIterator[ProcessBackend]:
    backend = ProcessBackend()
    config = make_config(small_model, **{"engine.vllm.env": {"SWARMTUNE_TEST": str(work_dir)}})
    await backend.start(config, work_dir=work_dir, resume=None)
    yield backend
    await backend.stop()
    await until(lambda: not vllm_processes(work_dir))


async def test_greedy_answer_is_streamed_and_is_what_transformers_says(backend, small_model):
    chunks = await ask(backend, SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, top_logprobs=3))
    assert len(chunks) > 1 and chunks[-1].finish_reason is FinishReason.LENGTH
    said = tokens(chunks)
    plain = plain_logprobs(load_plain(small_model), said)
    assert said == plain.argmax(-1).tolist()
    assert logprobs(chunks) == pytest.approx(plain.amax(-1).tolist(), abs=LOGPROB_ERROR)
    top = [alternatives for chunk in chunks for alternatives in chunk.top_logprobs or ()]
    assert [list(alternatives) for alternatives in top] == plain.topk(3, -1).indices.tolist()


@pytest.mark.parametrize("sampling", [{"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.5, "top_k": 5}, {}])
async def test_logprobs_are_of_the_whole_distribution_at_its_temperature(backend, small_model, sampling):
    chunks = await ask(backend, SamplingParams(max_tokens=16, ignore_eos=True, **sampling))
    said = tokens(chunks)
    plain = plain_logprobs(load_plain(small_model), said, sampling.get("temperature", 1.0))
    wanted = plain.gather(1, torch.tensor(said)[:, None])[:, 0].tolist()
    assert logprobs(chunks) == pytest.approx(wanted, abs=LOGPROB_ERROR)


async def test_grammar_is_obeyed_and_cuts_nothing_from_the_logprobs(backend, small_model):
    grammar = 'start: %json {"type": "boolean"}\n'
    chunks = await ask(backend, SamplingParams(max_tokens=16, grammar=grammar))
    from tokenizers import Tokenizer

    said = tokens(chunks)
    assert Tokenizer.from_file(str(small_model / "tokenizer.json")).decode(said) in {"true", "false"}
    plain = plain_logprobs(load_plain(small_model), said)
    wanted = plain.gather(1, torch.tensor(said)[:, None])[:, 0].tolist()
    assert logprobs(chunks) == pytest.approx(wanted, abs=LOGPROB_ERROR)


async def test_same_seed_same_answer(backend):
    first, second = [await ask(backend, SamplingParams(max_tokens=16, seed=7, ignore_eos=True)) for _ in range(2)]
    assert tokens(first) == tokens(second)


async def test_long_seeded_prompts_come_together(backend):
    """More tokens at once than vLLM takes in a step: a prompt cut in pieces that has a seed kills its CPU worker."""
    seeded = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    requests = [GenerateRequest(f"long {i}", [i + 3] * 900, seeded) for i in range(6)]

    async def one(request: GenerateRequest) -> list[GenerateChunk]:
        return [chunk async for chunk in backend.generate(request)]

    async with asyncio.timeout(SAFETY_S):
        answers = await asyncio.gather(*[one(request) for request in requests])
    assert [len(tokens(chunks)) for chunks in answers] == [4] * 6


async def test_closed_iterator_frees_its_place(backend):
    long = SamplingParams(max_tokens=2000, ignore_eos=True)
    streams = [backend.generate(GenerateRequest(f"long {i}", PROMPT, long)) for i in range(8)]
    for stream in streams:
        await anext(stream)
    waiting = asyncio.create_task(ask(backend, SamplingParams(max_tokens=4, ignore_eos=True)))
    await streams[0].aclose()
    assert len(tokens(await waiting)) == 4
    for stream in streams[1:]:
        await stream.aclose()


async def test_step_changes_the_engines_weights_to_the_trainers(backend, small_model, work_dir):
    greedy = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    before = await ask(backend, greedy)
    result = await backend.train(await sample_batch(backend, 1))
    assert result.weight_version == 1
    assert 0 < result.metrics["training/rollout_logprobs_diff_mean"] < LOGPROB_ERROR
    after = await ask(backend, greedy)
    assert {chunk.weight_version for chunk in after} == {1}
    trained = load_plain(small_model, work_dir / "vllm-weights" / "1")
    plain = plain_logprobs(trained, tokens(after))
    assert tokens(after) == plain.argmax(-1).tolist()
    assert logprobs(after) == pytest.approx(plain.amax(-1).tolist(), abs=LOGPROB_ERROR)
    assert logprobs(after) != pytest.approx(logprobs(before), abs=LOGPROB_ERROR)


async def test_server_killed_before_a_weight_sync_comes_back_with_the_new_weights(backend, work_dir):
    batch = await sample_batch(backend, 2)
    running = asyncio.create_task(ask(backend, SamplingParams(max_tokens=300, ignore_eos=True), "long"))
    os.kill(api_server(work_dir), signal.SIGKILL)
    async with asyncio.timeout(SAFETY_S):
        result = await backend.train(batch)
    assert result.weight_version == 2
    assert result.metrics["training/rollout_logprobs_diff_mean"] < LOGPROB_ERROR, "sampled by the trainer's weights 1"
    chunks = await running
    assert len(tokens(chunks)) == 300
    assert [c.weight_version for c in chunks] == sorted(c.weight_version for c in chunks)
    again = await backend.train(await sample_batch(backend, 3))
    assert again.metrics["training/rollout_logprobs_diff_mean"] < LOGPROB_ERROR, "sampled by the trainer's weights 2"


async def test_stop_leaves_no_process(backend, work_dir):
    assert vllm_processes(work_dir)
    await backend.stop()
    await until(lambda: not vllm_processes(work_dir))


def served(work_dir: Path) -> list[int]:
    """Requests that each of two servers has answered, as they count them themselves."""
    pages = [httpx.get(f"{url_of(api_server(work_dir, number))}/metrics").text for number in (0, 1)]
    return [int(sum(map(float, re.findall(r"^vllm:request_success_total{.*} (.+)$", page, re.M)))) for page in pages]


async def test_two_servers_share_episodes_keep_each_and_take_every_step(small_model, tmp_path):
    keys = {"engine.vllm.replicas": 2, "engine.vllm.env": {"SWARMTUNE_TEST": str(tmp_path)}}
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    backend = ProcessBackend()
    try:
        await backend.start(make_config(small_model, **keys), work_dir=tmp_path, resume=None)
        begun = served(tmp_path)
        first = await asyncio.gather(*[ask(backend, greedy, f"e{i}") for i in range(4)])
        before = served(tmp_path)
        assert [now - then for now, then in zip(before, begun, strict=True)] == [2, 2]
        for _ in range(3):
            await ask(backend, greedy, "e0")
        assert sorted(now - then for now, then in zip(served(tmp_path), before, strict=True)) == [0, 3]
        await backend.train(await sample_batch(backend, 1))
        second = await asyncio.gather(*[ask(backend, greedy, f"f{i}") for i in range(4)])
        for answers in (first, second):
            assert len({tuple(tokens(chunks)) for chunks in answers}) == 1
        trained = plain_logprobs(load_plain(small_model, tmp_path / "vllm-weights" / "1"), tokens(second[0]))
        assert tokens(second[0]) == trained.argmax(-1).tolist()
    finally:
        await backend.stop()
    await until(lambda: not vllm_processes(tmp_path))


async def answer_of_a_second_run_on(url: str, config: TrainConfig, folder: Path) -> list[GenerateChunk]:
    """Greedy answer of another training with an adapter of its own, attached to a server that has one already."""
    backend = ProcessBackend()
    work_dir = folder / "second"
    work_dir.mkdir()
    attached = TrainConfig.from_dict(config.model_dump() | {"engine.vllm.urls": [url]})
    try:
        await backend.start(attached, work_dir=work_dir, resume=None)
        return await ask(backend, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    finally:
        await backend.stop()


async def test_adapter_is_trained_by_clients_through_a_kill_and_all_of_it_dies_with_the_server(small_model, tmp_path):
    keys = {"lora": {"rank": 4, "alpha": 16}, "batch_tasks": 2, "optim.lr": 1e-3}
    config = make_config(small_model, **keys, **{"engine.vllm.env": {"SWARMTUNE_TEST": str(tmp_path)}})
    failures: list[BaseException] = []

    def rollout(task: str, episode: Any) -> float:
        """Ask once; more different letters are better, so that rewards differ."""
        llm = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0, timeout=SAFETY_S)
        try:
            answer = llm.chat.completions.create(model="any", messages=[{"role": "user", "content": f"Say {task}."}])
        except BaseException as error:
            failures.append(error)
            raise
        return len(set(answer.choices[0].message.content or "")) / 100

    with LocalServer(tmp_path / "data", fresh=True) as server:
        swarm = SwarmClient(server.url, patience_s=SAFETY_S)

        def play(steps: int) -> None:
            swarm.start(config)
            swarm.train([str(i) for i in range(4)], rollout, steps=steps)

        training = asyncio.create_task(asyncio.to_thread(play, 2))
        await until(lambda: list(tmp_path.glob("data/runs/*/metrics.jsonl")) or training.done())
        os.kill(api_server(next(tmp_path.glob("data/runs/*/engine"))), signal.SIGKILL)
        async with asyncio.timeout(SAFETY_S):
            await training
        (engine_dir,) = tmp_path.glob("data/runs/*/engine")
        second = await answer_of_a_second_run_on(url_of(api_server(engine_dir)), config, tmp_path)
        base = plain_logprobs(load_plain(small_model), tokens(second))
        assert tokens(second) == base.argmax(-1).tolist(), "its own adapter is new: what the base model says"
        assert logprobs(second) == pytest.approx(base.amax(-1).tolist(), abs=LOGPROB_ERROR)
        async with asyncio.timeout(SAFETY_S):
            await asyncio.to_thread(play, 3)
        records = await asyncio.to_thread(swarm.steps)
        assert [record.step for record in records] == [1, 2, 3]
        assert not failures, "no episode may notice that its vLLM server was killed"
        differences = [record.metrics["training/rollout_logprobs_diff_mean"] for record in records]
        assert max(differences) < LOGPROB_ERROR, "each adapter is in the engine as the trainer has it"
        assert vllm_processes(tmp_path)
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGKILL)
        await until(lambda: not vllm_processes(tmp_path))
