"""werewolves: the rules of nights and days, nonsense decided by rule, and trainings of one side, of several models."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import werewolf_games
from example_runs import Train, TrainRoles, load
from rule_judge import RuleJudge
from werewolf_players import AimlessPlayer, Endpoint, ModelPlayer, OpponentFails
from werewolf_rules import NINE_PLAYERS, NOBODY, Game, Result, Role, Seat, keys_of, named_in, rewards_of

from swarmtune import SwarmClient, swarm_script
from swarmtune.config import ConfigError
from swarmtune.local import LocalServer

example = load("werewolves")
W, V, S, WI, H = Role.WEREWOLF, Role.VILLAGER, Role.SEER, Role.WITCH, Role.HUNTER


class Scripted:
    """Answers by the first matching part of the question; everything it hears is kept."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.heard: list[str] = []
        self.asked: list[str] = []

    def tell(self, news: str) -> None:
        self.heard.append(news)

    def answer(self, question: str) -> str:
        self.asked.append(question)
        return next((said for part, said in self.answers.items() if part in question.lower()), NOBODY)


def table(*roles: Role, **players: Scripted) -> tuple[list[Seat], Callable[..., Result]]:
    """Seats named A, B, C, … ; players by name, the others abstain."""
    seats = [
        Seat(name, role, players.get(name) or Scripted(kill="B", speak="Hm.", words="Bye.", vote=NOBODY))
        for name, role in zip("ABCDEFGHI", roles, strict=False)
    ]
    return seats, lambda **options: Game(seats, seed=1, **options).play()


# -- rules


def test_werewolves_win_when_they_are_as_many_as_the_others():
    seats, play = table(W, V, V)
    result = play()
    assert result.winner == "werewolves" and result.days == 1 and not seats[1].alive
    assert rewards_of(result) == {"werewolves": 1.0, "village": 0.0}


def test_the_village_wins_by_voting_out_the_last_werewolf_who_has_last_words():
    wolf = Scripted(kill="B", words="You will regret this.", speak="Hello.")
    voters = {name: Scripted(vote="A", speak="A it is.") for name in "CD"}
    _, play = table(W, V, V, V, A=wolf, **voters)
    result = play()
    assert result.winner == "village" and result.days == 1
    assert 'A says as last words: "You will regret this."' in result.log
    assert any("Votes: A → nobody, C → A, D → A" in line for line in result.log)


def test_a_tied_vote_sends_nobody_away():
    seats, play = table(W, V, V, V, V, A=Scripted(kill="B", vote="C"), C=Scripted(vote="A"))
    assert "Nobody leaves today." in play(max_days=1).log and seats[0].alive and seats[2].alive


def test_the_seer_learns_a_side_and_nobody_else_does():
    seer = Scripted(seer="A")
    seats, play = table(W, V, S, V, V, C=seer)
    play(max_days=1)
    assert "A is a werewolf." in seer.heard
    assert not any("is a werewolf" in news for seat in seats if seat.name != "C" for news in seat.player.heard)


def test_the_witch_saves_once_and_poisons_once_never_in_one_night():
    witch = Scripted(antidote="yes", poison="A")
    _, play = table(W, V, WI, V, V, V, C=witch)
    result = play(max_days=3)
    assert "Day 1 breaks. Nobody died in the night." in result.log
    assert "Day 2 breaks. B and A died in the night." in result.log and result.winner == "village"
    asked = [q for q in witch.asked if q.startswith("Witch")]
    assert len(asked) == 2, "the antidote was hers one night, the poison the next, and no question without a potion"


def test_a_hunter_shoots_when_killed_or_voted_out_but_not_when_poisoned():
    seats, play = table(W, H, V, V, V, B=Scripted(hunter="A"))
    assert play().winner == "village" and not seats[0].alive
    voters = {name: Scripted(vote="C") for name in "DEF"}
    seats, play = table(W, V, H, V, V, V, C=Scripted(hunter="A"), **voters)
    assert play().winner == "village"
    seats, play = table(W, V, H, WI, V, V, V, C=Scripted(hunter="A"), D=Scripted(antidote="no", poison="C"))
    play(max_days=1)
    assert not seats[2].alive and seats[0].alive


def test_werewolves_know_each_other_and_hear_each_others_choices():
    first, second = Scripted(kill="C"), Scripted(kill="C")
    seats, play = table(W, W, V, V, V, V, A=first, B=second)
    play(max_days=1)
    assert "The other werewolves: B." in first.heard[0] and "So far: C." in second.asked[0]
    assert not any("other werewolves" in news for seat in seats[2:] for news in seat.player.heard)


def test_nobody_wins_when_the_days_run_out():
    _, play = table(W, V, V, V, V, V)
    result = play(max_days=2)
    assert result.winner is None and set(rewards_of(result).values()) == {0.0}


@pytest.mark.parametrize("roles", [(W,), (V, V), (W, W, V), (W, W)])
def test_a_table_that_is_no_game_is_refused(roles: Sequence[Role]):
    with pytest.raises(ValueError, match=r"are werewolves; take at least 1 and fewer than others"):
        table(*roles)[1]()


# -- answers


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("Ada", "Ada"),
        ("I vote for ada.", "Ada"),
        ("Ben seems nice.\nMy choice: Ada", "Ada"),
        ("Ada or Ben", None),
        ("Adamant", None),
        ("", None),
        ("42", None),
    ],
)
def test_an_answer_names_an_option_or_none(text: str, choice: str | None):
    assert named_in(text, ["Ada", "Ben"]) == choice


