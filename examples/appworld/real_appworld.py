"""The real AppWorld as environment: its own server, in its own Python environment, one process for each world at work.

AppWorld 0.1 needs pydantic 1, so it does not live in the client's process: `scripts/agents appworld` makes its own
environment. A server process holds one world at a time; `Servers` lends as many of them as there are.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from environment import EnvironmentBroken

from swarmtune.config import ConfigError

PYTHON = Path(__file__).resolve().parents[2] / ".venv-agents" / "appworld" / "bin" / "python"
_START_S, _CALL_S = 120.0, 180.0


def check(root: Path, python: Path = PYTHON) -> None:
    """Raises:
    ConfigError: what is missing, with the command that brings it.
    """
    if not python.exists():
        raise ConfigError(f"AppWorld is not installed ({python} is missing): run `scripts/agents appworld`")
    if not (root / "data" / "tasks").is_dir():
        raise ConfigError(
            f"AppWorld's data is not in {root / 'data'}: run `{python.parent}/appworld install` and "
            f"`{python.parent}/appworld download data --root {root}` (a network is needed), or give task.root"
        )


def task_ids(root: Path, split: str) -> list[str]:
    """Raises:
    ConfigError: there is no such split.
    """
    file = root / "data" / "datasets" / f"{split}.txt"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.txt")))
        raise ConfigError(f"task.split: AppWorld's data has no {split!r}; it has {known}")
    return [line.strip() for line in file.read_text().splitlines() if line.strip()]


class AppWorldServer:
    """One server process, or one that already answers at `url`."""

    def __init__(self, root: Path, *, python: Path = PYTHON, url: str | None = None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        if url is None:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            command = [str(python.parent / "appworld"), "serve", "environment", "--port", str(port), "--no-show-usage"]
            self._process = subprocess.Popen(
                [*command, "--root", str(root)], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
            )
            url = f"http://127.0.0.1:{port}"
        self._http = httpx.Client(base_url=url, timeout=_CALL_S)

    def wait(self) -> None:
        """Raises:
        EnvironmentBroken: it does not answer.
        """
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise EnvironmentBroken(
                    f"AppWorld's server ended with status {self._process.returncode}: {self._last_lines()}"
                )
            with contextlib.suppress(httpx.TransportError):
                self._http.get("/").raise_for_status()
                return
            time.sleep(0.1)
        raise EnvironmentBroken(f"AppWorld's server did not answer within {_START_S:.0f} s")

    def _last_lines(self) -> str:
        self._log.seek(0)
        return self._log.read()[-1000:].decode(errors="replace").strip()

    def post(self, path: str, **body: Any) -> Any:
        """The answer's output.

        Raises:
            EnvironmentBroken: there was none.
        """
        try:
            return self._http.post(path, json=body).raise_for_status().json()["output"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise EnvironmentBroken(f"AppWorld's server failed at {path}: {error!r}") from error

    def stop(self) -> None:
        self._http.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
        self._log.close()


class RealWorld:
    """One task on a server."""

    def __init__(self, server: AppWorldServer, task_id: str, experiment: str) -> None:
        self._server, self._task_id = server, task_id
        begun = server.post("/initialize", task_id=task_id, experiment_name=experiment)
        person = begun["supervisor"]
        self.instruction = (
            f"I am {person['first_name']} {person['last_name']} ({person['email']}, {person['phone_number']}). "
            f"{begun['instruction']}"
        )

    def execute(self, code: str) -> str:
        return str(self._server.post("/execute", task_id=self._task_id, code=code))

    def completed(self) -> bool:
        return bool(self._server.post("/task_completed", task_id=self._task_id))

    def score(self) -> float:
        """1.0 when all of AppWorld's own tests of the state pass: some pass when nothing was done."""
        return float(bool(self._server.post("/evaluate", task_id=self._task_id)["success"]))

    def close(self) -> None:
        with contextlib.suppress(EnvironmentBroken):
            self._server.post("/close", task_id=self._task_id)


class Servers:
    """A pool: as many worlds at once as there are servers, more episodes wait."""

    def __init__(self, servers: list[AppWorldServer]) -> None:
        self._all = servers
        self._free: queue.SimpleQueue[AppWorldServer] = queue.SimpleQueue()
        for server in servers:
            server.wait()
            self._free.put(server)

    @contextlib.contextmanager
    def world(self, task_id: str, experiment: str = "swarmtune") -> Iterator[RealWorld]:
        server = self._free.get()
        try:
            world = RealWorld(server, task_id, experiment)
            try:
                yield world
            finally:
                world.close()
        finally:
            self._free.put(server)

    def stop(self) -> None:
        for server in self._all:
            server.stop()
