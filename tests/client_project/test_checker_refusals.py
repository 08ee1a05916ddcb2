"""Broken projects: each gets the sentence that says what to change, in bounded time."""

from __future__ import annotations

import json

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
        ('{"task_id": f"t{i}", "n"', '{"n"', "tasks", "task_id"),
        ("said = ask(task, episode)", "said = '7'", "episode", "never asked the model"),
        (HONEST, 'print("reward", 1.0)', "episode", "return the reward"),
        (HONEST, "return [1.0]", "episode", "a list: return a finite number"),
        (HONEST, "return True", "episode", "a bool: return float"),
        (HONEST, "return '1.0'", "episode", "a str: return a finite number"),
        (HONEST, "return float('nan')", "episode", "the reward is nan: return a finite number"),
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


def test_a_loop_without_end_at_import_is_ended(check) -> None:
    name, sentence = failure(check("import openai", "import openai\nwhile True: pass", limit_s=1.0))
    assert name == "imports" and "not over after 1 s" in sentence


@pytest.mark.parametrize("hang", ["while True: pass", "import threading; threading.Event().wait()"])
def test_a_reward_that_hangs_is_ended(check, hang: str) -> None:
    name, sentence = failure(check(HONEST, hang, limit_s=8.0))
    assert name == "episode" and "bound the agent's loops" in sentence


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
