"""The child process of `a3r client check`: imports a project, plays it, and writes what it finds, a JSON line each.

    python -m a3r.client.probe play|replay|train FOLDER RECORDS [--limit S] [--episodes N] [--network]

`play` makes the checks, `replay` only repeats a few episodes for a comparison between processes, `train` does one step
by the script's own command line. A check is announced before it runs, so that whoever started this process and had to
end it knows where it was. The project's own prints go to standard output, the records to a file.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import inspect
import json
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from pydantic import ValidationError

from a3r.client import project as projects
from a3r.client.project import CountingRandom, Project, ProjectError, where_of
from a3r.client.stubs import Policy, Stub, last_message, random_words, stubs
from a3r.client.verdicts import FIRST_LOOK, Comparison, compare
from swarmtune.errors import BadReward
from swarmtune.rehearsal import Answer, Messages, Outage, Played, Rehearsal
from swarmtune.rollout import episode_seed, task_id_of

REPLAYED = 8
"""Episodes played again with the same seed and the same answers."""
SEEDS = (0, 1, 2)
SHOWN_TURNS, SHOWN_CHARACTERS, SHOWN_STUBS = 12, 600, 3
_BASELINE, _GOOD = "random baseline", "good answers"


class Failed(Exception):
    """A check's verdict is no; the message says what to change."""

    def __init__(self, sentence: str, **details: Any) -> None:
        super().__init__(sentence)
        self.details = details


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Carry out one mode and leave at once: threads of hanging rollouts would keep the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("play", "replay", "train"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--limit", type=float, default=30.0)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--network", action="store_true")
    options = parser.parse_args(argv)
    if not options.network:
        keep_off_the_network()
    records = Records(options.records)
    status = 0
    try:
        if options.mode == "train":
            status = train_one_step(options.folder)
        else:
            with Rehearsal() as stage:
                threading.Thread(target=watch, args=(stage, options.limit, records), daemon=True).start()
                player = Player(stage, options.limit)
                if options.mode == "play":
                    random.Random = CountingRandom  # before the project imports it
                    Checks(lambda: projects.load(options.folder), records, player, options.episodes).run()
                else:
                    records.write("replayed", fingerprint(projects.load(options.folder), player))
    except ProjectError as error:
        records.write("broken", {"sentence": str(error)})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def watch(stage: Rehearsal, limit_s: float, records: Records) -> None:
    """End this process when its event loop stands still: no time limit of an episode can be heard then."""
    while stage.responds_within(limit_s):
        time.sleep(0.5)
    records.write("blocked", {})
    os._exit(1)


class Records:
    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, kind: str, facts: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind} | facts, default=repr) + "\n")


# ---- the checks ------------------------------------------------------------------------------------------------------


