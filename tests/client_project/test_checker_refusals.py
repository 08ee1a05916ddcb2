"""Broken projects: each gets the sentence that says what to change, in bounded time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from a3r.client.check import CHECKS as NAMES
from a3r.client.check import NotAProject, Report, Verdict, check_project
from a3r.client.client_cli import app

HONEST = 'return float(said.strip() == str(task["n"]))'


def failure(report: Report) -> tuple[str, str]:
    """Name and sentence of the first check that failed; every check has a verdict."""
    assert [result.check for result in report.results] == list(NAMES)
    return next((r.check, r.sentence) for r in report.results if r.verdict is Verdict.FAIL)


@pytest.mark.parametrize(
    ("old", "new", "check_name", "words"),
    [
        ("def tasks(", "def tasks((", "imports", "train.py, line 5"),
        ("import openai", "import openai_of_nowhere", "imports", "no module 'openai_of_nowhere'"),
        ("import openai", "import openai\nprint('hello there')", "imports", "prints 'hello there"),
        (
            "import openai",
            "import openai\nraise OSError('no disk')",
            "imports",
            "raised OSError: no disk (train.py, line 3",
        ),
        ("import openai", "import openai, sys\nsys.exit(3)", "imports", "if __name__ == '__main__'"),
        ("SCRIPT = Script(", "OTHER = dict(", "imports", "exactly one module-level Script and has none"),
        (
            "SCRIPT = Script(",
            "from swarmtune.swarm_script import SwarmScript\n"
            "TEAM = (lambda **k: SwarmScript(script=Script(**k), roles=lambda parameters: ('a', 'b')))(",
            "imports",
            "trains several models",
        ),
        ('"batch_tasks": 4', '"batch_taks": 4', "imports", "did you mean 'batch_tasks'"),
        (
            "import openai",
            "import openai, urllib.request\nurllib.request.urlopen('http://data.example.org/x')",
            "imports",
            "it wanted to reach data.example.org",
        ),
        ('f"t{i}"', '"same"', "tasks", "two tasks have the task_id 'same'"),
        ("range(20)", "range(3)", "tasks", "3 tasks, but a step takes 4"),
        ("range(20)", "range(0)", "tasks", "gives no tasks"),
        (
            "    return [{",
            "    import random\n    return [{'x': random.random(), ",
            "tasks",
            "the same seed gives other tasks",
        ),
        (
            "    return [{",
            "    import random\n    r = random.Random(7)\n    return [{'x': r.random(), ",
            "tasks",
            "the same ones",
        ),
        ("return [{", "yield from [{", "tasks", "a generator is no list: return a list of tasks"),
        ('{"task_id": f"t{i}", "n"', '{"n"', "tasks", "task_id"),
        ("said = ask(task, episode)", "said = '7'", "episode", "never asked the model"),
        (HONEST, 'print("reward", 1.0)', "episode", "return the reward"),
        (HONEST, "return [1.0]", "episode", "a list: return a finite number"),
        (HONEST, "return True", "episode", "a bool: return float"),
        (HONEST, "return '1.0'", "episode", "a str: return a finite number"),
        (HONEST, "return float('nan')", "episode", "the reward is nan: return a finite number"),
        (HONEST, "return 10**400", "episode", "too large for a float"),
        (HONEST, "return 1j", "episode", "a complex: return a finite number"),
        (HONEST, "raise KeyboardInterrupt", "episode", "raised KeyboardInterrupt itself"),
        (HONEST, "return 1.0, {'mood': 'good'}", "episode", "metrics.mood"),
        (HONEST, "return 1 / 0", "episode", "raised ZeroDivisionError: division by zero (train.py, line 15)"),
        (HONEST, "raise SystemExit(4)", "episode", "called sys.exit(4)"),
        (HONEST, "return 1.0 / len(said)", "reward", "raised ZeroDivisionError"),
        (HONEST, "import os; os._exit(0)", "episode", "ended with status 0"),
        (HONEST, "import random; return random.random()", "seeded", "random.Random(episode.seed)"),
        (HONEST, "return hash(said) % 97 / 97", "seeded", "in another"),
        (
            "said = ask(task, episode)",
            "try:\n        said = ask(task, episode)\n    except Exception:\n        return 0.0",
            "aborts",
            "let the exception travel",
        ),
    ],
)
def test_a_broken_project_is_told_what_to_change(check, old: str, new: str, check_name: str, words: str) -> None:
    name, sentence = failure(check(old, new))
    assert (name, words in sentence) == (check_name, True), sentence


def test_a_shuffle_of_all_tasks_there_are_is_no_fixed_draw_and_copying_may_be_the_task(check) -> None:
    shuffled = "    import random\n    random.Random(seed).sample(range(20), 20)\n    return [{"
    assert check("    return [{", shuffled).ok


def test_what_a_project_says_commands_no_terminal(write) -> None:
    folder = write(HONEST, "raise ValueError('\\x1b[2J\\x07 cleared')")
    said = CliRunner().invoke(app, ["check", str(folder), "--episodes", "8"]).output
    assert "[2J" in said and "cleared" in said and "\x1b" not in said and "\x07" not in said


def test_a_loop_without_end_at_import_is_ended(check) -> None:
    name, sentence = failure(check("import openai", "import openai\nwhile True: pass", limit_s=1.0))
    assert name == "imports" and "not over after 1 s" in sentence


@pytest.mark.parametrize("hang", ["while True: pass", "import threading; threading.Event().wait()"])
def test_a_reward_that_hangs_is_ended(check, hang: str) -> None:
    name, sentence = failure(check(HONEST, hang, limit_s=8.0))
    assert name == "episode" and "bound the agent's loops" in sentence


@pytest.mark.parametrize("blocks", ["async rollout", "checks.py"])
def test_what_blocks_the_event_loop_is_ended_within_the_limit(check, blocks: str) -> None:
    forever = "import threading; threading.Event().wait()"
    if blocks == "checks.py":
        report = check(limit_s=5.0, checks=f"def random_answer(task, messages, rng):\n    {forever}\n")
    else:
        report = check("def rollout(task, episode):", f"async def rollout(task, episode):\n    {forever}", limit_s=5.0)
    name, sentence = failure(report)
    assert name == "episode" and "blocked the event loop for 5 s" in sentence


def test_rewards_that_follow_from_the_seed_alone_are_refused_without_good_answers(check) -> None:
    report = check(HONEST, "return (episode.seed or 0) % 97 / 96", checks=None)
    assert failure(report)[0] == "learnable" and "whatever was answered" in failure(report)[1]


OBJECTS = """\
    return [Task(i) for i in range(20)]


