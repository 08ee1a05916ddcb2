"""`a3r client new` writes a whole project that passes its checker; names are checked and nothing is overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from a3r.client.check import Options, check_project
from a3r.client.client_cli import app
from a3r.client.new import CannotWrite, write_project

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "README.md", "agent.py", "checks.py", "reward.py", "run_one_episode.py", "tasks.py", "test_client.py", "train.py",
}  # fmt: skip


def run_in(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "core"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_new_project_passes_its_checker_at_once(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["new", "my-task-2", "--dir", str(tmp_path / "deep")])
    assert made.exit_code == 0, made.output
    folder = tmp_path / "deep" / "my-task-2"
    assert {path.name for path in folder.iterdir()} == FILES
    report = check_project(folder, Options(limit_s=60.0, episodes=32))
    assert report.ok, report.as_dict()
    assert {path.name for path in folder.iterdir()} == FILES, "checking leaves nothing behind"


def test_a_new_projects_own_programs_run(tmp_path: Path) -> None:
    folder = write_project("my-task", tmp_path)
    shown = run_in(folder, "run_one_episode.py", "--say", "I say nothing")
    assert shown.returncode == 0 and "reward: 0.0" in shown.stdout, shown.stderr
    tested = run_in(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_client.py")
    assert tested.returncode == 0, tested.stdout
    schema = run_in(folder, "train.py", "--print-schema")
    assert schema.stdout.startswith("{"), schema.stderr


TWO_TURNS = """
import openai
from swarmtune.script import Script


def rollout(task, episode):
    llm = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    messages = [{"role": "user", "content": "Guess."}]
    for _ in range(2):
        reply = llm.chat.completions.create(model=episode.model, messages=messages).choices[0].message
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "Higher."}]
    return float(reply.content == "2 guesses")


SCRIPT = Script(name="other", tasks=lambda parameters, seed: ["one"], rollout=rollout, defaults={"model": "tiny"})
"""
COUNTING = """
def good_answer(task, messages):
    return f"{sum(m['role'] == 'user' for m in messages)} guesses"
"""


def test_its_player_of_one_episode_outlives_another_task_and_says_each_message_once(tmp_path: Path) -> None:
    folder = write_project("my-task", tmp_path)
    for name, text in (("train.py", TWO_TURNS), ("checks.py", COUNTING), ("tasks.py", "")):
        (folder / name).write_text(text)
    shown = run_in(folder, "run_one_episode.py")
    assert shown.returncode == 0, shown.stderr
    said = ["user: Guess.", "model: 1 guesses", "user: Higher.", "model: 2 guesses"]
    assert [line for line in shown.stdout.splitlines() if line.startswith(("user:", "model:"))] == said
    assert "reward: 1.0" in shown.stdout


def test_a_new_project_keeps_to_the_usual_style(tmp_path: Path) -> None:
    folder = write_project("my-task", tmp_path)
    (folder / "pyproject.toml").write_text("[tool.ruff]\nline-length = 120\n")
    for command in (["check", "--select", "E,F,I,B,UP"], ["format", "--check"]):
        done = run_in(folder, "-m", "ruff", *command, ".")
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["", "My-task", "my_task", "-a", "a-", "a--b", "2nd", "../up", "a/b", "a" * 65, "ä"])
def test_a_name_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CannotWrite, match="is no project name"):
        write_project(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("taken", "dangling"):
        refused = CliRunner().invoke(app, ["new", name, "--dir", str(tmp_path)])
        assert refused.exit_code == 2 and "exists already" in refused.output
    assert (tmp_path / "taken").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"taken", "dangling"}


def test_a_parent_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="cannot be written"):
        write_project("a", tmp_path / "file")
