"""The supervisor as shipped, with the fault points switched on."""

import importlib.util
import sys
from pathlib import Path

import faults

spec = importlib.util.spec_from_file_location(
    "a3r_supervisor", Path(__file__).resolve().parents[2] / "a3r" / "supervisor.py"
)
assert spec and spec.loader
supervisor = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = supervisor
spec.loader.exec_module(supervisor)
supervisor.__dict__["reached"] = lambda name: faults.reached(f"supervisor:{name}")
sys.exit(supervisor.main(sys.argv[1:]))
