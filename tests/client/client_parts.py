"""What the client tests share: small trainings, agents, a proxy that loses answers, a server that can be killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai

from swarmtune import TrainConfig
from swarmtune.client import Episode

HERE = Path(__file__).parent
_SEEDS = itertools.count(1)


def scripted(**keys: Any) -> TrainConfig:
    """A small training on the scripted engine. Each has a seed of its own, so that no test resumes another's run."""
    base = {
        "model": "tiny",
        "engine.kind": "scripted",
        "engine.context_length": 256,
        "sampling.max_tokens": 32,
        "batch_tasks": 2,
        "repeats": 2,
        "seed": next(_SEEDS),
        "checkpoint.every_steps": 0,
    }
    return TrainConfig.from_dict(base | {key.replace("__", "."): value for key, value in keys.items()})


SDK = openai.OpenAI(api_key="each episode has its own", max_retries=0)


def ask(episode: Any, question: str = "hello") -> str:
    """One model call of an episode with the OpenAI SDK."""
    llm = SDK.with_options(base_url=episode.base_url, api_key=episode.api_key)
    reply = llm.chat.completions.create(model="swarm", messages=[{"role": "user", "content": question}])
    return reply.choices[0].message.content or ""


def until(condition: Callable[[], Any], what: str, within_s: float = 30.0) -> Any:
    """Poll until `condition` is true; its value."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {within_s:g} s: {what}")


class LosingProxy:
    """Passes requests on; on demand loses the answers to the next ones: the server has acted, nobody hears of it."""

    def __init__(self, target: str) -> None:
        url = httpx.URL(target)
        self._target = (url.host, url.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lose = 0
        self._lock = threading.Lock()
        self.lost = 0

    def lose_answers(self, count: int) -> None:
        self._lose = count

    def __enter__(self) -> LosingProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:  # the server is away
                near.close()
                continue
            threading.Thread(target=self._pass, args=(near, far), daemon=True).start()
            threading.Thread(target=self._answer, args=(far, near), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        _hang_up(source, sink)

    def _answer(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(65536)) and not self._loses():
                sink.sendall(data)
        _hang_up(source, sink)

    def _loses(self) -> bool:
        with self._lock:
            if not self._lose:
                return False
            self._lose -= 1
            self.lost += 1
            return True


def _hang_up(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)  # close alone does not wake a thread that reads


class RestartableServer:
    """A server on one port that can be killed and started again on its data."""

    def __init__(self, data_dir: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._data_dir = data_dir
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "swarmtune.cli", "serve", "--port", str(self._port)]
        core = str(HERE.parents[1] / "core")
        self._data_dir.mkdir(exist_ok=True)
        with (self._data_dir / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--data-dir", str(self._data_dir)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join([core, str(HERE)])},
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def echo_rollout(task: Any, episode: Episode) -> float:
    """Asks once; reward 1 for every second repeat, by the seed, so that groups have variance mostly."""
    ask(episode)
    return float((episode.seed or 0) % 2)
