"""The supervisor alone: what it starts, how it ends, what it says about it."""

from __future__ import annotations

import ast
import errno
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from a3r import supervisor as sv
from a3r.results import RunRecord

GOOD = "for s in range(1, 4): row(s)\n"


def waiting(attempt, name="metrics.jsonl"):
    """The path of a file the client writes, once it is there."""
    deadline = time.monotonic() + 20
    while not (attempt.dir / name).exists():
        assert time.monotonic() < deadline, f"{name} was not written; {attempt.log()}"
        time.sleep(0.01)
    return attempt.dir / name


def test_a_good_run_leaves_a_record_with_its_files_and_nothing_alive(attempt):
    one = attempt(GOOD + 'put("eval.json", {"reward/final": 0.5})', expect_steps=3, required_metrics=["reward/mean"])
    record = RunRecord.model_validate(one.run())
    assert (record.status, record.steps, record.failure_class) == ("COMPLETED", 3, None)
    assert record.metrics["reward/final"].value == 0.5
    assert record.files["metrics.jsonl"] == sv.file_sha(one.dir / "metrics.jsonl")
    assert one.gone()


def test_it_needs_the_standard_library_only():
    tree = ast.parse(Path(sv.__file__).read_text())
    names = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {str(n.module).split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert names <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("program", "failure_class", "evidence"),
    [
        ('print("torch.OutOfMemoryError: CUDA out of memory"); sys.exit(1)', "oom", "out of memory"),
        ("raise MemoryError", "oom", "MemoryError"),
        ('print("ConfigError: optim.lrr: unknown key"); sys.exit(2)', "config", "unknown key"),
        ("sys.exit(2)", "config", "command line"),
        ('raise KeyError("reward_fn")', "code", "KeyError: 'reward_fn'"),
        ("os.kill(os.getpid(), 11)", "code", "signal 11"),
        ('print("openai.RateLimitError: Error code: 429 - quota"); sys.exit(1)', "external_dep", "429"),
        ('f = open("/dev/full", "w"); f.write("x"); f.flush()', "infra", "No space left"),
        ("os.kill(os.getpid(), 9)", "infra", "killed from outside"),
        ("sys.exit(7)", "unknown", "exit status 7"),
    ],
)
def test_the_class_follows_from_exit_status_and_logs(attempt, program, failure_class, evidence):
    result = attempt(program).run()
    assert (result["status"], result["failure_class"]) == ("FAILED", failure_class)
    assert evidence in result["failure_detail"]


@pytest.mark.parametrize(
    ("program", "clock", "failure_class"),
    [
        ("time.sleep(60)", {"first_step_s": 0.2}, "stalled"),
        ("row(1); time.sleep(60)", {"stall_s": 0.2}, "stalled"),
        ("while True: row(int(time.time() * 1e6)); time.sleep(0.01)", {"max_s": 0.3}, "timeout"),
    ],
)
def test_each_of_the_three_clocks_ends_a_run(attempt, program, clock, failure_class):
    timeouts = {"first_step_s": 15, "stall_s": 15, "max_s": 30, "grace_s": 0.2} | clock
    one = attempt(program, timeouts=timeouts)
    assert one.run()["failure_class"] == failure_class
    assert one.gone()


def test_a_jump_of_the_wall_clock_moves_no_timeout(attempt, monkeypatch):
    one = sv.Supervisor(sv.Launch.load(attempt("pass").dir))
    main = one.launch.processes[0]
    main.started = sv.now()
    for jump in (-1e6, 1e6):
        monkeypatch.setattr(sv.time, "time", lambda jump=jump: 1.8e9 + jump)
        assert one.clocks(main) is None


def test_a_value_that_is_no_number_is_divergence(attempt):
    one = attempt('row(1); row(2, **{"reward/mean": float("nan")}); time.sleep(60)')
    result = one.run()
    assert (result["status"], result["failure_class"]) == ("DIVERGED", "diverged")
    assert one.gone()


def test_a_metric_above_its_bound_for_long_enough_is_divergence(attempt):
    above = [{"metric": "kl", "value": 10, "for_steps": 2}]
    stop = {"nan": "diverged", "above": above}
    once = attempt("row(1, kl=11); row(2, kl=1); row(3, kl=11)", stop=stop)
    twice = attempt("row(1, kl=11); row(2, kl=12); time.sleep(60)", stop=stop)
    assert once.run()["status"] == "COMPLETED"
    assert twice.run()["status"] == "DIVERGED"


