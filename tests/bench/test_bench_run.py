"""Sessions over a real repository: what is measured, what it is tied to, what cannot be measured."""

import json
import os
import shutil

import pytest
from bench_project import git

from a3r.bench.session import Exit
from a3r.bench.store import Busy, Results
from a3r.bench.verdicts import Change, Outcome


def finding(session, commit):
    [series] = session.series(session.suites[0], session.history.first_parents("HEAD"))
    return series.finding(commit)


def results_of(project, commit):
    session = project.session()
    return session.results.of(session.suites[0].id, commit)


def test_a_regression_is_confirmed_by_reruns_and_its_commit_named(project):
    for speed in (10.0, 10.05, 9.95):
        project.commit(speed)
    bad = project.commit(6.0)
    summary = project.run("ALL")
    assert summary.exit is Exit.REGRESSION
    last = finding(project.session(), bad)
    assert (last.outcome, last.change) == (Outcome.CONFIRMED, Change.REGRESSION)
    assert summary.verdicts[-1].confirmed[0][1].commit == bad
    assert not project.left_over()


def test_an_improvement_is_reported_and_exits_with_0(project):
    project.commit(10.05)
    good = project.commit(15.0)
    summary = project.run("ALL")
    assert finding(project.session(), good).change is Change.IMPROVEMENT
    assert summary.verdicts[-1].exit is Exit.FINE


def test_results_are_tied_to_commit_machine_environment_seed_and_modules(project):
    project.run()
    head = git(project.root, "rev-parse", "HEAD")
    result = results_of(project, head)[0]
    assert (result.commit, result.seed, result.status) == (head, 1, "ok")
    assert result.machine == Results(project.folder).machine
    assert result.modules == {"subject": ["src/subject/__init__.py"]}
    assert result.versions["python"] and result.environment == "current"
    assert result.curves["speed"] and result.metrics["speed"] == result.curves["speed"][-1][1]


def test_what_has_results_is_not_measured_again(project):
    project.commit(10.1)
    project.run("ALL")
    before = len(project.runs())
    project.run("ALL")
    assert len(project.runs()) == before == 4


def test_head_alone_is_compared_with_its_predecessor(project):
    project.commit(10.05)
    assert project.run("HEAD").exit is Exit.FINE
    assert {r["speed"] for r in project.runs()} == {10.0, 10.05}


def test_runs_of_commits_are_interleaved(project):
    project.commit(10.05)
    project.run("ALL")
    assert [r["speed"] for r in project.runs()] == [10.0, 10.05, 10.05, 10.0]


def test_a_first_commit_has_nothing_to_be_compared_with(project):
    summary = project.run()
    assert summary.exit is Exit.UNDECIDED and "nothing to compare" in summary.verdicts[0].reasons[0]


def test_commits_with_documents_only_are_not_measured_and_never_alarm(project):
    project.commit(10.05)
    project.run("ALL")
    before = len(project.runs())
    for number in range(200):
        (project.root / "NOTES.md").write_text(f"note {number}")
        git(project.root, "add", "-A")
        git(project.root, "commit", "-q", "-m", "words")
    summary = project.run("NEW")
    assert len(summary.verdicts) == 200 and summary.exit is Exit.FINE
    assert not any(v.confirmed for v in summary.verdicts)
    assert len(project.runs()) == before


def test_a_commit_with_documents_only_tells_of_the_code_it_stands_on(project):
    bad = project.commit(6.0)
    project.commit(README_md="words")
    summary = project.run("HEAD")
    assert summary.exit is Exit.REGRESSION and summary.verdicts[0].confirmed[0][1].commit == bad
    assert project.run("HEAD").exit is Exit.FINE


def test_a_commit_that_does_not_build_is_recorded_and_the_others_measured(project):
    broken = project.commit("oops (")
    project.commit(10.05)
    summary = project.run("ALL")
    assert summary.exit is Exit.NOT_MEASURED
    assert [v.exit for v in summary.verdicts] == [Exit.UNDECIDED, Exit.NOT_MEASURED, Exit.FINE]
    assert results_of(project, broken)[0].status == "no_build"
    assert "compileall" in results_of(project, broken)[0].detail
    assert not project.left_over()


def test_a_mark_whose_reruns_cannot_be_made_does_not_stop_what_follows(project):
    client = (project.root / "client.py").read_text()
    project.commit(10.05)
    project.write(
        "client.py", client.replace("import subject", "import subject; assert int(args.seed) < 9000, 'no more'")
    )
    marked = project.commit(6.0)
    project.write("client.py", client)
    project.commit(10.02)
    summary = project.run("ALL")
    assert [v.exit for v in summary.verdicts[2:]] == [Exit.NOT_MEASURED, Exit.FINE]
    assert finding(project.session(), marked).outcome is Outcome.UNCONFIRMED


def test_a_run_that_fails_is_recorded_with_its_evidence(project):
    project.commit("__import__('sys').exit('sad')")
    summary = project.run()
    assert summary.exit is Exit.NOT_MEASURED
    assert any("failed" in reason for reason in summary.verdicts[-1].reasons)