class Task:
    def __init__(self, i):
        self.task_id, self.n = f"t{i}", i


def unused():
    return [{"""


def test_tasks_may_be_objects_without_a_repr(check) -> None:
    report = check("    return [{", OBJECTS)
    assert next(result for result in report.results if result.check == "tasks").verdict is Verdict.PASS


def test_an_ended_check_leaves_no_process(write, tmp_path) -> None:
    started = tmp_path / "started"
    folder = write(HONEST, f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    check = subprocess.Popen([sys.executable, "-m", "a3r.cli", "client", "check", str(folder)], env=environment())
    try:
        while not (started.is_file() and started.read_text()):
            assert check.poll() is None
            time.sleep(0.05)
        check.terminate()
        check.wait(60)
    finally:
        check.kill()
    child = Path("/proc", started.read_text(), "stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


def environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "core"), str(root)])}


def test_an_import_may_look_at_the_streams(check) -> None:
    look = "sys.stdout.reconfigure(errors='replace'), sys.stdout.buffer.flush(), sys.stdout.fileno()"
    report = check("import openai", f"import openai, sys\n{look}")
    assert next(result for result in report.results if result.check == "imports").verdict is Verdict.PASS


def test_a_flood_of_output_is_ended(check) -> None:
    flood = "\n    while True: print('x' * 10_000)"
    name, sentence = failure(check("said = ask(task, episode)", f"said = ask(task, episode){flood}"))
    assert name == "episode" and "printed more than 8 MB" in sentence


def test_a_gpu_library_is_named(check) -> None:
    name, sentence = failure(check("import openai", "import openai, sys\nsys.modules['vllm'] = sys"))
    assert name == "light" and "imports vllm" in sentence


def test_a_broken_declaration_in_checks_is_not_taken_for_an_outage(check) -> None:
    name, sentence = failure(check(checks="def good_answer(task, messages):\n    return task['solution']\n"))
    assert name == "episode" and "checks.py: KeyError('solution')" in sentence


def test_nothing_to_check_is_said(tmp_path) -> None:
    with pytest.raises(NotAProject, match="no such folder"):
        check_project(tmp_path / "absent")
    with pytest.raises(NotAProject, match=r"has no train\.py"):
        check_project(tmp_path)


def test_the_command_prints_json_and_exits_by_the_verdict(write) -> None:
    folder = write(HONEST, "return None")
    broken = CliRunner().invoke(app, ["check", str(folder), "--json", "--episodes", "8"])
    report = json.loads(broken.output)
    assert broken.exit_code == 1 and not report["ok"]
    assert [c["verdict"] for c in report["checks"]][:5] == ["pass", "pass", "pass", "fail", "skipped"]
    missing = CliRunner().invoke(app, ["check", str(folder / "absent")])
    assert missing.exit_code == 2 and "a3r client new" in missing.output