class Checks:
    """The checks of one process, in order. One that fails ends those that need what it checks."""

    def __init__(self, load: Callable[[], Project], records: Records, player: Player, episodes: int) -> None:
        self._load = load
        self._records = records
        self._player = player
        self._episodes = episodes
        self._project: Project | None = None
        self._tasks: list[Any] = []
        self._plays: dict[str, list[Played]] = {}

    def run(self) -> None:
        first = (self.imports, self.light, self.tasks, self.episode)
        if all(self._carry_out(check) for check in first) and self._carry_out(self.reward):
            for check in (self.seeded, self.aborts, self.stubs, self.learnable):
                self._carry_out(check)

    def _carry_out(self, check: Callable[[], str]) -> bool:
        self._records.write("begin", {"check": check.__name__})
        verdict, details = "pass", {}
        try:
            sentence = check()
        except Failed as failure:
            verdict, sentence, details = "fail", str(failure), failure.details
        self._records.write(
            "end", {"check": check.__name__, "verdict": verdict, "sentence": sentence, "details": details}
        )
        return verdict == "pass"

    @property
    def _loaded(self) -> Project:
        assert self._project is not None
        return self._project

    def imports(self) -> str:
        """train.py can be imported, has one Script, and its defaults are a configuration."""
        try:
            heard = Heard(sys.stdout)
            with contextlib.redirect_stdout(cast(TextIO, heard)):
                self._project = self._load()
        except ProjectError as error:
            raise Failed(str(error) + network_note()) from None
        if heard.head.strip():
            raise Failed(
                f"importing train.py prints {heard.head[:80]!r}: that spoils `train.py --print-schema`, which a study "
                "reads; print in functions, or log"
            )
        return f"train.py has the Script {self._project.script.name!r}"

    def light(self) -> str:
        """No GPU library is imported."""
        found = projects.gpu_libraries()
        if found:
            raise Failed(
                f"importing train.py imports {', '.join(found)}: a client needs no GPU library; import it inside the "
                "function that needs it, or leave it to the server"
            )
        return "imports none of " + ", ".join(projects.GPU_LIBRARIES)

    def tasks(self) -> str:
        """Tasks are named, enough, the same for the same seed, and others for another one where they are drawn."""
        by_seed, draws = zip(*(self._tasks_and_draws(seed) for seed in SEEDS), strict=True)
        self._tasks = mixed(by_seed[0])
        ids = [_task_id(task) for task in by_seed[0]]
        need = self._loaded.config.client_share or self._loaded.config.batch_tasks
        if len(set(ids)) < len(ids):
            twice = Counter(ids).most_common(1)[0][0]
            raise Failed(f"two tasks have the task_id {twice!r}: their episodes would count as one task's; name each")
        if len(ids) < need:
            raise Failed(f"{len(ids)} tasks, but a step takes {need} different ones: make more, or lower batch_tasks")
        if digest(tasks_of(self._loaded, SEEDS[0])) != digest(by_seed[0]):
            raise Failed(
                "the same seed gives other tasks the second time: draw from random.Random(seed), not from the global "
                "generator, the clock or a set's order"
            )
        if len({digest(tasks) for tasks in by_seed}) > 1:
            return f"{len(ids)} tasks, the same for the same seed, others for another one"
        if draws[0] and len(set(draws)) == 1:
            raise Failed(
                f"tasks are drawn at random, but seeds {SEEDS} give the same ones: give the seed that "
                "tasks(parameters, seed) gets to random.Random"
            )
        return f"{len(ids)} tasks, the same for every seed: right where they are all there are"

    def _tasks_and_draws(self, seed: int) -> tuple[list[Any], str]:
        """The tasks of a seed, and what random numbers were drawn from meanwhile; empty where none were."""
        CountingRandom.seeds.clear()
        state = random.getstate()
        tasks = tasks_of(self._loaded, seed)
        moved = digest(random.getstate()) if random.getstate() != state else ""
        return tasks, "/".join([*CountingRandom.seeds, moved])

    def episode(self) -> str:
        """One episode is played to its end and asks the model."""
        played = self._play(_GOOD if self._loaded.good_answer else _BASELINE, 1)[0]
        if not played.turns:
            raise Failed(
                "the episode never asked the model, so there is nothing to train: call episode.base_url with "
                "episode.api_key" + network_note()
            )
        return f"one episode of {len(played.turns)} model calls ended with reward {played.reward:g}"

    def reward(self) -> str:
        """Every answer gets a finite number: random, empty, copied and good ones."""
        names = [_BASELINE, *([_GOOD] if self._loaded.good_answer else []), "empty", "copy of the prompt"]
        count = sum(len(self._play(name, REPLAYED)) for name in names)
        return f"a finite number in each of {count} episodes"

    def seeded(self) -> str:
        """The same seed and the same answers give the same reward."""
        first = self._play(_BASELINE, REPLAYED)
        again = self._player.play(self._loaded, self._tasks, self._policy(_BASELINE), range(len(first)))
        for one, other in zip(first, again, strict=True):
            if one.reward != other.reward:
                raise Failed(
                    f"task {one.task_id!r} with seed {one.seed} earned {one.reward!r}, then {other.reward!r} for the "
                    "same answers: draw everything from random.Random(episode.seed)"
                )
        self._records.write("played", fingerprint_of(self._tasks, first))
        return f"{len(first)} episodes played twice earned the same"

    def aborts(self) -> str:
        """A failing endpoint is an exception, not a reward."""

        def outage(task: Any, messages: Messages, rng: random.Random) -> str:
            raise Outage("rehearsed")

        played = self._player.play(self._loaded, self._tasks, outage, range(1))[0]
        if played.error is None:
            raise Failed(
                f"the model's endpoint failed and the rollout returned the reward {played.reward!r}: an outage would "
                "be trained as a bad answer; let the exception travel, the episode is then aborted and tried again"
            )
        if isinstance(played.error, TimeoutError):
            raise Failed(
                f"the model's endpoint failed and the rollout was still busy after {self._player.limit_s:g} s: bound "
                "its retries and let the exception travel"
            )
        return f"an endpoint that fails aborts the episode ({type(played.error).__name__})"

    def stubs(self) -> str:
        """No policy without understanding earns more than the random baseline."""
        plays = self._play(_BASELINE, FIRST_LOOK)
        prompts = [turn.messages[-1]["content"] for played in plays for turn in played.turns if turn.messages]
        good = [turn.answer for played in self._good(FIRST_LOOK) for turn in played.turns]
        found = stubs(prompts, good)
        for stub in found:
            self._stub_policies[stub.name] = stub.policy
        won = [(stub, result) for stub in found if (result := self._compare(stub, len(found))).wins]
        won = [(stub, result) for stub, result in won if not self._is_the_answer(stub)]
        if won:
            stub, result = max(won, key=lambda pair: pair[1].edge)
            worst = sorted(won, key=lambda pair: -pair[1].edge)[:SHOWN_STUBS]
            names = "; ".join(f"{stub.name}: {words(result)}" for stub, result in worst)
            raise Failed(
                f"the reward is won without understanding ({names}): make such answers earn no more than random ones",
                transcript=self._transcript(stub, result),
                won=[stub.name for stub, _ in won],
            )
        declared = "random_answer" if self._loaded.random_answer else "random words; checks.py may declare another"
        baseline = _mean(self._play(_BASELINE, self._episodes))
        return f"{len(found)} stub policies earn no more than the baseline's {baseline:.3g} ({declared})"

    def learnable(self) -> str:
        """Good answers earn more than random ones."""
        if self._loaded.good_answer is None:
            spread = self._to_win()
            if not any(len(set(rewards)) > 1 for rewards in self._rewards_by_episode()):
                raise Failed(
                    "each episode earned the same whatever was answered, so nothing shows that a better answer earns "
                    "more: declare good_answer(task, messages) in checks.py"
                )
            return f"rewards between answers differ by up to {spread:.3g}; good_answer in checks.py would say by what"
        result = compare(
            _rewards(self._good(self._episodes)),
            _rewards(self._play(_BASELINE, self._episodes)),
            to_win=0.0,
            comparisons=1,
        )
        if not result.wins:
            raise Failed(
                f"good answers earn no more than random ones ({words(result)}): the reward must tell them apart",
                transcript=self._transcript(Stub(_GOOD, self._policy(_GOOD)), result),
            )
        return f"good answers earn {result.policy:.3g}, random ones {result.baseline:.3g}"

    # -- playing

    def _compare(self, stub: Stub, comparisons: int) -> Comparison:
        """A stub that is not ahead after the first look is done with."""
        result = None
        for episodes in sorted({min(FIRST_LOOK, self._episodes), self._episodes}):
            plays, baseline = self._play(stub.name, episodes), self._play(_BASELINE, episodes)
            result = compare(_rewards(plays), _rewards(baseline), to_win=self._to_win(), comparisons=comparisons)
            if not result.ahead:
                break
        assert result is not None
        return result

    def _is_the_answer(self, stub: Stub) -> bool:
        """Whether copying is the task: it says what the good answers say, word for word, in every episode."""
        said = [[turn.answer for turn in played.turns] for played in self._play(stub.name, FIRST_LOOK)]
        good = [[turn.answer for turn in played.turns] for played in self._good(FIRST_LOOK)]
        return stub.copies and said == good

    def _to_win(self) -> float:
        """From the baseline to the good answers; without those, from the lowest to the highest reward seen."""
        if self._loaded.good_answer is not None:
            gain = _mean(self._good(self._episodes)) - _mean(self._play(_BASELINE, self._episodes))
            if gain > 0.0:
                return gain
        seen = [reward for plays in self._plays.values() for reward in _rewards(plays)]
        return max(seen) - min(seen)

    def _rewards_by_episode(self) -> Iterator[list[float]]:
        """Of every episode (a task, a seed) what the policies that played it earned."""
        for index in range(max(map(len, self._plays.values()))):
            yield [float(plays[index].reward) for plays in self._plays.values() if index < len(plays)]

    def _good(self, episodes: int) -> list[Played]:
        return self._play(_GOOD, episodes) if self._loaded.good_answer else []

    def _play(self, name: str, episodes: int) -> list[Played]:
        """The first so many episodes of a policy; each is played once.

        Raises:
            Failed: one of them ended by no finite reward.
        """
        have = self._plays.setdefault(name, [])
        if len(have) < episodes:
            more = self._player.play(self._loaded, self._tasks, self._policy(name), range(len(have), episodes))
            for played in more:
                if sentence := what_is_wrong(played, self._player):
                    where = f"({name}, task {played.task_id!r})"
                    raise Failed(f"{sentence} {where}", transcript=transcript_of(played))
            have += more
        return have[:episodes]

    def _policy(self, name: str) -> Policy:
        if name == _BASELINE:
            return self._loaded.random_answer or random_words
        if name == _GOOD:
            good = self._loaded.good_answer
            assert good is not None
            return lambda task, messages, rng: good(task, messages)
        return self._stub_policies[name]

    @functools.cached_property
    def _stub_policies(self) -> dict[str, Policy]:
        return {"empty": lambda task, messages, rng: "", "copy of the prompt": last_message}

    def _transcript(self, stub: Stub, result: Comparison) -> str:
        """The episode in which a policy was furthest ahead of the baseline, and the baseline's."""
        pairs = list(zip(self._play(stub.name, result.n), self._play(_BASELINE, result.n), strict=True))
        best, beaten = max(pairs, key=lambda pair: pair[0].reward - pair[1].reward)
        return (
            f"--- {stub.name}, task {best.task_id!r}, reward {best.reward:g}\n{transcript_of(best)}\n"
            f"--- {_BASELINE}, the same task and seed, reward {beaten.reward:g}\n{transcript_of(beaten)}"
        )


