"""A swarm server of one's own: started as a child process on a free port of this machine, stopped with it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from swarmtune.errors import StartFailed

_START_S = 60.0
_STOP_S = 120.0
"""Its last checkpoint may take a while."""
_PR_SET_PDEATHSIG = 1


class LocalServer:
    """`swarmtune serve` as a child; ends with the block, and with this process however that ends."""

    def __init__(self, data_dir: Path, *, fresh: bool) -> None:
        """`fresh`: leave an earlier training in `data_dir` alone instead of going on with it."""
        self._data_dir = data_dir
        self._fresh = fresh
        self.log_path = data_dir / "server.log"
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it and wait until it answers.

        Raises:
            StartFailed: it ended or stayed silent; the message has its last lines.
        """
        self._data_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "swarmtune.cli", "serve", "--host", "127.0.0.1", "--port", "0"]
        command += ["--data-dir", str(self._data_dir), *(["--fresh"] if self._fresh else [])]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": _path_with_swarmtune()},
                start_new_session=True,  # Ctrl-C reaches this process only, which then stops the server in order
                preexec_fn=_end_with_parent,
            )
        try:
            self.url = self._await_url(self._process)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _await_url(self, process: subprocess.Popen[bytes]) -> str:
        """Where it listens: it writes that to server.json, with its process id, once it answers."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise StartFailed(f"the server ended with status {process.returncode}:\n{self._log_tail()}")
            with contextlib.suppress(OSError, ValueError, KeyError):
                found = json.loads((self._data_dir / "server.json").read_text(encoding="utf-8"))
                if found["pid"] == process.pid:
                    return found["url"]
            time.sleep(0.05)
        raise StartFailed(f"the server did not answer within {_START_S:.0f} s:\n{self._log_tail()}")

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _log_tail(self) -> str:
        return self.log_path.read_bytes()[-3000:].decode(errors="replace")


def _end_with_parent() -> None:
    """In the child: be told to stop when the parent is gone, `kill -9` included (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _path_with_swarmtune() -> str:
    """PYTHONPATH for the child: where this package was imported from, then what was there."""
    ours = str(Path(__file__).resolve().parent.parent)
    theirs = os.environ.get("PYTHONPATH")
    return f"{ours}{os.pathsep}{theirs}" if theirs else ours
