"""Is everything here that a machine needs for its part? One line each: what, how it is, what to do.

    python check_install.py --for client        # runs agents and reports rewards
    python check_install.py --for server        # holds a model and trains it
    python check_install.py --for studies       # a3r research

Exit status: 0 all is there; 1 something is missing. Run it with the Python that will do the work.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

CLIENT = ("pydantic", "httpx", "openai")
SERVER = ("aiohttp", "uvloop", "orjson", "msgpack", "tokenizers")
TRAIN = ("torch", "verl", "transformers", "renderers", "llguidance", "peft")
FREE_GB = {"client": 1, "server": 6, "studies": 6}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="part", choices=["client", "server", "studies"], default="client")
    part = parser.parse_args().part
    lines = [python_line(), package_line()]
    lines += [module_line(name, "pip install a3r") for name in CLIENT]
    if part in {"server", "studies"}:
        lines += [module_line(name, "pip install a3r") for name in SERVER]
        lines += [module_line(name, "pip install torch==2.13.0, then pip install 'a3r[train]'") for name in TRAIN]
        lines += [device_line(), memory_line()]
    if part == "studies":
        lines.append(tool_line("tmux", "install tmux: studies run without it, but nobody can look in"))
        lines.append(tool_line("git", "install git"))
    lines.append(disk_line(FREE_GB[part]))
    for good, words in lines:
        print(f"{'ok     ' if good else 'MISSING'}  {words}")
    return int(not all(good for good, _ in lines))


Line = tuple[bool, str]


def python_line() -> Line:
    good = sys.version_info >= (3, 11)
    return good, f"Python {sys.version.split()[0]}" + ("" if good else ": 3.11 or newer is needed; make a new .venv")


def package_line() -> Line:
    found = importlib.util.find_spec("swarmtune")
    if found is None or importlib.util.find_spec("a3r") is None:
        return False, f"swarmtune and a3r are not importable by {sys.executable}: pip install a3r there"
    return True, f"swarmtune from {Path(found.origin or '').parent}"


def module_line(name: str, fix: str) -> Line:
    if importlib.util.find_spec(name) is None:
        return False, f"{name}: {fix}"
    try:
        return True, f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return True, name


def device_line() -> Line:
    if shutil.which("nvidia-smi") is None:
        return True, f"no GPU: trains on {os.cpu_count()} CPU cores"
    asked = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=30)
    return done.returncode == 0, f"GPUs: {'; '.join((done.stdout or done.stderr).strip().splitlines())}"


def memory_line() -> Line:
    try:
        rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free_gb = int(rows["MemAvailable"].split()[0]) / 1e6
    except (OSError, KeyError, ValueError):
        return True, "memory: unknown on this system"
    return free_gb >= 4, f"memory: {free_gb:.1f} GB free; the 135M model trains in about 4"


def tool_line(name: str, fix: str) -> Line:
    found = shutil.which(name)
    return found is not None, f"{name}: {found or fix}"


def disk_line(need_gb: int) -> Line:
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    return free_gb >= need_gb, f"disk here: {free_gb:.0f} GB free, {need_gb} wanted"


if __name__ == "__main__":
    sys.exit(main())
