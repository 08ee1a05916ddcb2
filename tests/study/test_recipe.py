"""The recipe worker's table, and what it writes down about a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaigns import base_blueprint

from a3r.results import FailureClass
from a3r.worker import Failure, GiveUp, PauseArm, Retry
from a3r.workers import recipe
from a3r.workers.recipe import RecipeWorker, changed_config, model_digest

WORKER = RecipeWorker(Path("/nonexistent"), Path("/nonexistent"))


def react(kind: FailureClass, earlier: int = 0, **retry):
    blueprint = base_blueprint(retry=retry)
    failure = Failure("a/s1", "a", 1, earlier + 1, kind, "it broke", blueprint, Path("/nonexistent"), {kind: earlier})
    return WORKER.react(failure)


@pytest.mark.parametrize(
    ("kind", "retry", "allowed"),
    [
        (FailureClass.INFRA, {"infra": 2}, 2),
        (FailureClass.LOST, {"lost": 1}, 1),
        (FailureClass.STALLED, {"stalled": 2}, 2),
        (FailureClass.TIMEOUT, {}, 0),
        (FailureClass.CODE, {"code": 1}, 1),
        (FailureClass.UNKNOWN, {"code": 1}, 1),
        (FailureClass.OOM, {"oom": {"times": 1, "change": {}}}, 1),
        (FailureClass.FABRICATED, {}, 0),
    ],
)
def test_a_failure_is_retried_as_often_as_the_blueprint_allows(kind, retry, allowed):
    for earlier in range(allowed):
        assert isinstance(react(kind, earlier, **retry), Retry)
    assert isinstance(react(kind, allowed, **retry), GiveUp)


def test_a_wrong_configuration_stops_the_arm():
    reaction = react(FailureClass.CONFIG)
    assert isinstance(reaction, GiveUp) and reaction.block_arm


def test_an_external_failure_pauses_longer_each_time_and_never_gives_up_unless_told():
    waits = [r.after_s for n in range(12) if isinstance(r := react(FailureClass.EXTERNAL_DEP, n), PauseArm)]
    assert waits[:3] == [30.0, 60.0, 120.0] and waits[-1] == recipe.EXTERNAL_BACKOFF_MAX_S
    assert isinstance(react(FailureClass.EXTERNAL_DEP, external="fail"), GiveUp)


def test_a_declared_change_is_all_that_changes():
    assert changed_config({"micro": 7, "lr": 1e-4}, {"micro": "/2"}) == {"micro": 3, "lr": 1e-4}
    assert changed_config({"micro": 1, "lr": 1e-4}, {"micro": "/2", "lr": "*2"}) == {"micro": 1, "lr": 2e-4}


def test_a_model_folder_has_a_hash_that_follows_its_bytes(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    first = model_digest("m", tmp_path)
    assert first and first == model_digest(str(tmp_path / "m"), Path("/"))
    (tmp_path / "m" / "config.json").write_text('{"a": 1}')
    assert model_digest("m", tmp_path) != first
    assert model_digest("no-such-model", tmp_path) is None
    assert model_digest(None, tmp_path) is None
