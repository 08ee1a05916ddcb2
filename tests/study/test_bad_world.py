"""What the world does to a campaign: edited files, full disks, lost hosts, no ports, no tmux, a moving clock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections import Counter
from dataclasses import replace

import pytest
from campaigns import FAST, base_blueprint, decision_of, goal_lock
from test_campaign import journal, kinds, tick_until

from a3r import ledger as ledger_module
from a3r import study as study_module
from a3r.executor import HostUnreachable, Life, Sight
from a3r.executors.local import LocalExecutor
from a3r.hosts import load_hosts
from a3r.strictyaml import FormatError
from a3r.workers.recipe import slot_lock


def interrupted(campaign, condition, **lock):
    """A campaign whose leader left when a condition held."""
    directory = campaign.create(lock=goal_lock(**lock))
    study = campaign.open(directory)
    tick_until(study, lambda: condition(study), "the condition")
    study.close()
    return directory


def one_completed(study) -> bool:
    return any(r["state"] == "COMPLETED" for r in study.runs().values())


def test_slots_of_another_study_are_waited_for_and_use_up_no_retry(campaign):
    directory = campaign.create(hosts=campaign.hosts(slots=1))
    study = campaign.open(directory)
    lock = slot_lock(study.hosts.hosts[0], "cpu/0")
    with lock.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        tick_until(study, lambda: study.warnings, "it says what it waits for")
        for _ in range(5):
            study.tick()
        assert not study.open_attempts()
        assert study.warnings == ["cpu/0 of here are used by another study; runs wait for them"]
    study.run()
    study.close()
    assert {a["n"] for a in journal(directory).table("attempts").values()} == {1}


def test_a_result_edited_by_hand_is_put_back_and_recorded(campaign):
    directory = interrupted(campaign, one_completed)
    run = next(r["run"] for r in journal(directory).table("runs").values() if r["state"] == "COMPLETED")
    path = directory / "runs" / run / "attempts/1/result.json"
    original = path.read_bytes()
    path.write_text(path.read_text().replace('"steps": 6', '"steps": 600'))
    campaign.run(directory)
    assert path.read_bytes() == original
    assert path.with_suffix(".json.edited").exists()
    assert kinds(directory)["RESULT_RESTORED"] == 1


def test_a_result_edited_before_it_was_taken_is_refused(campaign):
    """Supervisors go on without a leader; somebody edits what one of them left."""
    directory = campaign.create()
    study = campaign.open(directory)
    tick_until(study, lambda: study.open_attempts(), "it runs")
    handle = study.handle(study.open_attempts()[0])
    deadline = time.monotonic() + 20
    while not (handle.directory / "result.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    result = json.loads((handle.directory / "result.json").read_text())
    (handle.directory / "result.json").write_text(json.dumps(result | {"nonce": "another"}))
    study.follow_attempts()
    refused = [e for e in study.store.events() if e.kind == "RESULT_REFUSED"]
    assert len(refused) == 1 and refused[0].data["class"] == "fabricated"
    study.run()
    study.close()


def test_metrics_edited_after_the_fact_stop_the_study_for_a_person(campaign):
    directory = interrupted(campaign, one_completed)
    run = next(r["run"] for r in journal(directory).table("runs").values() if r["state"] == "COMPLETED")
    path = directory / "runs" / run / "attempts/1/metrics.jsonl"
    original = path.read_text()
    path.write_text(original.replace("0.01", "0.02"))
    study = campaign.open(directory)
    assert study.run() != "DONE"
    assert study.hold and "changed since the run ended" in study.hold["reason"]
    path.write_text(original)
    (directory / "inbox" / "resume").write_text("{}")
    assert study.run() == "DONE"
    study.close()


def test_a_lock_file_edited_by_hand_is_put_back(campaign):
    directory = interrupted(campaign, one_completed)
    path = directory / "goal.lock.yaml"
    original = path.read_text()
    path.write_text(original.replace("at_least: 0.5", "at_least: 0.1"))
    campaign.run(directory)
    assert path.read_text() == original
    assert (directory / "goal.lock.yaml.edited").exists()


def test_a_corrupted_journal_page_does_not_end_a_study(campaign):
    directory = interrupted(campaign, one_completed)
    with open(directory / "journal.db", "r+b") as file:
        file.seek(4096)
        file.write(b"\x5a" * 4096 * 4)
    campaign.run(directory)
    assert decision_of(directory)["level"] == 1.0
    assert kinds(directory)["JOURNAL_REBUILT"] == 1
    assert Counter(e.run for e in journal(directory).events() if e.kind == "RUN_COMPLETED").most_common(1)[0][1] == 1


def test_a_full_disk_is_waited_out(campaign):
    directory = campaign.create()
    study = campaign.open(directory)
    study.tick()
    study.store.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    pages = study.store.db.execute("PRAGMA page_count").fetchone()[0]
    study.store.db.execute(f"PRAGMA max_page_count = {pages}")
    slept = []

    def make_room(seconds):
        slept.append(seconds)
        study.store.db.execute("PRAGMA max_page_count = 1000000")

    original = study_module.time.sleep
    study_module.time.sleep = lambda s: make_room(s) if s == FAST.disk_retry_s else original(s)
    try:
        study.run()
    finally:
        study_module.time.sleep = original
    assert slept and any("disk full" in w for w in study.warnings)
    study.close()
    assert decision_of(directory)["level"] == 1.0
    assert kinds(directory)["DISK_WAS_FULL"] == 1


def test_a_jump_of_the_wall_clock_changes_nothing(campaign, monkeypatch):
    real, began = time.time, time.time()
    jumps = iter([1e7, -1e7, 3e8])
    now = {"jump": 0.0}

    def jumping():
        if real() - began > 0.3 and now["jump"] == 0.0:
            now["jump"] = next(jumps, 0.0)
        return real() + now["jump"]

    monkeypatch.setattr(time, "time", jumping)
    directory = campaign.create(lock=goal_lock(base_blueprint(config={"step_s": 0.05}), budget={"wall": 600.0}))
    campaign.run(directory)
    assert decision_of(directory)["level"] == 1.0
    assert max(r["attempt"] for r in journal(directory).table("runs").values()) == 1


def test_no_free_port_is_said_and_tried_again(campaign, monkeypatch):
    base = base_blueprint(resources={"ports": ["server"]})
    directory = campaign.create(lock=goal_lock(base))
    study = campaign.open(directory)
    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "can_bind", lambda port: False)
        patch.setattr(ledger_module, "PORT_RANGE", range(20000, 20010))
        tick_until(study, lambda: study.warnings, "a warning")
        assert "1 ports wanted, 0 free in 20000-20009" in study.warnings[0]
        assert not study.open_attempts()
    study.close()


def test_ports_are_allotted_once(campaign):
    base = base_blueprint(config={"step_s": 0.2}, resources={"ports": ["a", "b"]})
    directory = campaign.create(lock=goal_lock(base))
    study = campaign.open(directory)
    tick_until(study, lambda: len(study.open_attempts()) == 2, "two run")
    ports = [p for a in study.open_attempts() for p in a["ports"].values()]
    assert len(set(ports)) == 4
    assert {f"here/port/{p}" for p in ports} <= set(study.store.table("leases"))
    (directory / "inbox" / "stop").write_text("{}")
    study.run()
    study.close()


def test_a_host_that_does_not_answer_is_unknown_not_dead(campaign, monkeypatch):
    """Its attempts stay, with their slots; nothing is started in their place until it answers again."""
    directory = campaign.create(lock=goal_lock(base_blueprint(config={"step_s": 0.05})))
    study = campaign.open(directory)
    tick_until(study, lambda: len(study.open_attempts()) == 2, "two run")
    with monkeypatch.context() as patch:
        patch.setattr(LocalExecutor, "look", lambda self, handle: Sight(Life.UNREACHABLE))
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            study.tick()
        assert {a["state"] for a in study.open_attempts()} == {"SUSPECT"}
        assert len(study.store.table("attempts")) == 2
        assert len(study.store.table("leases")) == 2
    study.run()
    study.close()
    assert decision_of(directory)["level"] == 1.0
    assert kinds(directory)["ATTEMPT_LOST"] == 0


def test_a_host_that_cannot_be_reached_at_launch_is_named(campaign, monkeypatch):
    def refuse(self, host):
        raise HostUnreachable(f"{host.name}: no route to host")

    directory = campaign.create()
    study = campaign.open(directory)
    monkeypatch.setattr(LocalExecutor, "check", refuse)
    tick_until(study, lambda: study.warnings, "a warning")
    assert "here: no route to host" in study.warnings[0]
    assert kinds(directory)["ATTEMPT_INTENT"] == 0
    study.close()


def test_a_reboot_is_proof_of_death(campaign, monkeypatch):
    directory = interrupted(campaign, lambda s: any(a["state"] == "RUNNING" for a in s.open_attempts()))
    for claim in directory.glob("runs/**/claim"):
        if not (claim.parent / "result.json").exists():
            facts = json.loads(claim.read_text())
            os.kill(facts["pid"], 9)
            claim.write_text(json.dumps(facts | {"boot_id": "an earlier boot"}))
    campaign.run(directory)
    lost = [a for a in journal(directory).table("attempts").values() if a["recovery_source"] == "HOST_REBOOT"]
    assert lost and {a["class"] for a in lost} == {"infra"}
    assert decision_of(directory)["level"] == 1.0


def test_a_host_that_fails_twice_goes_to_the_end_of_the_line(campaign):
    base = base_blueprint(config={"sim.fail": "crash", "sim.fail_first": 1})
    hosts = campaign.hosts()
    good = hosts.hosts[0].model_copy(update={"name": "there"})
    directory = campaign.create(lock=goal_lock(base), hosts=hosts.model_copy(update={"hosts": [*hosts.hosts, good]}))
    study = campaign.open(directory)
    tick_until(study, lambda: study.quarantined(), "two failures on one host")
    study.run()
    study.close()
    assert decision_of(directory)["level"] == 1.0


def test_a_leader_that_cannot_write_a_file_waits_for_room(campaign, monkeypatch):
    directory = campaign.create()
    study = campaign.open(directory)
    real, failed = study_module.write_text, []

    def full_once(path, text):
        if path.name == "plan.yaml" and not failed:
            failed.append(path)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, text)

    monkeypatch.setattr(study_module, "write_text", full_once)
    study.run()
    study.close()
    assert failed and kinds(directory)["DISK_WAS_FULL"] == 1
    assert decision_of(directory)["level"] == 1.0


def test_without_tmux_there_is_a_warning_and_a_study(campaign, monkeypatch):
    monkeypatch.setattr("a3r.executors.local.shutil.which", lambda name: None)
    directory = campaign.create()
    study = campaign.open(directory, replace(FAST, view=True))
    study.run()
    study.close()
    assert any("tmux is not installed" in w for w in study.warnings)
    assert kinds(directory)["VIEW_MISSING"] == 1
    assert decision_of(directory)["level"] == 1.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hosts: []", "at least 1"),
        ("hosts:\n  - {name: a, slots: 1}\n  - {name: a, slots: 1}", "two hosts are called 'a'"),
        ("hosts:\n  - {name: a, slotz: 1}", "did you mean 'slots'"),
        ("hosts:\n  - {name: a, slots: 0}", "no host has a slot"),
    ],
)
def test_a_hosts_file_is_checked(tmp_path, text, says):
    path = tmp_path / "hosts.yaml"
    path.write_text(text)
    with pytest.raises(FormatError, match=says):
        load_hosts(path)
    with pytest.raises(FormatError, match="no such file"):
        load_hosts(tmp_path / "absent.yaml")


def test_weights_of_a_completed_run_are_deleted_where_the_blueprint_does_not_keep_them(campaign):
    base = base_blueprint(checkpoint={"keep": False})
    directory = campaign.create(lock=goal_lock(base))
    campaign.run(directory)
    run_dirs = [directory / "runs" / run for run in journal(directory).table("runs")]
    assert run_dirs
    assert not any((run_dir / "ckpt").exists() for run_dir in run_dirs)
    assert all((run_dir / "attempts/1/result.json").exists() for run_dir in run_dirs)