# ---- playing ---------------------------------------------------------------------------------------------------------


class Player:
    """Plays policies on a project's tasks; episode i is task i with a seed of its own."""

    def __init__(self, stage: Rehearsal, limit_s: float) -> None:
        self._stage = stage
        self.limit_s = limit_s
        self.broken_policy: str | None = None
        """What a function of checks.py did wrong."""

    def play(self, project: Project, tasks: Sequence[Any], policy: Policy, which: Iterable[int]) -> list[Played]:
        parts = []
        for index in which:
            task, seed = tasks[index % len(tasks)], episode_seed(0, "client check", index)
            parts.append((task, self._answer(policy, task, seed), seed))
        rollout = shielded(project.script.rollout)
        first = self._stage.play_all(rollout, parts[:1], timeout_s=self.limit_s)
        if first and isinstance(first[0].error, TimeoutError):
            return [*first * len(parts)]  # one that hangs is not started again
        return first + self._stage.play_all(rollout, parts[1:], timeout_s=self.limit_s)

    def _answer(self, policy: Policy, task: Any, seed: int) -> Answer:
        """Random numbers follow from the episode and from what is asked, whatever else is asked at the same time."""

        def answer(messages: Messages) -> str:
            said = policy(task, messages, random.Random(f"{seed}/{digest(list(messages))}"))
            if not isinstance(said, str):
                raise TypeError(f"an answer must be text, not {type(said).__name__}")
            return said

        def noted(messages: Messages) -> str:
            try:
                return answer(messages)
            except Outage:
                raise
            except Exception as error:
                self.broken_policy = f"{getattr(policy, '__name__', 'the policy')} of checks.py: {error!r}"
                raise

        return noted


