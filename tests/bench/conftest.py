"""A repository in a temporary folder with a light scripted suite; its helpers are in bench_project.py."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bench_project import CLIENT, SUITE, Project, git


@pytest.fixture
def project(tmp_path, monkeypatch):
    witness = tmp_path / "witness.jsonl"
    monkeypatch.setenv("WITNESS", str(witness))
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    made = Project(root, tmp_path / "results", witness)
    made.write("client.py", CLIENT)
    made.write("blueprints/suites/light.yaml", SUITE)
    made.write(".gitignore", "__pycache__/\n")
    made.commit(10.0)
    return made
