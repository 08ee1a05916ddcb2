"""`swarmtune serve` as a process: addresses, keys, signals, and what a kill -9 leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

import swarmtune
from swarmtune.testing import chatml_model

SOURCE = str(Path(swarmtune.__file__).parent.parent)
PATIENCE_S = 60.0


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(chatml_model(tmp_path_factory.mktemp("model") / "chatml"))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "swarmtune.cli", *arguments]


def environment(**extra: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("SWARMTUNE_")} | {"PYTHONPATH": SOURCE} | extra


def run(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment(**extra), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def until(predicate: Callable[[], object]) -> object:
    """The first true value of `predicate`, within the tests' patience."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := predicate()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


class Process:
    """A server process of its own."""

    def __init__(self, data_dir: Path, *arguments: str, **extra: str) -> None:
        self.data_dir = data_dir
        self.log = data_dir.with_suffix(".log").open("ab")
        (data_dir / "server.json").unlink(missing_ok=True)
        self.child = subprocess.Popen(
            command("serve", "--port", "0", "--data-dir", str(data_dir), *arguments),
            env=environment(**extra),
            stdout=self.log,
            stderr=self.log,
        )
        self.url = json.loads(str(until(self._address)))["url"]
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def _address(self) -> str | None:
        assert self.child.poll() is None, self.data_dir.with_suffix(".log").read_text()[-2000:]
        path = self.data_dir / "server.json"
        return path.read_text() if path.exists() else None

    def signal(self, signum: int) -> int:
        """The exit code it ends with."""
        self.child.send_signal(signum)
        return self.child.wait(PATIENCE_S)

    def close(self) -> None:
        self.http.close()
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        self.log.close()

    def get(self, path: str, **query: object):
        return self.http.get(path, params={k: str(v) for k, v in query.items()}).raise_for_status().json()

    def post(self, path: str, body: dict | None = None):
        response = self.http.post(path, json=body or {})
        assert response.status_code == 200, response.text
        return response.json()

    def start(self, model: str, **overrides) -> None:
        config = {"model": model, "engine.kind": "scripted", "batch_tasks": 1, "repeats": 4, "batching.drain_s": 0.0}
        self.post("/v1/start", {"config": config | overrides})
        assert self.get("/v1/status", **{"while": "booting", "wait_s": 30})["state"] == "rolling"

    def run_episode(self, reward: float) -> str:
        """Claim, call, end; the id of an accepted episode."""
        grant = self.post("/v1/episodes", {"task_id": "t", "wait_s": 10})
        answer = self.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hi"}]},
            headers={"Authorization": f"Bearer {grant['api_key']}"},
        )
        assert answer.status_code == 200, answer.text
        episode = grant["episode_id"]
        ended = self.post(f"/v1/episodes/{episode}/end", {"reward": reward, "submission_id": f"end of {episode}"})
        assert ended["outcome"] == "admitted"
        return episode


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, data: str = "data", **extra: str) -> Process:
            process = Process(tmp_path / data, *arguments, **extra)
            stack.callback(process.close)
            return process

        yield start


def trained(data_dir: Path) -> list[str]:
    """The episodes that the newest checkpoint's weights contain."""
    newest = max((data_dir / "runs" / "0001" / "checkpoints").glob("step-*"))
    return json.loads((newest / "state.json").read_text())["episodes"]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_starts_bare_prints_its_address_and_writes_it_down(serve):
    process = serve()
    assert process.get("/v1/status")["state"] == "offline"
    assert process.url in process.data_dir.with_suffix(".log").read_text()
    shown = run("status", "--url", process.url)
    assert shown.returncode == 0 and "offline" in shown.stdout


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_with_the_training_on_disk_and_no_process_left(serve, model, signum):
    process = serve()
    process.start(model)
    ids = [process.run_episode(float(n)) for n in range(4)]
    assert process.get("/v1/steps", after=0, wait_s=30)
    assert process.signal(signum) == 0
    assert not alive(process.child.pid)
    assert sorted(trained(process.data_dir)) == sorted(ids)
    with pytest.raises(httpx.ConnectError):
        httpx.get(process.url)


def test_a_killed_server_comes_back_by_itself_and_trains_each_accepted_episode_once(serve, model):
    first = serve()
    first.start(model, **{"checkpoint.every_steps": 2})
    ids = [first.run_episode(float(n)) for n in range(4)]
    assert first.get("/v1/steps", after=0, wait_s=30)[0]["step"] == 1
    ids += [first.run_episode(float(n)) for n in range(3)]
    last = {"reward": 0.0, "submission_id": f"end of {ids[-1]}"}
    answer = first.post(f"/v1/episodes/{ids[-1]}/end", last)
    open_grant = first.post("/v1/episodes", {"task_id": "t"})
    first.signal(signal.SIGKILL)

    second = serve()
    assert second.get("/v1/status", **{"while": "booting", "wait_s": 30})["state"] == "rolling"
    assert [r["step"] for r in second.get("/v1/steps", after=0)] == [1]
    assert second.get("/v1/status")["pooled_episodes"] == 3
    assert second.post(f"/v1/episodes/{ids[-1]}/end", last) == answer
    assert second.get(f"/v1/episodes/{open_grant['episode_id']}")["state"] == "aborted"
    ids.append(second.run_episode(1.0))
    assert second.get("/v1/steps", after=1, wait_s=30)[0]["step"] == 2
    assert second.signal(signal.SIGTERM) == 0
    assert sorted(trained(second.data_dir)) == sorted(ids)
    lines = (second.data_dir / "runs/0001/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    numbers = [
        json.loads(line)["seq"] for line in (second.data_dir / "runs/0001/events.jsonl").read_text().splitlines()
    ]
    assert numbers == sorted(set(numbers))


