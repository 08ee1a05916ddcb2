"""Trains polite one-sentence replies to customers; the reward is the verdict of an LLM judge.

    python examples/judge_reward/train.py                                # a judge by rules, to try it out
    python examples/judge_reward/train.py --set task.judge_url=https://…/v1 --set task.judge_model=qwen-max
    python examples/judge_reward/train.py --set task.judge=openjudge …   # where `scripts/agents openjudge` put it

The key of the endpoint is read from the environment variable JUDGE_API_KEY.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import openai
from judge import Cached, Endpoint, Judge, OpenJudge, Patient
from pydantic import Field
from rule_judge import RuleJudge

from swarmtune.client import Episode
from swarmtune.config import ConfigError
from swarmtune.script import Parameters, Script, run

RUBRIC = "A reply to a customer: it thanks or apologises, names the matter, and is one sentence of at most 30 words."
MATTERS = (
    "My parcel has not arrived.|The lamp arrived broken.|I was charged twice.|Where is my invoice?|"
    "I love the new chair!|The app crashes when I log in.|Can I change my address?|The colour is wrong.|"
    "Your driver was very kind.|I want to cancel my order.|The manual is missing.|My refund is late.|"
    "The shop was closed on Monday.|The sizes run too small.|Thank you for the quick repair.|"
    "I cannot reach your hotline."
).split("|")


class Judging(Parameters):
    """Who judges, and how long one waits for it."""

    judge: Literal["endpoint", "openjudge"] = "endpoint"
    judge_url: str | None = None
    """An OpenAI-compatible endpoint; None starts the judge by rules."""
    judge_model: str = "rules"
    cache: Path = Path("runs/judge-verdicts.db")
    """Verdicts, kept between runs."""
    patience_s: float = Field(default=3600.0, gt=0)
    """How long an outage may last before the training gives up."""
    pause_s: float = Field(default=5.0, gt=0)
    """Time between two questions to a judge that is away."""


def make_tasks(judging: Judging, seed: int) -> Sequence[dict[str, Any]]:
    if judging.judge == "openjudge" and find_spec("openjudge") is None:
        raise ConfigError(
            "task.judge openjudge: py-openjudge is not here, and its pins do not fit the training's packages; "
            "run `scripts/agents openjudge`, then this script with .venv-agents/openjudge/bin/python and --server URL"
        )
    settings = judging.model_dump_json()
    judge_of(settings)  # complains now if it cannot be made
    return [{"task_id": f"reply-{n}", "matter": matter, "judging": settings} for n, matter in enumerate(MATTERS)]


def rollout(task: Mapping[str, Any], episode: Episode) -> tuple[float, dict[str, float]]:
    """One reply, judged."""
    llm = _sdk().with_options(base_url=episode.base_url, api_key=episode.api_key)
    question = f"Write one polite sentence in reply to this customer: {task['matter']}"
    messages: list[Any] = [{"role": "user", "content": question}]
    answer = llm.chat.completions.create(model=episode.model, messages=messages).choices[0].message.content or ""
    verdict = judge_of(task["judging"]).grade(question, answer, RUBRIC)
    return verdict.score, {"judge_wait_s": verdict.waited_s, "judge_cached": float(verdict.cached)}


@cache
def judge_of(settings: str) -> Judge:
    """The judge that all episodes of one configuration share.

    Raises:
        ConfigError: its cache cannot be used.
    """
    judging = Judging(**json.loads(settings))
    url = judging.judge_url or RuleJudge().__enter__().url  # a daemon thread: it ends with the process
    kind = OpenJudge if judging.judge == "openjudge" else Endpoint
    judge = kind(url, os.environ.get("JUDGE_API_KEY", ""), judging.judge_model)
    try:
        return Patient(Cached(judge, judging.cache), patience_s=judging.patience_s, pause_s=judging.pause_s)
    except OSError as error:
        raise ConfigError(str(error)) from None


@cache
def _sdk() -> openai.OpenAI:
    """One SDK client for all episodes: they share its connections, each with its own address and key."""
    return openai.OpenAI(api_key="each episode has its own")


JUDGE_REWARD = Script(
    name="judge_reward",
    parameters=Judging,
    tasks=make_tasks,
    rollout=rollout,
    defaults={
        "model": "smollm2-135m",
        "steps": 8,
        "batch_tasks": 8,
        "repeats": 8,
        "parallel": 64,
        "sampling.max_tokens": 48,
        "engine.context_length": 256,
        "optim.lr": 2e-5,
        "checkpoint.every_steps": 0,
    },
)

if __name__ == "__main__":
    run(JUDGE_REWARD)