def shielded(rollout: Callable[..., Any]) -> Callable[..., Any]:
    """A rollout whose sys.exit or KeyboardInterrupt is its own failure and not the end of this process."""
    if inspect.iscoroutinefunction(rollout):

        async def shielded_async(task: Any, episode: Any) -> Any:
            try:
                return await rollout(task, episode)
            except (SystemExit, KeyboardInterrupt) as error:
                raise _own_failure(error) from error

        return shielded_async

    def shielded_plain(task: Any, episode: Any) -> Any:
        try:
            return rollout(task, episode)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _own_failure(error) from error

    return shielded_plain


def _own_failure(error: SystemExit | KeyboardInterrupt) -> RuntimeError:
    if isinstance(error, SystemExit):
        return RuntimeError(f"the rollout called sys.exit({error.code!r})")
    return RuntimeError("the rollout raised KeyboardInterrupt itself: raise an Exception")


def what_is_wrong(played: Played, player: Player) -> str | None:
    """Why an episode has no finite reward, and what to change; None where it has one."""
    error = played.error
    if player.broken_policy is not None:
        return f"{player.broken_policy}: repair that function"
    if isinstance(error, TimeoutError):
        return (
            f"an episode was not over after {player.limit_s:g} s: bound the agent's loops and give its requests a "
            "timeout (or give --limit more)"
        )
    returned = error is None or isinstance(error, BadReward) or played.reward is not None
    if returned and (problem := reward_problem(played.reward)):
        return problem
    if error is None:
        return None
    if isinstance(error, ValidationError):
        wrong = "; ".join(f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors()[:3])
        return f"the episode cannot end with what the rollout returned ({wrong}): metrics are names with numbers"
    here = where_of(error, Path.cwd())
    return f"the rollout raised {type(error).__name__}: {_first_line(error)} ({here}){network_note()}"


