"""Scripted answers and a pretend update behind the backend contract: no torch, a real tokenizer, real token ids.

What it promises: the same request and script give the same tokens and logprobs; an update changes nothing but the
weight version and the list of episodes it has seen, and `save` writes that list, so that a test can prove from a
checkpoint which episodes the weights contain. It can be told to lose itself or to fail, as a real engine process
does.

Answers come from `engine.script`, a `module:function` taking (messages, request index) and returning text; without
one the last user message is echoed.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast, overload

from tokenizers import Tokenizer

from swarmtune.backend import BackendInfo, BackendLost, StartFailed
from swarmtune.config import TrainConfig
from swarmtune.types import FinishReason, GenerateChunk, GenerateRequest, SamplingParams, StepResult, TrainBatch

ScriptMessage = dict[str, str]
Script = Callable[[Sequence[ScriptMessage], int], str]
Act = Literal["start", "train", "save"]

_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)


class PromptMessages(Sequence[ScriptMessage]):
    """The prompt as {"role", "content"} messages, decoded when a script first looks at them.

    ChatML prompts are split into their messages; any other prompt is one user message.
    """

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._messages: list[ScriptMessage] | None = None

    def _decoded(self) -> list[ScriptMessage]:
        if self._messages is None:
            text = self._tokenizer.decode(list(self._token_ids), skip_special_tokens=False)
            found = [{"role": m[1], "content": m[2]} for m in _CHATML.finditer(text)]
            self._messages = found[:-1] if found else [{"role": "user", "content": text}]
        return self._messages

    def __len__(self) -> int:
        return len(self._decoded())

    @overload
    def __getitem__(self, index: int) -> ScriptMessage: ...
    @overload
    def __getitem__(self, index: slice) -> list[ScriptMessage]: ...
    def __getitem__(self, index: int | slice) -> ScriptMessage | list[ScriptMessage]:
        return self._decoded()[index]


def echo(messages: Sequence[ScriptMessage], index: int) -> str:
    """The built-in script: what the last user message said."""
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")


def load_script(spec: str | None) -> Script:
    """The callable that `module:function` names.

    Raises:
        StartFailed: no such module or function.
    """
    if spec is None:
        return echo
    module_name, _, function = spec.partition(":")
    try:
        script = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise StartFailed(
            f"engine.script: cannot load {spec!r} ({error}); give an importable `module:function`"
        ) from None
    if not callable(script):
        raise StartFailed(f"engine.script: {spec!r} is not callable; give a function (messages, index) -> text")
    return cast(Script, script)  # what it takes and returns shows when it is called


def pretend_logprob(token_id: int, position: int) -> float:
    """A logprob in (-2, 0) that depends only on token and position."""
    return -((token_id * 2654435761 + position * 40503) % 1999 + 1) / 1000.0


@lru_cache(maxsize=512)
def pretend_logprobs(token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """Of a whole answer; remembered, since a benchmark's answers repeat and its engine is not what it measures."""
    return tuple(pretend_logprob(token, at) for at, token in enumerate(token_ids))


