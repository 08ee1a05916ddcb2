"""The evals of skills: requests and tasks put to an assistant, here a scripted one, and the checks that decide."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from skill_stage import LIMIT_S, run_block
from typer.testing import CliRunner

from a3r.skill_checks import Block
from a3r.skill_evals import (
    MOST_OUTPUT,
    Case,
    Runner,
    Task,
    choice_prompt,
    chosen,
    decide,
    load_evals,
    prepare_folder,
    table,
)
from a3r.skills import Skill, read_skill, shipped
from a3r.skills_cli import app
from a3r.strictyaml import FormatError

SKILLS = shipped()
TASKS = [(skill, task) for skill in SKILLS for task in load_evals(skill, [s.name for s in SKILLS]).tasks]
IDS = [f"{skill.name}-{task.name}" for skill, task in TASKS]


# ---- the checks of the tasks -----------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("skill", "task"), TASKS, ids=IDS)
def test_the_check_refuses_no_work_and_takes_the_reference(
    skill: Skill, task: Task, variables: dict[str, str], in_terminal: None, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert not decide(task, skill, tmp_path / "empty")[0]
    prepare_folder(tmp_path / "untouched", task)
    if task.files:
        assert not decide(task, skill, tmp_path / "untouched")[0]
    prepare_folder(tmp_path / "solved", task)
    block = Block("bash", ("run",), task.reference, 1)
    groups: list[int] = []
    solved = run_block(block, tmp_path / "solved", variables | {"SKILL": str(skill.folder)}, groups)
    assert solved.status == 0, solved.words
    passed, words = decide(task, skill, tmp_path / "solved")
    assert passed, f"{words}\n{solved.words}"


def test_requests_are_put_to_one_skill_only() -> None:
    evals = {skill.name: load_evals(skill, [s.name for s in SKILLS]) for skill in SKILLS}
    requests = [r for e in evals.values() for r in (*e.triggers, *(miss.request for miss in e.near_misses))]
    assert len(set(requests)) == len(requests) >= 14 * 10
    for name, found in evals.items():
        assert any(miss.instead != "none" for miss in found.near_misses), name
        for skill in SKILLS:
            assert not any(skill.name in request for request in found.triggers), "a request gives the answer away"


# ---- a scripted assistant --------------------------------------------------------------------------------------------

EVALS = """\
triggers: [Paint it., "Is it dry?", "Which brush?", "Which colour?", It peels.]
near_misses:
  - {request: Bake bread., instead: bake}
  - {request: Bake rolls., instead: bake}
  - {request: Sing., instead: none}
  - {request: Dance., instead: none}
  - {request: Sleep., instead: none}
tasks:
  - {name: wall, request: Paint the wall red., files: {wall: bare}, check: "test \\"$(cat wall)\\" = red"}
  - {name: nothing, request: Hang., check: test -f done, limit_s: 1}
"""
ASSISTANT = """\
import pathlib, re, sys, time
prompt = sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read()
if "Which one skill" in prompt:
    request = re.search(r"A user asks:\\n\\n(.*)\\n", prompt)[1]
    choice = "paint" if "Paint" in request or "?" in request else "bake" if "Bake" in request else "**none**."
    print("no idea" if "peels" in request else f"I think of bake and paint, and take: {choice}")
elif "Hang" in prompt:
    time.sleep(600)
else:
    skill = pathlib.Path(re.search(r"(\\S+/SKILL.md)", prompt)[1])
    assert "name: paint" in skill.read_text() and not (skill.parent / "evals").exists()
    pathlib.Path("wall").write_text("red")
    print("Painted.")
