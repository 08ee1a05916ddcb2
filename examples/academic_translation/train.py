"""Trains three agents in a row that translate abstracts from English to Chinese: two models, two servers.

    python examples/academic_translation/train.py                                      # starts both servers
    python examples/academic_translation/train.py --server translator=URL --server reviewer=URL
    python examples/academic_translation/train.py --set translator.model=Qwen/Qwen2.5-7B-Instruct \
        --set reviewer.model=Qwen/Qwen2.5-14B-Instruct --set engine.kind=vllm

Agent 1 (translator) drafts, agent 2 (reviewer) corrects terms, agent 3 (translator again) writes the final text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import openai
from scoring import rewards_of, scores_of

from swarmtune.client import Episode
from swarmtune.config import ConfigError
from swarmtune.script import Parameters, Script
from swarmtune.swarm import SwarmEpisode
from swarmtune.swarm_script import SwarmScript, run

DRAFT = "Translate this abstract from English to Chinese. Answer with the translation only.\n\n{text}"
REVIEW = (
    "Check the terminology of this Chinese translation. Answer with at most five lines 'English term: Chinese term' "
    "for terms and abbreviations, nothing else.\n\nEnglish: {text}\n\nChinese: {draft}"
)
FINAL = (
    "Write the final Chinese translation of this abstract. Use the terms of the review. Write an abbreviation out in "
    "Chinese with the abbreviation in brackets at its first use. Write of the paper (本文), not of 'us' (我们). Answer "
    "with the translation only.\n\nEnglish: {text}\n\nDraft: {draft}\n\nReview: {review}"
)


class Abstracts(Parameters):
    file: Path = Path(__file__).with_name("abstracts.jsonl")
    """A JSON object a line: id, text, terms (English → Chinese), abbreviations (short → written out in Chinese)."""


def make_tasks(abstracts: Abstracts, seed: int) -> Sequence[dict[str, Any]]:
    """Raises:
    ConfigError: naming file and line.
    """
    try:
        lines = abstracts.file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"task.file: {abstracts.file} cannot be read ({error})") from None
    return [_task(line, f"{abstracts.file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def rollout(task: Mapping[str, Any], episode: SwarmEpisode) -> dict[str, tuple[float, dict[str, float]]]:
    """Draft, review, final text."""
    draft = ask(episode["translator"], DRAFT.format(text=task["text"]))
    review = ask(episode["reviewer"], REVIEW.format(text=task["text"], draft=draft))
    final = ask(episode["translator"], FINAL.format(text=task["text"], draft=draft, review=review))
    scores = scores_of(final, task)
    metrics = {"terminology": scores.terminology, "abbreviations": scores.abbreviations, "person": scores.person}
    return {role: (reward, metrics) for role, reward in rewards_of(draft, review, final, task).items()}


def ask(model: Episode, prompt: str) -> str:
    """One question to a role's model, as a new conversation."""
    llm = _sdk().with_options(base_url=model.base_url, api_key=model.api_key)
    messages: list[Any] = [{"role": "user", "content": prompt}]
    return llm.chat.completions.create(model=model.model, messages=messages).choices[0].message.content or ""


def _task(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
        texts = [found["id"], found["text"], *found["terms"].values(), *found["abbreviations"].values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {error!r}; it needs id, text, terms and abbreviations") from None
    if not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{where}: id, text, terms and abbreviations hold texts that are not empty")
    return {"task_id": found["id"], **found}


@cache
def _sdk() -> openai.OpenAI:
    """One SDK client for all episodes: they share its connections, each with its own address and key."""
    return openai.OpenAI(api_key="each episode has its own")


TRANSLATION = SwarmScript(
    script=Script(
        name="academic_translation",
        parameters=Abstracts,
        tasks=make_tasks,
        rollout=rollout,
        defaults={
            "model": "smollm2-135m",
            "steps": 8,
            "batch_tasks": 4,
            "repeats": 8,
            "parallel": 16,
            "sampling.max_tokens": 160,
            "engine.context_length": 1024,
            "optim.lr": 1e-5,
            "checkpoint.every_steps": 0,
        },
    ),
    roles=lambda _: ("translator", "reviewer"),
)

if __name__ == "__main__":
    run(TRANSLATION)