def reward_problem(reward: Any) -> str | None:
    if isinstance(reward, bool):
        return f"the reward is {reward}, a bool: return float(…), 1.0 or 0.0"
    if reward is None:
        return "the rollout returned no reward: return a number, or (reward, metrics)"
    if not isinstance(reward, (int, float)):
        return f"the reward is {reward!r:.80}, a {type(reward).__name__}: return a finite number, or (reward, metrics)"
    try:
        number = float(reward)
    except OverflowError:
        return "the reward is a whole number too large for a float: bound it, best to [0, 1]"
    if not math.isfinite(number):
        return f"the reward is {reward}: return a finite number; guard the division or the logarithm it comes from"
    return None


def transcript_of(played: Played) -> str:
    """The calls of an episode: what was asked last, and what was said."""
    lines = []
    for turn in played.turns[:SHOWN_TURNS]:
        asked = turn.messages[-1] if turn.messages else {"role": "nobody", "content": ""}
        lines.append(f"{asked['role']}: {_cut(asked['content'])}")
        lines.append(f"model: {_cut(turn.answer)}")
    if len(played.turns) > SHOWN_TURNS:
        lines.append(f"({len(played.turns) - SHOWN_TURNS} more calls)")
    return "\n".join(lines)


def words(result: Comparison) -> str:
    return (
        f"{result.policy:.3g} against {result.baseline:.3g} at random, {result.edge:+.3g} over {result.n} episodes, "
        f"at least {result.low:+.3g}, allowed {result.margin:.3g}"
    )


# ---- between processes -----------------------------------------------------------------------------------------------


