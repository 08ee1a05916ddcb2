"""`a3r bench` by its command line: exit statuses, messages, output for machines."""

import json
import os
import subprocess
import sys

import pytest
from bench_project import git


@pytest.fixture
def bench(project, tmp_path):
    """Run `a3r bench …` in the project."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p), "TMPDIR": str(tmp_path),
    }  # fmt: skip

    def call(*argv):
        return subprocess.run(
            [sys.executable, "-m", "a3r.cli", "bench", *argv, "--dir", str(project.folder)],
            cwd=project.root, env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    return call


def test_run_report_compare_and_bisect(project, bench, tmp_path):
    good = project.commit(10.05)
    project.commit(10.02)
    bad = project.commit(6.0)
    done = bench("run", "--commits", "ALL", "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["commits"][-1]["exit"] == 1
    done = bench("report")
    assert done.returncode == 0 and (project.folder / "report" / "report.html").exists()
    done = bench("compare", good, bad)
    assert done.returncode == 0 and "worse" in done.stdout
    assert json.loads(bench("compare", good, bad, "--json").stdout)[0]["verdict"] == "worse"
    done = bench("bisect")
    assert done.returncode == 1 and bad[:9] in done.stdout
    assert "by bisection" in bench("report").stdout + (project.folder / "report" / "report.json").read_text()


def test_nothing_new_is_fine(project, bench):
    project.commit(10.05)
    assert bench("run", "ALL").returncode == 3
    assert bench("run", "NEW").returncode == 0


def test_nightly_once_measures_what_is_new_and_leaves_a_summary(project, bench):
    project.commit(10.05)
    done = bench("nightly", "--once")
    assert done.returncode == 0, done.stderr
    project.commit(6.0)
    done = bench("nightly", "--once")
    assert done.returncode == 1 and "regression" in done.stdout
    assert len(list((project.folder / "nights").glob("*.json"))) == 2
    assert (project.folder / "report" / "badge.svg").exists()


def test_a_dirty_tree_is_refused_unless_asked_for(project, bench):
    project.write("src/subject/__init__.py", "SPEED = 10.07\n")
    done = bench("run", "HEAD")
    assert done.returncode == 2 and "uncommitted changes; commit them, or give --dirty" in done.stderr
    assert bench("run", "HEAD", "--dirty").returncode == 0
    assert bench("run", "ALL", "--dirty").returncode == 2


@pytest.mark.parametrize(("argv", "message"), [
    (("run", "nowhere"), "unknown commit 'nowhere'"),
    (("run", "HEAD", "--suite", "fast"), "no such suite"),
    (("run", "HEAD", "--task", "driv"), "did you mean 'drive'"),
    (("compare", "HEAD", "HEAD"), "no suite has results of both"),
    (("bisect",), "no confirmed regression"),
    (("bisect", "HEAD", "HEAD"), "is not before"),
    (("nightly", "--at", "26:00"), "write 02:00"),
    (("run", "HEAD..HEAD"), "holds no commit"),
])  # fmt: skip
def test_bad_input_is_a_message_and_exit_status_2(bench, argv, message):
    done = bench(*argv)
    assert done.returncode == 2 and message in done.stderr + done.stdout, done.stderr
    assert "Traceback" not in done.stderr


def test_outside_a_repository(bench, tmp_path):
    done = bench("run", "HEAD", "--repo", str(tmp_path))
    assert done.returncode == 2 and "not inside a git repository" in done.stderr


def test_what_could_not_be_measured_is_tried_again_on_request(project, bench):
    project.commit("broken (")
    assert bench("run", "HEAD").returncode == 2
    git(project.root, "commit", "-q", "--allow-empty", "-m", "nothing")
    assert bench("run", "HEAD", "--retry").returncode == 2


def test_a_crash_of_the_benchmark_itself_is_no_regression(project, bench):
    project.folder.mkdir()
    (project.folder / "work").write_text("in the way of a folder")
    assert bench("run", "HEAD").returncode == 2
