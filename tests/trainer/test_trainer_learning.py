"""Each algorithm really learns: a small model samples, is rewarded, is updated, and is rewarded more.

The task: after a prompt, sample tokens of the lower half of the vocabulary. The model begins near one half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trainer_episodes import VOCABULARY

from swarmtune.trainer.trainer import Trainer
from swarmtune.types import FinishedEpisode, Sample, TrainBatch

Make = Callable[..., Trainer]
TASKS, REPEATS, ANSWER = 4, 8, 6
STEPS, RISE = 25, 0.2
"""A training ends when the mean reward has risen so far, or after so many steps."""
PROMPTS = torch.randint(0, VOCABULARY, (TASKS, 12), generator=torch.Generator().manual_seed(4))


class Player:
    """Samples from the trainer's weights, as an engine does."""

    def __init__(self, model: Any, seed: int = 0) -> None:
        self._model = model.eval()
        self._generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def answers(self, trainer: Trainer, prompts: torch.Tensor, *, greedy: bool = False) -> tuple[torch.Tensor, ...]:
        """(N, ANSWER) tokens and log-probabilities."""
        self._model.load_state_dict({name: value.clone() for name, value in trainer.weights()}, strict=False)
        tokens, logprobs = prompts, []
        for _ in range(ANSWER):
            logp = torch.log_softmax(self._model(input_ids=tokens).logits[:, -1], dim=-1)
            drawn = logp.argmax(-1) if greedy else torch.multinomial(logp.exp(), 1, generator=self._generator)[:, 0]
            logprobs.append(logp.gather(1, drawn[:, None])[:, 0])
            tokens = torch.cat([tokens, drawn[:, None]], dim=1)
        return tokens[:, -ANSWER:], torch.stack(logprobs, dim=1)

    def batch(self, trainer: Trainer, step: int) -> TrainBatch:
        baselines = rewards_of(self.answers(trainer, PROMPTS, greedy=True)[0])
        tokens, logprobs = self.answers(trainer, PROMPTS.repeat_interleave(REPEATS, 0))
        rewards = rewards_of(tokens)
        episodes = []
        for n in range(TASKS * REPEATS):
            task, width = n // REPEATS, PROMPTS.shape[1]
            row = Sample(
                sample_id=f"{step}-{n}",
                episode_id=f"e{n}",
                task_id=f"t{task}",
                token_ids=[*PROMPTS[task].tolist(), *tokens[n].tolist()],
                loss_mask=[0] * width + [1] * ANSWER,
                logprobs=[0.0] * width + logprobs[n].tolist(),
                weight_versions=[-1] * width + [step - 1] * ANSWER,
            )
            metrics = {"reward_baseline": baselines[task]}
            episodes.append(FinishedEpisode(f"e{n}", f"t{task}", rewards[n], [row], metrics))
        return TrainBatch(step, episodes)


def rewards_of(tokens: torch.Tensor) -> list[float]:
    return (tokens < VOCABULARY // 2).float().mean(dim=1).tolist()


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"norm_adv_by_std": False},
    "gae": {"advantage": "gae", "lam": 0.95},
    "rloo": {"advantage": "rloo"},
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus"},
    "remax": {"advantage": "remax"},
    "optimal_token_baseline": {"advantage": "optimal_token_baseline"},
    "gspo": {"policy_loss": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    "dapo": {
        "loss_agg": "token-mean",
        "clip_ratio_high": 0.28,
        "overlong": {"max_resp_len": ANSWER, "len": 2},
    },
    "several steps, token TIS": {"mini_batches": 2, "rollout_correction": {"rollout_is": "token"}},
    "bypass reinforce": {"rollout_correction": {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}},
    "kl in reward": {"kl_in_reward": {"kl_coef": 0.01}},
}


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_reward_rises(trainer: Make, plain_model, name: str):
    keys: dict[str, Any] = {f"algorithm.{key}": value for key, value in ALGORITHMS[name].items()}
    if name == "gae":
        keys["critic.lr"] = 1e-3
    made = trainer(**keys, **{"optim.lr": 1e-2, "optim.grad_clip": 1.0})
    assert rises(made, Player(plain_model()))


def rises(trainer: Trainer, player: Player) -> bool:
    first = 0.0
    for step in range(1, STEPS + 1):
        metrics = trainer.update(player.batch(trainer, step))
        assert metrics["training/rollout_logprobs_diff_max"] < 1e-3
        first = first or metrics["reward/mean"]
        if metrics["reward/mean"] > first + RISE:
            return True
    return False


def test_reward_rises_with_lora(trainer: Make, plain_model):
    made = trainer(**{"lora.rank": 8, "lora.alpha": 16, "optim.lr": 1e-2})
    assert rises(made, Player(plain_model()))
