"""appworld: an agent does errands with apps, in a small world and, over AppWorld's server protocol, in the real one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mini_python
import pytest
import real_appworld
import small_world
from environment import EnvironmentBroken
from example_runs import Train, load

from swarmtune.config import ConfigError

example = load("appworld")


# -- the small world


def test_an_agent_that_does_its_errands_trains(train: Train):
    run = train(example.APPWORLD, "example_models:errands", {"task.count": 6, "batch_tasks": 3})
    assert run.status == 0 and run.outcomes().count("admitted") >= 6
    step = run.metrics[0]
    assert 0 < step["reward/mean"] < 1 and step["client/turns"] > 1
    assert step["batch/rows"] == step["episodes/trained"], "all turns of an episode are one row"


@pytest.mark.parametrize("task_id", small_world.task_ids(9))
def test_every_errand_can_be_done_and_doing_nothing_or_too_much_is_worth_nothing(task_id: str):
    world = small_world.SmallWorld(task_id)
    assert world.score() == 0.0 and not world.completed()
    for app, api, arguments in world._errand.steps:
        world.execute(f"apis.{app}.{api}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})")
    assert world.score() == 1.0
    world.execute("apis.supervisor.complete_task()")
    assert world.completed() and world.score() == 1.0
    world.execute("apis.wallet.send(email=apis.contacts.search(name='')[0]['email'], amount=1)")
    assert world.score() == 0.0, "something else was changed"


def test_saying_that_it_is_done_is_worth_nothing():
    world = small_world.SmallWorld("pay-0")
    world.execute("apis.supervisor.complete_task()")
    assert world.completed() and world.score() == 0.0


def test_a_world_follows_from_its_task():
    first, again = small_world.SmallWorld("clear-3"), small_world.SmallWorld("clear-3")
    show = "print(apis.mail.list(), apis.calendar.list(), apis.contacts.search(name=''))"
    assert first.instruction == again.instruction and first.execute(show) == again.execute(show)


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("apis.bank.rob()", "there is no apis.bank.rob; apis.docs.show() lists"),
        ("apis.wallet.send(who='x')", "it is apis.wallet.send(email: 'str', amount: 'int')"),
        ("apis.wallet.send(email='x@y', amount=3)", "nobody has the email 'x@y'"),
        ("apis.mail.reply(99, 'x')", "give its arguments by name"),
        ("apis.docs.__init__()", "there is no apis.docs.__init__"),
        ("apis.state.clear()", "there is no apis.state.clear"),
        ("print(", "SyntaxError"),
        ("x", "NameError: name 'x' is not defined"),
        ("().__class__.__bases__", "Attribute is not supported here"),
        ("__import__('os').system('id')", "can be called"),
        ("open('/etc/passwd')", "can be called"),
        ("def f(): pass", "FunctionDef is not supported here"),
        ("for a in 'x' + 'y':\n  for b in [1] :\n    print(a, b)", "x 1\ny 1"),
        ("items = [1, 2, 3]\nfor i in items:\n  if i > 1 and i != 3:\n    print(f'got {i}')", "got 2"),
        ("'a' + 'b'", "'ab'"),
    ],
)
def test_a_program_is_told_what_it_did_wrong_and_reaches_nothing_else(code: str, printed: str):
    assert printed in small_world.SmallWorld("pay-0").execute(code)


def test_a_program_has_a_budget():
    def call(app: str, api: str, arguments: Any) -> Any:
        return list(range(10**5))

    assert "more than 2000 steps" in mini_python.run("for i in apis.a.b():\n  x = i", call)
    assert len(mini_python.run("for i in apis.a.b():\n  print('x' + 'y')", call)) <= 4000
    assert "Error" in mini_python.run("(" * 500 + "1" + ")" * 500, call)


def test_a_turn_without_code_is_told_so():
    assert example.code_of("I would send the money.") == ""
    assert example.code_of("Sure.\n```python\nprint(1)\n```\nand then\n```\n2\n```") == "print(1)"
    assert example.code_of("```\nprint(1)") == "print(1)"


# -- the real one


class StandIn(ThreadingHTTPServer):
    """Answers as AppWorld's environment server does, with a small world behind it."""

    daemon_threads = True
    world: small_world.SmallWorld | None = None
    broken = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def output(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/initialize":
            self.world = small_world.SmallWorld(body["task_id"])
            person = {"first_name": "Ada", "last_name": "B", "email": "a@b", "phone_number": "1"}
            return {"task_id": body["task_id"], "instruction": self.world.instruction, "supervisor": person}
        assert self.world is not None
        if path == "/execute":
            return self.world.execute(body["code"])
        if path == "/evaluate":
            return {"success": self.world.score() == 1.0, "passes": [], "failures": []}
        return self.world.completed() if path == "/task_completed" else None


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self._answer(200, {"message": "Welcome"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.broken:
            self._answer(500, {})
        else:
            self._answer(200, {"output": self.server.output(self.path, body)})

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with StandIn(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def test_the_real_world_goes_through_the_same_loop(train: Train, stand_in: StandIn, tmp_path: Path, monkeypatch: Any):
    (tmp_path / "data" / "tasks").mkdir(parents=True)
    (tmp_path / "data" / "datasets").mkdir()
    (tmp_path / "data" / "datasets" / "train.txt").write_text("pay-0\nclear-0\n\n")
    monkeypatch.setattr(real_appworld.check, "__defaults__", (Path("/bin/sh"),))
    servers = real_appworld.Servers([real_appworld.AppWorldServer(tmp_path, url=stand_in.url)])
    monkeypatch.setattr(example, "_servers", lambda root, count: servers)
    settings = {"task.world": "appworld", "task.root": str(tmp_path)}
    run = train(example.APPWORLD, "example_models:errands", settings)
    assert run.status == 0 and run.outcomes().count("admitted") >= 4
    assert 0 < run.metrics[0]["reward/mean"] < 1
    servers.stop()


def test_a_world_that_breaks_is_no_reward_of_0(stand_in: StandIn):
    servers = real_appworld.Servers([real_appworld.AppWorldServer(Path("."), url=stand_in.url)])
    with pytest.raises(EnvironmentBroken, match=r"failed at /execute: .*500"), servers.world("pay-0") as world:
        stand_in.broken = True
        world.execute("1")
    stand_in.broken = False
    with servers.world("pay-0") as world:
        assert world.score() == 0.0, "the server was given back"


def test_what_is_missing_of_appworld_is_said_with_the_command_that_brings_it(tmp_path: Path):
    with pytest.raises(ConfigError, match="run `scripts/agents appworld`"):
        real_appworld.check(tmp_path, python=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"AppWorld's data is not in .*appworld download data --root"):
        real_appworld.check(tmp_path, python=Path("/bin/sh"))
    (tmp_path / "data" / "datasets").mkdir(parents=True)
    (tmp_path / "data" / "datasets" / "dev.txt").write_text("")
    with pytest.raises(ConfigError, match=r"no 'trian'; it has dev"):
        real_appworld.task_ids(tmp_path, "trian")