def tasks_of(project: Project, seed: int) -> list[Any]:
    """Raises:
    Failed: the project's tasks function raises or gives no tasks.
    """
    try:
        found = project.script.tasks(project.config.parameters, seed)
        if not isinstance(found, Sequence):
            raise TypeError(f"a {type(found).__name__} is no list: return a list of tasks")
        tasks = list(found)
    except Exception as error:
        where = where_of(error, project.folder)
        raise Failed(f"tasks(parameters, {seed}) raised {error!r} ({where}){network_note()}") from error
    if not tasks:
        raise Failed("tasks(parameters, seed) gives no tasks: return a list of them")
    return tasks


def mixed(tasks: Sequence[Any]) -> list[Any]:
    """Tasks in another order: the first of a list are often alike, and the checker plays the first."""
    return random.Random(0).sample(tasks, len(tasks))


def _task_id(task: Any) -> str:
    try:
        return task_id_of(task)
    except TypeError as error:
        raise Failed(str(error)) from None


def fingerprint(project: Project, player: Player) -> dict[str, Any]:
    """Tasks and rewards as this process sees them."""
    tasks = mixed(tasks_of(project, SEEDS[0]))
    return fingerprint_of(tasks, player.play(project, tasks, project.random_answer or random_words, range(REPLAYED)))


def fingerprint_of(tasks: Sequence[Any], plays: Sequence[Played]) -> dict[str, Any]:
    return {"tasks": digest(tasks), "rewards": [repr(played.reward) for played in plays]}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=_described).encode()).hexdigest()


def _described(value: Any) -> Any:
    """An object whose repr is only its address is what it holds."""
    return vars(value) if type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__") else repr(value)


def train_one_step(folder: Path) -> int:
    """One step by the script's own command line, on scripted answers."""
    from swarmtune.script import main as script_main
    from swarmtune.testing import chatml_model

    project = projects.load(folder)
    with tempfile.TemporaryDirectory(prefix="client-check-") as scratch:
        settings = {
            "engine.kind": "scripted",
            "engine.context_length": 65536,
            "model": str(chatml_model(Path(scratch) / "model", context=65536)),
            "batch_tasks": 2,
            "repeats": 2,
            "client_name": "check",
            "client_share": 2,
            "eval.repeats": 0,
            "algorithm.mini_batches": 1,
            "checkpoint.every_steps": 0,
        }
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        return script_main(project.script, ["--out", f"{scratch}/out", "--steps", "1", *sets])


# ---- the network -----------------------------------------------------------------------------------------------------

_wanted: list[str] = []
"""Hosts that were asked for and refused."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "", None})


def keep_off_the_network() -> None:
    """Refuse every address but this machine's own, from now on and for good."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.getaddrinfo":
            host = arguments[0]
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            host = arguments[1][0]
        else:
            return
        host = host.decode(errors="replace") if isinstance(host, bytes) else host
        if host not in _LOOPBACK and not str(host).startswith("127."):
            _wanted.append(str(host))
            raise ConnectionRefusedError(f"the check runs without network, {host} cannot be reached")

    sys.addaudithook(refuse)


def network_note() -> str:
    if not _wanted:
        return ""
    return (
        f"; it wanted to reach {_wanted[0]}, and the check has no network: ship the data, stand in for the service, or "
        "allow it with --network"
    )


class Heard:
    """A stream that keeps the beginning of what is written; all else of it is the stream's."""

    def __init__(self, through: TextIO) -> None:
        self._through = through
        self.head = ""

    def write(self, text: str) -> int:
        self.head += text[: 200 - len(self.head)] if len(self.head) < 200 else ""
        return self._through.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._through, name)


# ---- small things ----------------------------------------------------------------------------------------------------


def _rewards(plays: Sequence[Played]) -> list[float]:
    return [float(played.reward) for played in plays]


def _mean(plays: Sequence[Played]) -> float:
    return math.fsum(_rewards(plays)) / len(plays)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text)} characters)"


if __name__ == "__main__":
    main()
