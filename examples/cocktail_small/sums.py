"""The first client of the cocktail: one-digit sums, as in ../arithmetic."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "arithmetic"))

from train import ARITHMETIC

from swarmtune.script import run

SUMS = dataclasses.replace(ARITHMETIC, name="cocktail-sums", defaults={"client_name": "sums", "client_share": 4})

if __name__ == "__main__":
    run(SUMS)
