"""The engine process for real: a child with a tiny model, trained by veRL, killed, stopped, started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from swarmtune.backend import BackendLost, ContextOverflow, RequestRefused, StartFailed, UpdateFailed
from swarmtune.config import TrainConfig
from swarmtune.engines import process
from swarmtune.engines.process import ProcessBackend, _Child
from swarmtune.types import (
    FinishedEpisode,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    Sample,
    SamplingParams,
    TrainBatch,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [1, 2, 3, 4]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=8000, ignore_eos=True)
"""Far longer than any test runs."""
SAFETY_S = 60.0


def make_config(folder: Path, **keys: object) -> TrainConfig:
    base: dict[str, object] = {
        "model": str(folder),
        "trainer.dtype": "fp32",
        "optim.lr": 1e-2,
        "engine.context_length": 8192,
        "engine.threads": 1,
        "engine.max_batch": 4,
        "batch_tasks": 1,
        "repeats": 4,
    }
    return TrainConfig.from_dict(base | keys)


async def ask(backend: ProcessBackend, name: str, sampling: SamplingParams = GREEDY) -> list[GenerateChunk]:
    return [chunk async for chunk in backend.generate(GenerateRequest(name, PROMPT, sampling))]


def tokens(chunks: list[GenerateChunk]) -> list[int]:
    return [t for c in chunks for t in c.token_ids]


async def make_batch(backend: ProcessBackend, step: int) -> TrainBatch:
    """Four sampled episodes of one task, half of them rewarded."""
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    answers = await asyncio.gather(*[ask(backend, f"step {step}, {i}", sampling) for i in range(4)])
    episodes = []
    for i, chunks in enumerate(answers):
        sampled, blank = tokens(chunks), len(PROMPT)
        sample = Sample(
            sample_id=f"s{i}",
            episode_id=f"e{i}",
            task_id="task",
            token_ids=PROMPT + sampled,
            loss_mask=[0] * blank + [1] * len(sampled),
            logprobs=[0.0] * blank + [p for c in chunks for p in c.logprobs],
            weight_versions=[-1] * blank + [c.weight_version for c in chunks],
        )
        episodes.append(FinishedEpisode(f"e{i}", "task", float(i % 2), [sample]))
    return TrainBatch(step, episodes)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SAFETY_S):
        while not condition():  # noqa: ASYNC110 - other processes set no events
            await asyncio.sleep(0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(long_folder, tmp_path_factory) -> AsyncIterator[ProcessBackend]:
    """One backend for all, since a start takes seconds; each test but the last leaves it well."""
    backend = ProcessBackend()
    await backend.start(make_config(long_folder), work_dir=tmp_path_factory.mktemp("work"), resume=None)
    yield backend
    await backend.stop()


async def test_parallel_generations_each_get_their_own_answer(shared):
    seeds = [SamplingParams(max_tokens=10, seed=i, ignore_eos=True) for i in range(4)]
    together = await asyncio.gather(*[ask(shared, f"p{i}", s) for i, s in enumerate(seeds)])
    alone = [await ask(shared, f"a{i}", s) for i, s in enumerate(seeds)]
    assert [tokens(c) for c in together] == [tokens(c) for c in alone]
    assert len({tuple(tokens(c)) for c in together}) == 4
    assert all(c[-1].finish_reason is FinishReason.LENGTH for c in together)


async def test_refused_requests_leave_the_others_alone(shared):
    running = asyncio.create_task(ask(shared, "well", SamplingParams(max_tokens=200, ignore_eos=True)))
    with pytest.raises(ContextOverflow, match="8192"):
        await ask(shared, "too long", SamplingParams(max_tokens=8192))
    with pytest.raises(RequestRefused, match="vocabulary"):
        _ = [c async for c in shared.generate(GenerateRequest("odd", [99999], GREEDY))]
    assert len(tokens(await running)) == 200


async def test_closing_the_iterator_frees_its_place(shared):
    endless = [shared.generate(GenerateRequest(f"endless {i}", PROMPT, LONG)) for i in range(4)]
    for stream in endless:
        await anext(stream)
    waiting = asyncio.create_task(ask(shared, "waiting"))
    await asyncio.sleep(0)
    assert not waiting.done()
    await endless[0].aclose()
    async with asyncio.timeout(SAFETY_S):
        assert len(tokens(await waiting)) == 16
    for stream in endless:
        await stream.aclose()


async def test_sigint_is_ignored(shared):
    os.kill(shared.pid, signal.SIGINT)
    assert len(tokens(await ask(shared, "still here"))) == 16


async def test_save_that_cannot_be_written_is_an_os_error(shared, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r".+"):
        await shared.save(tmp_path / "file" / "checkpoint")
    assert len(tokens(await ask(shared, "after"))) == 16


async def test_update_that_cannot_be_trained_changes_nothing(shared):
    before = await ask(shared, "before")
    with pytest.raises(UpdateFailed, match="without episodes"):
        await shared.train(TrainBatch(99, []))
    after = await ask(shared, "after")
    assert (tokens(after), after[0].weight_version) == (tokens(before), before[0].weight_version)


async def test_generations_wait_for_an_update_and_none_is_dropped(shared):
    batch = await make_batch(shared, 7)
    sampling = SamplingParams(max_tokens=300, ignore_eos=True)
    running = asyncio.create_task(ask(shared, "running", sampling))
    training = asyncio.create_task(shared.train(batch))
    later = [asyncio.create_task(ask(shared, f"later {i}", sampling)) for i in range(6)]
    async with asyncio.timeout(SAFETY_S):
        answers = [await task for task in (running, *later)]
        assert (await training).weight_version == 7
    assert all(len(tokens(chunks)) == 300 for chunks in answers)
    assert {c.weight_version for c in answers[-1]} == {7}


async def test_starting_twice_is_refused(shared, long_folder, tmp_path):
    with pytest.raises(StartFailed, match="stop it first"):
        await shared.start(make_config(long_folder), work_dir=tmp_path, resume=None)


async def test_killed_process_is_noticed_and_restarted_from_its_checkpoint(shared, long_folder, tmp_path):
    untrained = await ask(shared, "untrained")
    step = untrained[0].weight_version + 1
    result = await shared.train(await make_batch(shared, step))
    assert (result.step, result.weight_version) == (step, step)
    assert result.metrics["actor/grad_norm"] > 0
    trained = await ask(shared, "trained")
    assert {c.weight_version for c in trained} == {step}
    assert [c.logprobs for c in trained] != [c.logprobs for c in untrained]
    await shared.save(tmp_path / "checkpoint")

    next_batch = await make_batch(shared, step + 1)
    lost = asyncio.create_task(shared.wait_lost())
    stream = shared.generate(GenerateRequest("cut off", PROMPT, LONG))
    await anext(stream)
    training = asyncio.create_task(shared.train(next_batch))
    await asyncio.sleep(0)
    assert not lost.done()
    os.kill(shared.pid, signal.SIGKILL)
    async with asyncio.timeout(SAFETY_S):
        with pytest.raises(BackendLost, match="signal 9"):
            while True:
                await anext(stream)
        with pytest.raises(BackendLost):
            await training
        assert "signal 9 (SIGKILL)" in await lost
    with pytest.raises(BackendLost):
        await ask(shared, "nobody there")

    info = await shared.start(make_config(long_folder), work_dir=tmp_path, resume=tmp_path / "checkpoint")
    assert info.weight_version == step
    again = await ask(shared, "again")
    assert [(c.token_ids, c.logprobs, c.weight_version) for c in again] == [
        (c.token_ids, c.logprobs, c.weight_version) for c in trained
    ]
    assert (await shared.train(next_batch)).weight_version == step + 1


async def test_failed_start_says_why_and_may_be_repeated(shared, long_folder, tmp_path):
    await shared.stop()
    with pytest.raises(StartFailed, match=r"unknown model: .*known names: .*tiny"):
        await shared.start(make_config(Path("no-such-model")), work_dir=tmp_path, resume=None)

    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((long_folder / "config.json").read_bytes())
    with pytest.raises(StartFailed, match="broken") as failure:
        await shared.start(make_config(broken), work_dir=tmp_path, resume=None)
    assert failure.value.reason in failure.value.log_tail
    assert not is_alive(shared.pid)

    failed = shared.pid
    dying = asyncio.create_task(shared.start(make_config(long_folder), work_dir=tmp_path, resume=None))
    await until(lambda: shared.pid != failed)
    os.kill(shared.pid, signal.SIGKILL)
    with pytest.raises(StartFailed, match="signal 9"):
        await dying

    failed = shared.pid
    stopped = asyncio.create_task(shared.start(make_config(long_folder), work_dir=tmp_path, resume=None))
    await until(lambda: shared.pid != failed)
    async with asyncio.timeout(SAFETY_S):
        await shared.stop()
        with pytest.raises(StartFailed, match="stopped"):
            await stopped
    assert not is_alive(shared.pid)

    assert (await shared.start(make_config(long_folder), work_dir=tmp_path, resume=None)).weight_version == 0
    assert len(tokens(await ask(shared, "well again"))) == 16


async def test_process_gives_signs_of_life_while_it_computes(shared):
    step = (await ask(shared, "before"))[0].weight_version + 1
    training = asyncio.create_task(shared.train(await make_batch(shared, step)))
    await asyncio.sleep(0)
    for _ in range(3):
        await shared._child.call("ping")
    assert not training.done()
    await training


async def test_frozen_process_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "SILENT_S", 6.0)
    child = await _Child.spawn(tmp_path, threads=1)
    async with asyncio.timeout(SAFETY_S):
        await child.call("ping")
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(BackendLost, match="no sign of life"):
            await child.call("save", path=str(tmp_path / "checkpoint"))
        assert "frozen" in (await child.over or "")
    assert not is_alive(child.pid)


async def test_process_that_does_not_answer_is_killed_within_the_grace(tmp_path):
    child = await _Child.spawn(tmp_path, threads=1)
    os.kill(child.pid, signal.SIGSTOP)
    async with asyncio.timeout(SAFETY_S):
        await child.end(grace_s=0.2)
    assert not is_alive(child.pid)


async def test_engine_process_dies_with_a_server_that_is_killed(long_folder, tmp_path):
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, str(long_folder), str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert server.stdout is not None
    engine = int(await server.stdout.readline())
    assert is_alive(engine)
    server.kill()
    await server.wait()
    await until(lambda: not is_alive(engine))


SERVER = textwrap.dedent("""
    import asyncio, sys
    from pathlib import Path
    from swarmtune.config import TrainConfig
    from swarmtune.engines.process import ProcessBackend

    async def main():
        backend = ProcessBackend()
        config = TrainConfig.from_dict({"model": sys.argv[1], "engine.threads": 1, "trainer.dtype": "fp32"})
        starting = asyncio.create_task(backend.start(config, work_dir=Path(sys.argv[2]), resume=None))
        while backend.pid is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        print(backend.pid, flush=True)
        await starting
        await asyncio.Event().wait()

    asyncio.run(main())
""")


async def test_server_side_never_imports_torch():
    check = "import sys, swarmtune.engines.process as p; sys.exit('torch' in sys.modules)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", check, env=env)
    assert await process.wait() == 0


async def test_stop_while_generating_leaves_no_process(shared, long_folder, tmp_path):
    pid = shared.pid
    stream = shared.generate(GenerateRequest("endless", PROMPT, LONG))
    await anext(stream)
    async with asyncio.timeout(SAFETY_S):
        await shared.stop()
        with pytest.raises(BackendLost, match="stopped"):
            while True:
                await anext(stream)
    assert not is_alive(pid)
    await shared.stop()
