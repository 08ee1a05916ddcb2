"""Model routes: the journey of one call, from an episode's key to recorded tokens.

key → episode → dialect decodes → tracker prepares → engine generates → dialect encodes → tracker commits → delivered.

What always holds: an answer is committed before its last byte is sent and marked delivered after; a client that hangs
up cancels its generation, and what it did not get whole is never trained; a stream ends with its end mark or with the
dialect's error event, never in silence; calls of a live episode wait while weights change or a lost engine comes
back.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson
from aiohttp import web

from swarmtune.backend import BackendLost, ContextOverflow, GenerateFailed, RequestRefused
from swarmtune.config import SamplingConfig
from swarmtune.episodes import Episode, EpisodeError, UnknownEpisode
from swarmtune.gateway.answers import AnswerTexts, Splitter, cut_at, whole_message
from swarmtune.gateway.auth import Keyring, bearer_key
from swarmtune.gateway.control import STATUS, ControlRefused, unreadable
from swarmtune.gateway.dialect import (
    Answer,
    CallInfo,
    Delta,
    Dialect,
    ModelCall,
    PromptTooLong,
    Refused,
    StreamEncoder,
    TokenLogprob,
    item_not_found,
    malformed,
    unsupported,
)
from swarmtune.gateway.dialects import DIALECTS
from swarmtune.gateway.dialects.anthropic import AnthropicDialect
from swarmtune.gateway.dialects.chat import ChatDialect
from swarmtune.gateway.dialects.responses import ResponsesDialect, turn_of_response
from swarmtune.gateway.grammar import unconstrained
from swarmtune.gateway.sse import Heartbeat, event_stream, kept_alive
from swarmtune.protocol import Code
from swarmtune.rendering.renderer import Renderer, TemplateRefused
from swarmtune.run import Run, Session
from swarmtune.tracker import PreparedTurn
from swarmtune.types import FinishReason, GenerateRequest, Message, Reply, SamplingParams

if TYPE_CHECKING:
    from swarmtune.server import SwarmServer

log = logging.getLogger(__name__)

Serve = Callable[[Dialect, web.Request], Awaitable[web.StreamResponse]]

MAX_DEPTH = 128
"""Nesting of a body: parts of it are written as JSON again, and writers have limits."""

LARGE_BYTES_PER_TOKEN = 8
"""A body of more bytes than this for each token of context is looked at before it is rendered."""

PIECE_CHARS = 1 << 16
"""How much text is encoded at once to see whether a large prompt can fit."""

BASES = ("/v1", "/v1/v1", "")
"""Where clients look for a route: some put /v1 before every path, some expect it in the address they were given."""

Speak = Callable[[int, Delta], Awaitable[None]]
"""Tell the client what became certain of an answer."""


@dataclass(slots=True)
class Told:
    """How much of an answer was given out."""

    content: int = 0
    """Characters."""
    reasoning: int = 0
    """Characters."""
    calls: int = 0
    logprobs: int = 0

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs)

    def add(self, delta: Delta) -> Delta:
        self.content += len(delta.content)
        self.reasoning += len(delta.reasoning)
        self.calls += len(delta.calls)
        self.logprobs += len(delta.logprobs)
        return delta

    def rest_of(self, message: Message) -> Delta:
        """What of a message was not given out."""
        return Delta(
            message.content[self.content :],
            (message.reasoning or "")[self.reasoning :],
            message.tool_calls[self.calls :],
        )


@dataclass(slots=True)
class Choice:
    """One answer of a call: what is asked of the engine, and what has come of it."""

    turn: PreparedTurn
    sampling: SamplingParams
    splitter: Splitter
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ABORTED
    stop_string: str | None = None
    told: Told = field(default_factory=Told)

    def forget(self, splitter: Splitter) -> None:
        """What was sampled so far is lost with its engine."""
        self.token_ids, self.logprobs, self.versions, self.top = [], [], [], []
        self.splitter = splitter


class ModelRoutes:
    def __init__(self, server: SwarmServer, keys: Keyring) -> None:
        self._server = server
        self._keys = keys
        self._texts: AnswerTexts | None = None

    def add_to(self, app: web.Application) -> None:
        for base in BASES:
            for path, dialect in DIALECTS.items():
                app.router.add_post(f"{base}/{path}", self._told_in(dialect(), self._serve))
            app.router.add_post(f"{base}/messages/count_tokens", self._told_in(AnthropicDialect(), self._count))
            stored = f"{base}/responses/{{id}}"
            app.router.add_get(stored, self._told_in(ResponsesDialect(), self._stored), allow_head=False)
            app.router.add_delete(stored, self._told_in(ResponsesDialect(), self._forget))
            app.router.add_get(f"{base}/models", self.models, allow_head=False)
            app.router.add_get(f"{base}/models/{{name:.+}}", self.model, allow_head=False)

    def _told_in(self, dialect: Dialect, serve: Serve) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler whose refusals are told in the dialect's own form."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await serve(dialect, request)
            except ConnectionError:
                if request.transport is not None and not request.transport.is_closing():
                    raise
                return web.Response()  # no one is there to be told
            except Exception as error:  # noqa: BLE001 - the boundary: one call's fault is told to its client alone
                refusal = as_refusal(error)
                return web.Response(
                    body=orjson.dumps(dialect.error(refusal)),
                    status=refusal.status,
                    headers=refusal.headers(),
                    content_type="application/json",
                )

        return handle

    # -- one call

    async def _serve(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        run, episode = self._episode_of(request)
        session = run.session(episode)
        call = written_out(session, await self._decode(run, dialect, request))
        run.book.begin_call(episode)
        position = episode.calls - 1
        sampled = 0
        try:
            choices = self._prepare(run, session, call, position)
            used = choices[0].sampling
            ignored = call.ignored + unconstrained(call, used.grammar)
            session.note(choices[0].turn.turn_id, call.dialect, call.sampling.said(), used, ignored)
            info = CallInfo(
                response_id=choices[0].turn.turn_id,
                model=call.model or (run.info.model_name if run.info else ""),
                created=int(time.time()),
                prompt_tokens=len(choices[0].turn.prompt),
                cached_tokens=cached_tokens(choices[0].turn),
            )
            exchange = Exchange(self._server, run, episode, session, call, info, choices, self._answer_texts(run))
            try:
                if call.stream:
                    return await exchange.stream(dialect, request)
                return await exchange.whole(dialect, request)
            finally:
                sampled = exchange.close()
        finally:
            run.book.finish_call(episode, sampled)

    async def _decode(self, run: Run, dialect: Dialect, request: web.Request) -> ModelCall:
        raw = await request.read()
        call = dialect.decode(read_body(raw), request.headers)
        assert run.info is not None and run.renderer is not None
        if len(raw) > LARGE_BYTES_PER_TOKEN * run.info.context_length:
            refuse_hopeless(call, run.renderer, run.info.context_length)
        return call

    def _episode_of(self, request: web.Request) -> tuple[Run, Episode]:
        key = bearer_key(request.headers)
        if key is None:
            raise Refused(
                Code.UNAUTHORIZED,
                "no key: send the episode's api_key as `Authorization: Bearer`",
                status=401,
                retry=False,
            )
        run = self._server.live_run()
        try:
            return run, run.book.by_key(key)
        except UnknownEpisode:
            if self._keys.knows(key):
                raise Refused(
                    Code.FORBIDDEN,
                    "this is a key of the server, not of an episode: claim one (POST /v1/episodes) and use its api_key",
                    status=403,
                    retry=False,
                ) from None
            raise

    def _prepare(self, run: Run, session: Session, call: ModelCall, position: int) -> list[Choice]:
        """Prompts and sampling of every answer. Changes nothing.

        Raises:
            Refused, TemplateRefused
        """
        assert run.info is not None and run.renderer is not None
        texts = self._answer_texts(run)
        grammar = texts.grammar(call) if run.info.constrains else None
        refuse_unenforced(call, grammar)
        if call.prefill is not None:
            raise unsupported(
                call.prefill,
                "This model does not support assistant message prefill. The conversation must end with a user message "
                "or a tool's result",
            )
        retry = call.retry_count > 0
        if call.prompts:
            ids = [p if isinstance(p, list) else run.renderer.encode(p) for p in call.prompts]
            if not all(ids):
                raise malformed("prompt", "must not be empty: send at least one token")
            turns = [session.tracker.prepare_tokens(prompt, retry=retry) for prompt in ids]
        else:
            turns = [session.tracker.prepare(call.messages, call.tools, retry=retry)]
        choices = []
        for turn in turns:
            room = run.info.context_length - len(turn.prompt)
            if room < 1:
                raise PromptTooLong(
                    len(turn.prompt), run.info.context_length, param="prompt" if call.prompts else "messages"
                )
            for n in range(call.n):
                seed = session.seed_for(position, len(choices), asked=call.sampling.seed)
                sampling = resolve_sampling(call, session.sampling, run.renderer.stop_token_ids, room, seed, grammar)
                again = turn if n == 0 else replace(turn, turn_id=uuid4().hex, redelivery=None)
                choices.append(Choice(again, sampling, texts.splitter(sampling.stop, raw=bool(call.prompts))))
        return choices

    def _answer_texts(self, run: Run) -> AnswerTexts:
        assert run.renderer is not None
        if self._texts is None or self._texts.renderer is not run.renderer:
            self._texts = AnswerTexts(run.renderer)
        return self._texts

    async def _count(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """Tokens of the prompt that a call would have; nothing is recorded."""
        run, episode = self._episode_of(request)
        session = run.session(episode)
        call = await self._decode(run, dialect, request)
        turn = session.tracker.prepare(call.messages, call.tools)
        return web.json_response({"input_tokens": len(turn.prompt)})

    # -- answers that were kept

    async def _stored(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """An answer once more. Whoever has read it here has it whole, also where its first delivery was cut off."""
        session, turn_id, body = self._stored_answer(request)
        if request.query.get("stream", "false").lower() in ("true", "1"):
            raise unsupported("stream", "an answer that was kept comes whole; leave stream out")
        response = web.Response(body=body, content_type="application/json")
        await response.prepare(request)
        await response.write_eof()
        session.tracker.mark_delivered(turn_id)
        return response

    async def _forget(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """The answer can no longer be read, continued or referred to by its id; it trains like any other."""
        session, turn_id, _ = self._stored_answer(request)
        session.answers.forget(turn_id)
        session.conversations.forget(turn_id)
        return web.json_response({"id": request.match_info["id"], "object": "response", "deleted": True})

    def _stored_answer(self, request: web.Request) -> tuple[Session, str, bytes]:
        """Raises:
        Refused: not kept; EpisodeError: the episode is over.
        """
        run, episode = self._episode_of(request)
        session = run.session(episode)
        turn_id = turn_of_response(request.match_info["id"])
        try:
            return session, turn_id, session.answers.get(turn_id)
        except KeyError:
            raise Refused(
                Code.NOT_FOUND,
                f"Response with id '{request.match_info['id']}' not found: it is not of this episode, was made with "
                "store: false, or is not among the last ones, which alone are kept",
                status=404,
                param="response_id",
                retry=False,
            ) from None

    # -- models

    async def models(self, request: web.Request) -> web.Response:
        return self._about_models(request, None)

    async def model(self, request: web.Request) -> web.Response:
        return self._about_models(request, request.match_info["name"])

    def _about_models(self, request: web.Request, name: str | None) -> web.Response:
        dialect = AnthropicDialect() if "anthropic-version" in request.headers else ChatDialect()
        try:
            key = bearer_key(request.headers)
            if key is None or not self._keys.knows(key):
                self._episode_of(request)
            run = self._server.live_run()
            served = run.info.model_name if run.info is not None else run.config.model
            entry = about_model(name or served, int(run.started_at))
            payload = (
                entry
                if name
                else {"object": "list", "data": [entry], "first_id": served, "last_id": served, "has_more": False}
            )
            return web.json_response(payload)
        except (Refused, ControlRefused, EpisodeError) as error:
            refusal = as_refusal(error)
            return web.json_response(dialect.error(refusal), status=refusal.status, headers=refusal.headers())


@dataclass(slots=True)
class Exchange:
    """One call between its episode and its client, once it is understood."""

    server: SwarmServer
    run: Run
    episode: Episode
    session: Session
    call: ModelCall
    info: CallInfo
    choices: list[Choice]
    texts: AnswerTexts
    committed: list[Choice] = field(default_factory=list)
    delivered: bool = False

    @property
    def renderer(self) -> Renderer:
        assert self.run.renderer is not None
        return self.run.renderer

    async def whole(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        await self._generate_all(None)
        answers = self._commit_all()
        body = orjson.dumps(dialect.whole(self.call, self.info, answers))
        self._keep(body)
        response = web.Response(body=body, content_type="application/json")
        await response.prepare(request)
        await response.write_eof()
        self._delivered()
        return response

    async def stream(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        response = event_stream()
        encoder = dialect.stream(self.call, self.info)
        async with kept_alive(request, response) as heartbeat:
            try:
                await self._generate_all(self._speaker(encoder, heartbeat))
                answers = self._commit_all()
                if self.call.keep:
                    self._keep(orjson.dumps(dialect.whole(self.call, self.info, answers)))
                await self._finish_stream(encoder, heartbeat, answers)
                self._delivered()
            except (ConnectionError, asyncio.CancelledError):
                raise
            except Exception as error:
                if not response.prepared:
                    raise
                response.force_close()
                await heartbeat.write(encoder.error(as_refusal(error)))
        await response.write_eof()
        return response

    def _speaker(self, encoder: StreamEncoder, heartbeat: Heartbeat) -> Speak:
        async def speak(index: int, delta: Delta) -> None:
            await heartbeat.write(encoder.delta(index, delta))

        return speak

    async def _finish_stream(self, encoder: StreamEncoder, heartbeat: Heartbeat, answers: Sequence[Answer]) -> None:
        """What deltas have not said, then the end mark."""
        out = b""
        for index, (choice, answer) in enumerate(zip(self.choices, answers, strict=True)):
            untold = tuple(answer.logprobs or ())[choice.told.logprobs :]
            rest = choice.told.add(replace(choice.told.rest_of(answer.message), logprobs=untold))
            if rest:
                out += encoder.delta(index, rest)
            out += encoder.finish(index, answer)
        await heartbeat.write(out + encoder.close(answers))

    # -- generating

    async def _generate_all(self, speak: Speak | None) -> None:
        if len(self.choices) == 1:
            await self._generate(0, self.choices[0], speak)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for index, choice in enumerate(self.choices):
                    group.create_task(self._generate(index, choice, speak))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _generate(self, index: int, choice: Choice, speak: Speak | None) -> None:
        """Sample one answer. With the engine lost before anything was told, it is sampled anew once that is back."""
        if choice.turn.redelivery is not None:
            return
        while True:
            backend, life = await self.server.serving()
            request = GenerateRequest(
                choice.turn.turn_id,
                choice.turn.prompt,
                choice.sampling,
                self.episode.episode_id,
                lane=self.episode.kind,
            )
            text = self.renderer.stream() if speak is not None else None
            chunks = backend.generate(request)
            try:
                async for chunk in chunks:
                    choice.token_ids += chunk.token_ids
                    choice.logprobs += chunk.logprobs
                    choice.versions += [chunk.weight_version] * len(chunk.token_ids)
                    if chunk.top_logprobs:
                        choice.top += chunk.top_logprobs
                    if text is not None and speak is not None:
                        await self._tell(index, choice, text.push(chunk.token_ids), speak)
                    if chunk.finish_reason is not None:
                        choice.finish_reason, choice.stop_string = chunk.finish_reason, chunk.stop_string
                if choice.finish_reason is FinishReason.ABORTED:
                    raise Refused(
                        Code.ENGINE_LOST, "the engine gave this answer up; ask again", status=503, retry_after_s=1.0
                    )
                return
            except BackendLost as lost:
                if choice.told:
                    raise Refused(
                        Code.ENGINE_LOST,
                        f"the engine was lost in the middle of this answer: {lost}",
                        status=503,
                        retry_after_s=5.0,
                    ) from lost
                choice.forget(self.texts.splitter(choice.sampling.stop, raw=bool(self.call.prompts)))
                self.server.report_lost(life, str(lost))
            finally:
                await close_generation(chunks)

    async def _tell(self, index: int, choice: Choice, text: str, speak: Speak) -> None:
        """Give out what has become certain with `text`, and the logprobs of tokens that were not told yet."""
        reasoning, content = choice.splitter.push(text)
        logprobs = self._logprobs(choice, choice.told.logprobs) if self.call.logprobs else ()
        delta = Delta(content, reasoning, logprobs=tuple(logprobs))
        if self.call.tools and choice.splitter.at_end_of_call:
            message = self._message(choice, self.renderer.decode(choice.token_ids))
            if len(message.tool_calls) > choice.told.calls:
                delta = replace(choice.told.rest_of(message), logprobs=delta.logprobs)
        if delta:
            await speak(index, choice.told.add(delta))

    def _logprobs(self, choice: Choice, start: int = 0) -> list[TokenLogprob]:
        top = choice.top[start:] if choice.top else None
        return self.texts.entries(choice.token_ids[start:], choice.logprobs[start:], top)

    # -- recording

    def _commit_all(self) -> list[Answer]:
        """The answers, in the episode's tree from here on; nothing is committed of an episode that is over.

        Raises:
            EpisodeError
        """
        if not self.episode.is_open:
            self.run.book.by_key(self.episode.key or "")
        return [self._commit(choice) for choice in self.choices]

    def _commit(self, choice: Choice) -> Answer:
        again = choice.turn.redelivery
        if again is not None:
            choice.token_ids, choice.logprobs = again.token_ids, again.logprobs
            choice.finish_reason, choice.stop_string = again.finish_reason, again.stop_string
            message = again.message or Message("assistant", again.text)
        else:
            self.session.versions.update(choice.versions)
            text = self.renderer.decode(choice.token_ids)
            message = self._message(choice, text)
            reply = Reply(
                choice.token_ids,
                choice.logprobs,
                choice.versions,
                choice.finish_reason,
                text=text,
                message=message,
                stop_string=choice.stop_string,
            )
            self.session.tracker.commit(
                choice.turn, reply, delivered=False, temperature=choice.sampling.temperature or 1.0
            )
        self.committed.append(choice)
        if self.call.keep:
            said = self.call.messages[self.call.instructions :]
            self.session.conversations.remember(choice.turn.turn_id, said, message)
        return Answer(
            turn_id=choice.turn.turn_id,
            message=message,
            finish_reason=choice.finish_reason,
            prompt_tokens=len(choice.turn.prompt),
            completion_tokens=len(choice.token_ids),
            cached_tokens=cached_tokens(choice.turn),
            reasoning_tokens=self.texts.reasoning_tokens(choice.token_ids) if message.reasoning else 0,
            stop_string=choice.stop_string,
            logprobs=self._logprobs(choice) if self.call.logprobs else None,
        )

    def _message(self, choice: Choice, text: str) -> Message:
        if self.call.prompts:
            return Message("assistant", cut_at(text, choice.stop_string), turn_id=choice.turn.turn_id)
        return whole_message(
            self.renderer.parse(choice.token_ids, self.call.tools),
            text,
            choice.turn.turn_id,
            choice.stop_string,
            self.texts.splitter(choice.sampling.stop, raw=False),
            one_call=not self.call.parallel_tool_calls,
        )

    def _keep(self, body: bytes) -> None:
        if self.call.keep:
            self.session.answers.keep(self.info.response_id, body)

    def _delivered(self) -> None:
        for choice in self.committed:
            self.session.tracker.mark_delivered(choice.turn.turn_id)
        self.delivered = True

    def close(self) -> int:
        """Sampled tokens that were committed; what was not is counted as lost to a client that hung up or an error."""
        for choice in self.choices:
            if choice not in self.committed and choice.turn.redelivery is None:
                self.session.tracker.discard(choice.turn, "not_delivered")
        return sum(len(c.token_ids) for c in self.committed if c.turn.redelivery is None)


# -- helpers


async def close_generation(chunks: Any) -> None:
    """Closing the iterator cancels the generation."""
    await chunks.aclose()


def read_body(raw: bytes) -> dict[str, Any]:
    """Raises:
    Refused: not a JSON object.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            body = orjson.loads(with_whole_characters(raw))
        except (ValueError, RecursionError):
            raise Refused(Code.BAD_REQUEST, f"the body is not JSON: {error}", retry=False) from None
    if not isinstance(body, dict):
        raise Refused(Code.BAD_REQUEST, f"the body must be a JSON object, not {type(body).__name__}", retry=False)
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and deeper_than(body, MAX_DEPTH):
        raise Refused(Code.BAD_REQUEST, f"the body is nested deeper than {MAX_DEPTH} levels", retry=False)
    return body