@pytest.mark.parametrize("said", ["", "   ", "lorem ipsum", "A B C D E F", "\x00{}[]", "x" * 5000])
def test_a_player_who_talks_nonsense_is_asked_once_more_and_then_decided_by_rule(said: str):
    roles = (W, V, S, WI, H, V)
    seats = [Seat(name, role, Constant(said)) for name, role in zip("ABCDEF", roles, strict=True)]
    result = Game(seats, seed=3, max_days=2).play()
    assert sum(result.nonsense.values()) > 4
    assert any("answered nonsense; taken as" in line for line in result.log)
    assert all(len(line) < 500 for line in result.log)
    assert "Nobody leaves today." in result.log, "a vote without a name is no vote"


class Constant:
    def __init__(self, said: str) -> None:
        self._said = said

    def tell(self, news: str) -> None:
        pass

    def answer(self, question: str) -> str:
        return self._said


def test_games_without_a_plan_end_and_follow_from_their_seed():
    task = werewolf_games.make_tasks(werewolf_games.Table(), 0)[0]
    results = [werewolf_games.play(task, {}, seed) for seed in range(30)]
    assert [r.log for r in results] == [werewolf_games.play(task, {}, seed).log for seed in range(30)]
    assert {r.winner for r in results} >= {"werewolves", "village"}
    assert not any(sum(r.nonsense.values()) for r in results)


def test_seats_of_one_role_are_numbered_and_unknown_roles_refused():
    assert keys_of(NINE_PLAYERS)[:4] == ["werewolf-1", "werewolf-2", "werewolf-3", "villager-1"]
    with pytest.raises(ConfigError, match=r"trained: wolf is not in the game; it has hunter, seer, villager"):
        werewolf_games.sides_of(["wolf"])
    both = werewolf_games.Table(trained=["werewolf", "seer"])
    with pytest.raises(ConfigError, match=r"one model cannot win and lose at once; .*train_roles.py"):
        werewolf_games.shared_tasks(both, 0)


def test_an_opponent_that_is_down_says_what_to_check_and_rewards_nobody():
    with RuleJudge() as gone:
        pass
    player = ModelPlayer(Endpoint(gone.url, "k", "big", trained=False))
    with pytest.raises(OpponentFails, match=r"opponent big at http.*does not answer .*check task.opponent_url"):
        player.answer("?")


# -- trainings


def test_one_model_plays_all_werewolves_a_row_a_seat(train: Train):
    run = train(example.WEREWOLVES, "example_models:picks_an_option", {"task.max_days": 3, "repeats": 3})
    assert run.status == 0 and run.outcomes().count("admitted") == 6
    step = run.metrics[0]
    assert step["client/days"] >= 1 and step["client/nonsense"] == 0
    assert step["reward/mean"] == pytest.approx(step["client/werewolves_win"])
    assert step["episodes/trained"] < step["batch/rows"] <= 3 * step["episodes/trained"]


def test_opponents_come_from_any_endpoint(train: Train):
    with RuleJudge() as opponents:
        opponents.answer = lambda prompt: (200, AimlessPlayer(len(prompt)).answer(prompt))  # type: ignore[method-assign]
        settings = {"task.trained": ["seer", "witch"], "task.opponent_url": opponents.url, "task.max_days": 2}
        run = train(example.WEREWOLVES, "example_models:picks_an_option", settings)
        assert run.status == 0 and opponents.asked > 20
    assert run.metrics[0]["reward/mean"] == pytest.approx(run.metrics[0]["client/village_wins"])


def test_each_role_has_a_server_and_a_reward_of_its_own(train_roles: TrainRoles):
    roles = load("werewolves", "train_roles")
    settings = {"task.max_days": 2, "seer.sampling.max_tokens": 32}
    run = train_roles(roles.WEREWOLF_ROLES, "example_models:picks_an_option", ["werewolf", "seer"], settings)
    assert run.status == 0
    werewolf, seer = run.metrics["werewolf"][0], run.metrics["seer"][0]
    assert werewolf["reward/mean"] == pytest.approx(werewolf["client/werewolves_win"])
    assert seer["reward/mean"] == pytest.approx(seer["client/village_wins"])
    assert werewolf["batch/rows"] > seer["batch/rows"], "three seats on one server, one on the other"
    configs = {role: json.loads((run.out / role / "resolved_config.json").read_text()) for role in run.metrics}
    assert configs["seer"]["sampling"]["max_tokens"] == 32 != configs["werewolf"]["sampling"]["max_tokens"]
    assert (run.out / "rewards.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "batch_taks=2"], "batch_taks: unknown key; did you mean 'batch_tasks'?"),
        (["--set", "seer.batch_taks=2"], "batch_taks: unknown key; did you mean 'batch_tasks'?"),
        (["--set", 'task.trained=["seer", "seer"]'], "roles: at least one, each once; got seer, seer"),
        (["--set", 'task.trained=["wolf"]'], "wolf is not in the game"),
        (["--server", "witch=http://x"], "--server witch: write ROLE=URL; the roles are werewolf, seer"),
    ],
)
def test_what_no_role_and_no_configuration_has_is_refused(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    script = load("werewolves", "train_roles").WEREWOLF_ROLES
    assert swarm_script.main(script, [*arguments, "--out", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err


def test_win_rates_of_both_sides_are_told(example_server: LocalServer, capsys: Any):
    with SwarmClient(example_server.url) as swarm:
        keys = {"engine.kind": "scripted", "engine.script": "example_models:picks_an_option", "seed": 4712}
        swarm.start({"model": "tiny", "engine": {"kind": "scripted", "script": keys["engine.script"]}, "seed": 4712})
        status = load("werewolves", "win_rates").main(["--server", example_server.url, "--games", "3"])
        swarm.stop()
    lines = capsys.readouterr().out.splitlines()
    assert status == 0 and lines[0].startswith("werewolves wins ") and lines[1].startswith("village    wins ")
