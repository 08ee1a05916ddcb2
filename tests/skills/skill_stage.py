"""A place in which a skill's code blocks run as a person would run them: a folder, the commands on PATH, a server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from a3r.skill_checks import Block, blocks
from a3r.skills import Skill

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
"""No block takes so long, on a busy machine either."""
CONFIG = {
    "model": "tiny",
    "engine.kind": "scripted",
    "batch_tasks": 2,
    "repeats": 2,
    "sampling.max_tokens": 64,
    "checkpoint.every_steps": 0,
    "batching.drain_s": 0.0,
}
"""Of the shared server."""


def make_commands(folder: Path) -> Path:
    """A folder with `a3r`, `swarmtune` and `python` for PATH, whichever way this checkout was installed."""
    folder.mkdir(parents=True)
    for name, what in (("python", ""), ("python3", ""), ("a3r", "-m a3r.cli"), ("swarmtune", "-m swarmtune.cli")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {what} "$@"\n')
        script.chmod(0o755)
    return folder


def environment(commands: Path, url: str, home: Path) -> dict[str, str]:
    """Nothing of this process's environment but what a block needs."""
    kept = {k: v for k, v in os.environ.items() if k in {"LANG", "TMPDIR"}}
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    home.mkdir(parents=True, exist_ok=True)
    return kept | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'core'}{os.pathsep}{ROOT}",
        "HOME": str(home),
        "XDG_CACHE_HOME": cache,
        "SWARMTUNE_URL": url,
        "OMP_NUM_THREADS": "1",
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@example.org",
    }


@contextmanager
def served(commands: Path, folder: Path) -> Iterator[str]:
    """A server process with the scripted engine, rolling; its address."""
    argv = [str(commands / "swarmtune"), "serve", "--port", "0", "--data-dir", str(folder)]
    folder.mkdir(parents=True)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            argv, env=environment(commands, "", folder / "home"), stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (folder / "server.json").exists():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield json.loads((folder / "server.json").read_text())["url"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
class Ran:
    """A block that was run."""

    block: Block
    status: int
    words: str


def play(skill: Skill, folder: Path, variables: dict[str, str]) -> list[Ran]:
    """Write the files and run the blocks of a skill in order, up to the first that ends otherwise than it says.

    What the blocks started in the background lives until the last of them is over.
    """
    (folder / "scripts").symlink_to(skill.folder / "scripts")
    done: list[Ran] = []
    groups: list[int] = []
    try:
        for block in blocks(skill.body, skill.body_line):
            if block.file:
                path = folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
            if block.runs:
                done.append(run_block(block, folder, variables, groups))
                if done[-1].status != block.status:
                    break
    finally:
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    return done


def run_block(block: Block, folder: Path, variables: dict[str, str], groups: list[int]) -> Ran:
    """Run one block; its process group is added to `groups`."""
    argv = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else ["python", "-c"]
    log = folder / f".block-{block.line}.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*argv, block.text],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    groups.append(process.pid)
    try:
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    return Ran(block, status, f"status {status}\n{block.text}\n---\n{log.read_text()[-4000:]}")