class ScriptedBackend:
    """The backend contract with scripted answers; see the module's promise."""

    def __init__(self, script: Script | None = None) -> None:
        self._given_script = script
        self._script: Script = script or echo
        self._tokenizer: Tokenizer | None = None
        self._encode: Callable[[str], list[int]] = lambda text: []
        self._config: TrainConfig | None = None
        self._eos = 0
        self._index = itertools.count()
        self._version = 0
        self._trained: list[str] = []
        self._lost: asyncio.Future[str] | None = None
        self._open = asyncio.Event()
        self._planned: dict[Act, Exception] = {}
        self.requests: deque[GenerateRequest] = deque(maxlen=100)
        """The last ones, oldest first."""
        self.in_flight = 0
        """Generations running now."""
        self.cancelled = 0
        """Generations closed before their last chunk."""

    # -- what tests ask for

    def lose(self, reason: str = "told to") -> None:
        """Die as an engine process does: every call, now and later, raises BackendLost until the next start."""
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(reason)
        self._open.set()

    def fail_next(self, act: Act, error: Exception) -> None:
        """Let the next start, train or save raise `error`."""
        self._planned[act] = error

    @property
    def trained_episodes(self) -> list[str]:
        """Episodes the pretend weights contain, in order of training."""
        return list(self._trained)

    # -- the contract

    async def start(self, config: TrainConfig, *, work_dir: Path, resume: Path | None) -> BackendInfo:
        self._raise_planned("start")
        folder = await asyncio.to_thread(model_folder, config.model)
        self._script = self._given_script or load_script(config.engine.script)
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
            raise StartFailed(f"{folder}/tokenizer.json: {error}; give a Hugging Face model folder") from error
        self._tokenizer = tokenizer
        self._encode = lru_cache(maxsize=512)(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
        self._eos = end_token(folder)
        self._config = config
        self._version, self._trained = load_checkpoint(resume) if resume else (0, [])
        self._lost = asyncio.get_running_loop().create_future()
        self._open.set()
        return BackendInfo(
            model_path=folder,
            model_name=config.model if not Path(config.model).exists() else folder.name,
            context_length=min(config.engine.context_length, trained_context(folder)),
            weight_version=self._version,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        await self._open.wait()
        self._raise_if_lost()
        self.requests.append(request)
        assert self._tokenizer is not None and self._config is not None
        sampling, version = request.sampling, self._version
        text = self._script(PromptMessages(self._tokenizer, request.prompt_token_ids), next(self._index))
        ids, finish, stop_string = self._answer(text, sampling)
        logprobs = list(pretend_logprobs(tuple(ids)))
        top = _alternatives(ids, logprobs, sampling.top_logprobs) if sampling.top_logprobs else None
        self.in_flight += 1
        done = 0
        try:
            if pace := self._config.engine.script_tokens_per_s:
                while done < len(ids) - 1:
                    await self._sleep(1.0 / pace)
                    yield GenerateChunk(
                        ids[done : done + 1],
                        logprobs[done : done + 1],
                        version,
                        top_logprobs=top[done : done + 1] if top else None,
                    )
                    done += 1
                await self._sleep(1.0 / pace)
            last = GenerateChunk(
                ids[done:], logprobs[done:], version, finish, stop_string, top[done:] if top is not None else None
            )
            done = -1
            yield last
        finally:
            self.in_flight -= 1
            self.cancelled += done >= 0

    async def train(self, batch: TrainBatch) -> StepResult:
        self._raise_if_lost()
        assert self._config is not None
        if not self._config.batching.overlap:
            self._open.clear()
        try:
            await self._sleep(self._config.engine.script_update_s)
            self._raise_planned("train")
            self._trained += [episode.episode_id for episode in batch.episodes]
            self._version = batch.step
        finally:
            self._open.set()
        if batch.supervised_lr is not None:
            metrics = {"sft/loss": 1.0 / batch.step, "actor/lr": batch.supervised_lr}
            return StepResult(step=batch.step, weight_version=self._version, metrics=metrics)
        rewards = [episode.reward for episode in batch.episodes]
        tokens = sum(episode.sampled_tokens for episode in batch.episodes)
        return StepResult(
            step=batch.step,
            weight_version=self._version,
            metrics={
                "actor/pg_loss": -sum(rewards) / max(1, len(rewards)) / 100,
                "actor/grad_norm": 1.0 / math.sqrt(batch.step),
                "actor/lr": self._config.optim.lr,
                "train/tokens": float(tokens),
            },
        )

    async def save(self, path: Path) -> None:
        self._raise_if_lost()
        self._raise_planned("save")
        await asyncio.to_thread(write_checkpoint, path, self._version, self._trained)

    async def wait_lost(self) -> str:
        if self._lost is None:
            return await asyncio.Future()
        return await asyncio.shield(self._lost)

    async def stop(self, *, grace_s: float = 10.0) -> None:
        self.lose("stopped")

    # -- inside

    def _answer(self, text: str, sampling: SamplingParams) -> tuple[list[int], FinishReason, str | None]:
        """Token ids of `text` with its end token, cut by stop strings and the token limit."""
        ids = list(self._encode(text))
        finish, stop_string = FinishReason.STOP, None
        if sampling.ignore_eos and ids:
            ids = list(itertools.islice(itertools.cycle(ids), sampling.max_tokens))
            finish = FinishReason.LENGTH
        elif sampling.stop and (hit := self._first_stop(ids, sampling.stop)):
            length, stop_string = hit
            ids = ids[:length]
        else:
            ids.append(sampling.stop_token_ids[0] if sampling.stop_token_ids else self._eos)
        if len(ids) > sampling.max_tokens:
            ids, finish, stop_string = ids[: sampling.max_tokens], FinishReason.LENGTH, None
        return ids, finish, stop_string

    def _first_stop(self, ids: list[int], stops: Sequence[str]) -> tuple[int, str] | None:
        """Tokens up to and with the one that completes the earliest stop string."""
        assert self._tokenizer is not None
        for length in range(1, len(ids) + 1):
            text = self._tokenizer.decode(ids[:length])
            if found := [s for s in stops if s in text]:
                return length, min(found, key=text.index)
        return None

    async def _sleep(self, seconds: float) -> None:
        """Sleep, or raise as soon as the backend is lost."""
        assert self._lost is not None
        if seconds > 0 and not self._lost.done():
            await asyncio.wait([self._lost], timeout=seconds)
        self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        if self._lost is None:
            raise BackendLost("the scripted backend has not been started")
        if self._lost.done():
            raise BackendLost(self._lost.result())

    def _raise_planned(self, act: Act) -> None:
        error = self._planned.pop(act, None)
        if error is not None:
            raise error


def _alternatives(ids: Sequence[int], logprobs: Sequence[float], k: int) -> list[dict[int, float]]:
    return [{token: lp} | {token + n: lp - n for n in range(1, k)} for token, lp in zip(ids, logprobs, strict=True)]


def model_folder(model: str) -> Path:
    """The folder a configuration's `model` means.

    Raises:
        StartFailed: no such model.
    """
    if (Path(model).expanduser() / "tokenizer.json").is_file():
        return Path(model).expanduser()
    from swarmtune.models import ModelError, resolve  # only a catalogue name needs the catalogue

    try:
        return resolve(model)
    except (ModelError, OSError) as error:
        raise StartFailed(str(error)) from error


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def end_token(folder: Path) -> int:
    """The model's end-of-sequence token id, from its configuration files."""
    for name in ("generation_config.json", "config.json"):
        eos = _json(folder / name).get("eos_token_id")
        if eos is not None:
            return int(eos[0] if isinstance(eos, list) else eos)
    return 0


def trained_context(folder: Path) -> int:
    """Tokens the model was made for."""
    return int(_json(folder / "config.json").get("max_position_embeddings", 1 << 20))


def load_checkpoint(path: Path) -> tuple[int, list[str]]:
    """Step and episodes of a checkpoint.

    Raises:
        StartFailed: it is missing or damaged.
    """
    try:
        state = json.loads((path / "state.json").read_text())
        return state["step"], state["episodes"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StartFailed(f"{path}: the checkpoint cannot be read ({error})") from error


def write_checkpoint(path: Path, step: int, episodes: list[str]) -> None:
    """Complete or absent: written beside its place, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        (scratch / "state.json").write_text(json.dumps({"step": step, "episodes": episodes}))
        if path.exists():
            shutil.rmtree(path)
        os.rename(scratch, path)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