def test_a_module_from_outside_the_worktree_makes_the_result_invalid(project, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(project.root / "src", elsewhere)
    client = (project.root / "client.py").read_text()
    trick = client.replace("import subject", f"import sys; sys.path.insert(0, {str(elsewhere)!r}); import subject")
    head = project.commit(10.0, client__py="") or ""
    project.write("client.py", trick)
    head = project.commit(10.05)
    assert project.run().exit is Exit.NOT_MEASURED
    result = results_of(project, head)[0]
    assert result.status == "invalid" and str(elsewhere) in result.detail


def test_a_run_that_loads_no_module_under_test_proves_nothing(project):
    client = (
        (project.root / "client.py").read_text().replace("import subject", "class subject: SPEED, __file__ = 10, ''")
    )
    project.write("client.py", client)
    head = project.commit(10.05)
    project.run()
    assert results_of(project, head)[0].status == "invalid"


def test_a_dirty_tree_is_measured_with_its_patch(project):
    head = project.commit(10.0)
    project.write("src/subject/__init__.py", "SPEED = 4.0\n")
    patch = project.history().dirty_patch()
    summary = project.run("HEAD", patch=patch)
    name = summary.verdicts[0].commit
    assert name.startswith(f"{head}+") and summary.exit is Exit.REGRESSION
    assert "SPEED = 4.0" in (results_of(project, name)[0].patch or "")
    assert (project.root / "src/subject/__init__.py").read_text() == "SPEED = 4.0\n"


def test_a_dirty_tree_does_not_enter_the_history(project):
    project.write("src/subject/__init__.py", "SPEED = 4.0\n")
    project.run("HEAD", patch=project.history().dirty_patch())
    git(project.root, "checkout", "--", ".")
    project.commit(10.05)
    assert project.run("HEAD").exit is Exit.FINE


def test_no_free_disk_is_said_recorded_and_tried_again_later(project, monkeypatch):
    project.commit(10.05)
    full = shutil.disk_usage("/")._replace(free=1000)
    with monkeypatch.context() as patched:
        patched.setattr("a3r.bench.worktrees.shutil.disk_usage", lambda _: full)
        summary = project.run("ALL")
    assert summary.exit is Exit.NOT_MEASURED and "MiB free" in summary.verdicts[0].reasons[0]
    assert not project.left_over() and not project.runs()
    assert project.run("ALL").verdicts[-1].exit is Exit.FINE


def test_a_worktree_left_by_a_killed_run_is_cleaned_up(project):
    project.commit(10.05)
    session = project.session()
    left = session.worktrees.path(git(project.root, "rev-parse", "HEAD"))
    git(project.root, "worktree", "add", "--detach", "--lock", str(left), "HEAD")
    (left / "src/subject/__init__.py").write_text("SPEED = 1.0\n")
    stray = session.worktrees.folder / "0123456789ab"
    stray.mkdir()
    assert project.run("ALL").verdicts[-1].exit is Exit.FINE
    assert {r["speed"] for r in project.runs()} == {10.0, 10.05}
    assert not project.left_over()


def test_worktrees_of_others_are_left_alone(project, tmp_path):
    git(project.root, "worktree", "add", "-q", "--detach", str(tmp_path / "mine"), "HEAD")
    project.run()
    assert (tmp_path / "mine" / "client.py").exists()


def test_a_changed_lock_file_gets_an_environment_of_its_own_and_an_equal_one_shares_it(project):
    suite = project.root / "blueprints/suites/light.yaml"
    made = project.root.parent / "made.txt"
    create = (
        "environment:\n  lock: [constraints.txt]\n  create:\n"
        f'    - ["{{python}}", "-m", "venv", "--without-pip", "{{env}}"]\n    - [sh, -c, "echo made >> {made}"]\n'
    )
    suite.write_text(suite.read_text().replace("tasks:", create + "tasks:"))
    old = project.commit(10.0, **{"constraints.txt": "a==1"})
    older = project.commit(10.05)
    new = project.commit(10.02, **{"constraints.txt": "a==2"})
    project.run(f"{old}~1..HEAD")
    assert made.read_text() == "made\n" * 2  # one for the commits before the lock file, one for a==1
    envs = [results_of(project, c)[0].environment for c in (old, older, new)]
    assert envs[0] == envs[1] != envs[2]


def test_a_second_benchmark_on_the_same_folder_is_refused(project):
    with (
        Results(project.folder).exclusive(),
        pytest.raises(Busy, match=str(os.getpid())),
        project.session().results.exclusive(),
    ):
        pass


def test_bisect_names_the_commit_between_measured_ones_and_skips_what_does_not_build(project):
    commits = [project.commit(10.0 + 0.01 * i) for i in range(3)]
    project.commit("broken (")
    bad = project.commit(6.0)
    for i in range(1, 3):
        project.commit(6.0 + 0.01 * i)
    head = git(project.root, "rev-parse", "HEAD")
    session = project.session()
    history = session.history.first_parents(head)
    project.run("HEAD")
    session = project.session()
    [series] = session.series(session.suites[0], history)
    found = session.compare_fresh(series, commits[0], head, Change.REGRESSION)
    assert found.outcome is Outcome.CONFIRMED
    commit, located = session.bisect(series, found)
    assert commit == bad and located.sure
    assert not project.left_over()


def test_no_change_between_two_commits_is_not_bisected(project):
    first = project.commit(10.0)
    head = project.commit(10.01)
    project.run("ALL")
    session = project.session()
    [series] = session.series(session.suites[0], session.history.first_parents(head))
    assert session.compare_fresh(series, first, head, Change.REGRESSION).outcome is not Outcome.CONFIRMED


def test_result_files_are_plain_json_that_is_never_rewritten(project):
    project.run()
    files = sorted((project.folder / "results").rglob("*.json"))
    stamps = [f.stat().st_mtime_ns for f in files]
    assert json.loads(files[0].read_text())["schema"] == "a3r/bench-result/v1"
    project.run()
    assert [f.stat().st_mtime_ns for f in files] == stamps
