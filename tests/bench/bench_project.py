"""A repository in a temporary folder with a light scripted suite: real git, worktrees and supervisors, no training."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from a3r.bench.commits import History
from a3r.bench.measure import Measurer
from a3r.bench.session import Session
from a3r.bench.store import Results
from a3r.bench.suites import load_suite
from a3r.hosts import Host

CLIENT = """
import argparse, json, os, random, pathlib
parser = argparse.ArgumentParser()
for name in ("config", "seed", "out"):
    parser.add_argument("--" + name)
args = parser.parse_args()
import subject
out = pathlib.Path(args.out)
out.joinpath("resolved_config.json").write_text(pathlib.Path(args.config).read_text())
noise = random.Random(f"{subject.SPEED} {args.seed}").gauss(0, 0.1)
with open(os.environ["WITNESS"], "a") as file:
    file.write(json.dumps({"speed": subject.SPEED, "seed": args.seed, "from": subject.__file__}) + "\\n")
with out.joinpath("metrics.jsonl").open("w") as file:
    for step in (1, 2):
        file.write(json.dumps({"step": step, "speed": subject.SPEED + noise, "reward/mean": step * 0.1}) + "\\n")
"""

SUITE = """
schema: a3r/suite/v1
name: light
modules: [subject]
pythonpath: [src]
build: [["{python}", "-m", "compileall", "-q", "src"]]
tasks:
  - name: drive
    blueprint:
      schema: a3r/blueprint/v1
      name: drive
      processes:
        - name: client
          main: true
          argv: ["{python}", "client.py", "--config", "{spec}", "--seed", "{seed}", "--out", "{attempt_dir}"]
      timeouts: {first_step_s: 30, stall_s: 30, max_s: 60, grace_s: 1}
      metrics: {required: [speed]}
      retry: {infra: 0, lost: 2}
    metrics:
      speed: {direction: higher, min_effect: 0.2, unit: km/h}
"""


def git(repo: Path, *argv: str) -> str:
    identity = {f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    dates = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
    done = subprocess.run(
        ["git", "-C", str(repo), *argv], capture_output=True, text=True, check=True, env=os.environ | identity | dates
    )
    return done.stdout.strip()


@dataclass
class Project:
    """A repository whose commits differ in the speed of `subject`."""

    root: Path
    folder: Path
    witness: Path

    def commit(self, speed: float | str | None = None, **files: str) -> str:
        """Commit a speed (text is written as it is) and other files; returns the hash."""
        if speed is not None:
            self.write("src/subject/__init__.py", f"SPEED = {speed}\n")
        for name, text in files.items():
            self.write(name.replace("__", "/").replace("_md", ".md"), text)
        git(self.root, "add", "-A")
        git(self.root, "commit", "-q", "--allow-empty", "-m", f"speed {speed}, {' '.join(files)}")
        return git(self.root, "rev-parse", "HEAD")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def history(self) -> History:
        return History(self.root)

    def session(self, **settings) -> Session:
        results = Results(self.folder)
        host = Host(name="here", slots=1, lock_dir=str(self.folder.parent / "locks"))
        said: list[str] = []
        suite = load_suite(self.root / "blueprints/suites/light.yaml")
        session = Session(self.history(), results, [suite], Measurer(results, host, tick_s=0.02), said.append)
        session.said = said
        return session

    def run(self, spec: str = "HEAD", steps: int | None = None, patch: bytes = b""):
        session = self.session()
        return session.run(session.history.select(spec, steps, lambda c: session.settled(session.suites[0], c)), patch)

    def runs(self) -> list[dict]:
        """Every run that was really made."""
        return [json.loads(line) for line in self.witness.read_text().splitlines()] if self.witness.exists() else []

    def left_over(self) -> list[str]:
        """Worktrees that git or the folder still has, beside the project's own."""
        listed = [
            line for line in git(self.root, "worktree", "list", "--porcelain").splitlines() if "worktree " in line
        ]
        folder = self.folder / "work" / "worktrees"
        return listed[1:] + [p.name for p in folder.iterdir()] if folder.exists() else listed[1:]
