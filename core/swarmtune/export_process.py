"""Exporting weights in a process of its own, so that a server needs no torch and answers meanwhile.

The process is `python -m swarmtune.trainer.export`; it dies with its server. What it writes is complete or absent,
however it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from swarmtune.protocol import Code, ExportRequest, ExportView

REFUSED, NO_SPACE = 2, 3
"""Exit statuses: it cannot be exported as asked; there is no space. Anything else is a fault."""


class ExportFailed(Exception):
    """Nothing was exported; `code` says whose fault it is."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


async def export_apart(checkpoint: Path, request: ExportRequest) -> ExportView:
    """Export a checkpoint of a run as asked.

    Raises:
        ExportFailed: with the sentence the process ended with.
    """
    command = [sys.executable, "-m", "swarmtune.trainer.export", str(checkpoint), "--out", request.path]
    command += ["--parent", str(os.getpid())]
    command += ["--adapter"] if request.adapter else []
    command += ["--dtype", request.dtype] if request.dtype else []
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(),
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return ExportView.model_validate(json.loads(out.splitlines()[-1]))
    lines = err.decode(errors="replace").strip().splitlines() or [f"it ended with status {process.returncode}"]
    code = {REFUSED: Code.BAD_REQUEST, NO_SPACE: Code.NO_SPACE}.get(process.returncode or 0, Code.INTERNAL)
    raise ExportFailed(code, f"not exported: {lines[-1]}")


def _environment() -> dict[str, str]:
    """The child finds this package where it is only on sys.path, and leaves the cores to the training."""
    package_root = str(Path(__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": f"{package_root}{os.pathsep}{path}" if path else package_root,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
