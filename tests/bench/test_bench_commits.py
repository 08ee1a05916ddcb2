"""Which commits a word means; first-parent history; what cannot have changed a result."""

import subprocess

import pytest
from bench_project import git

from a3r.bench.commits import CommitError, History, matches


def pick(project, spec, steps=None, measured=lambda c: False):
    return list(project.history().select(spec, steps, measured).wanted)


def test_ranges_are_exclusive_at_their_start(project):
    first, second, third = (project.commit(v) for v in (1, 2, 3))
    assert pick(project, f"{first}..{third}") == [second, third]
    assert pick(project, "HEAD") == [third]
    assert pick(project, second) == [second]


def test_new_is_what_follows_the_last_measured_commit(project):
    first, second, third = (project.commit(v) for v in (1, 2, 3))
    assert pick(project, "NEW", measured=lambda c: c == first) == [second, third]
    assert pick(project, "NEW", measured=lambda c: c == third) == []
    assert pick(project, "NEW") == [third]


def test_steps_are_spread_evenly_and_hold_the_newest(project):
    commits = [project.commit(v) for v in range(9)]
    picked = pick(project, f"{commits[1]}..HEAD", steps=3)
    assert picked == [commits[2], commits[5], commits[8]]
    assert pick(project, "ALL", steps=1) == [commits[8]]


def test_history_follows_first_parents(project):
    base = project.commit(1)
    git(project.root, "checkout", "-q", "-b", "side")
    side = project.commit(2)
    git(project.root, "checkout", "-q", "main")
    git(project.root, "merge", "-q", "--no-ff", "-m", "merged", "side")
    head = git(project.root, "rev-parse", "HEAD")
    assert pick(project, f"{base}..HEAD") == [head]
    with pytest.raises(CommitError, match="not on the first-parent history"):
        pick(project, f"{side}..HEAD")


def test_an_unknown_commit_names_the_near_one(project):
    git(project.root, "branch", "feature-speed")
    with pytest.raises(CommitError, match="unknown commit 'feature-sped'; did you mean 'feature-speed'"):
        pick(project, "feature-sped")
    with pytest.raises(CommitError, match="unknown commit '--help'"):
        pick(project, "--help")


def test_a_shallow_clone_is_refused_where_its_history_is_needed(project, tmp_path):
    project.commit(2)
    subprocess.run(
        ["git", "clone", "-q", "--depth", "1", f"file://{project.root}", str(tmp_path / "shallow")], check=True
    )
    shallow = History(tmp_path / "shallow")
    for spec in ("ALL", "NEW", "HEAD~1..HEAD"):
        with pytest.raises(CommitError, match="git fetch --unshallow"):
            shallow.select(spec, None, lambda c: False)
    assert len(shallow.select("HEAD", None, lambda c: False).wanted) == 1


def test_outside_a_repository_is_said(tmp_path):
    with pytest.raises(CommitError, match="not inside a git repository"):
        History(tmp_path)


def test_commits_that_touch_documents_only_have_their_predecessors_code(project):
    code = project.commit(2.0)
    words = project.commit(README_md="read me", docs__guide="more")
    back = project.commit(1.0)
    again = project.commit(2.0)
    history, session = project.history(), project.session()
    line = history.first_parents("HEAD")
    suite = session.suites[0]
    assert session.representative(suite, words, line) == code
    assert session.representative(suite, back, line) == back
    assert session.representative(suite, again, line) == again


@pytest.mark.parametrize(("path", "pattern", "expected"), [
    ("docs/a/b.txt", "docs/**", True), ("mydocs/a", "docs/**", False), ("a/README.md", "*.md", True),
    ("a/b.py", "a/*.py", True), ("LICENSE", "LICENSE", True), ("a.mdx", "*.md", False),
])  # fmt: skip
def test_patterns(path, pattern, expected):
    assert matches(path, pattern) is expected
