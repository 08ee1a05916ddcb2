"""A small world of apps with AppWorld's loop: contacts, mail, calendar, wallet; tasks with checks of the state.

What always holds: a world follows from its task alone; the score looks at the state of the apps and at nothing the
agent says: the share of the wanted changes that were made, and 0 as soon as anything else was changed, or nothing was.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mini_python

State = dict[str, Any]
NAMES = "Ada Brown|Ben Okafor|Chen Wei|Dana Novak|Eli Haddad|Fay Lindgren|Gus Romero|Hana Sato".split("|")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
EVENTS = ("dentist", "yoga", "team lunch", "piano lesson", "call with the bank", "haircut")


class ApiError(Exception):
    """What an API says when it cannot do what it was asked."""


class Apps:
    """The APIs, one method each, named APP_API; docstrings are what `apis.docs.show` tells."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.done = False

    def call(self, app: str, api: str, arguments: Mapping[str, Any]) -> Any:
        """Raises:
        ApiError: there is no such API, or the arguments do not fit.
        """
        method = getattr(type(self), f"{app}_{api}", None)
        if method is None:
            raise ApiError(f"there is no apis.{app}.{api}; apis.docs.show() lists what there is")
        try:
            inspect.signature(method).bind(self, **arguments)
        except TypeError as error:
            raise ApiError(f"apis.{app}.{api}: {error}; it is {signature_of(method)}") from None
        return copy.deepcopy(method(self, **arguments))

    def docs_show(self) -> str:
        """Lists all APIs."""
        return "\n".join(f"{signature_of(method)}: {inspect.getdoc(method)}" for method in apis())

    def supervisor_complete_task(self) -> str:
        """Says that you are done."""
        self.done = True
        return "the task is marked complete"

    def contacts_search(self, name: str) -> list[dict[str, str]]:
        """Contacts whose name contains `name`: name and email."""
        return [c for c in self.state["contacts"] if str(name).lower() in c["name"].lower()]

    def mail_list(self, sender: str = "") -> list[dict[str, Any]]:
        """Mails, newest first, of a sender's email or of all: mail_id, sender, subject, answered."""
        return [m for m in self.state["mail"] if sender in ("", m["sender"])]

    def mail_reply(self, mail_id: int, text: str) -> str:
        """Answers a mail."""
        mail = next((m for m in self.state["mail"] if m["mail_id"] == mail_id), None)
        if mail is None:
            raise ApiError(f"no mail {mail_id!r}")
        mail["answered"] = str(text)
        return "sent"

    def calendar_list(self, day: str = "") -> list[dict[str, Any]]:
        """Events of a day or of the week: event_id, day, title."""
        return [e for e in self.state["calendar"] if day in ("", e["day"])]

    def calendar_delete(self, event_id: int) -> str:
        """Deletes an event."""
        before = len(self.state["calendar"])
        self.state["calendar"] = [e for e in self.state["calendar"] if e["event_id"] != event_id]
        if len(self.state["calendar"]) == before:
            raise ApiError(f"no event {event_id!r}")
        return "deleted"

    def wallet_send(self, email: str, amount: int) -> str:
        """Sends money to somebody's email."""
        if email not in {c["email"] for c in self.state["contacts"]}:
            raise ApiError(f"nobody has the email {email!r}")
        if isinstance(amount, bool) or not isinstance(amount, int) or not 0 < amount <= self.state["wallet"]["balance"]:
            raise ApiError("the amount must be a whole number from 1 to the balance")
        self.state["wallet"]["balance"] -= amount
        self.state["wallet"]["sent"].append({"email": email, "amount": amount})
        return "sent"


def apis() -> list[Callable[..., Any]]:
    known = inspect.getmembers(Apps, inspect.isfunction)
    return [method for name, method in known if "_" in name.strip("_") and not name.startswith("_")]


def signature_of(method: Callable[..., Any]) -> str:
    app, _, api = method.__name__.partition("_")
    parameters = [str(p) for p in inspect.signature(method).parameters.values() if p.name != "self"]
    return f"apis.{app}.{api}({', '.join(parameters)})"


@dataclass(frozen=True)
class Errand:
    """Something to do, and how the world looks when it is done."""

    instruction: str
    steps: tuple[tuple[str, str, dict[str, Any]], ...]
    """Calls that do it: (app, API, arguments); the wanted state follows from them."""


class SmallWorld:
    def __init__(self, task_id: str) -> None:
        draw = random.Random(task_id)
        self._start = _state(draw)
        self._errand = _errand(task_id, self._start, draw)
        self._apps = Apps(copy.deepcopy(self._start))
        self._variables: dict[str, Any] = {}
        self.instruction = self._errand.instruction
        self.solution = self._errand.steps
        """Calls that do it; nothing the agent is told."""

    def execute(self, code: str) -> str:
        return mini_python.run(code, self._apps.call, self._variables)

    def completed(self) -> bool:
        return self._apps.done

    def score(self) -> float:
        """The largest share of the wanted calls whose effect, and nothing else, is seen in the state."""
        steps = self._errand.steps
        for count in range(len(steps), 0, -1):
            for first in range(len(steps) - count + 1):
                if self._apps.state == self._after(steps[first : first + count]):
                    return count / len(steps)
        return 0.0

    def close(self) -> None:
        """Nothing is held."""

    def _after(self, steps: tuple[tuple[str, str, dict[str, Any]], ...]) -> State:
        apps = Apps(copy.deepcopy(self._start))
        for app, api, arguments in steps:
            apps.call(app, api, arguments)
        return apps.state


def task_ids(count: int) -> list[str]:
    return [f"{kind}-{number}" for number in range((count + 2) // 3) for kind in ("pay", "clear", "reply")][:count]


def _state(draw: random.Random) -> State:
    names = draw.sample(NAMES, 5)
    people = [{"name": name, "email": name.lower().replace(" ", ".") + "@post.example"} for name in names]
    mails = [
        {"mail_id": 40 - n, "sender": draw.choice(people)["email"], "subject": f"note {n}", "answered": ""}
        for n in range(4)
    ]
    events = [{"event_id": 70 + n, "day": draw.choice(DAYS), "title": draw.choice(EVENTS)} for n in range(6)]
    return {"contacts": people, "mail": mails, "calendar": events, "wallet": {"balance": 200, "sent": []}}


def _errand(task_id: str, state: State, draw: random.Random) -> Errand:
    kind = task_id.partition("-")[0]
    if kind == "pay":
        person, amount = draw.choice(state["contacts"]), draw.randint(5, 60)
        call = ("wallet", "send", {"email": person["email"], "amount": amount})
        return Errand(f"Send {amount} to {person['name']} from my wallet.", (call,))
    if kind == "clear":
        day = draw.choice(sorted({event["day"] for event in state["calendar"]}))
        calls = [("calendar", "delete", {"event_id": e["event_id"]}) for e in state["calendar"] if e["day"] == day]
        return Errand(f"I am ill on {day}: delete all my events of that day.", tuple(calls))
    if kind == "reply":
        mail, text = draw.choice(state["mail"]), draw.choice(("yes", "no", "later"))
        newest = next(m for m in state["mail"] if m["sender"] == mail["sender"])
        name = next(c["name"] for c in state["contacts"] if c["email"] == mail["sender"])
        call = ("mail", "reply", {"mail_id": newest["mail_id"], "text": text})
        return Errand(f"Answer the newest mail from {name} with exactly '{text}'.", (call,))
    raise ValueError(f"{task_id!r}: a task of the small world begins with pay-, clear- or reply-")