def test_a_server_killed_in_the_update_trains_that_batch_once(serve, model):
    first = serve()
    first.start(model, **{"engine.script_update_s": 0.5})
    ids = [first.run_episode(float(n)) for n in range(4)]
    until(lambda: first.get("/v1/status")["state"] == "weight_syncing")
    first.signal(signal.SIGKILL)
    second = serve()
    assert second.get("/v1/steps", after=0, wait_s=30)[0]["step"] == 1
    assert second.signal(signal.SIGTERM) == 0
    assert sorted(trained(second.data_dir)) == sorted(ids)


def test_fresh_leaves_the_last_training_alone(serve, model):
    first = serve()
    first.start(model)
    first.run_episode(1.0)
    first.signal(signal.SIGKILL)
    second = serve("--fresh")
    assert second.get("/v1/status")["state"] == "offline"
    second.start(model)
    status = second.get("/v1/status")
    assert (status["pooled_episodes"], status["run_dir"].endswith("0002")) == (0, True)


def test_a_training_that_was_stopped_on_purpose_does_not_come_back_by_itself(serve, model):
    first = serve()
    first.start(model)
    first.post("/v1/stop")
    first.signal(signal.SIGTERM)
    assert serve().get("/v1/status")["state"] == "offline"


def test_the_stop_command_ends_the_server_or_only_the_training(serve, model):
    process = serve()
    process.start(model)
    assert run("pool", "--url", process.url).stdout.startswith("step 1")
    assert "offline" in run("stop", "--training-only", "--url", process.url).stdout
    assert process.get("/v1/status")["state"] == "offline"
    assert "server stopped" in run("stop", "--url", process.url).stdout
    assert process.child.wait(PATIENCE_S) == 0
    assert not (process.data_dir / "server.json").exists()


def test_the_events_command_follows_until_interrupted(serve, model):
    process = serve()
    process.start(model)
    watch = subprocess.Popen(
        command("events", "--url", process.url), env=environment(), stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert watch.stdout is not None
        assert "state=booting" in watch.stdout.readline()
        process.run_episode(1.0)
        until(lambda: "outcome=admitted" in watch.stdout.readline())
        watch.send_signal(signal.SIGINT)
        assert watch.wait(PATIENCE_S) == 0
    finally:
        watch.kill()
        watch.communicate()


def test_a_port_in_use_is_exit_code_2_with_a_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("serve", "--port", port, "--data-dir", str(tmp_path))
    assert done.returncode == 2
    assert f"port {port}" in done.stderr and "--port" in done.stderr and "Traceback" not in done.stderr


def test_a_data_folder_in_use_is_exit_code_2(serve):
    process = serve()
    done = run("serve", "--port", "0", "--data-dir", str(process.data_dir))
    assert done.returncode == 2 and "another server uses it" in done.stderr


def test_an_open_bind_without_a_control_key_is_refused_and_with_one_it_wants_it(serve, tmp_path):
    done = run("serve", "--host", "0.0.0.0", "--port", "0", "--data-dir", str(tmp_path / "x"))
    assert done.returncode == 2 and "--control-key-env" in done.stderr
    short = run("serve", "--control-key-env", "SHORT", "--data-dir", str(tmp_path / "x"), SHORT="abc")
    assert short.returncode == 2 and "16 characters" in short.stderr
    key = "a-long-control-key"
    process = serve("--host", "0.0.0.0", "--control-key-env", "KEY", KEY=key)
    url = process.url.replace("0.0.0.0", "127.0.0.1")
    assert httpx.get(f"{url}/v1/status").status_code == 401
    assert run("status", "--url", url).returncode == 1
    assert run("status", "--url", url, SWARMTUNE_KEY=key).returncode == 0


def test_a_file_where_the_data_folder_should_be_is_named(tmp_path):
    (tmp_path / "file").touch()
    done = run("serve", "--port", "0", "--data-dir", str(tmp_path / "file"))
    assert done.returncode == 2 and "is a file; give a folder" in done.stderr


def test_an_address_without_a_scheme_is_refused_at_once():
    done = run("status", "--url", "127.0.0.1:10086")
    assert done.returncode == 2 and "--url '127.0.0.1:10086': give a server's address" in done.stderr


def test_no_server_is_a_sentence_not_a_traceback():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    done = run("status", "--url", url)
    assert done.returncode == 1 and "swarmtune serve" in done.stderr and "Traceback" not in done.stderr
