"""`pip install a3r` stays light: the client, the command lines and the orchestrator never load the training stack."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "ray", "verl", "vllm", "transformers", "tensordict", "datasets"}
MODULES = [
    "swarmtune",
    "swarmtune.client",
    "swarmtune.feeder",
    "swarmtune.evaluation",
    "swarmtune.script",
    "swarmtune.swarm",
    "swarmtune.swarm_feeder",
    "swarmtune.models",
    "swarmtune.cli",
    "swarmtune.serve",
    "swarmtune.server",
    "a3r",
    "a3r.models_cli",
    "a3r.cli",
]


def run(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "core"), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("module", MODULES)
def test_importing_loads_no_training_stack_prints_nothing_and_makes_no_file(module: str, tmp_path: Path) -> None:
    code = f"import {module}, sys; heavy = {HEAVY!r} & set(sys.modules); assert not heavy, heavy"
    done = run(code, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_client_loads_no_server_and_no_plotting(tmp_path: Path) -> None:
    done = run(
        "import swarmtune, sys; swarmtune.SwarmClient, swarmtune.TrainConfig\n"
        "assert not {'aiohttp', 'matplotlib', 'scipy', 'openai', 'numpy'} & set(sys.modules)",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["swarmtune.cli", "a3r.cli", "a3r.models_cli"])
def test_help_loads_no_training_stack(module: str) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['x', '--help']\n"
        f"try: runpy.run_module({module!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"heavy = {HEAVY!r} & set(sys.modules); assert not heavy, heavy"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_the_plain_installation_asks_for_no_training_stack() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {re.split(r"[\[<>=~! ]", line)[0].lower() for line in project["dependencies"]}
    assert not asked & HEAVY


def test_the_constraints_pin_everything_and_name_no_place() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    assert any(line.startswith("torch==") for line in lines)
    pinned = {_plain(line.split("==")[0]) for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    wanted += project["optional-dependencies"]["dev"]
    assert {_plain(re.split(r"[\[<>=~!; ]", line)[0]) for line in wanted} <= pinned


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.slow
def test_the_wheel_holds_both_packages_and_the_licence(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True,
        timeout=240,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
        entry_points = archive.read(next(n for n in names if n.endswith("/entry_points.txt"))).decode()
    assert {"swarmtune/__init__.py", "swarmtune/py.typed", "swarmtune/client.py", "a3r/__init__.py"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"swarmtune", "a3r", wheel.name.split("-py3")[0] + ".dist-info"}
    assert "swarmtune = swarmtune.cli:main" in entry_points
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    assert "Provides-Extra: train" in metadata


def test_the_version_is_one(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    done = run("import swarmtune; print(swarmtune.__version__)", cwd=tmp_path)
    assert done.stdout.strip() == project["version"]
    with_metadata = next((d for d in importlib.metadata.distributions() if d.name == "a3r"), None)
    assert with_metadata is None or with_metadata.version == project["version"]
