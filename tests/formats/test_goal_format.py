"""Goals: front matter, the documented phrases, questions instead of guesses, and the lock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from a3r.compile import OpenQuestionsError, compile_goal, parse_answers
from a3r.goal import GoalLock, LevelRange
from a3r.prose import read_prose
from a3r.strictyaml import FormatError

ROOT = Path(__file__).resolve().parents[2]
GOALS = ROOT / "blueprints" / "goals"
APPENDIX_B = (GOALS / "appendix_b.md").read_text().split("---\n", 2)[2]

FRONT = """\
title: t
question:
  type: min_that_still
  factor: batch_size
  levels: [1, 2, 4]
  criterion: {metric: reward/mean, at: {last_k: 2}, rule: {at_least: 0.5}}
base: base.yaml
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    (tmp_path / "base.yaml").write_text((ROOT / "blueprints" / "simulated.yaml").read_text())

    def make(text: str) -> Path:
        (tmp_path / "goal.md").write_text(text)
        return tmp_path / "goal.md"

    return make


def front(text: str, prose: str = "") -> str:
    return f"---\n{text}---\n{prose}"


# --- the appendix's goal


def test_verbatim_objective_is_read_as_far_as_it_goes_and_asks_for_the_rest(write: Write) -> None:
    with pytest.raises(OpenQuestionsError) as found:
        compile_goal(write(APPENDIX_B))
    draft = found.value.draft
    question = draft["question"]
    assert question["type"] == "min_that_still"
    assert question["factor"] == "batch_size"
    assert question["levels"] == [1, 2, 4, 8, 16, 32, 64]
    assert [m["factor"] for m in question["moderators"]] == ["max_response_length_in_one_turn"]
    assert draft["fixed"] == {"model": "Qwen3-8B", "total_training_steps": 60, "ppo_epoch": 1, "mini_batch_num": 1}
    assert draft["gpus_per_run"] == 8
    assert [q.key for q in found.value.questions] == [
        "question.moderators.max_response_length_in_one_turn.levels",
        "question.criterion",
        "base",
    ]


def test_answers_complete_the_verbatim_objective(write: Write) -> None:
    answers = parse_answers(
        [
            "question.moderators.max_response_length_in_one_turn.levels=[4000, 10000]",
            "question.criterion={metric: reward/mean, at: {last_k: 5}, reference: {level: 64}, "
            "rule: {ratio_at_least: 0.8}}",
            "base=base.yaml",
        ]
    )
    lock = compile_goal(write(APPENDIX_B), answers)
    assert lock.compiled_by == "parser"
    assert lock.base.resources.kind == "gpu"
    assert lock.base.resources.gpus == 8
    assert lock.base.config["mini_batch_num"] == 1
    assert lock.goal.question.moderators[0].levels == [4000, 10000]
    assert any("batch_size from 1 to 64 is tested at" in a for a in lock.assumptions)
    assert any("Python interpreter" in a for a in lock.assumptions)


def test_bullets_of_any_kind_and_wrapped_lines_are_read() -> None:
    text = APPENDIX_B.replace("- ", "• ").replace("(batch_size from", "\n(batch_size from").replace("=1", "= 1")
    assert read_prose(text).draft == read_prose(APPENDIX_B).draft


