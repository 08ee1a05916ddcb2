"""The token tree of an episode becomes training rows: Algorithm 1 of the AgentJet paper, linear in stored tokens.

A timeline absorbs every timeline whose blocks are its own first blocks. On a tree that is: each leaf becomes a row,
and each answer on the way to it is trained in exactly one row below it. Where the paper leaves it to the order of
collection which of several branches takes the common trunk, here the tree decides: a branch that goes on from the very
tokens of the trunk before one that shows them otherwise, then the one with the most sampled tokens. So the result does
not depend on which of two parallel calls came back first. One rule is added: an answer never absorbs another answer,
so that two equal answers to one prompt both train.

What always holds: every sampled token of a call that may train has loss mask 1 in exactly one row, with its own
logprob and weight version (`check_conservation` proves it per episode). Changes nothing in the tracker. No I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from swarmtune.tracker import BreakReason, CallRecord, Node, Tracker
from swarmtune.types import MatchPolicy, Sample


class ConservationViolated(Exception):
    """A sampled token is not trained exactly once as it was sampled; the message names the call and what differs."""

    @property
    def reason(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class Break:
    """A call that did not simply continue the conversation before it."""

    reason: BreakReason
    turn_id: str
    broke_from: str | None
    """Turn id of the call that it might have continued."""
    position: int | None = None
    """Index of the first token that differs."""
    before: str = ""
    """Text around that token in the earlier call."""
    now: str = ""
    """Text around that token in this call's prompt."""


@dataclass(slots=True)
class MergeReport:
    """What merging did, in counts."""

    match: MatchPolicy
    calls: int = 0
    """Calls that were merged."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows under none, token and text."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens in those rows."""
    sampled_tokens: int = 0
    """Tokens with loss mask 1."""
    inexact_tokens: int = 0
    """Of these: trained in another context than they were sampled in."""
    breaks: list[Break] = field(default_factory=list)
    """Of the merged calls but the first, which has nothing to break from: side calls before it do not count."""
    recognised: dict[str, int] = field(default_factory=dict)
    """Calls by how their own turns were recognised: ids, text, loose, none."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Calls that do not train, by reason: side, undelivered, empty, or the reason they were discarded for."""
    mixed_temperature_rows: int = 0

    @property
    def ratio(self) -> float:
        """Tokens unmerged over tokens merged, under the policy used; 1.0 when there is nothing."""
        merged = self.tokens.get(self.match, 0)
        return self.tokens["none"] / merged if merged else 1.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        counts = Counter(str(item.reason) for item in self.breaks)
        return {**asdict(self), "ratio": self.ratio, "break_counts": dict(counts)}


@dataclass(frozen=True, slots=True)
class MergeResult:
    samples: list[Sample]
    report: MergeReport


def merge(
    tracker: Tracker, *, match: MatchPolicy = "text", task_id: str = "", include_side_calls: bool = False
) -> MergeResult:
    """Training rows of an episode, and what was merged and why not more.

    Args:
        match: `token` merges where token ids agree, `text` also where only the text of the blocks does. A `text` row
        holds
            each answer's own sampled tokens; `context_exact` is 0 where the tokens before them are not those that the
            answer was sampled after.
    """
    calls = calls_to_train(tracker, include_side_calls=include_side_calls)
    plans: dict[MatchPolicy, list[_Group]] = {policy: _plan(tracker, calls, policy) for policy in ("token", "text")}
    rows = [_Row.of(leaf) for leaf in plans[match]]
    samples = [row.sample(tracker.episode_id, task_id) for row in rows]
    report = MergeReport(
        match=match,
        calls=len(calls),
        rows={"none": len(calls), **{policy: len(leaves) for policy, leaves in plans.items()}},
        tokens={
            "none": sum(call.node.length for call in calls),
            **{policy: sum(leaf.length for leaf in leaves) for policy, leaves in plans.items()},
        },
        sampled_tokens=sum(call.sampled_tokens for call in calls),
        inexact_tokens=sum(row.inexact_tokens for row in rows),
        breaks=[_explain(tracker, call, call.break_reason) for call in calls[1:] if call.break_reason is not None],
        recognised=dict(Counter(call.recognised_by for call in calls)),
        left_out=_left_out(tracker, calls),
        mixed_temperature_rows=sum(len(row.temperatures) > 1 for row in rows),
    )
    return MergeResult(samples, report)


