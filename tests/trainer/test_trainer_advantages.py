"""Advantages are per episode, by veRL's estimators; each is checked against a few lines of its own.

Rules:
1. An episode counts once in its group, however many rows and tokens it has.
2. All sampled tokens of an episode get its advantage (reinforce_plus_plus and remax with gamma < 1 excepted).
3. An episode alone in its group has advantage 0 with the estimators that compare within groups.
"""

from __future__ import annotations

from statistics import mean, stdev

import pytest
import torch
from trainer_episodes import episode_advantages, make_batch, sample

from swarmtune.config import AlgorithmConfig, ConfigError
from swarmtune.trainer.advantages import Facts, check_estimator, estimate, known_estimators
from swarmtune.types import FinishedEpisode


def episodes(rewards: dict[str, list[float]], *, rows: int = 1) -> list[FinishedEpisode]:
    """Per task its rewards; episode k samples 3 + k tokens in each of its rows."""
    made = []
    for task, values in rewards.items():
        for k, reward in enumerate(values):
            name = f"{task}{k}"
            samples = [sample(i, name, task, prompt=[1, 2, 3], turns=[(3 + k, 1)]) for i in range(rows)]
            made.append(FinishedEpisode(name, task, reward, samples))
    return made


REWARDS = {"a": [1.0, 0.0, 0.5], "b": [0.2, 0.2, 0.9]}


def scalars(name: str, given: list[FinishedEpisode], **keys: object) -> list[float]:
    """One value per episode; checks that all of its tokens have it."""
    result = []
    config = AlgorithmConfig.model_validate({"advantage": name, **keys})
    for episode, values in zip(given, episode_advantages(given, config), strict=True):
        assert values.shape == (episode.sampled_tokens,)
        assert torch.equal(values, values[:1].expand_as(values))
        result.append(float(values[0]))
    return result


def by_group(fn) -> list[float]:
    return [a for rewards in REWARDS.values() for a in fn(rewards)]


def lengths(rewards: list[float]) -> list[int]:
    return [3 + k for k in range(len(rewards))]


def whiten(values: list[float], counts: list[int]) -> list[float]:
    """Zero mean and unit variance over tokens."""
    total = sum(counts)
    m = sum(v * c for v, c in zip(values, counts, strict=True)) / total
    var = sum(c * (v - m) ** 2 for v, c in zip(values, counts, strict=True)) / (total - 1)
    return [(v - m) / (var + 1e-8) ** 0.5 for v in values]


