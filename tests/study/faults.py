"""Dying at a named point: the only place that knows A3R_CRASH_AT. Standard library only; no product code imports it.

A3R_CRASH_AT=`NAME@HIT,…` kills the process with SIGKILL when NAME is reached for the HIT-th time in the whole campaign,
whichever process reaches it. A3R_FAULT_DIR holds the counts; A3R_TRACE collects every name.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path


def reached(name: str) -> None:
    folder = os.environ.get("A3R_FAULT_DIR")
    if not folder:
        return
    if os.environ.get("A3R_TRACE"):
        append(Path(folder) / "trace", f"{name}\n")
    targets = [target.rpartition("@") for target in os.environ.get("A3R_CRASH_AT", "").split(",")]
    hits = {int(hit) for wanted, _, hit in targets if wanted == name}
    if hits and append(Path(folder) / f"count-{name.replace(':', '-')}", ".") in hits:
        append(Path(folder) / "died", f"{name}\n")
        os.kill(os.getpid(), signal.SIGKILL)


def append(path: Path, text: str) -> int:
    """Add to a file in one write; its size afterwards."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, text.encode())
        return os.fstat(fd).st_size
    finally:
        os.close(fd)