@pytest.mark.parametrize(
    ("prose", "expected"),
    [
        ("Find the largest x that still trains.", {"type": "max_that_still", "factor": "x"}),
        ("Which optim.lr is best in reward/mean?", {"type": "best", "factor": "optim.lr"}),
        ("Find the best batch_size by eval/pass@1.", {"type": "best", "factor": "batch_size"}),
        ("Compare variant A with B.", {"type": "compare", "factor": "variant", "levels": ["A", "B"]}),
        ("Does batch_size influence reward/mean?", {"type": "effect", "factor": "batch_size"}),
        ("Find the smallest x that still works, x in {1, 2, 4}.", {"levels": [1, 2, 4]}),
        ("Find the smallest optim.lr that still works (optim.lr from 1e-7 to 1e-4).",
         {"levels": [1e-7, 1e-6, 1e-5, 1e-4]}),
    ],
)  # fmt: skip
def test_documented_questions(prose: str, expected: dict[str, object]) -> None:
    question = read_prose(prose).draft["question"]
    assert {key: question[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("prose", "criterion"),
    [
        ("a reward/mean of at least 0.6 over the last 2 steps",
         {"metric": "reward/mean", "rule": {"at_least": 0.6}, "at": {"last_k": 2}}),
        ("eval/loss at most 0.2", {"metric": "eval/loss", "rule": {"at_most": 0.2}, "better": "lower"}),
        ("eval/pass@1 not worse by more than 0.03 than at 64",
         {"metric": "eval/pass@1", "rule": {"not_worse_by": 0.03}, "reference": {"level": 64}}),
        ("at least 80 % of the reward/mean at 64",
         {"metric": "reward/mean", "rule": {"ratio_at_least": 0.8}, "reference": {"level": 64}}),
    ],
)  # fmt: skip
def test_documented_criteria(prose: str, criterion: dict[str, object]) -> None:
    draft = read_prose(f"Find the smallest x that still gives {prose}.").draft
    assert draft["question"]["criterion"] == criterion


def test_documented_constraints() -> None:
    draft = read_prose("Find the best x.\n\n- at most 30 runs\n- within 2 hours\n- 4 GPUs per run\n- K=3\n").draft
    assert draft["budget"] == {"runs": 30, "wall": 7200.0}
    assert draft["gpus_per_run"] == 4
    assert draft["fixed"] == {"k": 3}


def test_range_that_is_neither_doubling_nor_decades_is_asked_about(write: Write) -> None:
    with pytest.raises(OpenQuestionsError) as found:
        compile_goal(write("Find the smallest x that still works (x from 3 to 50)."))
    assert "question.levels" in [q.key for q in found.value.questions]


def test_prose_without_a_question_is_asked_about(write: Write) -> None:
    with pytest.raises(OpenQuestionsError) as found:
        compile_goal(write("Make the model better, please."))
    assert {"question.type", "question.factor", "question.levels"} <= {q.key for q in found.value.questions}


# --- front matter


def test_front_matter_wins_over_prose(write: Write) -> None:
    prose = "Find the minimum batch_size that still trains (batch_size from 1 to 64).\n"
    lock = compile_goal(write(front(FRONT, prose)))
    assert lock.goal.question.levels == [1, 2, 4]
    assert lock.compiled_by == "front_matter"
    assert lock.prose == prose.strip()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("levels: [1, 2, 4]", "levels: [4, 2, 1]"), "rising order"),
        (("levels: [1, 2, 4]", "levels: [1]"), "at least two levels"),
        (("levels: [1, 2, 4]", "levels: [1, 2, '4']"), "rising order"),
        (("levels: [1, 2, 4]", "levels: [1.5, 2.5, 4.5]"), "not of type integer"),
        (("levels: [1, 2, 4]", "levels: {low: 4, high: 1, scale: log2}"), "swap them"),
        (("factor: batch_size", "factor: batch_sise"), "did you mean 'batch_size'"),
        (("at_least: 0.5", "at_leest: 0.5"), "did you mean 'at_least'"),
        (("at_least: 0.5", "not_worse_by: 0.5"), "add `reference"),
        (("at_least: 0.5", "margin: 0.5"), "needs to know what passing is"),
        (("at_least: 0.5", "at_least: '0.5'"), "text where a number is due"),
        (("base: base.yaml", "base: bass.yaml"), "no blueprint at bass.yaml"),
        (("base: base.yaml", "base: base.yaml\nbudget: {wall: 0}"), "greater than 0"),
        (("base: base.yaml", "base: base.yaml\nbudget: {runs: 0}"), "greater than or equal to 1"),
        (("base: base.yaml", "base: base.yaml\nstats: {looks: [6, 3]}"), "must rise"),
        (("base: base.yaml", "base: base.yaml\nfixed: {batch_size: 3}"), "both fixed and varied"),
        (("base: base.yaml", "base: base.yaml\nfixed: {batch_sise: 3}"), "does not know this key"),
        (("base: base.yaml", "base: base.yaml\nfixd: {x: 3.0}"), "did you mean 'fixed'"),
        (("title: t", "title: t\ntitle: u"), "given twice"),
        (("type: min_that_still", "type: minimum"), "min_that_still"),
        (("last_k: 2", "last_k: 2, step: 3"), "not both"),
    ],
)
def test_wrong_front_matter_says_line_problem_and_fix(write: Write, change: tuple[str, str], words: str) -> None:
    with pytest.raises(FormatError) as found:
        compile_goal(write(front(FRONT.replace(*change))), root=ROOT)
    assert words in str(found.value)
    assert "goal.md:" in str(found.value) or "goal.md (base" in str(found.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("---\ntitle: t\n", "not closed"),
        ("", "empty"),
        ("---\n- a\n---\nx", "`key: value` lines"),
        ("---\ntitle: [\n---\nx", "not valid YAML"),
    ],
)
def test_unreadable_goal(write: Write, text: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        compile_goal(write(text))


def test_missing_goal_and_goal_that_is_not_text(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such file"):
        compile_goal(tmp_path / "none.md")
    (tmp_path / "g.md").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="not UTF-8"):
        compile_goal(tmp_path / "g.md")


def test_names_people_use_become_the_clients(write: Write) -> None:
    lock = compile_goal(write(front(FRONT + "fixed: {learning_rate: 1e-5, ppo_epochs: 2}\n")))
    assert lock.goal.fixed == {"optim.lr": 1e-5, "ppo_epoch": 2}
    assert "learning_rate is the client's optim.lr" in lock.assumptions


@pytest.mark.parametrize(
    ("given", "levels"),
    [
        ({"low": 1, "high": 64, "scale": "log2"}, [1, 2, 4, 8, 16, 32, 64]),
        ({"low": 1e-6, "high": 1e-4, "scale": "log10"}, [1e-6, 1e-5, 1e-4]),
        ({"low": 1e-6, "high": 3e-5, "scale": "half_decades"}, [1e-6, 3e-6, 1e-5, 3e-5]),
        ({"low": 1, "high": 48, "scale": "log2"}, [1, 2, 4, 8, 16, 32, 48]),
        ({"low": 0, "high": 1, "count": 3}, [0, 0.5, 1]),
    ],
)
def test_ranges_of_levels(given: dict[str, object], levels: list[float]) -> None:
    assert LevelRange.model_validate(given).levels() == levels


# --- the lock


def test_lock_is_read_back_and_an_edit_is_refused(write: Write) -> None:
    lock = compile_goal(write(front(FRONT)))
    text = lock.to_yaml()
    assert GoalLock.from_yaml(text) == lock
    with pytest.raises(FormatError, match="does not match its hash"):
        GoalLock.from_yaml(text.replace("at_least: 0.5", "at_least: 0.4"))


def test_same_goal_gives_the_same_lock(write: Write) -> None:
    path = write(front(FRONT))
    assert compile_goal(path).hash == compile_goal(path).hash
