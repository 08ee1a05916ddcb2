"""math: questions from every source, answers judged, and a python tool that a program does not get out of."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import answers
import math_tasks
import psutil
import pytest
from example_runs import EXAMPLES, Train, load
from python_tool import Limits, Ran, SandboxUnavailable, run_python

from swarmtune.config import ConfigError

example = load("math")
SHORT = Limits(cpu_s=2, wall_s=4.0)


# -- questions and answers


def test_sums_need_nothing_and_train(train: Train):
    run = train(example.MATH, "example_models:sums", {"task.count": 6})
    assert run.status == 0 and run.outcomes().count("admitted") >= 4
    assert 0 < run.metrics[0]["reward/mean"] <= 1 and run.metrics[0]["client/turns"] == 1
    assert (run.out / "reward.png").stat().st_size > 5000


def test_an_agent_with_a_python_tool_trains_one_row_an_episode(train: Train, tmp_path: Path):
    pytest.importorskip("math_verify")
    file = tmp_path / "products.jsonl"
    rows = [{"problem": f"What is {n} times {n + 11}?", "answer": str(n * (n + 11))} for n in range(12, 16)]
    file.write_text("\n".join(map(json.dumps, rows)))
    run = train(example.MATH, "example_models:computes", {"task.file": str(file), "task.tool": True})
    assert run.status == 0
    step = run.metrics[0]
    assert 0 < step["client/tool_calls"] < 1 and 0 < step["reward/mean"] < 1
    assert step["batch/rows"] == step["episodes/trained"] < step["merge/calls"], "the turns of an episode are one row"


def test_reasoning_gym_makes_and_scores_tasks():
    pytest.importorskip("reasoning_gym")
    (task,) = math_tasks.gym("chain_sum", 1, seed=3)
    assert answers.score(task, f"First I add.\nAnswer: {task['answer']}") == 1.0
    assert answers.score(task, "Answer: no idea") < 0.1
    with pytest.raises(ConfigError, match=r"no 'chain_summ'; it has .*chain_sum"):
        math_tasks.gym("chain_summ", 1, seed=0)


@pytest.mark.parametrize(
    ("expected", "said", "worth"),
    [
        ("1/2", r"Answer: $\frac{1}{2}$", 1.0),
        ("1/2", "Answer: 0.5", 1.0),
        ("204", r"so it is \boxed{204}", 1.0),
        ("204", "Answer: 205", 0.0),
        ("204", "", 0.0),
        ("204", "I cannot say.", 0.0),
        ("2\\sqrt{3}", r"Answer: $\sqrt{12}$", 1.0),
    ],
)
def test_math_verify_judges_from_a_thread_as_well(expected: str, said: str, worth: float):
    pytest.importorskip("math_verify")
    assert answers.score({"judge": "math-verify", "answer": expected}, said) == worth


def test_rows_of_aime_and_dapo_are_understood_and_equal_questions_taken_once(tmp_path: Path):
    file = tmp_path / "mixed.jsonl"
    dapo = {"prompt": [{"role": "user", "content": "Find x."}], "reward_model": {"ground_truth": "34"}}
    rows = [{"problem": "Find y.", "answer": 12}, dapo, dapo]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert [(task["question"], task["answer"]) for task in math_tasks.from_file(file)] == [
        ("Find y.", "12"),
        ("Find x.", "34"),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("{", ":1: is no JSON"), ("[1]", ":1: must be an object"), ('{"problem": "x"}', "no answer .*it has problem")],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, complaint: str):
    file = tmp_path / "bad.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=complaint):
        math_tasks.from_file(file)


def test_without_the_hub_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConfigError, match=r"ConnectionError.*go online, or get it elsewhere and give task.file="):
        math_tasks.from_hub("dapo-math")


def test_a_call_that_makes_no_sense_is_answered():
    class Call:
        class function:
            name, arguments = "python", "{broken"

    assert "Arguments must be" in example.use_tool(Call)
    Call.function.name = "shell"
    assert "no tool 'shell'" in example.use_tool(Call)


# -- the sandbox


@pytest.fixture(params=[True, False], ids=["namespaces", "limits only"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs a program both ways, where this machine can."""
    try:
        isolation = run_python("", namespaces=request.param).isolation
    except SandboxUnavailable as error:  # root, with a Python under /root, without namespaces
        assert "run the client as an ordinary user" in str(error)
        if not Path("/usr/bin/python3").exists():
            pytest.skip(str(error))
        monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
        isolation = run_python("", namespaces=request.param).isolation
    if request.param and isolation != "namespaces":
        pytest.skip("the kernel grants no namespaces here")
    return lambda program, limits=SHORT: run_python(program, limits, namespaces=request.param)