EXPECTED = {
    "grpo": lambda: by_group(lambda r: [(x - mean(r)) / (stdev(r) + 1e-6) for x in r]),
    "grpo_vectorized": lambda: by_group(lambda r: [(x - mean(r)) / (stdev(r) + 1e-6) for x in r]),
    "grpo_passk": lambda: by_group(
        lambda r: [(sorted(r)[-1] - sorted(r)[-2]) / (stdev(r) + 1e-6) if x == max(r) else 0.0 for x in r]
    ),
    "gpg": lambda: by_group(lambda r: [6 / 5 * (x - mean(r)) for x in r]),
    "rloo": lambda: by_group(lambda r: [x - (sum(r) - x) / (len(r) - 1) for x in r]),
    "rloo_vectorized": lambda: by_group(lambda r: [x - (sum(r) - x) / (len(r) - 1) for x in r]),
    "opo": lambda: by_group(
        lambda r: [x - sum(v * n for v, n in zip(r, lengths(r), strict=True)) / sum(lengths(r)) for x in r]
    ),
    "reinforce_plus_plus": lambda: whiten(by_group(lambda r: r), [n for r in REWARDS.values() for n in lengths(r)]),
    "reinforce_plus_plus_baseline": lambda: whiten(
        by_group(lambda r: [x - mean(r) for x in r]), [n for r in REWARDS.values() for n in lengths(r)]
    ),
    "gdpo": lambda: whiten(
        by_group(lambda r: [(x - mean(r)) / (stdev(r) + 1e-6) for x in r]),
        [n for r in REWARDS.values() for n in lengths(r)],
    ),
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_estimator_equals_its_formula(name: str):
    assert scalars(name, episodes(REWARDS)) == pytest.approx(EXPECTED[name](), abs=1e-5)


def test_every_known_estimator_has_a_formula_here():
    asked_of_the_models = {"gae", "optimal_token_baseline", "tir_optimal_token_baseline"}
    assert set(known_estimators()) == set(EXPECTED) | asked_of_the_models | {"remax"}


def facts_of(given: list[FinishedEpisode], seed: int = 3) -> Facts:
    """Made-up answers of the models; the second episode's last token is not computed."""
    generator = torch.Generator().manual_seed(seed)

    def random(low: float, high: float) -> list[torch.Tensor]:
        return [low + (high - low) * torch.rand(e.sampled_tokens, generator=generator) for e in given]

    computed = [torch.ones(e.sampled_tokens, dtype=torch.bool) for e in given]
    computed[1][-1] = False
    return Facts(
        computed=computed,
        penalties=random(0.0, 0.1),
        values=random(-0.5, 0.5),
        old_logprobs=random(-3.0, -0.1),
        sum_pi_squared=random(0.1, 0.9),
    )


def test_gae_runs_over_an_episodes_rows_one_after_the_other_with_the_reward_at_the_last_computed_token():
    given = episodes(REWARDS, rows=2)
    facts = facts_of(given)
    found = estimate(given, [e.reward for e in given], AlgorithmConfig(advantage="gae", gamma=0.9, lam=0.8), facts)
    raw, returns = [], []
    for i, episode in enumerate(given):
        n = int(facts.computed[i].sum())
        rewards = [-float(p) for p in facts.penalties[i][:n]]
        rewards[-1] += episode.reward
        values = [*facts.values[i][:n].tolist(), 0.0]
        gae, advantages = 0.0, [0.0] * n
        for t in reversed(range(n)):
            gae = rewards[t] + 0.9 * values[t + 1] - values[t] + 0.9 * 0.8 * gae
            advantages[t] = gae
        raw += advantages
        returns += [a + v for a, v in zip(advantages, values, strict=False)]
    whole = whiten(raw, [1] * len(raw))
    got = torch.cat([a[c] for a, c in zip(found.advantages, facts.computed, strict=True)])
    assert got.tolist() == pytest.approx(whole, abs=1e-4)
    got = torch.cat([r[c] for r, c in zip(found.returns, facts.computed, strict=True)])
    assert got.tolist() == pytest.approx(returns, abs=1e-5)
    assert float(found.advantages[1][-1]) == 0.0


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_optimal_token_baselines_weigh_returns_by_the_variance_of_the_path_so_far(name: str):
    given = episodes({"a": [1.0, 0.0]})  # 3 and 4 tokens
    facts = facts_of(given)
    facts = Facts(facts.computed, old_logprobs=facts.old_logprobs, sum_pi_squared=facts.sum_pi_squared)
    found = estimate(given, [1.0, 0.0], AlgorithmConfig(advantage=name), facts)
    paths = [
        (1 - 2 * p[:3].exp() + s[:3]).cumsum(0) for p, s in zip(facts.old_logprobs, facts.sum_pi_squared, strict=True)
    ]
    baseline = paths[0] / (paths[0] + paths[1] + 1e-8)  # the first episode's return is 1 everywhere, the second's 0
    assert found.advantages[0].tolist() == pytest.approx((1 - baseline).tolist(), abs=1e-5)
    assert found.advantages[1][:3].tolist() == pytest.approx((-baseline).tolist(), abs=1e-5)


def test_a_penalty_on_tokens_lowers_the_episodes_reward_for_estimators_that_compare_episodes():
    given = episodes(REWARDS)
    penalties = [torch.full((e.sampled_tokens,), 0.01 * (i + 1)) for i, e in enumerate(given)]
    facts = Facts([torch.ones(e.sampled_tokens, dtype=torch.bool) for e in given], penalties=penalties)
    found = estimate(given, [e.reward for e in given], AlgorithmConfig(advantage="rloo"), facts)
    shaped = [e.reward - float(p.sum()) for e, p in zip(given, penalties, strict=True)]
    first = shaped[:3]
    expected = [x - (sum(first) - x) / 2 for x in first]
    assert [float(a[0]) for a in found.advantages[:3]] == pytest.approx(expected, abs=1e-5)


def test_an_episode_of_which_nothing_was_computed_still_counts_in_its_group():
    given = episodes({"a": [1.0, 0.0]})
    computed = [torch.ones(3, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)]
    found = estimate(given, [1.0, 0.0], AlgorithmConfig(advantage="rloo"), Facts(computed))
    assert found.advantages[0].tolist() == [1.0] * 3
    assert not found.advantages[1].any()


def test_dr_grpo_does_not_divide_by_the_deviation():
    expected = by_group(lambda r: [x - mean(r) for x in r])
    assert scalars("grpo", episodes(REWARDS), norm_adv_by_std=False) == pytest.approx(expected, abs=1e-6)


def test_remax_subtracts_the_greedy_reward():
    given = episodes(REWARDS)
    for episode in given:
        episode.metrics["reward_baseline"] = 0.25
    assert scalars("remax", given) == pytest.approx([e.reward - 0.25 for e in given])


def test_remax_without_a_baseline_names_the_metric():
    with pytest.raises(ValueError, match="reward_baseline"):
        scalars("remax", episodes(REWARDS))


def test_discount_runs_back_from_the_episodes_end():
    given = episodes({"a": [1.0], "b": [0.0]})
    values = episode_advantages(given, AlgorithmConfig(advantage="reinforce_plus_plus", gamma=0.5))
    steps = values[0].diff()
    assert float(steps[1] / steps[0]) == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
def test_rows_of_an_episode_do_not_change_its_advantage(name: str):
    one, two = episodes(REWARDS), episodes(REWARDS)
    two[1].samples.append(sample(9, two[1].episode_id, "a", prompt=[4, 5], turns=[(0, 2)]))
    assert scalars(name, one) == pytest.approx(scalars(name, two))


@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_passk", "gpg", "reinforce_plus_plus_baseline"])
def test_an_episode_alone_in_its_group_has_advantage_zero(name: str):
    assert scalars(name, episodes({"a": [1.0, 0.0], "b": [1.0]}))[2] == 0.0


def test_one_sampled_token_in_the_whole_batch_is_no_error():
    given = [FinishedEpisode("e", "t", 1.0, [sample(0, "e", "t", prompt=[1], turns=[(1, 0)])])]
    assert scalars("reinforce_plus_plus", given) == [0.0]


def test_unknown_estimator_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown 'gpro'; did you mean 'grpo'\? known: .*rloo"):
        check_estimator("gpro", 8)


def test_group_estimator_with_groups_of_one_is_refused():
    with pytest.raises(ConfigError, match="repeats is 1"):
        check_estimator("opo", 1)


def test_a_real_batch_has_one_value_per_sampled_token():
    batch = make_batch()
    values = episode_advantages(batch.episodes, AlgorithmConfig())
    assert [len(v) for v in values] == [e.sampled_tokens for e in batch.episodes]
