"""Requests of one episode become a token tree: prepare, then commit.

Owns every token an episode's calls put in or got out, each stored once. A node is one message; its parent is the
message before it; a sampled answer is a node with logprobs. What always holds: a committed node never changes; a
prompt continues from the ids that were really sampled and never from their text encoded again; `prepare` changes
nothing; only answers that were delivered whole are trainable. Knows nothing of HTTP or engines, does no I/O, and is
not thread-safe: one event loop.

Its own turns are recognised by the ids they were delivered with, else by canonical comparison of their content. A
message is looked up by a key chained over the conversation (64-bit hashes, valid in this process only), so a call
costs one hash per message of the request and otherwise only what is new.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby, islice
from typing import Literal, TypeAlias, TypeVar
from uuid import uuid4

import orjson

from swarmtune.rendering.renderer import Rendered, Renderer
from swarmtune.types import Author, Block, FinishReason, Message, Reply, Timeline, ToolSpec

History = Literal["as_templated", "as_sampled"]
RecognisedBy = Literal["ids", "text", "loose", "none"]
T = TypeVar("T")


class BreakReason(StrEnum):
    """Why a call did not simply continue the conversation before it."""

    TEMPLATE_STRIP = "template_strip"
    """The prompt shows an earlier answer otherwise than it was sampled (thinking stripped or not echoed)."""
    RESPLIT = "resplit"
    """The same text, tokenized otherwise than it was sampled."""
    TOOL_ARGUMENT_REWRITE = "tool_argument_rewrite"
    """An earlier answer came back with other tool arguments."""
    COMPACTION = "compaction"
    """Earlier messages were dropped or summarised."""
    SUB_AGENT = "sub_agent"
    """Another conversation: other system prompt, other tools, or another opening."""
    RETRY = "retry"
    """The same conversation again, after its answer was delivered."""
    EDITED_HISTORY = "edited_history"
    """Earlier messages were changed, or the conversation was taken up again at an earlier point."""


class Node:
    """One message in the tree: the tokens it adds to its parent's context. Only its last two fields may change.

    The tokens of a line of messages lie in one array, so that a context is copied in one piece however many messages it
    has; a fork begins an array of its own.
    """

    __slots__ = (
        "_before",
        "_line",
        "_start",
        "_stop",
        "answer",
        "author",
        "call",
        "continued",
        "depth",
        "last",
        "length",
        "origin",
        "parent",
    )

    def __init__(
        self,
        parent: Node | None,
        tokens: array[int],
        author: Author,
        *,
        call: CallRecord | None = None,
        origin: CallRecord | None = None,
    ) -> None:
        goes_on = parent is not None and parent._stop == len(parent._line)
        self._line: array[int] = parent._line if parent is not None and goes_on else array("i")
        self._before: Node | None = parent._before if parent is not None and goes_on else parent
        """The node that the line forked from."""
        self._start = len(self._line)
        self._line.extend(tokens)
        self._stop = len(self._line)
        self.parent = parent
        self.author: Author = author
        self.call = call
        """The call that sampled this node; None for context."""
        self.origin = origin
        """Of a context node: the own turn that it shows again, in its old place in the conversation."""
        self.depth: int = parent.depth + 1 if parent is not None else 1
        self.length: int = (parent.length if parent is not None else 0) + len(tokens)
        """Tokens from the root to here, both ends included."""
        self.last: CallRecord | None = call or (parent.last if parent is not None else None)
        """The deepest sampled call from the root to here."""
        self.answer: CallRecord | None = None
        """The latest answer sampled to the prompt that ends here."""
        self.continued: CallRecord | None = None
        """The latest call whose prompt goes on from here."""

    @property
    def tokens(self) -> array[int]:
        """A copy, int32. Of a sampled node: the generation prompt, then the sampled ids."""
        return self._line[self._start : self._stop]

    @property
    def token_count(self) -> int:
        return self._stop - self._start

    def path(self) -> list[Node]:
        """Nodes from the root to here."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def context(self) -> array[int]:
        """All token ids from the root to here, int32."""
        pieces: list[array[int]] = []
        node: Node | None = self
        while node is not None:
            pieces.append(node._line[: node._stop])
            node = node._before
        out = pieces.pop()
        for piece in reversed(pieces):
            out.extend(piece)
        return out

    def head(self, count: int) -> array[int]:
        """The first tokens of this node alone, int32."""
        return self._line[self._start : self._start + count]


