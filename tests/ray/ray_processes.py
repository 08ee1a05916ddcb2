"""Finding, watching and waiting for the processes of a Ray session, by their parents and never by name alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil

PATIENCE_S = 240.0


def until(predicate: Callable[[], object], what: str = "", limit_s: float = PATIENCE_S) -> object:
    """The first true value."""
    deadline = time.monotonic() + limit_s
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.05)
    return value


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(processes: list[psutil.Process]) -> list[str]:
    """Command lines of those that still run."""
    lines = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                lines.append(" ".join(process.cmdline())[:120])
        except psutil.NoSuchProcess:
            continue
    return lines


def ranks_of(pid: int) -> list[int]:
    """Process ids of the trainer's ranks below the engine process `pid`."""
    found = []
    for process in descendants(pid):
        try:
            if process.cmdline() and process.cmdline()[0].startswith("ray::RankWorker"):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def engine_log(data_dir: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in data_dir.rglob("engine.log"))