@pytest.mark.parametrize(
    ("program", "launch", "evidence"),
    [
        ("row(1); row(2)", {"expect_steps": 3}, "2 of 3 steps"),
        ("row(1); row(2); row(900)", {}, "holes"),
        (GOOD + 'put("eval.json", {"steps": 60})', {}, "claims 60 steps"),
        (GOOD, {"required_metrics": ["kl"]}, "kl"),
    ],
)
def test_a_client_that_lies_about_its_work_is_caught(attempt, program, launch, evidence):
    result = attempt(program, **launch).run()
    assert (result["status"], result["failure_class"]) == ("FAILED", "fabricated")
    assert evidence in result["failure_detail"]


@pytest.mark.parametrize(
    ("resolved", "good"),
    [
        ({"optim": {"lr": 1e-5}}, True),
        ({"optim.lr": 1e-5, "x": 1}, True),
        ({"optim": {"lr": 2e-5}}, False),
        ({}, False),
    ],
)
def test_a_key_that_the_client_did_not_take_as_asked_is_a_config_failure(attempt, resolved, good):
    one = attempt(GOOD + f'put("resolved_config.json", {json.dumps(resolved)})', asked={"optim.lr": 1e-5})
    assert one.run()["failure_class"] == (None if good else "config")


def test_a_client_starts_only_when_what_it_needs_is_ready(attempt, tmp_path):
    flag = tmp_path / "ready"
    server = f"import time; time.sleep(0.2); open({str(flag)!r}, 'w'); time.sleep(60)"
    program = f"assert os.path.exists({str(flag)!r})\n" + GOOD
    one = attempt(program, helpers={"server": {"code": server, "ready": {"file": str(flag)}}})
    assert one.run()["status"] == "COMPLETED"
    assert one.gone()


def test_readiness_is_asked_over_http(attempt, tmp_path):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = (
        "import http.server, time; time.sleep(0.1)\n"
        f"http.server.HTTPServer(('127.0.0.1', {port}), http.server.SimpleHTTPRequestHandler).serve_forever()"
    )
    ready = {"http": f"http://127.0.0.1:{port}/", "within_s": 15}
    program = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/').read()\n" + GOOD
    assert attempt(program, helpers={"server": {"code": server, "ready": ready}}).run()["status"] == "COMPLETED"


def test_a_process_that_never_gets_ready_is_a_timeout(attempt):
    helpers = {"server": {"code": "import time; time.sleep(60)", "ready": {"file": "/nonexistent", "within_s": 0.2}}}
    assert attempt(GOOD, helpers=helpers).run()["failure_class"] == "timeout"


def test_a_server_that_dies_ends_the_run_with_its_own_reason(attempt):
    helpers = {"server": {"code": "import time; time.sleep(0.2); raise KeyError('weights')"}}
    result = attempt("row(1); time.sleep(60)", helpers=helpers).run()
    assert result["failure_class"] == "code"
    assert "server" in result["failure_detail"]


def test_a_program_that_does_not_exist_is_a_config_failure(attempt):
    one = attempt(GOOD)
    launch = json.loads((one.dir / "launch.json").read_text())
    launch["processes"][0]["argv"] = ["/nonexistent/program"]
    (one.dir / "launch.json").write_text(json.dumps(launch))
    assert one.run()["failure_class"] == "config"


def test_a_second_supervisor_of_the_same_attempt_does_nothing(attempt):
    one = attempt("row(1); time.sleep(1.0)\nrow(2)")
    one.start()
    first = one.claim()
    one.start()
    assert one.result()["steps"] == 2
    assert sv.read_json(one.dir / "claim") == first
    assert (one.dir / "metrics.jsonl").read_text().count("\n") == 2


def test_a_fenced_attempt_neither_starts_nor_reports(attempt):
    one = attempt(GOOD)
    (one.dir / "fenced").write_text("{}")
    one.start()
    assert one.gone()
    assert not (one.dir / "claim").exists()
    assert not (one.dir / "metrics.jsonl").exists()


def test_a_fence_during_the_run_ends_it_without_a_result(attempt):
    one = attempt("row(1); time.sleep(60)")
    one.start()
    waiting(one)
    (one.dir / "fenced").write_text("{}")
    assert one.gone()
    assert not (one.dir / "result.json").exists()


def test_a_slot_that_somebody_holds_is_not_shared(attempt, tmp_path):
    lock = tmp_path / "cpu-0.lock"
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = attempt(GOOD, locks=[str(lock)], lock_wait_s=0.1).run()
    assert (result["failure_class"], result["steps"]) == ("infra", 0)


