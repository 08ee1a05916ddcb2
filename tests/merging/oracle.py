"""Algorithm 1 of the AgentJet paper (section 3.4.2), written down as it is published: quadratic and obvious."""

from __future__ import annotations

from dataclasses import replace

from swarmtune.types import Block, MatchPolicy, Timeline


def merge_timelines(timelines: list[Timeline], match: MatchPolicy) -> list[Timeline]:
    """The timelines that are left, in the order given, with the sampled blocks of those they absorbed."""
    merged = [Timeline(t.call_id, [replace(block) for block in t.blocks]) for t in timelines]
    absorbed: set[int] = set()
    for i in range(len(merged) - 1, 0, -1):
        if i in absorbed:
            continue
        for j in range(i - 1, -1, -1):
            if j not in absorbed and mergeable(merged[i], merged[j], match):
                carry_over(merged[i], merged[j])
                absorbed.add(j)
    return [timeline for i, timeline in enumerate(merged) if i not in absorbed]


def mergeable(longer: Timeline, shorter: Timeline, match: MatchPolicy) -> bool:
    return len(longer.blocks) >= len(shorter.blocks) and all(
        same(one, other, match) for one, other in zip(longer.blocks, shorter.blocks, strict=False)
    )


def same(one: Block, other: Block, match: MatchPolicy) -> bool:
    return one.token_ids == other.token_ids if match == "token" else one.text == other.text


def carry_over(longer: Timeline, shorter: Timeline) -> None:
    for one, other in zip(longer.blocks, shorter.blocks, strict=False):
        if other.author == "llm" and one.author != "llm":
            one.author = "llm"
            one.token_ids = other.token_ids
            one.logprobs = other.logprobs
            one.loss_mask = other.loss_mask
            one.weight_versions = other.weight_versions