def calls_to_train(tracker: Tracker, *, include_side_calls: bool = False) -> list[CallRecord]:
    """Delivered, not discarded, not empty, and of the main conversation unless side calls are asked for."""
    return [
        call
        for call in tracker.calls
        if call.trainable and (include_side_calls or not tracker.is_side(call.profile, resumes=call.resumes))
    ]


def merge_order(tracker: Tracker, *, match: MatchPolicy = "text", include_side_calls: bool = False) -> list[str]:
    """Turn ids in the order in which Algorithm 1 is to be given the timelines: each branch before the one that takes
    the
    trunk. Merging in this order is what `merge` does."""
    calls = calls_to_train(tracker, include_side_calls=include_side_calls)
    leaves = _plan(tracker, calls, match)
    order: dict[str, None] = {}
    for leaf in leaves:
        for group in leaf.chain():
            if group.call is not None:
                order.setdefault(group.call.turn_id)
    return list(order)


def check_conservation(tracker: Tracker, samples: Sequence[Sample], *, include_side_calls: bool = False) -> None:
    """Every sampled token of every call that may train is in exactly one sample, with loss mask 1 and its own values.

    Raises:
        ConservationViolated
    """
    due = {call.turn_id: call for call in calls_to_train(tracker, include_side_calls=include_side_calls)}
    for sample in samples:
        calls = []
        for turn_id in sample.call_ids:
            call = due.pop(turn_id, None)
            if call is None:
                raise ConservationViolated(
                    f"sample {sample.sample_id}: call {turn_id} trains twice, or is none of those that may train"
                )
            calls.append(call)
        _check_row(sample, calls)
    if due:
        raise ConservationViolated(f"{len(due)} calls are in no sample, the first is {next(iter(due))}")


def _check_row(sample: Sample, calls: Sequence[CallRecord]) -> None:
    mask = np.asarray(sample.loss_mask, dtype=bool)
    lengths = {len(sample.token_ids), len(sample.loss_mask), len(sample.logprobs), len(sample.weight_versions)}
    if len(lengths) > 1:
        raise ConservationViolated(f"sample {sample.sample_id}: its lists differ in length: {sorted(lengths)}")
    expected = {
        "token ids": [call.sampled_ids() for call in calls],
        "logprobs": [call.logprobs for call in calls],
        "weight versions": [np.asarray(call.weight_versions(), dtype=np.int32) for call in calls],
    }
    found = {
        "token ids": np.asarray(sample.token_ids, dtype=np.int32)[mask],
        "logprobs": np.asarray(sample.logprobs, dtype=np.float32)[mask],
        "weight versions": np.asarray(sample.weight_versions, dtype=np.int32)[mask],
    }
    for what, parts in expected.items():
        wanted = np.concatenate([np.asarray(part) for part in parts]) if parts else np.empty(0)
        if not np.array_equal(wanted, found[what]):
            raise ConservationViolated(
                f"sample {sample.sample_id}: {what} with loss mask 1 are not those sampled in calls {sample.call_ids}"
            )


@dataclass(slots=True, eq=False)
class _Group:
    """Blocks of several timelines that match, at one place in the conversation."""

    nodes: list[Node]
    parent: _Group | None
    call: CallRecord | None = None
    """The answer sampled here."""
    children: list[_Group] = field(default_factory=list)
    """In merge order: the last one takes the trunk."""
    sampled: int = 0
    """Sampled tokens from here to the leaves."""
    leaf: _Group = field(init=False)
    """End of the row that trains this answer."""

    def __post_init__(self) -> None:
        self.leaf = self

    def chain(self) -> list[_Group]:
        """Groups from the first message to here."""
        groups: list[_Group] = []
        group: _Group | None = self
        while group is not None and group.nodes:
            groups.append(group)
            group = group.parent
        groups.reverse()
        return groups

    @property
    def length(self) -> int:
        """Of a leaf: tokens of its timeline."""
        return self.call.node.length if self.call is not None else 0

    def claim(self) -> tuple[bool, int, bytes, bytes]:
        """What decides between siblings who takes the trunk; the largest does. Independent of the order of calls."""
        trunk = self.parent.call.node if self.parent is not None and self.parent.call is not None else None
        exact = trunk is None or any(node.parent is trunk for node in self.nodes)
        logprobs = self.call.logprobs.tobytes() if self.call is not None else b""
        return exact, self.sampled, min(node.tokens.tobytes() for node in self.nodes), logprobs