def with_whole_characters(raw: bytes) -> str:
    """JSON with U+FFFD for half a character, which clients send that cut a text by its UTF-16 length.

    Raises:
        ValueError, RecursionError: not JSON all the same.
    """
    text = json.dumps(json.loads(raw), ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def refuse_hopeless(call: ModelCall, renderer: Renderer, context_length: int) -> None:
    """Refuse what cannot fit without encoding all of it: 20 MB take a minute, in which nobody else is answered.

    Raises:
        PromptTooLong: its number of tokens is an estimate.
    """
    for prompt in call.prompts:
        if isinstance(prompt, str):
            _refuse_long_texts([prompt], renderer, context_length, "prompt")
    texts = [text for message in call.messages for text in _texts_of(message)]
    texts += [orjson.dumps(tool).decode() for tool in call.tools]
    _refuse_long_texts(texts, renderer, context_length, "messages")


def _texts_of(message: Message) -> Iterator[str]:
    yield message.role  # a message without content has tokens too
    yield message.content
    yield from (call.arguments for call in message.tool_calls)


def _refuse_long_texts(texts: Sequence[str], renderer: Renderer, context_length: int, param: str) -> None:
    """Encode piece by piece until it is certain that the texts do not fit; cut words add some tokens a piece."""
    tokens = characters = 0
    for text in _pieces(texts):
        tokens += max(1, len(renderer.encode(text)) - 16)
        characters += len(text)
        if tokens > context_length:
            estimate = tokens * sum(map(len, texts)) // characters
            raise PromptTooLong(max(estimate, tokens), context_length, param=param)


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """The texts in order, short ones joined and long ones cut, about PIECE_CHARS each."""
    gathered: list[str] = []
    length = 0
    for text in texts:
        for start in range(0, len(text), PIECE_CHARS):
            gathered.append(text[start : start + PIECE_CHARS])
            length += len(gathered[-1])
            if length >= PIECE_CHARS:
                yield "".join(gathered)
                gathered, length = [], 0
    if gathered:
        yield "".join(gathered)


def deeper_than(value: Any, limit: int) -> bool:
    """Whether JSON is nested deeper than `limit` objects and lists."""
    level = [value]
    for _ in range(limit):
        inner = [v for holder in level for v in (holder.values() if type(holder) is dict else holder)]
        level = [v for v in inner if type(v) is dict or type(v) is list]
        if not level:
            return False
    return True


def about_model(name: str, since: int) -> dict[str, Any]:
    """One entry of /v1/models with the fields of both styles; each client reads its own."""
    openai = {"id": name, "object": "model", "created": since, "owned_by": "swarmtune"}
    return openai | {
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(since, UTC).isoformat(),
    }


def cached_tokens(turn: PreparedTurn) -> int:
    return turn.base.length if turn.base is not None else 0


def written_out(session: Session, call: ModelCall) -> ModelCall:
    """The call with all that it names by id alone.

    Raises:
        Refused: no such answer in this episode.
    """
    return continued(session, quoted(session, call))


def quoted(session: Session, call: ModelCall) -> ModelCall:
    """The call with the parts of earlier answers that it quotes in their places."""
    if not call.quotes:
        return call
    messages = list(call.messages)
    for at, quote in call.quotes.items():
        try:
            said = session.conversations.answer(quote.turn_id)
        except KeyError:
            raise item_not_found(quote.item_id, quote.param) from None
        messages[at] = quote.written_out(messages[at], said)
    return replace(call, messages=tuple(messages))


def continued(session: Session, call: ModelCall) -> ModelCall:
    """The call with the conversation that it continues before its own messages, after its instructions."""
    if call.continues is None:
        return call
    try:
        before = session.conversations.until(call.continues)
    except KeyError:
        raise Refused(
            Code.UNKNOWN_RESPONSE,
            f"Previous response with id '{call.echo['previous_response_id']}' not found: it is not of this episode, "
            "or was made with store: false; send the whole conversation as `input`",
            param="previous_response_id",
            retry=False,
        ) from None
    own = call.messages
    return replace(call, messages=own[: call.instructions] + before + own[call.instructions :])


def refuse_unenforced(call: ModelCall, grammar: str | None) -> None:
    """Raises:
    Refused: a strict schema that this engine cannot enforce. What is not strict is left to the model, and noted.
    """
    if grammar is None and call.format is not None and call.format.strict:
        raise unsupported(
            call.format.param, "this engine cannot enforce a schema; send strict: false to have it left to the model"
        )


def resolve_sampling(
    call: ModelCall,
    episode: SamplingConfig,
    stop_token_ids: tuple[int, ...],
    room: int,
    seed: int | None,
    grammar: str | None,
) -> SamplingParams:
    """What the engine is asked: the request's wishes over the episode's, unless those are pinned; limits clamped."""
    asked = call.sampling
    free = not episode.pinned
    stop = asked.stop if free and asked.stop is not None else tuple(episode.stop)
    top_k = asked.top_k if free and asked.top_k is not None else episode.top_k
    return SamplingParams(
        max_tokens=min(asked.max_tokens or episode.max_tokens, episode.max_tokens, room),
        temperature=asked.temperature if free and asked.temperature is not None else episode.temperature,
        top_p=(asked.top_p or 1e-6) if free and asked.top_p is not None else episode.top_p,
        top_k=max(0, top_k),
        stop=stop,
        stop_token_ids=stop_token_ids + (asked.stop_token_ids if free else ()),
        seed=seed,
        top_logprobs=call.top_logprobs,
        ignore_eos=asked.ignore_eos and free,
        grammar=grammar,
    )


def as_refusal(error: Exception) -> Refused:
    """Any error of a call, as the refusal its client is told."""
    match error:
        case Refused():
            return error
        case TemplateRefused():
            message = f"the model's chat template does not take this conversation: {error}"
            return Refused(Code.TEMPLATE_REFUSED, message, param="messages", retry=False)
        case UnknownEpisode():
            return Refused(
                Code.UNAUTHORIZED, "no episode has this key: claim one (POST /v1/episodes)", status=401, retry=False
            )
        case EpisodeError():
            return Refused(error.code, str(error), status=STATUS.get(error.code, 410), retry=False)
        case ControlRefused():
            body = error.body
            waits = body.retry_after_s is not None
            return Refused(body.code, body.message, status=503, retry_after_s=body.retry_after_s, retry=waits)
        case ContextOverflow():
            return Refused(Code.CONTEXT_LENGTH, str(error), param="messages", retry=False)
        case RequestRefused():
            return Refused(Code.BAD_REQUEST, str(error), retry=False)
        case web.RequestPayloadError():
            return Refused(Code.BAD_REQUEST, unreadable(error), retry=False)
        case web.HTTPRequestEntityTooLarge():
            return Refused(Code.BAD_REQUEST, f"the body is too large: {error.text}", status=413, retry=False)
        case GenerateFailed():
            return Refused(Code.INTERNAL, f"the engine failed on this request: {error}", status=500)
        case _:
            log.error("call failed", exc_info=error)
            return Refused(Code.INTERNAL, f"{type(error).__name__}: {error}; see the server's log", status=500)