@dataclass(frozen=True, slots=True)
class Profile:
    """What tells one agent's conversations from another's; hashes, for comparison only."""

    system: int
    tools: int
    has_tools: bool


class CallRecord:
    """One committed model call. Only its delivery and whether it was discarded may change."""

    __slots__ = (
        "answer",
        "break_from",
        "break_reason",
        "delivered",
        "discarded",
        "finish_reason",
        "index",
        "logprobs",
        "node",
        "opening",
        "profile",
        "prompt_key",
        "prompt_messages",
        "recognised_by",
        "resumes",
        "temperature",
        "turn_id",
        "undelivered",
        "versions",
    )

    def __init__(self, turn: PreparedTurn, reply: Reply, index: int, *, delivered: bool, temperature: float) -> None:
        self.turn_id = turn.turn_id
        self.index = index
        """Position in commit order, from 0."""
        self.node: Node
        self.opening = len(turn.opening)
        """Tokens of the generation prompt at the head of the node; the rest was sampled."""
        self.logprobs = array("f", reply.logprobs)
        """float32, one per sampled token."""
        self.versions = tuple((version, len(list(run))) for version, run in groupby(reply.weight_versions))
        """Runs of (weight version, number of sampled tokens)."""
        self.finish_reason = reply.finish_reason
        self.temperature = temperature
        self.delivered = delivered
        """Whether the client has the whole answer: what it does not have never trains."""
        self.discarded: str | None = None
        """Why this call must not train; None when it may."""
        self.undelivered: Reply | None = None if delivered else reply
        """Kept until it is delivered, to be delivered again."""
        self.recognised_by: RecognisedBy = turn.recognised_by
        self.break_reason: BreakReason | None = None
        """Why this call did not simply go on from an earlier one; None when it did, or when it is the first."""
        self.break_from: CallRecord | None = None
        """The call that it might have gone on from."""
        self.prompt_key = turn.key
        self.prompt_messages = turn.prompt_messages
        self.profile = turn.profile
        self.resumes = turn.walk.resumes
        """Whether the history showed an own turn."""
        self.answer = _AnswerKeys.of(reply.message or Message("assistant", reply.text))

    @property
    def sampled_tokens(self) -> int:
        return self.node.token_count - self.opening

    @property
    def prompt_tokens(self) -> int:
        return self.node.length - self.sampled_tokens

    @property
    def trainable(self) -> bool:
        """Delivered whole and not discarded; side calls are the merger's choice."""
        return self.delivered and self.discarded is None and self.sampled_tokens > 0

    def sampled_ids(self) -> array[int]:
        """The sampled token ids, int32."""
        return self.node.tokens[self.opening :]

    def weight_versions(self) -> list[int]:
        """One per sampled token."""
        return [version for version, count in self.versions for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Segment:
    """A message that a prepared turn adds to the tree when it is committed."""

    key: int
    tokens: array[int]
    author: Author
    origin: CallRecord | None


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """What a request means to the tree, before anything is sampled."""

    turn_id: str
    """Fresh, unless `redelivery` is set: then that of the turn to deliver again."""
    prompt: array[int]
    """All prompt token ids, int32: cheap to copy and to send as bytes."""
    parent: CallRecord | None
    """The deepest own turn that the prompt goes on from, token for token."""
    recognised_by: RecognisedBy
    """How own turns in the history were recognised: the weakest way that was needed; none where there are none."""
    side: bool
    """No tools, or another system prompt, than the episode's main conversation so far."""
    redelivery: Reply | None
    """The answer to deliver again, with the tool call ids it had: call `mark_delivered` afterwards, not `commit`."""
    replaces: CallRecord | None
    """The answer that a retry did not get and that could not be delivered again: discarded when this one is there."""
    base: Node | None
    """The node that the new tokens hang on."""
    segments: tuple[Segment, ...]
    opening: array[int]
    """The generation prompt, where it is not part of the last segment."""
    key: int
    """Chained key of the prompt; 0 for a raw prompt."""
    prompt_messages: int
    profile: Profile
    walk: Walk

    @property
    def prompt_token_ids(self) -> list[int]:
        """`prompt` as a new list of ints."""
        return self.prompt.tolist()


@dataclass(frozen=True, slots=True)
class _AnswerKeys:
    """Hashes of an assistant message, for recognising it when it comes back."""

    plain: int
    """Content and tool calls, to the letter."""
    content: int
    """Content, trimmed."""
    calls: int
    """Tool calls, their arguments as canonical JSON."""
    names: int
    """Names of the tool calls."""
    reasoning: int | None
    """Trimmed; None when there is none."""
    has_calls: bool

    @classmethod
    def of(cls, message: Message) -> _AnswerKeys:
        return cls(
            _plain_key(message),
            hash(message.content.strip()),
            hash(tuple((call.name, _canonical_json(call.arguments)) for call in message.tool_calls)),
            hash(tuple(call.name for call in message.tool_calls)),
            _reasoning_key(message),
            bool(message.tool_calls),
        )

    def compare(self, message: Message) -> BreakReason | None:
        """None when `message` is this answer, reasoning aside; else what was changed in it."""
        if _plain_key(message) == self.plain:
            return None
        other = _AnswerKeys.of(message)
        same_text = other.content == self.content or (self.has_calls and not message.content.strip())
        if same_text and other.calls == self.calls:
            return None
        rewritten = same_text and self.has_calls and other.names == self.names
        return BreakReason.TOOL_ARGUMENT_REWRITE if rewritten else BreakReason.EDITED_HISTORY

    def shown_by(self, message: Message) -> bool:
        """Whether `message` shows the answer's reasoning, if it had any."""
        return self.reasoning is None or _reasoning_key(message) == self.reasoning


@dataclass(slots=True)
class Walk:
    """Where a conversation's messages lead in the tree."""

    keys: list[int]
    """Chained key of the conversation up to each message."""
    origins: list[CallRecord | None]
    """The own turn that each message shows."""
    in_place: list[bool]
    """Whether it shows it after the conversation that it answered."""
    node: Node | None = None
    """Deepest known node."""
    depth: int = 0
    """Messages up to and including `node`."""
    recognised_by: RecognisedBy = "none"
    edited: BreakReason | None = None
    """How the first changed own turn was changed."""
    edited_call: CallRecord | None = None

    @property
    def resumes(self) -> bool:
        """Whether the history shows an own turn."""
        return any(origin is not None for origin in self.origins)


_Continuation: TypeAlias = "tuple[Node | None, array[int], tuple[Segment, ...], array[int]]"
_WEAKER: dict[RecognisedBy, int] = {"loose": 0, "text": 1, "ids": 2, "none": 3}
_AUTHORS: dict[str, Author] = {"user": "user", "system": "user", "assistant": "env", "tool": "env"}


class Tracker:
    """The token tree of one episode.

    Args:
        renderer: of the model that answers; may be shared between trackers.
        history: `as_templated` follows the chat template, and the client, where an earlier answer is shown otherwise
            than it was sampled (a new branch); `as_sampled` keeps what was sampled (one branch).
    """

    def __init__(self, episode_id: str, renderer: Renderer, *, history: History = "as_templated") -> None:
        self.episode_id = episode_id
        self.renderer = renderer
        self.history: History = history
        self.calls: list[CallRecord] = []
        """Committed calls, in commit order."""
        self.discards: dict[str, int] = {}
        """Reason → calls that will never train, committed or not."""
        self._nodes: dict[int, Node] = {}
        """Chained key of a conversation → the node that ends it; the latest where there are several."""
        self._answers: dict[int, CallRecord] = {}
        """Chained key of a prompt and an answer's content → the latest call that sampled it."""
        self._by_id: dict[str, CallRecord] = {}
        """Turn ids and tool call ids → call."""
        self._raw_lengths: set[int] = set()
        """Lengths of raw prompts with their answers."""
        self._profiles: dict[Profile, int] = {}
        """Calls per profile, in order of first use."""

    # prepare: nothing below changes the tree

    def prepare(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, retry: bool = False
    ) -> PreparedTurn:
        """Find the longest known prefix of a conversation, and the tokens that ask for its next answer.

        Args:
            messages: at least one.
            retry: the client says that an earlier try of this very request failed.

        Raises:
            TemplateRefused: the model's chat template does not take this conversation.
        """
        profile = _profile(messages, tools)
        walk = self._walk(messages, hash(("tools", profile.tools)))
        base, context, segments, opening = self._continue(walk, messages, tools)
        answered = base.answer if base is not None and not segments else None
        redelivery = self._redelivery(answered, tools, retry) if answered is not None else None
        return PreparedTurn(
            turn_id=answered.turn_id if answered is not None and redelivery is not None else uuid4().hex,
            prompt=_join(context, segments, opening),
            parent=base.last if base is not None else None,
            recognised_by=walk.recognised_by,
            side=self.is_side(profile, resumes=walk.resumes),
            redelivery=redelivery,
            replaces=answered if retry and redelivery is None else None,
            base=base,
            segments=segments,
            opening=opening,
            key=walk.keys[-1],
            prompt_messages=len(messages),
            profile=profile,
            walk=walk,
        )

    def prepare_tokens(self, token_ids: Sequence[int], *, retry: bool = False) -> PreparedTurn:
        """A raw prompt (/v1/completions): it continues the longest own prompt with answer that it begins with."""
        prompt = array("i", token_ids)
        base = self._nodes.get(_raw_key(prompt)) or self._longest_raw_prefix(prompt)
        rest = prompt[base.length :] if base is not None else prompt
        segments = (Segment(_raw_key(prompt), rest, "user", None),) if rest else ()
        answered = base.answer if base is not None and not segments else None
        redelivery = self._redelivery(answered, (), retry) if answered is not None else None
        profile = Profile(0, 0, False)
        parent = base.last if base is not None else None
        return PreparedTurn(
            turn_id=answered.turn_id if answered is not None and redelivery is not None else uuid4().hex,
            prompt=prompt,
            parent=parent,
            recognised_by="text" if parent is not None else "none",
            side=self.is_side(profile, resumes=parent is not None),
            redelivery=redelivery,
            replaces=answered if retry and redelivery is None else None,
            base=base,
            segments=segments,
            opening=array("i"),
            key=0,
            prompt_messages=1,
            profile=profile,
            walk=Walk([0], [parent], [False], base, 0),
        )

    def _walk(self, messages: Sequence[Message], key: int) -> Walk:
        walk = Walk([], [], [])
        nodes: dict[int, Node] | None = self._nodes
        as_sampled = self.history == "as_sampled"
        add_key, add_origin, add_in_place = walk.keys.append, walk.origins.append, walk.in_place.append
        for message in messages:
            origin, in_place = None, False
            if message.role != "assistant":
                key = hash((key, message.role, message.content, message.name))
            else:
                origin = self._recognise(key, message, walk)
                if origin is None:
                    key = hash((key, "assistant", _plain_key(message), _reasoning_key(message)))
                else:
                    in_place = origin.prompt_key == key
                    silent = as_sampled or origin.answer.reasoning is None
                    key = _turn_key(key, origin, silent or origin.answer.shown_by(message))
            add_key(key)
            add_origin(origin)
            add_in_place(in_place)
            if nodes is not None:
                node = nodes.get(key)
                if node is None:
                    nodes = None  # nothing below an unknown message is known
                else:
                    walk.node = node
                    walk.depth += 1
        return walk

    def _recognise(self, key: int, message: Message, walk: Walk) -> CallRecord | None:
        """The own turn that an assistant message shows; None for one that no model wrote or that was changed."""
        call = self._by_id.get(message.turn_id) if message.turn_id else None
        if call is None and message.tool_calls:
            call = self._by_id.get(message.tool_calls[0].id)
        how: RecognisedBy = "ids"
        plain = _plain_key(message)
        if call is not None:
            if call.answer.plain != plain and (change := call.answer.compare(message)) is not None:
                walk.edited, walk.edited_call = walk.edited or change, walk.edited_call or call
                return None
        else:
            call = self._answers.get(hash((key, plain)))
            how = "text" if call is not None and call.answer.reasoning == _reasoning_key(message) else "loose"
            if call is None:
                keys = _AnswerKeys.of(message)
                call = self._answers.get(hash((key, keys.content, keys.calls)))
        if call is not None and _WEAKER[how] < _WEAKER[walk.recognised_by]:
            walk.recognised_by = how
        return call

    def _continue(self, walk: Walk, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> _Continuation:
        """The node to go on from with its context, the messages to add to it, and the generation prompt."""
        node = walk.node
        if node is not None and walk.depth == len(messages) and node.answer is not None:
            return node, node.context(), (), _opening(node.answer)

        def go_on_from(start: Node) -> _Continuation | None:
            lead = _opening(start.answer) if start.call is None and start.answer is not None else array("i")
            context = start.context()
            prefix = context + lead if lead else context
            new, keep = messages[start.depth :], self.history == "as_sampled"
            rendered = self.renderer.extend(prefix, messages[: start.depth], new, tools, keep=keep)
            if rendered is None:
                return None
            return start, context, *_segments(rendered, start.depth, walk, messages, lead)

        found = _deepest(self._starts(node, messages), go_on_from)
        if found is not None:
            return found
        rendered = self.renderer.render(messages, tools)
        return None, array("i"), *_segments(rendered, 0, walk, messages, array("i"))

    def _starts(self, node: Node | None, messages: Sequence[Message]) -> Iterator[Node]:
        """Nodes to try to go on from, deepest first: own answers, and prompts whose answer is now shown otherwise."""
        while node is not None:
            shown_otherwise = (
                node.answer is not None and node.depth < len(messages) and messages[node.depth].role == "assistant"
            )
            if node.call is not None or shown_otherwise:
                yield node
            node = node.parent

    def _redelivery(self, answered: CallRecord, tools: Sequence[ToolSpec], retry: bool) -> Reply | None:
        """The earlier answer to this very prompt, where the client did not get it whole."""
        whole = answered.finish_reason is not FinishReason.ABORTED and answered.discarded is None
        if not whole or (answered.delivered and not retry):
            return None
        if answered.undelivered is not None:
            return answered.undelivered
        reply = self._reply(answered, tools)
        same = reply.message is not None and answered.answer.compare(reply.message) is None
        return reply if same else None  # a stop string had cut what was delivered: it is sampled anew

    def _reply(self, call: CallRecord, tools: Sequence[ToolSpec]) -> Reply:
        """A delivered answer again, from its tokens, with the ids that it had."""
        ids = call.sampled_ids().tolist()
        message = self.renderer.parse(ids, tools)
        names = [i for i, owner in self._by_id.items() if owner is call and i != call.turn_id]
        calls = tuple(replace(c, id=i) for c, i in zip(message.tool_calls, names, strict=False))
        return Reply(
            ids,
            call.logprobs.tolist(),
            call.weight_versions(),
            call.finish_reason,
            self.renderer.decode(ids),
            replace(message, tool_calls=calls or message.tool_calls, turn_id=call.turn_id),
        )

    def _longest_raw_prefix(self, prompt: array[int]) -> Node | None:
        for length in sorted(self._raw_lengths, reverse=True):
            if length <= len(prompt):
                node = self._nodes.get(_raw_key(prompt[:length]))
                if node is not None:
                    return node
        return None

    # commit: the only place that changes the tree

    def commit(
        self, turn: PreparedTurn, reply: Reply, *, delivered: bool = True, temperature: float = 1.0
    ) -> CallRecord:
        """Add a prepared turn and its answer to the tree.

        Args:
            reply: `message` carries the tool call ids it is delivered with.
            delivered: False until the client has the whole answer; see `mark_delivered`.
            temperature: what the answer was sampled at.

        Raises:
            ValueError: the reply's lists differ in length, or the turn is already committed.
        """
        if not len(reply.token_ids) == len(reply.logprobs) == len(reply.weight_versions):
            raise ValueError(
                f"reply to turn {turn.turn_id}: {len(reply.token_ids)} tokens, {len(reply.logprobs)} logprobs, "
                f"{len(reply.weight_versions)} weight versions; the engine must report one of each per token"
            )
        if turn.turn_id in self._by_id:
            raise ValueError(f"turn {turn.turn_id} is already committed; prepare the request again")
        call = CallRecord(turn, reply, len(self.calls), delivered=delivered, temperature=temperature)
        prompt_end = self._grow(turn)
        call.break_reason, call.break_from = self._break(turn, prompt_end)
        call.node = Node(prompt_end, turn.opening + array("i", reply.token_ids), "llm", call=call)
        prompt_end.answer = call
        if turn.base is not None:
            turn.base.continued = call
        self._register(turn, call, reply)
        if turn.replaces is not None:
            self.discard(turn.replaces, "retried")
        for echoed in turn.walk.origins:
            if echoed is not None and not echoed.delivered and echoed.discarded is None:
                self.mark_delivered(echoed.turn_id)
        return call

    def mark_delivered(self, turn_id: str) -> None:
        """The client has the whole answer of a committed turn.

        Raises:
            KeyError: no such turn.
        """
        call = self._by_id[turn_id]
        call.delivered = True
        call.undelivered = None

    def discard(self, turn: PreparedTurn | CallRecord, reason: str) -> None:
        """A call that must never train: cancelled, orphaned, half delivered. Counted under `reason`; idempotent."""
        call = self._by_id.get(turn.turn_id)
        if call is not None:
            if call.discarded is not None:
                return
            call.discarded = reason
            call.undelivered = None
        self.discards[reason] = self.discards.get(reason, 0) + 1

    def _grow(self, turn: PreparedTurn) -> Node:
        """Add the prompt's new messages, sharing nodes that an overlapping call has added meanwhile."""
        node = turn.base
        for segment in turn.segments:
            again = segment.origin is not None
            key = hash((segment.key, "again")) if again else segment.key
            known = self._nodes.get(key)
            if known is None or known.parent is not node or known.tokens != segment.tokens:
                known = Node(node, segment.tokens, segment.author, origin=segment.origin)
                self._nodes[key] = known
                if again:  # never in place of the sampled node
                    self._nodes.setdefault(segment.key, known)
            node = known
        if node is None:
            raise ValueError("a prompt has at least one message")
        return node

    def _register(self, turn: PreparedTurn, call: CallRecord, reply: Reply) -> None:
        self.calls.append(call)
        self._by_id[call.turn_id] = call
        if reply.message is not None:
            self._by_id.update((c.id, call) for c in reply.message.tool_calls if c.id)
        if turn.key == 0:
            self._nodes[_raw_key(turn.prompt + array("i", reply.token_ids))] = call.node
            self._raw_lengths.add(call.node.length)
        else:
            self._nodes[_turn_key(turn.key, call, True)] = call.node
            self._answers[hash((turn.key, call.answer.plain))] = call
            self._answers[hash((turn.key, call.answer.content, call.answer.calls))] = call
        self._profiles[turn.profile] = self._profiles.get(turn.profile, 0) + 1

    # why a call starts a branch

    def _break(self, turn: PreparedTurn, prompt_end: Node) -> tuple[BreakReason | None, CallRecord | None]:
        base = turn.base
        if prompt_end.answer is not None:
            return BreakReason.RETRY, prompt_end.answer
        if not self.calls or (base is not None and base.call is not None and base.continued is None):
            return None, None
        if base is None:
            return self._fresh_start(turn)
        shown = turn.walk.origins[base.depth] if turn.key != 0 and base.call is None else None
        if shown is not None:
            if turn.segments[0].origin is shown:
                return self._shown_otherwise(shown, turn.segments[0].tokens), shown
            return self._moved(turn, shown)
        return turn.walk.edited or BreakReason.EDITED_HISTORY, base.continued or base.answer

    def _fresh_start(self, turn: PreparedTurn) -> tuple[BreakReason, CallRecord | None]:
        """Nothing of the tree could be gone on from."""
        walk = turn.walk
        if turn.key == 0:
            return self._raw_break(turn)
        known = walk.node.path() if walk.node is not None else []
        for node, segment in zip(known, turn.segments, strict=False):
            if node.call is not None and segment.tokens != node.tokens:
                return self._shown_otherwise(node.call, segment.tokens), node.call
        if walk.edited is not None:
            return walk.edited, walk.edited_call
        own = next((origin for origin in reversed(walk.origins) if origin is not None), None)
        if own is not None:
            return self._moved(turn, own)
        before = next((call for call in reversed(self.calls) if call.profile == turn.profile), None)
        if before is None:
            return BreakReason.SUB_AGENT, None
        if before.resumes and turn.prompt_messages < before.prompt_messages:
            return BreakReason.COMPACTION, before
        shares_task = any(node.author == "user" for node in known[1:])
        return (BreakReason.EDITED_HISTORY, before) if shares_task else (BreakReason.SUB_AGENT, None)

    def _moved(self, turn: PreparedTurn, own: CallRecord) -> tuple[BreakReason, CallRecord]:
        """An own turn stands after other messages than those it answered."""
        if turn.profile.system != own.profile.system and turn.profile.tools != own.profile.tools:
            return BreakReason.SUB_AGENT, own
        dropped = turn.walk.origins.index(own) < own.prompt_messages
        return BreakReason.COMPACTION if dropped else BreakReason.EDITED_HISTORY, own

    def _shown_otherwise(self, own: CallRecord, tokens: array[int]) -> BreakReason:
        same_text = self.text(own.node.tokens) == self.text(tokens)
        return BreakReason.RESPLIT if same_text else BreakReason.TEMPLATE_STRIP

    def _raw_break(self, turn: PreparedTurn) -> tuple[BreakReason, CallRecord | None]:
        before = next((call for call in reversed(self.calls) if call.profile == turn.profile), None)
        if before is None:
            return BreakReason.SUB_AGENT, None
        same_text = self.text(turn.prompt).startswith(self.text(before.node.context()))
        return BreakReason.RESPLIT if same_text else BreakReason.EDITED_HISTORY, before

    # reading

    @property
    def sampled_tokens(self) -> int:
        return sum(call.sampled_tokens for call in self.calls)

    def call(self, turn_id: str) -> CallRecord:
        """A committed call by its turn id, or by the id of one of its tool calls.

        Raises:
            KeyError
        """
        return self._by_id[turn_id]

    def is_side(self, profile: Profile, *, resumes: bool) -> bool:
        """Whether a conversation is beside the episode's main one: a title, a memory, a summary.

        The main conversation is the one with tools, if any has them, and then the one with the most calls. A side call
        has no tools where the main one has them, or another system prompt. One such change alone does not make a side
        call: with own turns in its history it is the main conversation going on. Some agents offer tools no longer when
        they ask for the last answer.
        """
        main = max([*self._profiles, profile], key=lambda p: (p.has_tools, self._profiles.get(p, 0)))
        other_system, tools_gone = profile.system != main.system, main.has_tools and not profile.has_tools
        if resumes:
            return other_system and profile.tools != main.tools
        return other_system or tools_gone

    def text(self, token_ids: Sequence[int]) -> str:
        """What tokens say: special tokens left out, trimmed. What `match: text` compares."""
        return self.renderer.decode(token_ids).strip()

    def block_text(self, node: Node) -> str:
        """Text of a block. An own turn in its place has the text that it was sampled with, however it is shown."""
        return self.text(node.origin.node.tokens if node.origin is not None else node.tokens)

    def timelines(self) -> list[Timeline]:
        """The blocks of each call, in commit order. Only a call's own answer is authored `llm`: history is context."""
        return [self.timeline(call) for call in self.calls]

    def timeline(self, call: CallRecord) -> Timeline:
        blocks = [self._context_block(node) for node in call.node.path()[:-1]]
        opening, sampled = call.opening, call.sampled_tokens
        answer = Block(
            "llm",
            self.block_text(call.node),
            call.node.tokens.tolist(),
            [0.0] * opening + call.logprobs.tolist(),
            [0] * opening + [1] * sampled,
            [-1] * opening + call.weight_versions(),
        )
        return Timeline(call.turn_id, [*blocks, answer])

    def _context_block(self, node: Node) -> Block:
        count = node.token_count
        author: Author = "env" if node.author == "llm" else node.author
        return Block(author, self.block_text(node), node.tokens.tolist(), [0.0] * count, [0] * count, [-1] * count)

    def memory_bytes(self) -> int:
        """Bytes that the tree holds, indexes included, shared strings and integers not."""
        nodes = {id(node): node for call in self.calls for node in call.node.path()}
        lines = {id(node._line): node._line for node in nodes.values()}
        total = sum(sys.getsizeof(part) for part in (*nodes.values(), *lines.values()))
        for call in self.calls:
            total += sum(
                sys.getsizeof(part) for part in (call, call.logprobs, call.versions, call.answer, call.turn_id)
            )
        indexes = (self._nodes, self._answers, self._by_id)
        return total + sum(sys.getsizeof(index) + 32 * len(index) for index in indexes)


def _profile(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Profile:
    system = []
    for message in messages:
        if message.role != "system":
            break
        system.append(message.content)
    return Profile(
        hash(tuple(system)), hash(orjson.dumps(list(tools), option=orjson.OPT_SORT_KEYS)) if tools else 0, bool(tools)
    )


def _plain_key(message: Message) -> int:
    if not message.tool_calls:
        return hash(message.content)
    return hash((message.content, *((call.name, call.arguments) for call in message.tool_calls)))


def _reasoning_key(message: Message) -> int | None:
    return hash(message.reasoning.strip()) if message.reasoning else None


def _canonical_json(text: str) -> bytes | str:
    """JSON without its spelling: key order and white space. Text that is not JSON stays, trimmed."""
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_SORT_KEYS)
    except orjson.JSONDecodeError:
        return text.strip()


def _turn_key(key: int, call: CallRecord, shown: bool) -> int:
    """Chained key after an own turn; with its reasoning and without it are two conversations."""
    return hash((key, call.turn_id, shown))


def _raw_key(token_ids: array[int]) -> int:
    return hash(("raw", token_ids.tobytes()))


def _opening(call: CallRecord) -> array[int]:
    """The generation prompt that was put before a call's answer, int32."""
    return call.node.head(call.opening)


def _segments(
    rendered: Rendered, offset: int, walk: Walk, messages: Sequence[Message], lead: array[int]
) -> tuple[tuple[Segment, ...], array[int]]:
    """Rendered tokens as segments for `messages[offset:]`, and the generation prompt; `lead` goes before the first."""
    segments: list[Segment] = []
    end = 0
    for index, (start, end) in enumerate(rendered.spans, offset):
        tokens = array("i", rendered.token_ids[start:end])
        segments.append(
            Segment(
                walk.keys[index],
                tokens if segments else lead + tokens,
                _AUTHORS[messages[index].role],
                walk.origins[index] if walk.in_place[index] else None,
            )
        )
    return tuple(segments), array("i", rendered.token_ids[end:])


def _join(context: array[int], segments: Iterable[Segment], opening: array[int]) -> array[int]:
    """The whole prompt, built in `context`."""
    for segment in segments:
        context.extend(segment.tokens)
    context.extend(opening)
    return context


def _deepest(starts: Iterator[Node], attempt: Callable[[Node], T | None]) -> T | None:
    """The first start that works. Past the second they are bisected: what works at one works before it too."""
    for start in islice(starts, 2):
        found = attempt(start)
        if found is not None:
            return found
    rest = list(starts)
    best: T | None = None
    low, high = 0, len(rest)
    while low < high:
        middle = (low + high) // 2
        found = attempt(rest[middle])
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best
