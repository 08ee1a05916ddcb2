"""Whole campaigns with the simulated client: what happens to failures, people's commands, budgets and restarts."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace

import campaigns
import pytest
from campaigns import FAST, base_blueprint, decision_of, goal_lock

from a3r.campaign import CampaignError, IllegalTransition, LeaderRunning
from a3r.report import verify
from a3r.research import Reports
from a3r.results import RunRecord, RunStatus
from a3r.store import Store


def journal(directory):
    return Store.open_read_only(directory)


def kinds(directory) -> Counter:
    return Counter(e.kind for e in journal(directory).events())


def failing(fail: str, **config):
    """Only the middle level fails, as `sim.fail` says."""
    return goal_lock(
        base_blueprint(config={"sim.fail": fail, "sim.fail_level": "1.0"} | config.pop("config", {}), **config)
    )


def tick_until(study, condition, what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        study.survive(study.tick)
        time.sleep(0.01)


def test_a_campaign_goes_from_goal_to_decision(campaign):
    directory = campaign.create()
    campaign.run(directory)
    assert decision_of(directory)["level"] == 1.0
    assert (directory / "stages/01/plan.yaml").exists()
    runs = journal(directory).table("runs")
    assert {r["state"] for r in runs.values()} == {"COMPLETED"}
    assert len(runs) == 8, "seeds that ran already are not run again"
    assert not journal(directory).table("leases")


def test_every_run_says_what_it_was(campaign):
    directory = campaign.create()
    campaign.run(directory)
    record = RunRecord.read(directory / "runs/x1.0/s1/attempts/1/result.json")
    p = record.provenance
    assert p.commit and p.dirty is not None and p.host and p.boot_id and p.a3r_version
    assert p.config_sha256 and p.resolved_config_sha256 and p.versions["python"]
    assert p.seed == record.seed == 1


def test_a_finished_campaign_is_not_run_again(campaign):
    directory = campaign.create()
    campaign.run(directory)
    before = kinds(directory)
    campaign.run(directory)
    assert kinds(directory) - before == Counter({"LEADER_STARTED": 1})


def test_a_second_leader_is_refused(campaign):
    directory = campaign.create()
    study = campaign.open(directory)
    with pytest.raises(LeaderRunning, match="a3r status"):
        campaign.open(directory)
    study.close()
    campaign.open(directory).close()


def test_another_goal_in_the_same_directory_is_refused(campaign):
    campaign.create()
    with pytest.raises(CampaignError, match="another --dir"):
        campaign.create(lock=goal_lock(title="something else"))


def test_a_directory_without_a_study_says_how_to_start_one(campaign, tmp_path):
    with pytest.raises(CampaignError, match="a3r research"):
        campaign.open(tmp_path / "nothing")


def test_a_new_leader_adopts_what_runs(campaign):
    directory = campaign.create(lock=goal_lock(base_blueprint(config={"step_s": 0.4})))
    first = campaign.open(directory)
    tick_until(first, lambda: any(a["state"] == "RUNNING" for a in first.open_attempts()), "something runs")
    first.close()
    campaign.run(directory)
    assert kinds(directory)["ATTEMPT_ADOPTED"] >= 1
    assert kinds(directory)["ATTEMPT_LOST"] == 0
    assert max(r["attempt"] for r in journal(directory).table("runs").values()) == 1


def test_a_killed_trainer_goes_on_from_its_last_step(campaign):
    directory = campaign.create(lock=failing("crash", config={"sim.fail_step": 4}))
    campaign.run(directory)
    record = RunRecord.read(directory / "runs/x1.0/s1/attempts/2/result.json")
    assert (record.status, record.resumed_from, record.steps) == ("COMPLETED", 3, 6)
    assert RunRecord.read(directory / "runs/x1.0/s1/attempts/1/result.json").failure_class == "infra"


def test_a_stalled_run_is_stopped_and_resumed(campaign):
    timeouts = {"first_step_s": 20.0, "stall_s": 0.3, "max_s": 60.0, "grace_s": 0.1}
    directory = campaign.create(lock=failing("stall", timeouts=timeouts))
    campaign.run(directory)
    runs = journal(directory).table("runs")
    assert (runs["x1.0/s1"]["state"], runs["x1.0/s1"]["attempt"]) == ("COMPLETED", 2)


@pytest.mark.parametrize(
    ("fail", "failure_class", "attempts"),
    [("oom", "oom", 1), ("lie", "fabricated", 1), ("config", "config", 1), ("diverge", "diverged", 1)],
)
def test_what_a_retry_cannot_mend_is_not_retried(campaign, fail, failure_class, attempts):
    directory = campaign.create(lock=failing(fail, config={"sim.fail_first": 99, "batch_size": 16}))
    campaign.run(directory)
    run = journal(directory).table("runs")["x1.0/s1"]
    assert (run["class"], run["attempt"]) == (failure_class, attempts)
    assert run["state"] == ("DIVERGED" if fail == "diverge" else "FAILED")
    assert decision_of(directory)["level"] == 10.0, "failures are not observations"


def test_out_of_memory_is_retried_only_with_the_declared_change(campaign):
    retry = {"oom": {"times": 1, "change": {"batch_size": "/2"}}}
    lock = failing("oom", config={"batch_size": 16}, retry=retry)
    directory = campaign.create(lock=lock)
    campaign.run(directory)
    spec = json.loads((directory / "runs/x1.0/s1/attempts/2/spec.json").read_text())
    assert spec["batch_size"] == 8
    assert journal(directory).table("runs")["x1.0/s1"]["state"] == "COMPLETED"


def test_the_same_failure_twice_stops_an_arm(campaign):
    lock = failing("code", config={"sim.fail_first": 99}, retry={"code": 5})
    directory = campaign.create(lock=lock)
    campaign.run(directory)
    store = journal(directory)
    assert store.table("arms")["x1.0"]["blocked"]
    states = Counter(r["state"] for r in store.table("runs").values() if r["arm"] == "x1.0")
    attempts = sum(r["attempt"] for r in store.table("runs").values() if r["arm"] == "x1.0")
    assert states["COMPLETED"] == 0 and attempts <= 3


def test_the_same_failure_in_three_arms_asks_for_a_person_and_resume_does_them_again(campaign):
    lock = goal_lock(base_blueprint(config={"sim.fail": "code", "sim.fail_first": 2}, retry={"code": 0}))
    directory = campaign.create(lock=lock)
    study = campaign.open(directory)
    study.run()
    assert study.hold and study.hold["kind"] == "needs_human" and "KeyError" in study.hold["reason"]
    study.close()
    (directory / "inbox" / "resume").write_text("{}")
    again = campaign.open(directory)
    tick_until(again, lambda: not again.hold, "resumed")
    names = {r["run"]: r["state"] for r in again.runs().values()}
    assert names["x1.0/s1"] == RunStatus.SUPERSEDED
    assert "x1.0/s1.r1" in names
    assert not (directory / "runs/x1.0/s1").exists() and (directory / "superseded/x1.0/s1").exists()
    again.close()


def test_a_service_that_is_down_pauses_the_arm_and_uses_up_no_retry(campaign, monkeypatch):
    from a3r.workers import recipe

    monkeypatch.setattr(recipe, "EXTERNAL_BACKOFF_S", 0.05)
    directory = campaign.create(lock=failing("external"))
    campaign.run(directory)
    run = journal(directory).table("runs")["x1.0/s1"]
    assert (run["state"], run["attempt"]) == ("COMPLETED", 2)
    paused = [e for e in journal(directory).events() if e.data.get("reaction") == "PauseArm"]
    assert paused and "429" in paused[0].data["detail"]


def test_a_missing_secret_is_said_before_anything_starts(campaign):
    lock = goal_lock(base_blueprint(env={"secrets": ["A3R_TEST_ABSENT"]}))
    directory = campaign.create(lock=lock)
    study = campaign.open(directory)
    study.run()
    study.close()
    detail = journal(directory).table("runs")["x0.1/s1"]["detail"]
    assert "A3R_TEST_ABSENT is not set; export it" in detail
    assert not list(directory.glob("runs/**/claim"))


def test_a_secret_reaches_the_process_and_no_file(campaign, monkeypatch):
    monkeypatch.setenv("A3R_TEST_SECRET", "sesame-4711")
    directory = campaign.create(lock=goal_lock(base_blueprint(env={"secrets": ["A3R_TEST_SECRET"]})))
    campaign.run(directory)
    assert decision_of(directory)["level"] == 1.0
    files = [p for p in directory.rglob("*") if p.is_file()]
    assert not [p for p in files if b"sesame-4711" in p.read_bytes()]


# ---- budgets


def test_a_budget_of_runs_ends_the_study_with_a_partial_answer(campaign):
    directory = campaign.create(lock=goal_lock(budget={"runs": 3}))
    campaign.run(directory)
    states = Counter(r["state"] for r in journal(directory).table("runs").values())
    assert states == {"COMPLETED": 3, "CANCELLED": 3}
    assert decision_of(directory)["notes"] == ["the budget is used up (runs)"]


def test_gpu_time_is_debited_with_its_worst_case_and_settled_with_what_it_took(campaign):
    resources = {"kind": "gpu", "gpus": 2}
    lock = goal_lock(base_blueprint(resources=resources), budget={"gpu_h": 2 * 60 / 3600})
    directory = campaign.create(lock=lock, hosts=campaign.hosts(gpus=[0, 1, 2, 3]))
    study = campaign.open(directory)
    tick_until(study, lambda: study.open_attempts(), "one run fits into the budget at a time")
    assert len(study.open_attempts()) == 1
    assert study.ledger.left().gpu_s == 0.0
    tick_until(study, lambda: study.runs()["x0.1/s1"]["state"] == "COMPLETED", "it ends")
    assert 0.0 < (study.ledger.left().gpu_s or 0.0) < 120.0
    study.close()
    spent = campaign.open(directory).ledger.left().gpu_s
    assert spent is not None and spent < 120.0, "what was spent stays spent after a restart"


def test_wall_time_counts_while_a_leader_runs(campaign):
    directory = campaign.create(lock=goal_lock(budget={"wall": 0.4}))
    study = campaign.open(directory, replace(FAST, tick_s=0.05))
    study.run()
    study.close()
    ended = [e for e in journal(directory).events() if e.kind == "BUDGET_EXHAUSTED"]
    assert ended and ended[0].data["budget"] == "wall time"
    assert "CANCELLED" in {r["state"] for r in journal(directory).table("runs").values()}


def test_an_endless_leader_is_ended_by_the_budget_of_stages(campaign):
    class Endless(campaigns.SmallLeader):
        def think(self, goal, history):
            return self.stage(goal, len(history.plans), [10.0], [len(history.plans) + 1])

    directory = campaign.create(lock=goal_lock(budget={"stages": 3}))
    campaign.run(directory, leader=Endless())
    assert "all 3 stages" in decision_of(directory)["sentence"]
    assert len(journal(directory).table("runs")) == 3


# ---- people


def test_nothing_starts_before_a_yes(campaign):
    directory = campaign.create(lock=goal_lock(hitl={"approve": "plan"}))
    study = campaign.open(directory, replace(FAST, approve_all=False))
    tick_until(study, lambda: study.state == "AWAIT_APPROVAL", "asks")
    for _ in range(20):
        study.tick()
    assert study.state == "AWAIT_APPROVAL" and not study.runs()
    (directory / "inbox" / "approve-0123").write_text("{}")
    study.tick()
    assert study.state == "AWAIT_APPROVAL", "another hash approves nothing"
    (directory / "inbox" / f"approve-{study.goal.hash}").write_text("{}")
    study.run()
    study.close()
    assert decision_of(directory)["level"] == 1.0
    assert not list((directory / "inbox").iterdir())


def test_each_stage_waits_where_the_goal_says_so(campaign):
    directory = campaign.create(lock=goal_lock(hitl={"approve": "stage"}))
    study = campaign.open(directory, replace(FAST, approve_all=False))
    asked = set()

    def approve(study):
        waiting = study.row.get("waiting")
        if study.state == "AWAIT_APPROVAL" and waiting["hash"] not in asked:
            asked.add(waiting["hash"])
            (directory / "inbox" / f"approve-{waiting['hash']}").write_text("{}")

    study.run(approve)
    study.close()
    assert len(asked) == 3, "the goal and two stages"


@pytest.mark.parametrize(("on_timeout", "ends"), [("proceed", "DONE"), ("stop", "DONE"), ("pause", "AWAIT_APPROVAL")])
def test_silence_does_what_the_goal_says(campaign, on_timeout, ends):
    hitl = {"approve": "plan", "timeout": 0.01, "on_timeout": on_timeout}
    directory = campaign.create(lock=goal_lock(hitl=hitl))
    study = campaign.open(directory, replace(FAST, approve_all=False))
    tick_until(study, lambda: study.state == "DONE" or study.hold, "something follows")
    assert study.state == ends
    assert bool(study.runs()) == (on_timeout == "proceed")
    study.close()


def test_pause_starts_nothing_new_and_resume_goes_on(campaign):
    directory = campaign.create(lock=goal_lock(base_blueprint(config={"step_s": 0.05})))
    study = campaign.open(directory)
    tick_until(study, lambda: study.open_attempts(), "it runs")
    (directory / "inbox" / "pause").write_text('{"now": true}')
    tick_until(study, lambda: study.hold and not study.open_attempts(), "paused, runs stopped")
    attempts = len(study.store.table("attempts"))
    for _ in range(20):
        study.tick()
    assert len(study.store.table("attempts")) == attempts
    (directory / "inbox" / "resume").write_text("{}")
    study.run()
    study.close()
    assert decision_of(directory)["level"] == 1.0


def test_stop_ends_with_a_partial_report_and_nothing_alive(campaign):
    directory = campaign.create(lock=goal_lock(base_blueprint(config={"step_s": 1.0})))
    study = campaign.open(directory)
    tick_until(study, lambda: any(a["state"] == "RUNNING" for a in study.open_attempts()), "it runs")
    (directory / "inbox" / "stop").write_text('{"reason": "enough"}')
    study.run()
    study.close()
    assert "enough" in decision_of(directory)["sentence"]
    assert {r["state"] for r in journal(directory).table("runs").values()} == {"CANCELLED"}
    assert not journal(directory).table("leases")


def test_the_report_of_a_study_stopped_between_a_plan_and_its_declaration_is_verified(campaign):
    directory = campaign.create()
    study = campaign.open(directory)
    study.reporter = Reports()
    tick_until(study, lambda: study.state == "DECLARING" and len(study.plans()) == 2, "a second stage is planned")
    assert not (directory / "stages/01/plan.yaml").exists()
    (directory / "inbox" / "stop").write_text("{}")
    study.run()
    study.close()
    assert (directory / "stages/01/plan.yaml").exists(), "the report counts this plan's looks: verify must find it"
    verify(directory)


def test_a_waiting_run_can_be_vetoed_and_an_unknown_command_is_answered(campaign):
    directory = campaign.create()
    study = campaign.open(directory)
    tick_until(study, lambda: study.runs(), "declared")
    (directory / "inbox" / "veto-x10.0%s2").write_text("{}")
    (directory / "inbox" / "dance").write_text("")
    study.run()
    study.close()
    assert journal(directory).table("runs")["x10.0/s2"]["state"] == "CANCELLED"
    answers = {e.data["file"]: e.data["outcome"] for e in journal(directory).events() if e.kind == "COMMAND"}
    assert "unknown command" in answers["dance"]


def test_an_illegal_transition_raises_and_is_recorded(campaign):
    directory = campaign.create()
    study = campaign.open(directory)
    with pytest.raises(IllegalTransition):
        study._move("DONE", "NONSENSE")
    assert kinds(directory)["ILLEGAL_TRANSITION"] == 1
    study.close()


def test_the_leader_costs_little_of_the_wall_time(campaign):
    """CPU time of the leading process over a campaign's wall time; the share falls with the length of the runs."""
    directory = campaign.create(lock=goal_lock(base_blueprint(config={"step_s": 0.5}), question=campaigns.one_level()))
    study = campaign.open(directory, replace(FAST, tick_s=0.25))
    cpu, wall = time.process_time(), time.monotonic()
    study.run()
    share = (time.process_time() - cpu) / (time.monotonic() - wall)
    study.close()
    assert share < 0.05, "runs of three seconds; runs of minutes divide this by their length"