def _plan(tracker: Tracker, calls: Sequence[CallRecord], match: MatchPolicy) -> list[_Group]:
    """The rows' last groups, in merge order."""
    children = _children(calls)
    members = set(calls)
    root = _Group([], None)
    groups = [root]
    for group in groups:  # grows while it is walked: parents come before their children
        below = children.get(None, []) if group is root else [c for n in group.nodes for c in children.get(n, [])]
        group.children = [_Group(nodes, group, call) for nodes, call in _matching(tracker, below, members, match)]
        groups.extend(group.children)
    for group in reversed(groups):
        own = group.call.sampled_tokens if group.call is not None else 0
        group.sampled = own + sum(child.sampled for child in group.children)
        if len(group.children) > 1:
            group.children.sort(key=_Group.claim)
        if group.children:
            group.leaf = group.children[-1].leaf
    return list(_leaves(root))


def _children(calls: Sequence[CallRecord]) -> dict[Node | None, list[Node]]:
    """Parent → nodes below it, of the part of the tree that leads to `calls`; None → the first messages."""
    children: dict[Node | None, list[Node]] = {}
    seen: set[Node] = set()
    for call in calls:
        node: Node | None = call.node
        while node is not None and node not in seen:
            seen.add(node)
            children.setdefault(node.parent, []).append(node)
            node = node.parent
    return children


def _leaves(root: _Group) -> Iterator[_Group]:
    stack = [root]
    while stack:
        group = stack.pop()
        if group.children:
            stack.extend(reversed(group.children))
        elif group.nodes:
            yield group


def _matching(
    tracker: Tracker, nodes: Sequence[Node], members: set[CallRecord], match: MatchPolicy
) -> Iterator[tuple[list[Node], CallRecord | None]]:
    """Blocks that match, with the one answer among them."""
    if len(nodes) == 1:
        yield list(nodes), nodes[0].call if nodes[0].call in members else None
        return
    alike: dict[str | bytes, list[Node]] = {}
    for node in nodes:
        alike.setdefault(tracker.block_text(node) if match == "text" else node.tokens.tobytes(), []).append(node)
    for group in alike.values():
        answers = [node.call for node in group if node.call is not None and node.call in members]
        if len(answers) < 2:
            yield group, answers[0] if answers else None
        else:
            yield from _one_answer_each(group, answers)


def _one_answer_each(nodes: Sequence[Node], answers: list[CallRecord]) -> Iterator[tuple[list[Node], CallRecord]]:
    """Equal answers stay apart, each with the blocks that show it."""
    answers.sort(key=lambda call: (call.node.tokens.tobytes(), call.logprobs.tobytes()))
    split: dict[CallRecord, list[Node]] = {call: [] for call in answers}
    for node in nodes:
        split[_shown(node, answers)].append(node)
    for call, group in split.items():
        yield group, call


def _shown(node: Node, answers: Sequence[CallRecord]) -> CallRecord:
    """Which of several answers of equal text a block shows: one of the same tokens, else the one it came from."""
    own = node.call or node.origin
    exact = [call for call in answers if call.node.tokens == node.tokens]
    for candidates in (exact, answers):
        if own is not None and own in candidates:
            return own
        if candidates is exact and exact:
            return exact[-1]
    return answers[-1]