"""


@pytest.fixture
def two(tmp_path: Path) -> list[Skill]:
    for name in ("paint", "bake"):
        (tmp_path / "skills" / name / "evals").mkdir(parents=True)
        text = f"---\nname: {name}\ndescription: Does {name}. Use when asked. Do not use when not.\n---\nDo.\n"
        (tmp_path / "skills" / name / "SKILL.md").write_text(text)
    (tmp_path / "skills" / "paint" / "evals" / "evals.yaml").write_text(EVALS)
    return [read_skill(tmp_path / "skills" / name) for name in ("paint", "bake")]


@pytest.mark.parametrize("way", ["{prompt}", ""])
def test_an_assistant_is_asked_watched_and_judged(way: str, two: list[Skill], tmp_path: Path) -> None:
    (tmp_path / "assistant.py").write_text(ASSISTANT)
    command = f"{shlex.quote(sys.executable)} {tmp_path / 'assistant.py'} {way}"
    told: list[Case] = []
    cases = Runner(command, two, tmp_path / "out", told=told.append).run(two[0], kinds=["trigger", "near miss", "task"])
    assert told == cases and [case.passed for case in cases] == [True] * 4 + [False] + [True] * 5 + [True, False]
    assert cases[4].answer == "" and cases[-1].remark.startswith("stopped at its limit of time or output")
    task = tmp_path / "out" / "paint" / "task-wall"
    assert (task / "stdout.txt").read_text() == "Painted.\n" and "Paint the wall red." in (
        task / "prompt.txt"
    ).read_text()
    assert (task / "folder" / ".codex" / "skills" / "paint" / "SKILL.md").exists()
    assert (tmp_path / "out" / "paint" / "trigger-1" / "stdout.txt").read_text().startswith("I think of bake")
    lines = table({"paint": cases}).splitlines()
    assert lines[2] == "| paint | 4/5 | 5/5 | 1/2 |"
    assert lines[6].startswith("| paint trigger-5 | paint | no name | It peels.")


def test_the_command_writes_a_table_for_people_and_one_for_programs(tmp_path: Path, in_terminal: None) -> None:
    (tmp_path / "says.py").write_text("print('install-swarm')\n")
    command = f"{shlex.quote(sys.executable)} {tmp_path / 'says.py'}"
    words = ["eval", "install-swarm", "--command", command, "--only", "triggers", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and "| install-swarm | 6/6 | 0/5 | – |" in done.output
    assert (tmp_path / "out" / "table.md").read_text() in done.output
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    assert data["command"] == command and len(data["skills"]["install-swarm"]) == 11
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2 and "holds something already" in again.output
    assert CliRunner().invoke(app, [*words[:-1], str(tmp_path / "x"), "--only", "all of it"]).exit_code == 2


def test_an_assistant_that_cannot_be_started_fails_every_case(two: list[Skill], tmp_path: Path) -> None:
    (tmp_path / "assistant").write_text("no program\0")
    (tmp_path / "assistant").chmod(0o755)
    cases = Runner(str(tmp_path / "assistant"), two, tmp_path / "out", told=lambda _: None).run(
        two[0], kinds=["trigger", "task"]
    )
    assert not any(case.passed for case in cases)
    assert all("ended with status 127" in case.remark for case in cases)


@pytest.mark.parametrize(
    ("command", "words"), [(" ", "is empty"), ('"', "no closing quotation"), ("no-such-assistant", "no program 'no-")]
)
def test_a_command_that_is_none_is_refused_and_leaves_no_folder(command: str, words: str, tmp_path: Path) -> None:
    asked = ["eval", "install-swarm", "--command", command, "--out", str(tmp_path / "out")]
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 2 and words in refused.output and not (tmp_path / "out").exists()


def test_a_program_beside_the_caller_is_found_from_the_tasks_folder(
    two: list[Skill], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "assistant").write_text("#!/bin/sh\necho paint\n")
    (tmp_path / "assistant").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    cases = Runner("./assistant", two, tmp_path / "out", told=lambda _: None).run(two[0], kinds=["trigger"])
    assert all(case.passed for case in cases)


def test_an_assistant_that_floods_is_ended_and_its_output_cut(two: list[Skill], tmp_path: Path) -> None:
    cases = Runner("yes paint", two, tmp_path / "out", told=lambda _: None).run(two[0], kinds=["trigger"])
    assert all("limit of time or output" in case.remark for case in cases)
    assert (tmp_path / "out" / "paint" / "trigger-1" / "stdout.txt").stat().st_size == MOST_OUTPUT


def test_what_an_assistant_leaves_running_is_ended_with_its_task(two: list[Skill], tmp_path: Path) -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); open('pid', 'w').write(str(p.pid))"
    (tmp_path / "leaves.py").write_text(code)
    command = f"{shlex.quote(sys.executable)} {tmp_path / 'leaves.py'}"
    Runner(command, two, tmp_path / "out", told=lambda _: None).run(two[0], kinds=["task"])
    pid = (tmp_path / "out" / "paint" / "task-wall" / "folder" / "pid").read_text()
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, timeout=LIMIT_S).stdout
    assert state.strip() in {"", "Z"}


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("paint", "paint"),
        ("`Paint`.", "paint"),
        ("Not bake, but paint", "paint"),
        ("none", "none"),
        ("paint... no: none of them", "none"),
        ("repaint", ""),
        ("paint-wall", ""),
        ("", ""),
    ],
)
def test_the_last_name_an_assistant_says_is_its_answer(said: str, answer: str) -> None:
    assert chosen(said, ["paint", "bake"]) == answer


def test_the_question_shows_every_description_and_hides_the_answer(two: list[Skill]) -> None:
    prompt = choice_prompt(two, "Bake rolls.")
    assert "- paint: Does paint." in prompt and "- bake: Does bake." in prompt and "Bake rolls." in prompt


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (", It peels.", "", "4 of them; write at least 5"),
        ("instead: bake", "instead: boil", "no other skill 'boil'"),
        ("instead: none", "instead: paint", "no other skill 'paint'"),
        ("name: wall", "name: The Wall", "name"),
        ("check: test -f done", "chek: test -f done", "unknown key; did you mean 'check'"),
        ("triggers: [", "triggers: [[", "not valid YAML"),
        ("limit_s: 1", "limit_s: soon", "is not a duration"),
    ],
)
def test_bad_evals_are_refused_with_their_line(old: str, new: str, sentence: str, two: list[Skill]) -> None:
    (two[0].folder / "evals" / "evals.yaml").write_text(EVALS.replace(old, new, 1))
    with pytest.raises(FormatError, match=r"evals\.yaml") as error:
        load_evals(two[0], ["paint", "bake"])
    assert sentence in str(error.value)


def test_a_check_runs_in_the_folder_and_knows_the_evals(two: list[Skill], tmp_path: Path) -> None:
    task = Task(name="x", request="x", check=f'test -f "$EVALS/evals.yaml" && test "$PWD" = {tmp_path} && echo seen')
    assert decide(task, two[0], tmp_path) == (True, "seen\n")
