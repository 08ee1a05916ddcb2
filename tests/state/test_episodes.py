"""Rules of an episode's life:

1. claimed → ended | aborted | expired, each exactly once; a closed episode never opens again.
2. A repeat of what closed it gets the same answer; anything else gets a typed refusal that says how to fix it.
3. A call in flight and an end in progress keep an episode from expiring.
4. Ids and keys are never reused; a claim id gets its own episode again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from swarmtune.episodes import (
    MAX_REWARD,
    BadReward,
    ClaimConflict,
    EndConflict,
    Episode,
    EpisodeBook,
    EpisodeError,
    EpisodeExpired,
    EpisodeOver,
    TooManyEpisodes,
    UnknownEpisode,
    key_digest,
    validate_reward,
)
from swarmtune.protocol import Code, EndResult, EpisodeState


def result_of(episode: Episode):
    return EndResult(episode_id=episode.episode_id, outcome="admitted", samples=1, sampled_tokens=3)


def end(book: EpisodeBook, e: Episode, submission: str = "s1", reward: object = 1.0):
    return book.end(e.episode_id, submission, reward, result_of(e))


def in_state(book: EpisodeBook, state: str) -> Episode:
    e = book.claim("t", lease_s=5.0)
    match state:
        case "ending":
            book.begin_end(e.episode_id, "s1", 1.0)
        case "ended":
            end(book, e)
        case "aborted":
            book.abort(e.episode_id, "tool died")
        case "expired":
            book.expire(e.episode_id, "drain deadline")
    return e


ACTIONS: dict[str, Callable[[EpisodeBook, Episode], object]] = {
    "touch": lambda book, e: book.touch(e.episode_id),
    "by_key": lambda book, e: book.by_key(e.key or ""),
    "begin_call": lambda book, e: book.begin_call(e),
    "end_same": lambda book, e: end(book, e, "s1"),
    "end_other": lambda book, e: end(book, e, "s2"),
    "abort": lambda book, e: book.abort(e.episode_id),
    "expire": lambda book, e: book.expire(e.episode_id, "late"),
}

# state → action → the state after it, or the refusal (which leaves the state as it is)
TABLE: dict[str, dict[str, str | type[Exception]]] = {
    "claimed": {
        "touch": "claimed",
        "by_key": "claimed",
        "begin_call": "claimed",
        "end_same": "ended",
        "end_other": "ended",
        "abort": "aborted",
        "expire": "expired",
    },
    "ending": {
        "touch": "claimed",
        "by_key": "claimed",
        "begin_call": EpisodeOver,
        "end_same": RuntimeError,
        "end_other": EndConflict,
        "abort": EpisodeOver,
        "expire": EpisodeOver,
    },
    "ended": {
        "touch": EpisodeOver,
        "by_key": EpisodeOver,
        "begin_call": EpisodeOver,
        "end_same": "ended",
        "end_other": EndConflict,
        "abort": EpisodeOver,
        "expire": EpisodeOver,
    },
    "aborted": {
        "touch": EpisodeOver,
        "by_key": EpisodeOver,
        "begin_call": EpisodeOver,
        "end_same": EpisodeOver,
        "end_other": EpisodeOver,
        "abort": "aborted",
        "expire": EpisodeOver,
    },
    "expired": {
        "touch": EpisodeExpired,
        "by_key": EpisodeExpired,
        "begin_call": EpisodeExpired,
        "end_same": EpisodeExpired,
        "end_other": EpisodeExpired,
        "abort": EpisodeExpired,
        "expire": EpisodeExpired,
    },
}


@pytest.mark.parametrize(("state", "action"), [(s, a) for s in TABLE for a in ACTIONS])
def test_every_action_in_every_state_does_what_the_table_says(book, state, action):
    episode = in_state(book, state)
    before, expected = episode.state, TABLE[state][action]
    if isinstance(expected, str):
        ACTIONS[action](book, episode)
        assert episode.state == expected
    else:
        with pytest.raises(expected):
            ACTIONS[action](book, episode)
        assert episode.state is before
    assert book.open_count == sum(e.is_open for e in [episode])


@pytest.mark.parametrize(
    ("state", "code"), [("ended", Code.EPISODE_OVER), ("aborted", Code.EPISODE_OVER), ("expired", Code.EPISODE_EXPIRED)]
)
def test_a_key_that_is_over_is_refused_by_its_reason_and_counted(book, state, code):
    episode = in_state(book, state)
    with pytest.raises(EpisodeError, match="claim a new one") as refusal:
        book.by_key(episode.key or "")
    assert refusal.value.code is code
    assert (episode.late_calls, book.late_calls) == (1, 1)


def test_a_key_never_given_out_is_unknown_and_counted(book):
    with pytest.raises(UnknownEpisode, match="api_key") as refusal:
        book.by_key("sk-ep-guess")
    assert refusal.value.code is Code.UNKNOWN_EPISODE
    assert book.late_calls == 1


def test_the_reason_of_an_abort_is_in_the_refusal(book):
    episode = in_state(book, "aborted")
    with pytest.raises(EpisodeOver, match="tool died"):
        book.touch(episode.episode_id)


def test_ids_and_keys_are_fresh_and_keys_are_not_ids(book):
    episodes = [book.claim("t", lease_s=1.0) for _ in range(8)]
    assert len({e.episode_id for e in episodes} | {e.key for e in episodes}) == 16
    assert all(len(e.key or "") > 40 for e in episodes)
    assert all(e.key_digest == key_digest(e.key or "") for e in episodes)


# -- claims


def test_the_same_claim_id_gets_the_same_episode(book, clock):
    first = book.claim("t", lease_s=5.0, claim_id="c1")
    clock.advance(4)
    assert book.claim("t", lease_s=5.0, claim_id="c1") is first
    assert book.claimed_by("c1") is first
    assert (first.last_seen, book.open_count) == (clock.now, 1)


def test_a_claim_id_of_another_task_or_kind_is_a_conflict(book):
    book.claim("t", lease_s=5.0, claim_id="c1")
    for task, kind in (("u", "train"), ("t", "evaluate")):
        with pytest.raises(ClaimConflict, match="new id"):
            book.claim(task, lease_s=5.0, kind=kind, claim_id="c1")


def test_a_claim_id_whose_episode_is_closed_is_refused(book):
    episode = book.claim("t", lease_s=5.0, claim_id="c1")
    book.abort(episode.episode_id)
    assert book.claimed_by("c1") is None
    with pytest.raises(EpisodeOver, match="new claim id"):
        book.claim("t", lease_s=5.0, claim_id="c1")


def test_open_episodes_are_bounded_and_closing_one_makes_room(book):
    episodes = [book.claim("t", lease_s=5.0) for _ in range(8)]
    with pytest.raises(TooManyEpisodes, match="max_open_episodes") as refusal:
        book.claim("t", lease_s=5.0)
    assert refusal.value.retry_after_s is not None
    book.abort(episodes[0].episode_id)
    book.claim("t", lease_s=5.0)


# -- ends


def test_a_repeated_end_gets_the_first_answer_even_with_another_reward(book):
    episode = book.claim("t", lease_s=5.0)
    first = end(book, episode, "s1", 1.0)
    assert end(book, episode, "s1", 0.0) is first
    assert episode.reward == 1.0


def test_an_end_that_could_not_be_stored_leaves_the_episode_open(book, clock):
    episode = book.claim("t", lease_s=5.0)
    book.begin_end(episode.episode_id, "s1", 1.0)
    clock.advance(100)
    book.cancel_end(episode.episode_id)
    assert (episode.is_open, episode.submission_id, episode.reward) == (True, None, None)
    assert book.expire_due() == []
    end(book, episode, "s2", 0.5)
    assert episode.reward == 0.5


@pytest.mark.parametrize(
    "reward", [math.nan, math.inf, -math.inf, None, True, "1.0", [1.0], {}, 10**400, -(10**30), 1e19, 1 + 0j]
)
def test_a_reward_that_is_no_finite_number_is_refused_and_the_episode_stays_open(book, reward):
    episode = book.claim("t", lease_s=5.0)
    with pytest.raises(BadReward, match="reward") as refusal:
        book.begin_end(episode.episode_id, "s1", reward)
    assert refusal.value.code is Code.BAD_REWARD
    assert len(str(refusal.value)) < 200
    assert episode.is_open and not episode.ending
    end(book, episode, "s1", 0)


@pytest.mark.parametrize("reward", [0, 1, -1.5, 1e-300, MAX_REWARD])
def test_finite_numbers_are_rewards(reward):
    value = validate_reward(reward)
    assert (value, type(value)) == (reward, float)


# -- leases


def test_a_lease_runs_out_without_calls_and_heartbeats(book, clock):
    idle, lively = book.claim("t", lease_s=5.0), book.claim("t", lease_s=5.0)
    clock.advance(4)
    book.touch(lively.episode_id)
    assert book.next_expiry_s() == 1.0
    clock.advance(1)
    assert book.expire_due() == [idle]
    assert book.expire_due() == []
    assert idle.state is EpisodeState.EXPIRED and "5 s" in (idle.reason or "")


def test_a_call_in_flight_keeps_the_episode_and_its_finish_starts_the_lease_anew(book, clock):
    episode = book.claim("t", lease_s=5.0)
    book.begin_call(episode)
    clock.advance(60)
    assert (book.expire_due(), book.next_expiry_s()) == ([], None)
    book.finish_call(episode, sampled_tokens=7)
    clock.advance(4)
    assert book.expire_due() == []
    clock.advance(1)
    assert book.expire_due() == [episode]
    assert (episode.calls, episode.in_flight, episode.sampled_tokens) == (1, 0, 7)


def test_an_end_in_progress_keeps_the_episode(book, clock):
    episode = in_state(book, "ending")
    clock.advance(60)
    assert book.expire_due() == []
    book.commit_end(episode.episode_id, result_of(episode))
    assert episode.state is EpisodeState.ENDED


def test_a_call_may_finish_after_its_episode_was_closed_but_not_twice(book):
    episode = book.claim("t", lease_s=5.0)
    book.begin_call(episode)
    book.abort(episode.episode_id)
    book.finish_call(episode)
    with pytest.raises(ValueError, match="without begin_call"):
        book.finish_call(episode)


# -- counts and memory


def test_open_tasks_counts_training_episodes_only(book, clock):
    first = book.claim("t", lease_s=5.0, client="a")
    clock.advance(2)
    book.claim("t", lease_s=5.0, client="b")
    book.claim("t", lease_s=5.0, kind="evaluate")
    assert (book.open_tasks["t"].count, book.open_tasks["t"].client) == (2, "a")
    assert book.open_tasks["t"].newest_claim == clock.now
    book.abort(first.episode_id)
    assert book.open_tasks["t"].count == 1
    assert book.open_count == 2


def test_closed_episodes_are_remembered_up_to_a_bound(clock):
    book = EpisodeBook(clock, max_open=8, remember=3)
    episodes = [book.claim("t", lease_s=5.0, claim_id=f"c{i}") for i in range(5)]
    for e in episodes:
        end(book, e)
    with pytest.raises(UnknownEpisode):
        book.by_key(episodes[0].key or "")
    with pytest.raises(UnknownEpisode):
        book.get(episodes[1].episode_id)
    for e in episodes[2:]:
        with pytest.raises(EpisodeOver):
            book.by_key(e.key or "")
    assert book.claim("t", lease_s=5.0, claim_id="c0") is not episodes[0]


def test_a_restored_episode_answers_its_key_and_its_submission_as_before(book, clock):
    episode = in_state(book, "ended")
    later = EpisodeBook(clock, max_open=8)
    later.restore(episode)
    with pytest.raises(EpisodeOver):
        later.by_key(episode.key or "")
    assert end(later, episode, "s1") == result_of(episode)
    with pytest.raises(EndConflict):
        end(later, episode, "s2")
    with pytest.raises(ValueError, match="only closed"):
        later.restore(book.claim("t", lease_s=5.0))


def test_the_view_says_what_a_client_may_know(book, clock):
    episode = book.claim("t", lease_s=5.0, weight_version=3)
    clock.advance(2)
    view = book.view(episode)
    assert (view.state, view.lease_left_s, view.weight_version) == (EpisodeState.CLAIMED, 3.0, 3)
    assert episode.key is not None and episode.key not in view.model_dump_json()
    end(book, episode, reward=0.25)
    assert (book.view(episode).reward, book.view(episode).lease_left_s) == (0.25, None)
