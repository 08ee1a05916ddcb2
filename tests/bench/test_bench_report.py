"""Reports and comparisons are computed from the results and need nothing beside themselves."""

import json
import re

from a3r.bench.compare import compare
from a3r.bench.report import markdown, write
from a3r.bench.session import Exit


def measured(project):
    project.commit(10.05)
    project.commit(9.95)
    bad = project.commit(6.0)
    summary = project.run("ALL")
    session = project.session()
    return bad, summary, session, session.history.first_parents("HEAD")


def test_the_report_names_the_regression_and_needs_no_other_file(project, tmp_path):
    bad, _, session, history = measured(project)
    data = write(session, history, tmp_path / "out", "a3r bench report")
    page = (tmp_path / "out" / "report.html").read_text()
    assert data["exit"] == Exit.REGRESSION and [i["commit"] for i in data["incidents"]] == [bad]
    assert bad[:9] in page and "<svg" in page and 'class="band"' in page
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org)", page)
    assert "regression" in (tmp_path / "out" / "badge.svg").read_text()
    assert json.loads((tmp_path / "out" / "badge.json").read_text())["message"] == "regression"
    plain = json.loads((tmp_path / "out" / "report.json").read_text())
    assert plain["suites"][0]["rows"][0]["points"][-1]["commit"] == bad


def test_a_report_twice_has_the_same_bytes(project, tmp_path):
    _, _, session, history = measured(project)
    pages = []
    for name in ("a", "b"):
        write(session, history, tmp_path / name, "a3r bench report")
        pages.append((tmp_path / name / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_text_from_commits_is_escaped(project, tmp_path):
    project.write("src/subject/__init__.py", "SPEED = 10.05\n")
    project.commit(**{"<script>alert(1)</script>.txt".replace("/", "|"): "x"})
    project.run("ALL")
    session = project.session()
    write(session, session.history.first_parents("HEAD"), tmp_path / "out", "a3r")
    assert "<script>" not in (tmp_path / "out" / "report.html").read_text()


def test_an_empty_folder_gives_a_report_that_says_so(project, tmp_path):
    session = project.session()
    data = write(session, session.history.first_parents("HEAD"), tmp_path / "out", "a3r")
    assert data["sentence"] == "Nothing is measured yet."


def test_the_summary_for_a_pull_request_names_commit_and_effect(project):
    bad, summary, session, history = measured(project)
    text = markdown(session, summary, history, [])
    assert f"`{bad[:9]}`" in text and "regression confirmed by reruns, -4 km/h" in text


def test_compare_shows_intervals_and_claims_only_what_they_allow(project):
    bad, _, session, history = measured(project)
    [row] = compare(session, history[-2], bad)
    assert (row.verdict == "worse" and row.high < 0 and row.n[1] == 10) or row.n[1] == 6
    [row] = compare(session, history[0], history[1])
    assert row.verdict in ("not worse by the least effect", "undecided")


def test_compare_leaves_out_what_is_not_measured(project):
    session = project.session()
    head = session.history.resolve("HEAD")
    assert compare(session, head, head) == []
