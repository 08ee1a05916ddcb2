"""The rules of the game: how it ends, what counts, and that nonsense is settled."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.who_is_the_spy.spy_parts import (
    agents,
    asked,
    dealt,
    game,
    house,
    mock_games,
    play,
    prompts,
    voting_for,
    words,
)

SPY, CIVILIAN = game.Side.SPY, game.Side.CIVILIAN
Void = game.Void


def test_the_word_list_has_pairs_enough_and_its_clues_never_say_their_word() -> None:
    assert len(words.pairs()) == 270 and len({pair.name for pair in words.pairs()}) == 270
    for kind in words.clues().values():
        assert len(set(itertools.chain(*kind.values()))) == sum(map(len, kind.values())), "a clue fits one word only"
        for word, clues in kind.items():
            assert len(clues) == 4 and not any(word in clue.lower() for clue in clues)


def test_a_deal_follows_from_its_seed_and_gives_each_side_its_word() -> None:
    one, same, other = dealt(seed=1), dealt(seed=1), dealt(seed=2)
    assert one.seats == same.seats != other.seats
    assert Counter(seat.side for seat in one.seats) == {CIVILIAN: 4, SPY: 1}
    by_side = {side: {seat.word for seat in one.seats if seat.side is side} for side in (CIVILIAN, SPY)}
    assert all(len(found) == 1 for found in by_side.values()) and by_side[CIVILIAN] != by_side[SPY]
    deals = [dealt(seed=seed) for seed in range(60)]
    assert {next(i for i, s in enumerate(d.seats) if s.side is SPY) for d in deals} == {0, 1, 2, 3, 4}
    assert {d.seats[0].word for d in deals} == set(words.pairs()[0].words), "either word may be the civilians'"
    assert len({seat.name for d in deals for seat in d.seats}) > 100


@pytest.mark.parametrize(("players", "spies"), [(4, 2), (3, 2), (4, 0), (2, 1)])
def test_a_deal_that_the_spies_have_won_already_is_refused(players: int, spies: int) -> None:
    with pytest.raises(ValueError, match="fewer than the civilians"):
        dealt(players=players, spies=spies)


def test_civilians_win_when_the_last_spy_is_out() -> None:
    played = dealt(players=7, spies=2)
    spies = [seat.name for seat in played.seats if seat.side is SPY]
    assert play(played, voting_for(lambda names: next((s for s in spies if s in names), names[0]))) is CIVILIAN
    assert {r.eliminated for r in played.rounds} == set(spies) and len(played.rounds) == 2


def test_spies_win_when_they_are_as_many_as_the_civilians() -> None:
    played = dealt(players=7, spies=2)
    civilians = [seat.name for seat in played.seats if seat.side is CIVILIAN]
    assert play(played, voting_for(lambda names: next(c for c in civilians if c in names))) is SPY
    assert len(played.rounds) == 3 and Counter(seat.side for seat in played.living) == {CIVILIAN: 2, SPY: 2}


def test_players_know_their_word_and_nobodys_side() -> None:
    played = dealt()
    for seat in played.seats:
        told = prompts.rules(seat)
        assert seat.word in told and house.secret_of([{"role": "system", "content": told}]) == seat.word
    spy, civilian = (next(s for s in played.seats if s.side is side) for side in (SPY, CIVILIAN))
    told = prompts.rules(spy).replace(spy.word, "W").replace(spy.name, "N")
    assert told == prompts.rules(civilian).replace(civilian.word, "W").replace(civilian.name, "N")


@given(
    answers=st.lists(st.text(max_size=40), min_size=1, max_size=30),
    players=st.integers(3, 8),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_whatever_players_say_the_game_ends_by_its_rules(answers, players: int, seed: int, data) -> None:
    spies = data.draw(st.integers(1, (players - 1) // 2))
    played = dealt(players=players, spies=spies, seed=seed)
    endless = itertools.cycle(answers)
    winner = play(played, lambda question, choices: next(endless))
    assert winner is played.winner and len(played.rounds) <= players - 2
    living = {seat.name for seat in played.seats}
    for now in played.rounds:
        assert {d.speaker for d in now.descriptions} == {b.voter for b in now.ballots} == living
        assert all(b.target in living - {b.voter} for b in now.ballots)
        votes = Counter(b.target for b in now.ballots)
        assert votes[now.eliminated] == max(votes.values())
        living -= {now.eliminated}


def test_a_silent_player_is_asked_a_bounded_number_of_times_and_then_settled_by_rule() -> None:
    played = dealt(players=3, attempts=3)
    questions: list[str] = []

    def silent(question: str, choices: object) -> str:
        questions.append(question)
        return ""

    play(played, silent)
    assert len(questions) == 3 * (3 + 3), "three players, three attempts each for a description and for a vote"
    assert all(d.text is None and d.voids == (Void.EMPTY,) * 3 for d in played.rounds[0].descriptions)
    assert all(ballot.by_lot for ballot in played.rounds[0].ballots)
    again = dealt(players=3, attempts=3)
    play(again, silent)
    assert again.rounds == played.rounds, "lots are drawn from the game's seed"


def test_the_others_hear_that_a_description_was_forfeited() -> None:
    played, heard = dealt(players=3), []
    play(played, lambda question, choices: heard.append(question) or "")
    assert any("(said nothing)" in question for question in heard)


@pytest.mark.parametrize(
    ("text", "void"),
    [
        ("It grows on a tree", None),
        ("", Void.EMPTY),
        ("?!", Void.EMPTY),
        ("{word}", Void.STATES_WORD),
        ("I like {word}s and more", Void.STATES_WORD),
        ("I am the spy", Void.CONFESSES),
        ("Trust me, I'm a civilian.", Void.CONFESSES),
        ("the others see it often in spring", Void.REPEATS),
        ("the others see it often in autumn rain and fog", None),
    ],
)
def test_what_is_no_description(text: str, void: object) -> None:
    played = dealt()
    me, other = played.seats[0], played.seats[1]
    played.rounds.append(game.Round(1, [game.Description(other.name, "The others see it often, in spring.")]))
    assert game.why_void(text.format(word=me.word), me, played) == void


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Ada Abbott", "Ada Abbott"),
        ("I think it is ada.", "Ada Abbott"),
        ("Baker!", "Boris Baker"),
        ("Ada Abbott, surely: Abbott", "Ada Abbott"),
        ("Ada or Boris", None),
        ("Carla", None),
        ("Adamant", None),
        ("", None),
    ],
)
def test_a_vote_means_one_name(text: str, name: str | None) -> None:
    assert game.named(text, ["Ada Abbott", "Boris Baker"]) == name


def test_a_vote_for_oneself_is_no_vote() -> None:
    played = dealt(players=3)
    play(played, {seat.name: voting_for(lambda names, me=seat.name: me) for seat in played.seats})
    assert all(ballot.by_lot for ballot in played.rounds[0].ballots)


def test_a_failing_player_ends_the_game_and_is_no_move() -> None:
    def broken(question: str, choices: object) -> str:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        asyncio.run(game.play(dealt(), dict.fromkeys((s.name for s in dealt().seats), asked(broken))))


def test_metrics_count_what_was_settled_by_rule() -> None:
    played = dealt(players=3)
    spy = next(seat for seat in played.seats if seat.side is SPY)
    says = {
        seat.name: voting_for(lambda names: spy.name) if seat is not spy else (lambda question, choices: "")
        for seat in played.seats
    }
    assert play(played, says) is CIVILIAN
    mine, theirs = agents.metrics_of(played, CIVILIAN), agents.metrics_of(played, SPY)
    assert mine["describe/forfeited"] == mine["vote/by_lot"] == 0.0 and mine["vote/against_other_side"] == 1.0
    assert theirs["describe/forfeited"] == theirs["describe/empty"] == theirs["vote/by_lot"] == 1.0


def test_mocked_games_are_whole_conversations_of_winners_that_break_no_rule() -> None:
    mocked = mock_games.conversations(agents.GameParameters(), games=12, seed=5)
    assert mocked == mock_games.conversations(agents.GameParameters(), games=12, seed=5)
    assert mocked != mock_games.conversations(agents.GameParameters(), games=12, seed=6)
    assert len(mocked) >= 12
    for conversation in mocked:
        roles = [message["role"] for message in conversation["messages"]]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2)]
        text = "\n".join(message["content"] for message in conversation["messages"])
        assert not any(again in text for again in ("(said nothing)", "in other words", "exactly one of these"))
