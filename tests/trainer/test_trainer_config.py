"""The configuration takes what was written and nothing that only looks like it; what clashes says the way out."""

from __future__ import annotations

from typing import Any

import pytest

from swarmtune.config import ConfigError, TrainConfig


def config(**keys: Any) -> TrainConfig:
    return TrainConfig.from_dict({"model": "tiny"} | keys)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("optim.lr", True, "valid number"),
        ("optim.lr", "3", "valid number"),
        ("repeats", "8", "valid integer"),
        ("repeats", True, "valid integer"),
        ("train_side_calls", "yes", "valid boolean"),
        ("sampling.temperature", False, "valid number"),
    ],
)
def test_what_only_looks_like_a_value_is_refused(key: str, value: Any, told: str):
    with pytest.raises(ConfigError, match=f"{key}: .*{told}"):
        config(**{key: value})


def test_an_exponent_that_yaml_reads_as_text_is_a_number():
    assert config(**{"optim.lr": "2e-5"}).optim.lr == 2e-5


@pytest.mark.parametrize("betas", [[0.9, 1.0], [-0.1, 0.9], [0.9], [0.9, True]])
def test_betas_are_two_numbers_from_0_to_below_1(betas: list[Any]):
    with pytest.raises(ConfigError, match=r"optim\.betas"):
        config(**{"optim.betas": betas})


def test_a_warm_up_as_long_as_the_schedule_is_refused():
    with pytest.raises(ConfigError, match="warmup_steps: 5 leaves nothing"):
        config(**{"optim.warmup_steps": 5, "optim.total_steps": 5})


@pytest.mark.parametrize("keys", [{"algorithm.advantage": "gae"}, {"critic.lr": 1e-4}])
def test_gae_and_its_critic_come_together(keys: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"critic: .*belong together"):
        config(**keys)


@pytest.mark.parametrize(
    ("key", "value"), [("batching", 3), ("batching", [1]), ("batching", None), ("algorithm", "grpo"), ("optim", 1e-5)]
)
def test_a_section_that_is_none_is_named(key: str, value: Any):
    with pytest.raises(ConfigError, match=f"{key}: .*valid dictionary"):
        config(**{key: value})


def test_a_key_that_is_no_text_is_named():
    with pytest.raises(ConfigError, match="3: a key is text"):
        TrainConfig.from_dict({"model": "tiny", "optim": {3: 1}})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_is_one_that_every_generator_takes(seed: int):
    with pytest.raises(ConfigError, match="seed: "):
        config(seed=seed)


def test_c3_with_one_episode_a_task_would_never_start_a_step_and_is_refused():
    keys = {"batching.policy": "nonzero_variance_task_count", "algorithm.advantage": "reinforce_plus_plus"}
    with pytest.raises(ConfigError, match=r"repeats: 1 .* no step would start"):
        config(repeats=1, **keys)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"critic.mini_batches": 65}, r"critic\.mini_batches: more mini-batches than episodes"),
        ({"critic.warmup_steps": 5, "max_steps": 5}, r"critic\.warmup_steps: 5 of max_steps 5 .* never learns"),
    ],
)
def test_a_critic_that_leaves_nothing_to_train_is_refused(keys: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        config(**{"algorithm.advantage": "gae"} | keys)


def test_rejection_without_a_threshold_is_refused():
    with pytest.raises(ConfigError, match="rollout_rs and rollout_rs_threshold"):
        config(**{"algorithm.rollout_correction.rollout_rs": "seq_sum_k1"})


def test_an_overlong_buffer_longer_than_the_answer_is_refused():
    with pytest.raises(ConfigError, match="more than max_resp_len 8"):
        config(**{"algorithm.overlong": {"max_resp_len": 8, "len": 9}})


def test_a_resolved_configuration_reads_back_as_itself():
    made = config(**{"algorithm.advantage": "gae", "critic": {}, "algorithm.overlong": {"max_resp_len": 9, "len": 3}})
    assert TrainConfig.from_dict(made.model_dump(mode="json")) == made
    assert TrainConfig.from_dict(made.model_dump()) == made