def test_the_slot_stays_taken_until_the_last_stray_process_is_dead(attempt, tmp_path):
    """The supervisor is killed; its trainer dies with it, a double-forked grandchild does not, and holds the lock."""
    lock = tmp_path / "cpu-0.lock"
    stray = "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)\nos.wait()\n"
    one = attempt(stray + "row(1); time.sleep(60)", locks=[str(lock)])
    one.start()
    waiting(one)
    os.kill(one.claim()["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while len(sv.marked_processes(one.nonce)) != 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(sv.marked_processes(one.nonce)) == 1, "the trainer died with its supervisor, the stray did not"
    with open(lock) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert sv.kill_marked(one.nonce)
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_strays_are_swept_at_the_end_of_a_good_run(attempt):
    stray = "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)\nos.wait()\n"
    one = attempt(stray + GOOD)
    assert one.run()["status"] == "COMPLETED"
    assert one.gone()


def test_hanging_up_does_not_end_it_and_a_polite_end_is_reported(attempt):
    one = attempt("row(1); time.sleep(60)")
    one.start()
    waiting(one)
    pid = one.claim()["pid"]
    os.kill(pid, signal.SIGHUP)
    os.kill(pid, signal.SIGHUP)
    assert sv.start_time(pid) is not None
    os.kill(pid, signal.SIGTERM)
    result = one.result()
    assert (result["failure_class"], "SIGTERM" in result["failure_detail"]) == ("infra", True)
    assert one.gone()


def test_a_stop_file_cancels(attempt):
    one = attempt("row(1); time.sleep(60)")
    one.start()
    waiting(one)
    (one.dir / "stop").write_text("paused")
    result = one.result()
    assert (result["status"], result["failure_detail"]) == ("CANCELLED", "paused")


def test_rows_of_an_earlier_attempt_count_as_steps_but_not_as_signs_of_life(attempt):
    one = attempt("time.sleep(60)", timeouts={"first_step_s": 0.3, "stall_s": 60, "max_s": 60, "grace_s": 0.1})
    (one.dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.1}\n')
    assert one.run()["failure_class"] == "stalled"
    two = attempt("row(2); row(3)", expect_steps=3)
    (two.dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.1}\n{"step": 2, "reward/mean": 0.9}\n')
    result = two.run()
    assert (result["status"], result["resumed_from"], result["steps"]) == ("COMPLETED", 1, 3)


def test_a_torn_last_line_is_not_a_step(attempt):
    program = GOOD + 'open(OUT + "/metrics.jsonl", "a").write(\'{"step": 4, "rew\')'
    assert attempt(program, expect_steps=3).run()["steps"] == 3


def test_a_result_is_written_once(tmp_path):
    assert sv.write_once(tmp_path / "result.json", {"a": 1})
    assert not sv.write_once(tmp_path / "result.json", {"a": 2})
    assert json.loads((tmp_path / "result.json").read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_a_full_disk_gives_up_the_reserve_and_says_so(attempt, monkeypatch):
    one = sv.Supervisor(sv.Launch.load(attempt("pass").dir))
    (one.dir / "reserve").write_bytes(b"x")
    real = sv.write_once

    def write_when_there_is_room(path, data):
        if (one.dir / "reserve").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(sv, "write_once", write_when_there_is_room)
    one.report(sv.End("COMPLETED"))
    result = sv.read_json(one.dir / "result.json")
    assert result and result["provenance"]["extra"]["disk_full"]


def test_equal_failures_have_equal_signatures_whatever_their_numbers():
    one = sv.signature("code", "KeyError: 'x' at 0x7f3a, step 17, /tmp/a/b.py")
    assert one == sv.signature("code", "KeyError: 'x' at 0x99, step 3, /home/u/c.py")
    assert one != sv.signature("code", "KeyError: 'y' at 0x99, step 3, /home/u/c.py")


def test_the_client_says_what_data_it_loaded_and_nothing_else_of_the_provenance(attempt):
    one = attempt(GOOD + 'put("env.json", {"data_sha256": "d" * 64, "commit": "mine", "model_sha256": 5})')
    p = RunRecord.model_validate(one.run()).provenance
    assert (p.data_sha256, p.commit, p.model_sha256) == ("d" * 64, None, None)


def test_the_room_reserved_for_the_result_is_given_back(attempt):
    one = attempt(GOOD)
    one.run()
    deadline = time.monotonic() + 20
    while (one.dir / "reserve").exists():  # it goes after the result is there
        assert time.monotonic() < deadline
        time.sleep(0.01)
