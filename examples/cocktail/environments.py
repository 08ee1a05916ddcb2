"""A virtual environment of its own for each client, light, from this checkout."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"sums": ["httpx", "pydantic", "openai"], "one-word": ["httpx", "pydantic"]}
"""Client → what its environment has besides swarmtune."""


class EnvironmentFailed(RuntimeError):
    """An environment could not be made; the message ends with what pip said."""


def python_of(name: str, folder: Path) -> Path:
    """The interpreter of a client's environment under `folder`, made where it is missing or out of date.

    Raises:
        EnvironmentFailed
    """
    home = folder / name
    stamp, wanted = home / ".stamp", _fingerprint(name)
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"making the environment of {name} in {home}", file=sys.stderr, flush=True)
        _command([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)])
        with tempfile.TemporaryDirectory() as wheels:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
            _command([*pip, "wheel", "--no-deps", "--wheel-dir", wheels, str(ROOT)])
            into = [*pip, "--python", str(home / "bin" / "python"), "install", "-c", str(ROOT / "constraints.txt")]
            _command([*into, "--no-deps", *map(str, Path(wheels).glob("*.whl"))])
            _command([*into, *PACKAGES[name]])
        stamp.write_text(wanted)
    return home / "bin" / "python"


def _fingerprint(name: str) -> str:
    digest = hashlib.sha256(f"{sys.version} {PACKAGES[name]}".encode())
    for file in [ROOT / "constraints.txt", *sorted((ROOT / "core" / "swarmtune").glob("*.py"))]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _command(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentFailed(
            f"{' '.join(command[:6])} … failed; check the network and pip's settings, or give --python to run both "
            f"clients with one interpreter:\n{done.stderr.strip()[-1500:]}"
        )