def test_a_program_sees_no_secret_and_its_folder_is_gone_afterwards(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "very secret")
    ran = run(
        "import os; open('x', 'w').write('1'); print(os.getcwd(), sorted(os.environ), os.listdir('/proc/self/fd'))"
    )
    folder = ran.output.split()[0]
    assert ran.ended == "ok" and "OPENAI" not in ran.output and "secret" not in ran.output
    assert not Path(folder).exists()
    assert ran.output.count("'") <= 2 * (5 + 5), "five variables, and few open files"


def test_a_fork_bomb_stays_small_and_ends(run):
    ran = run(
        "import os, time\nmade = 0\nfor _ in range(500):\n  try:\n    if os.fork() == 0: time.sleep(60); os._exit(0)\n"
        "    made += 1\n  except OSError: break\nprint('made', made)"
    )
    assert 0 < int(ran.output.split()[1]) <= 12


def test_memory_time_and_output_have_limits(run):
    assert "MemoryError" in run("x = 'a' * 10**10").output
    assert run("while True: pass").ended == "time"
    assert run("import time; time.sleep(60)", Limits(wall_s=1.0)).ended == "time"
    endless = run("while True: print('x' * 1000)")
    assert endless.ended == "output" and len(endless.output) == SHORT.output_bytes
    assert "stopped: it printed too much" in endless.text


def test_a_file_cannot_grow_without_end(run):
    ran = run("f = open('big', 'wb')\nwhile True: f.write(b'x' * 10**6)")
    assert ran.ended in {"error", "time"} and ("File too large" in ran.output or "No space left" in ran.output)


def test_nothing_outside_the_folder_can_be_written(run, tmp_path: Path):
    tmp_path.chmod(0o777)
    ran = run(f"open({str(tmp_path / 'escaped')!r}, 'w')")
    if ran.isolation == "namespaces":
        assert ran.ended == "error" and not (tmp_path / "escaped").exists()
    here = run(f"open({str(EXAMPLES / 'math' / 'escaped')!r}, 'w')")
    assert here.ended == "error" or (os.getuid() and here.isolation == "limits")
    (EXAMPLES / "math" / "escaped").unlink(missing_ok=True)


def test_there_is_no_network_in_namespaces():
    ran = run_python("import socket; socket.create_connection(('127.0.0.1', 9), timeout=2)", SHORT)
    if ran.isolation != "namespaces":
        pytest.skip("the kernel grants no namespaces here")
    assert "unreachable" in ran.output or "refused" in ran.output
    assert run_python("import socket; print(len(socket.if_nameindex()))", SHORT).output.strip() == "1"


def test_a_child_that_hides_in_a_session_of_its_own_does_not_survive(run, tmp_path: Path):
    mark = f"survivor-{tmp_path.name}-{os.getpid()}"
    ran = run(
        "import os, sys, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork(): os._exit(0)\n"
        "  os.close(1); os.close(2)\n"
        f"  os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(120)', {mark!r}])\n"
        "time.sleep(0.5)\nprint('done')"
    )
    assert ran.output.strip() == "done"
    assert not survivors(mark)


def survivors(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if mark in (process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def test_a_program_that_fails_says_why(run):
    ran = run("1 / 0")
    assert ran.ended == "error" and "ZeroDivisionError" in ran.text
    assert "no output" in run("x = 1").text


def test_homes_and_sockets_are_covered_in_namespaces(tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        listener.bind(f"{folder}/door")
        Path(folder, "door").chmod(0o777)
        listener.listen()
        knock = f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({folder + '/door'!r})\nprint('open')"
        ran = run_python(f"import os\nprint(os.listdir({str(Path.home())!r}))\n{knock}", SHORT)
    if ran.isolation != "namespaces":
        pytest.skip("the kernel grants no namespaces here")
    assert "open" not in ran.output.split() and "FileNotFoundError" in ran.output
    (seen,) = re.findall(r"^\[.*\]$", ran.output, re.MULTILINE)
    assert set(ast.literal_eval(seen)) < set(os.listdir(Path.home())), "nothing but this Python's folder"
