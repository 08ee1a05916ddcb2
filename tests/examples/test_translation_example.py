"""academic_translation: two models in three steps, rewards per role that neither lists nor copies can win."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scoring
from example_models import GOOD, PLAIN
from example_runs import TrainRoles, load

from swarmtune.config import ConfigError

example = load("academic_translation")
TASKS = {task["task_id"]: task for task in example.make_tasks(example.Abstracts(), 0)}
RIVER = TASKS["river"]


def test_three_agents_and_two_models_train_with_a_reward_for_each_role(train_roles: TrainRoles, tmp_path: Path):
    only = [json.dumps(TASKS[name] | {"id": name}) for name in ("river", "galaxy")]
    (tmp_path / "two.jsonl").write_text("\n".join(only))
    settings = {"task.file": str(tmp_path / "two.jsonl"), "repeats": 3}
    run = train_roles(example.TRANSLATION, "example_models:translates", ["translator", "reviewer"], settings)
    assert run.status == 0
    translator, reviewer = run.metrics["translator"][0], run.metrics["reviewer"][0]
    assert 0 < translator["reward/mean"] < 1 and translator["client/person"] < 1
    assert translator["reward/mean"] != reviewer["reward/mean"]
    assert translator["batch/rows"] == 2 * translator["episodes/trained"], "agents 1 and 3"
    assert reviewer["batch/rows"] == reviewer["episodes/trained"], "agent 2"


def test_a_good_translation_has_all_three_and_a_plain_one_lacks_what_the_paper_names():
    assert scoring.scores_of(GOOD["river"], RIVER) == scoring.Scores(1.0, 1.0, 1.0)
    plain = scoring.scores_of(PLAIN["river"], RIVER)
    assert plain == scoring.Scores(1 / 3, 0.0, 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        RIVER["text"],
        "，".join([*RIVER["terms"].values(), "数字高程模型（DEM）", "本文"]),
        "本文泥沙输移三角洲侵蚀数字高程模型（DEM）。" * 12,
        "Here is the translation you asked for: 本文研究泥沙输移。",
        "本文研究。" * 3,
    ],
)
def test_what_is_no_translation_earns_nothing(text: str):
    assert scoring.scores_of(text, RIVER) == scoring.Scores(0.0, 0.0, 0.0)
    assert scoring.rewards_of(text, "sediment transport: 泥沙输移", text, RIVER) == {"translator": 0.0, "reviewer": 0.0}


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("数字高程模型（DEM）", 1.0),
        ("数字高程模型(DEM)", 1.0),
        ("数字高程模型（Digital Elevation Model, DEM）", 1.0),
        ("DEM（数字高程模型）", 0.0),
        ("DEM显示，数字高程模型（DEM）", 0.0),
        ("数字高程模型", 0.0),
    ],
)
def test_an_abbreviation_is_written_out_at_its_first_use(text: str, worth: float):
    assert scoring.abbreviations(text, RIVER) == worth


def test_a_reviewer_earns_for_right_terms_that_are_taken_up_and_not_for_naming_everything():
    right = "sediment transport: 泥沙输移\nerosion: 侵蚀"
    wrong = "sediment transport: 沉淀运输\nerosion: 腐蚀"
    draft = PLAIN["river"]
    taken = scoring.rewards_of(draft, right, GOOD["river"], RIVER)["reviewer"]
    ignored = scoring.rewards_of(draft, right, draft, RIVER)["reviewer"]
    useless = scoring.rewards_of(draft, wrong, draft, RIVER)["reviewer"]
    assert taken == 1.0 > ignored > useless
    everything = right + "\n" + "词" * scoring.REVIEW_CHARACTERS
    assert scoring.rewards_of(draft, everything, draft, RIVER)["reviewer"] <= useless


def test_every_abstract_of_the_set_can_be_scored():
    assert len(TASKS) == 12
    for task in TASKS.values():
        assert all(english.lower()[:5] in task["text"].lower() for english in task["terms"])
        assert all(f"({short})" in task["text"] for short in task["abbreviations"])
        written = "".join(f"{long}（{short}）" for short, long in task["abbreviations"].items())
        filler = "本文的工作基于多年来在不同地区收集并整理的观测资料，采用统一方法加以比较和检验，"
        text = f"{filler}涉及{'、'.join(task['terms'].values())}。其中用到{written}等手段。结果与以往的认识有所不同。"
        assert scoring.scores_of(text, task) == scoring.Scores(1.0, 1.0, 1.0), task["task_id"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", ":1: JSONDecodeError"),
        ('{"id": "a", "text": "b"}', r":1: KeyError\('terms'\); it needs id, text, terms and abbreviations"),
        (
            '{"id": "a", "text": "", "terms": {}, "abbreviations": {}}',
            ":1: id, text, terms and abbreviations hold texts",
        ),
        ("[]", ":1: TypeError"),
    ],
)
def test_a_bad_line_of_the_set_is_named(tmp_path: Path, line: str, complaint: str):
    (tmp_path / "bad.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=complaint):
        example.make_tasks(example.Abstracts(file=tmp_path / "bad.jsonl"), 0)


def test_silent_agents_earn_nothing_and_end_nothing(monkeypatch: Any):
    monkeypatch.setattr(example, "ask", lambda model, prompt: "")
    outcome = example.rollout(RIVER, {"translator": None, "reviewer": None})
    assert {role: reward for role, (reward, _) in outcome.items()} == {"translator": 0.0, "reviewer": 0.0}
