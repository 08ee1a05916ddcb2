"""hosts.yaml: the machines of a study and what a run can hold on each.

Without a file the local machine is used: one CPU slot per core, or its GPUs where `nvidia-smi` lists any.

    hosts:
      - name: here
        executor: local
        slots: 2            # CPU runs that may be live at once
        threads: 1          # OMP_NUM_THREADS of each
      - name: gpu-box
        executor: local
        gpus: [0, 1, 2, 3]
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from a3r.formats import Part, parse_model
from a3r.strictyaml import FormatError, Problem, load_strict


class Host(Part):
    """One machine."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    executor: str = "local"
    slots: int | None = Field(None, ge=0)
    """CPU runs at once; None is the number of cores on a machine without GPUs, 0 on one with."""
    threads: int = Field(default=1, ge=1)
    """Threads a CPU run may use, told to it as OMP_NUM_THREADS."""
    gpus: list[int] = Field(default_factory=list)
    gpu_model: str = "any"
    lock_dir: str | None = None
    """Where slot locks live, for all studies on the machine. None is a directory per user in the temporary folder."""
    address: str | None = None
    """For executors that go elsewhere."""

    def slot_names(self, kind: str) -> list[str]:
        """Slots of a kind (`cpu` or `gpu`), in topology order."""
        numbers = self.gpus if kind == "gpu" else range(self.slots or 0)
        return [f"{kind}/{n}" for n in numbers]


class Hosts(Part):
    hosts: list[Host] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [h.name for h in self.hosts]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"two hosts are called {twice[0]!r}; rename one")
        if not any(h.slots or h.gpus for h in self.hosts):
            raise ValueError("no host has a slot or a GPU; set slots: 1 or list gpus")
        return self

    def named(self, name: str) -> Host:
        return next(h for h in self.hosts if h.name == name)


def load_hosts(path: Path | None) -> Hosts:
    """The hosts of a file, or the local machine.

    Raises:
        FormatError: with line, problem and fix.
    """
    if path is None:
        return Hosts(hosts=[local_host()])
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FormatError(
            [Problem(str(path), "no such file", "check --hosts, or leave it out to use this machine")]
        ) from None
    return parse_model(Hosts, load_strict(text, str(path)))


def local_host() -> Host:
    """This machine as it is: its GPUs, or else its cores."""
    gpus = visible_gpus()
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in socket.gethostname()) or "local"
    return Host(name=name.lstrip("._-") or "local", gpus=gpus, slots=0 if gpus else len(os.sched_getaffinity(0)))


def visible_gpus() -> list[int]:
    """Indices that `nvidia-smi` lists; empty without it."""
    if not shutil.which("nvidia-smi"):
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [int(line) for line in done.stdout.split() if line.isdigit()] if done.returncode == 0 else []
