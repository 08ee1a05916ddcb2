"""Disks that are full, files that are damaged, and servers that come back to them."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swarmtune.gateway.control import ControlRefused
from swarmtune.journal import Journal
from swarmtune.protocol import RegisterRequest
from swarmtune.testing import LocalServer, chatml_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(chatml_model(tmp_path_factory.mktemp("model") / "chatml"))


@asynccontextmanager
async def opened(data: Path, model: str) -> AsyncIterator[LocalServer]:
    async with LocalServer(data, model) as local:
        await local.server.status_when(leaves="booting", wait_s=30)
        yield local


async def leave_a_run(data: Path, model: str, **config) -> Path:
    """A training with one step, as a server leaves that is to go on with it; its run folder."""
    async with opened(data, model) as local:
        await local.boot(**config)
        for reward in (0.0, 1.0):
            await local.run_episode(reward=reward)
        await local.server.steps_after(0, wait_s=30)
    return data / "runs" / "0001"


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_training_can_be_stopped_on_a_full_disk(tmp_path, model, monkeypatch):
    async with opened(tmp_path / "data", model) as local:
        await local.boot()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", full)
            assert (await local.server.stop()).state == "offline"
    async with opened(tmp_path / "data", model) as local:
        assert local.server.status().state == "offline"


async def test_a_fault_while_stopping_still_ends_in_offline(tmp_path, model, monkeypatch):
    async with opened(tmp_path / "data", model) as local:
        await local.boot()

        async def fault(*_: object) -> None:
            raise RuntimeError("told to")

        with monkeypatch.context() as patch:
            patch.setattr(local.server, "_save_if_needed", fault)
            with contextlib.suppress(RuntimeError):
                await local.server.stop()
        assert local.server.status().state == "offline"
        assert (await local.boot()).state == "rolling"


@pytest.mark.parametrize("at", ["journal", "config", "memory"])
async def test_a_start_that_the_disk_refuses_leaves_nothing_and_works_once_there_is_space(
    tmp_path, model, monkeypatch, at
):
    data = tmp_path / "data"
    write_text = Path.write_text

    def some_refused(path: Path, *rest: object) -> int:
        refused = {"config": "config.json", "memory": "training.tmp"}.get(at)
        return full() if path.name == refused else write_text(path, *rest)  # type: ignore[arg-type, return-value]

    async with opened(data, model) as local:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", some_refused)
            if at == "journal":
                patch.setattr(Journal, "create", full)
            with pytest.raises(ControlRefused, match="free some space") as caught:
                await local.boot()
        assert caught.value.body.code == "no_space"
        assert local.server.status().state == "offline"
        assert (await local.boot()).state == "rolling"


async def test_a_run_folder_cut_short_while_it_was_made_is_no_run(tmp_path, model):
    folder = tmp_path / "data" / "runs" / "0001"
    folder.mkdir(parents=True)
    (folder / "journal.db").write_bytes(b"")
    async with opened(tmp_path / "data", model) as local:
        assert (await local.boot()).state == "rolling"
        assert local.server.status().run_dir == str(folder.with_name("0002"))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xff"])
async def test_a_server_goes_on_with_the_last_run_when_its_note_of_it_is_damaged(tmp_path, model, content):
    await leave_a_run(tmp_path / "data", model)
    (tmp_path / "data" / "training.json").write_bytes(content)
    async with opened(tmp_path / "data", model) as local:
        status = local.server.status()
        assert (status.state, status.step) == ("rolling", 1)


async def test_a_damaged_metrics_file_costs_its_damaged_lines(tmp_path, model):
    folder = await leave_a_run(tmp_path / "data", model)
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(whole + b'7\nnull\n[1]\n{"no": "step"}\n{"step": "x"}\n\xff\0\n{"step": 9')
    async with opened(tmp_path / "data", model) as local:
        assert local.server.status().state == "rolling"
        assert (folder / "metrics.jsonl").read_bytes() == whole


async def test_a_damaged_journal_is_a_state_with_a_way_out_not_a_server_that_cannot_start(tmp_path, model):
    folder = await leave_a_run(tmp_path / "data", model)
    torn = bytearray((folder / "journal.db").read_bytes())
    torn[4096 : 4096 * 6] = b"\xa5" * (4096 * 5)
    (folder / "journal.db").write_bytes(torn)
    async with opened(tmp_path / "data", model) as local:
        status = local.server.status()
        assert status.state == "failed" and "damaged" in (status.reason or "") and "--fresh" in (status.reason or "")
        with pytest.raises(ControlRefused, match="--fresh"):
            await local.server.start(local.config())
        assert (await local.boot(seed=7)).state == "rolling"


async def test_a_damaged_checkpoint_is_a_state_with_a_way_out(tmp_path, model):
    folder = await leave_a_run(tmp_path / "data", model)
    (folder / "checkpoints" / "step-000001" / "state.json").write_text('{"step": ')
    async with opened(tmp_path / "data", model) as local:
        status = local.server.status()
        assert status.state == "failed"
        assert "step-000001" in (status.reason or "") and "--fresh" in (status.reason or "")
        assert (await local.boot(seed=7)).state == "rolling"


async def test_shares_that_no_longer_fit_together_do_not_keep_a_server_from_coming_back(tmp_path, model):
    async with opened(tmp_path / "data", model) as local:
        await local.boot(**{"batching.client_timeout_s": 0.05})
        await local.server.register(RegisterRequest(name="first", share=1))
        await local.until(lambda: not local.server.client_views()[0].alive)
        await local.server.register(RegisterRequest(name="second", share=1))
    async with opened(tmp_path / "data", model) as local:
        assert local.server.status().state == "rolling"
        assert [v.name for v in local.server.client_views()] == ["first", "second"]


async def test_a_client_that_said_goodbye_is_not_waited_for_after_a_restart(tmp_path, model):
    async with opened(tmp_path / "data", model) as local:
        await local.boot(**{"batching.policy": "all_clients_agree"})
        for name in ("stays", "leaves"):
            await local.server.register(RegisterRequest(name=name))
        async with local.http.delete("/v1/clients/leaves") as response:
            assert response.status == 200
    async with opened(tmp_path / "data", model) as local:
        assert [v.name for v in local.server.client_views()] == ["stays"]
