"""What the `a3r research` command is made of: goal in, study led, report out. No terminal in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a3r.attempts import Settings
from a3r.campaign import create
from a3r.compile import compile_goal
from a3r.goal import GoalLock
from a3r.hosts import Hosts, load_hosts
from a3r.leader import Decision, History, Leader, Verdict, make_leader
from a3r.ledger import Ledger
from a3r.questions import StoreJournal
from a3r.store import Store
from a3r.study import Study
from a3r.worker import Worker


class UsageError(RuntimeError):
    """The command cannot be carried out as given; the message says what to do."""


@dataclass(frozen=True)
class LeaderOptions:
    name: str = "adaptive"
    model: str | None = None
    base_url: str | None = None

    def checked(self) -> LeaderOptions:
        """Raises:
        UsageError: an LLM leader without a model.
        """
        if self.name not in ("adaptive", "llm"):
            raise UsageError(f"--leader {self.name}: unknown; known: adaptive, llm")
        if self.name == "llm" and not self.model:
            raise UsageError("--leader llm needs --model (and --base-url, where it is not OpenAI's)")
        return self


class Reports:
    """Stage and final reports as shipped; a study that had to stop gets the verdicts that its runs support."""

    def stage(self, campaign: Path, number: int, history: History) -> None:
        self._writer().stage(campaign, number, history)

    def final(self, campaign: Path, decision: Decision, history: History) -> Path | None:
        return self._writer().final(campaign, decision, history)

    def partial(self, goal: GoalLock, history: History, why: str) -> Decision:
        from a3r.analysis import conclude

        if not history.plans:
            return Decision(verdict=Verdict.NOT_MEASURED, sentence=f"Not answered: {why}.", notes=[why])
        return conclude(goal, history, notes=[f"ended early: {why}"])

    def _writer(self):
        from a3r.report import StudyReporter  # brings plotting along, which a study needs only at its ends

        return StudyReporter()


def _lock(campaign: Path) -> GoalLock:
    return GoalLock.from_yaml((campaign / "goal.lock.yaml").read_text(encoding="utf-8"))


def leader_for(store: Store, ledger: Ledger, options: Mapping[str, Any]) -> Leader:
    if options["name"] != "llm":
        return make_leader(options["name"])
    return make_leader(
        "llm",
        model=options["model"],
        base_url=options["base_url"],
        journal=StoreJournal(store, ledger),
    )


def helper_for(options: Mapping[str, Any], campaign: Path):
    """The LLM worker where the study has a model; else nobody."""

    def make(store: Store, ledger: Ledger, root: Path) -> Worker | None:
        if options["name"] != "llm":
            return None
        from a3r.leaders.llm import Model
        from a3r.workers.llm import LlmWorker

        model = Model(options["model"], options["base_url"])
        return LlmWorker(campaign, root, StoreJournal(store, ledger), model)

    return make


def prepare(
    goal: Path,
    directory: Path | None,
    leader: LeaderOptions,
    hosts_file: Path | None,
    answers: Mapping[str, Any],
    root: Path,
) -> tuple[Path, GoalLock]:
    """Compile a goal and make its campaign directory, or find the one that exists.

    Args:
        goal: goal.md, or the directory of a study that exists.

    Raises:
        FormatError, OpenQuestionsError: from compiling.
        CampaignError: the directory holds another study.
        UsageError: the goal's budget allows nothing.
    """
    if goal.is_dir():
        return goal, _lock(goal)
    target = directory or Path("runs") / goal.stem
    if (target / "goal.lock.yaml").exists() and goal.exists() and unchanged(goal, target):
        return target, _lock(target)
    lock = compiled(goal, leader.checked(), answers, root)
    create(
        target,
        goal.read_text(encoding="utf-8"),
        lock,
        root=root,
        leader=vars(leader.checked()),
        hosts=load_hosts(hosts_file),
    )
    return target, lock


def compiled(goal: Path, leader: LeaderOptions, answers: Mapping[str, Any], root: Path) -> GoalLock:
    """By the parser; what it leaves open is asked of the model, where there is one and nobody answered by hand."""
    if leader.name != "llm" or answers:
        return compile_goal(goal, answers, root)
    from a3r.leaders.llm import Model, compile_with_model

    return compile_with_model(goal, Model(leader.model or "", leader.base_url), root=root)


def unchanged(goal: Path, campaign: Path) -> bool:
    """Whether a study was started from exactly this goal file: then it goes on without compiling again."""
    copy = campaign / "goal.md"
    return copy.exists() and copy.read_bytes() == goal.read_bytes() and (campaign / "journal.db").exists()


def open_study(directory: Path, settings: Settings, hosts: Hosts | None = None) -> Study:
    """A campaign with everything as shipped."""
    store = Store.open_read_only(directory)
    facts = store.row("campaign", "facts") or {"leader": {"name": "adaptive"}}
    store.close()
    return Study.open(
        directory,
        make_leader=leader_for,
        reporter=Reports(),
        settings=settings,
        make_helper=helper_for(facts["leader"], directory.resolve()),
        hosts=hosts,
    )
