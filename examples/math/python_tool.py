"""The agent's python tool: runs a program that a model wrote, in a process of its own, within limits.

    print(run_python("print(2 ** 100)").text)

What always holds: the program gets no secret of this process (an empty environment, no open files); a fresh folder
that is gone afterwards; bounded CPU time, memory, files, processes, wall time and output. Where the kernel grants
namespaces (`Ran.isolation`) it also has no network, can write nowhere but in its folder, sees no homes and no sockets,
and leaves no process behind. Without them it runs as a user of its own if this process is root, else as this user, and
could end its guardian. What is not covered it can read as any user can.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

SANDBOX = Path(__file__).with_name("python_sandbox.py")
_OUT_OF_CPU_TIME = {128 + signal.SIGXCPU, 128 + signal.SIGKILL}
_STOP_S = 10.0

Isolation = Literal["namespaces", "limits"]
Ended = Literal["ok", "error", "time", "output"]


class SandboxUnavailable(RuntimeError):
    """No program can be run here; the message says what to change."""


@dataclass(frozen=True)
class Limits:
    cpu_s: int = 5
    wall_s: float = 20.0
    memory_mb: int = 512
    """Address space of each process."""
    files_mb: int = 16
    """Of one file; with namespaces of all files together."""
    processes: int = 8
    output_bytes: int = 4096


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Ran:
    output: str
    """Standard output and error, cut at the limit."""
    ended: Ended
    isolation: Isolation

    @property
    def text(self) -> str:
        """What the model is told."""
        note = {
            "ok": "" if self.output else "(no output; print the result)",
            "error": "" if self.output else "(the program failed without a message)",
            "time": "\n(stopped: it ran too long)",
            "output": "\n(stopped: it printed too much)",
        }[self.ended]
        return self.output + note


def run_python(program: str, limits: Limits = DEFAULT_LIMITS, *, namespaces: bool = True) -> Ran:
    """Run `program` to its end or to its first limit.

    Args:
        namespaces: False leaves them out, as on a machine that grants none.

    Raises:
        SandboxUnavailable: nothing can be run here.
    """
    if len(program) > 100_000 or "\0" in program:
        return Ran("(not run: it has more than 100,000 characters, or a zero byte)", "error", "limits")
    report, report_fd = os.pipe()
    with tempfile.TemporaryDirectory(prefix="python-tool-", ignore_cleanup_errors=True) as work, open(report) as told:
        python = {"interpreter": sys.executable, "python": _python_folders(), "home": os.path.expanduser("~")}
        fixed = {"work": work, "namespaces": namespaces, "report_fd": report_fd} | python
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SANDBOX), json.dumps(asdict(limits) | fixed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=work,
            env={},
            pass_fds=[report_fd],
            start_new_session=True,
        )
        os.close(report_fd)
        try:
            output, stopped = _follow(process, program, limits)
        finally:
            status = _stop(process)
        said = told.read()
    if said not in ("namespaces", "limits"):
        raise SandboxUnavailable(
            f"the python tool cannot run programs here ({said or output or f'status {status}'}); run the client as an "
            "ordinary user, or install Python where other users may run it"
        )
    ended: Ended = stopped or ("ok" if status == 0 else "time" if status in _OUT_OF_CPU_TIME else "error")
    return Ran(output, ended, said)  # type: ignore[arg-type] - one of the two, by the check above


def _python_folders() -> list[str]:
    """What this Python needs to run: its environment, the one that was made from, and where its links lead through."""
    folders, link = {sys.prefix, sys.base_prefix}, Path(sys.executable)
    while link.is_symlink():
        link = link.parent / os.readlink(link)
        folders.add(os.path.normpath(link.parent))
    return sorted(folders)


def _follow(process: subprocess.Popen[bytes], program: str, limits: Limits) -> tuple[str, Ended | None]:
    """Its output, and the limit that it ran into while printing or waiting."""
    deadline = time.monotonic() + limits.wall_s
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(program.encode("utf-8", "replace"))
        process.stdin.close()
    output, stopped = b"", None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while stopped is None:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                stopped = "time"
            elif not (part := os.read(process.stdout.fileno(), 65536)):
                break
            else:
                output += part
                stopped = "output" if len(output) > limits.output_bytes else None
    return output[: limits.output_bytes].decode(errors="replace"), stopped


def _stop(process: subprocess.Popen[bytes]) -> int:
    """Its exit status; what still runs is killed by the sandbox when it is told to end."""
    assert process.stdin is not None and process.stdout is not None
    if process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)  # it closed its output and is about to end
    if process.poll() is None:
        process.terminate()
    try:
        return process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        process.stdin.close()
        process.stdout.close()
