"""Reports.

1. A report of an untouched study verifies, for every kind of question, with failures among the runs.
2. One changed digit anywhere in a report, a stage's report, a plan, a lock or a run record makes it fail.
3. Writing it again gives the same bytes.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from a3r.analysis import conclude
from a3r.compile import compile_goal
from a3r.leader import BudgetLeft, Decision, History, Verdict
from a3r.leaders.adaptive import AdaptiveLeader
from a3r.report import Report, StudyReporter, VerifyError, read_evidence, verify
from a3r.results import RunStatus

GOALS = Path(__file__).resolve().parents[2] / "blueprints" / "goals"
Copy = Callable[[Path], Path]
FAILING = {"sim.fail": "code", "sim.fail_p": 0.2}


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    def make(study: Path) -> Path:
        shutil.copytree(study, tmp_path / "copy")
        return tmp_path / "copy"

    return make


@pytest.mark.parametrize("goal", ["appendix_b", "compare", "best", "effect"])
def test_report_of_an_untouched_study_verifies(finished: Callable[..., Path], goal: str) -> None:
    found = verify(finished(goal))
    assert found.numbers > 30
    assert found.runs >= 10


def test_report_with_failed_runs_verifies_and_lists_them(finished: Callable[..., Path]) -> None:
    study = finished("appendix_b", **FAILING)
    assert verify(study).runs > 10
    text = (study / "report" / "report.md").read_text()
    assert "| code | " in text
    assert "code" in (study / "report" / "data.csv").read_text()


def test_verify_takes_the_report_folder_too(finished: Callable[..., Path]) -> None:
    assert verify(finished("compare") / "report").numbers > 10


def flip_a_digit(path: Path, lot: random.Random) -> bool:
    data = path.read_bytes()
    digits = [m.start() for m in re.finditer(rb"[0-9]", data)]
    if not digits:
        return False
    at = lot.choice(digits)
    path.write_bytes(data[:at] + str((int(chr(data[at])) + 1 + lot.randrange(8)) % 10).encode() + data[at + 1 :])
    return True


PLACES = [
    "report/report.json",
    "report/report.md",
    "report/report.html",
    "report/data.csv",
    "report/sha256.json",
    "report/figures/ladder.svg",
    "stages/*/report.json",
    "stages/*/report.md",
    "stages/*/plan.yaml",
    "goal.lock.yaml",
    "runs/**/metrics.jsonl",
    "runs/**/result.json",
]


@pytest.mark.parametrize("place", PLACES)
def test_one_changed_digit_is_found(finished: Callable[..., Path], copy: Callable[[Path], Path], place: str) -> None:
    study = copy(finished("compare"))
    files = sorted(study.glob(place))
    assert files
    lot = random.Random(place)
    for _ in range(6):
        path = lot.choice(files)
        before = path.read_bytes()
        assert flip_a_digit(path, lot)
        with pytest.raises(VerifyError):
            verify(study)
        path.write_bytes(before)
    verify(study)


def test_mismatch_names_file_line_and_both_texts(finished: Callable[..., Path], copy: Callable[[Path], Path]) -> None:
    study = copy(finished("compare"))
    path = study / "report" / "report.md"
    path.write_text(path.read_text().replace("(look 5)", "(look 6)", 1))
    with pytest.raises(VerifyError, match=r"report\.md: line \d+ says .*look 6.*the run records give .*look 5"):
        verify(study)


def test_a_run_removed_from_the_study_is_found(finished: Callable[..., Path], copy: Callable[[Path], Path]) -> None:
    study = copy(finished("compare"))
    shutil.rmtree(next((study / "runs").glob("*/s*")))
    with pytest.raises(VerifyError, match="source cannot be read"):
        verify(study)


def test_a_report_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match="no report"):
        verify(tmp_path)


def test_writing_a_report_again_gives_the_same_bytes(
    finished: Callable[..., Path], copy: Callable[[Path], Path]
) -> None:
    study = copy(finished("best"))
    before = {p: p.read_bytes() for p in sorted((study / "report").rglob("*")) if p.is_file()}
    decision = Report.model_validate_json((study / "report" / "report.json").read_text()).decision
    StudyReporter().final(study, decision, read_evidence(study).history)
    assert {p: p.read_bytes() for p in before} == before


def test_html_stands_alone(finished: Callable[..., Path]) -> None:
    html = (finished("appendix_b") / "report" / "report.html").read_text()
    assert "<svg" in html
    assert 'name="viewport"' in html
    assert not re.search(r"""(?:src|href)=["']https?://""", html)
    assert "<script" not in html


def test_no_machine_path_in_a_report(finished: Callable[..., Path]) -> None:
    study = finished("compare")
    for path in (study / "report").rglob("*"):
        if path.is_file():
            assert str(study) not in path.read_text()


def test_study_that_could_not_begin_has_a_report_too(tmp_path: Path) -> None:
    lock = compile_goal(GOALS / "compare.md")
    decision = AdaptiveLeader().plan(lock, History(budget=BudgetLeft(runs=1)))
    assert isinstance(decision, Decision)
    study = tmp_path / "study"
    study.mkdir()
    (study / "goal.lock.yaml").write_text(lock.to_yaml())
    StudyReporter().final(study, decision, History())
    assert verify(study).runs == 0
    assert "NOT_MEASURED" in (study / "report" / "report.md").read_text()


def test_study_ended_from_outside_reports_what_its_runs_say(finished: Callable[..., Path], copy: Copy) -> None:
    study = copy(finished("compare"))
    ended = Decision(verdict=Verdict.NOT_MEASURED, sentence="Not answered: stopped.", notes=["stopped by a person"])
    StudyReporter().final(study, ended, read_evidence(study).history)
    verify(study)
    text = (study / "report" / "report.md").read_text()
    assert "variant B is better than A" in text
    assert "stopped by a person" in text


def test_run_that_the_journal_does_not_count_is_listed_and_excluded(finished: Callable[..., Path], copy: Copy) -> None:
    study = copy(finished("compare"))
    history = read_evidence(study).history
    vetoed = replace(history.observations[0], status=RunStatus.CANCELLED, failure_detail="vetoed", series={})
    decision = conclude(read_evidence(study).lock, replace(history, observations=(vetoed, *history.observations[1:])))
    StudyReporter().final(study, decision, History(history.plans, (vetoed, *history.observations[1:])))
    report = Report.model_validate_json((study / "report" / "report.json").read_text())
    row = next(r for r in report.runs if r.run == vetoed.run)
    assert (row.status, row.excluded, row.value) == ("CANCELLED", "cancelled", None)
    used = {src.split(":")[0] for arm in decision.table for n in arm.numbers.values() for src in n.src}
    assert vetoed.run not in used