@dataclass(slots=True)
class _Row:
    """One merged timeline in the making."""

    leaf: _Group
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    context_exact: list[int] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    temperatures: dict[float, int] = field(default_factory=dict)
    """Temperature → sampled tokens."""
    inexact_tokens: int = 0

    @classmethod
    def of(cls, leaf: _Group) -> _Row:
        """The leaf's timeline, with every answer that it absorbs in place of the block that shows it."""
        row = cls(leaf)
        chain = leaf.chain()
        path = leaf.call.node.path() if leaf.call is not None else []
        contexts = _Contexts()
        for group, shown in zip(chain, path, strict=True):
            if group.call is not None and group.leaf is leaf:
                row.add_answer(group.call, exact=contexts.reproduce(group.call.node.parent))
                contexts.append(group.call.node)
            else:
                row.add_context(shown)
                contexts.append(shown)
        return row

    def add_context(self, node: Node) -> None:
        self._add_unsampled(node.tokens)

    def add_answer(self, call: CallRecord, *, exact: bool) -> None:
        count = call.sampled_tokens
        self._add_unsampled(call.node.head(call.opening))
        self.token_ids.extend(call.sampled_ids())
        self.loss_mask.extend([1] * count)
        self.logprobs.extend(call.logprobs)
        self.weight_versions.extend(call.weight_versions())
        self.context_exact.extend([int(exact)] * count)
        self.call_ids.append(call.turn_id)
        self.temperatures[call.temperature] = self.temperatures.get(call.temperature, 0) + count
        self.inexact_tokens += 0 if exact else count

    def _add_unsampled(self, tokens: Sequence[int]) -> None:
        count = len(tokens)
        self.token_ids.extend(tokens)
        self.loss_mask.extend([0] * count)
        self.logprobs.extend([0.0] * count)
        self.weight_versions.extend([-1] * count)
        self.context_exact.extend([1] * count)

    def sample(self, episode_id: str, task_id: str) -> Sample:
        forked_from = _forked_from(self.leaf)
        return Sample(
            sample_id=_sample_id(episode_id, self.leaf),
            episode_id=episode_id,
            task_id=task_id,
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            logprobs=self.logprobs,
            weight_versions=self.weight_versions,
            context_exact=self.context_exact if self.inexact_tokens else None,
            temperature=max(self.temperatures, key=lambda t: (self.temperatures[t], t)),
            call_ids=self.call_ids,
            parent_id=_sample_id(episode_id, forked_from) if forked_from is not None else None,
        )


class _Contexts:
    """Compares what calls were sampled after with the row that is being built. Visits each node once."""

    def __init__(self) -> None:
        self._row: list[Node] = []
        self._same: dict[Node | None, bool] = {None: True}

    def append(self, node: Node) -> None:
        self._row.append(node)

    def reproduce(self, node: Node | None) -> bool:
        """Whether the row's tokens are those from the root to `node`."""
        open_nodes: list[Node] = []
        while node is not None and node not in self._same:
            open_nodes.append(node)
            node = node.parent
        same = self._same[node]
        for node in reversed(open_nodes):
            own = self._row[node.depth - 1]
            same = same and (own is node or own.tokens == node.tokens)
            self._same[node] = same
        return same


def _sample_id(episode_id: str, leaf: _Group) -> str:
    return f"{episode_id}/{leaf.call.turn_id if leaf.call is not None else ''}"


def _forked_from(leaf: _Group) -> _Group | None:
    """The leaf whose row took the trunk that this row grew from; None for a row of its own."""
    group = leaf
    while group.parent is not None and group.parent.leaf is leaf:
        group = group.parent
    return group.parent.leaf if group.parent is not None and group.parent.nodes else None


def _left_out(tracker: Tracker, merged: Sequence[CallRecord]) -> dict[str, int]:
    counts = Counter(tracker.discards)
    kept = set(merged)
    for call in tracker.calls:
        if call in kept or call.discarded is not None:
            continue
        counts["undelivered" if not call.delivered else "side" if call.sampled_tokens else "empty"] += 1
    return dict(counts)


def _explain(tracker: Tracker, call: CallRecord, reason: BreakReason) -> Break:
    """Where a call's tokens part from those of the call that it broke from."""
    before = call.break_from
    if before is None:
        return Break(reason, call.turn_id, None)
    ours, theirs = call.node.path(), before.node.path()
    shared = 0
    while shared < min(len(ours), len(theirs)) and ours[shared] is theirs[shared]:
        shared += 1
    start = ours[shared - 1].length if shared else 0
    mine, other = _tokens(ours[shared:]), _tokens(theirs[shared:])
    common = min(len(mine), len(other))
    differing = np.flatnonzero(mine[:common] != other[:common])
    at = int(differing[0]) if len(differing) else common
    window = slice(at, at + 8)
    return Break(
        reason,
        call.turn_id,
        before.turn_id,
        start + at,
        tracker.renderer.decode(other[window].tolist(), special=True),
        tracker.renderer.decode(mine[window].tolist(), special=True),
    )


def _tokens(nodes: Sequence[Node]) -> np.ndarray:
    parts = [np.asarray(node.tokens, dtype=np.int32) for node in nodes]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
