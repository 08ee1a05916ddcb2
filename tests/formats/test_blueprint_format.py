"""Blueprints: identity, placeholders, structure, and what the client takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from a3r.blueprint import (
    Blueprint,
    ClientSchemaError,
    client_schema,
    config_problems,
    fill,
    flat_properties,
    load_blueprint,
    schema_argv,
)
from a3r.formats import dump, parse_model
from a3r.strictyaml import FormatError, load_strict

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = ROOT / "blueprints" / "simulated.yaml"


@pytest.fixture
def simulated() -> Blueprint:
    return load_blueprint(SIMULATED)[0]


def test_id_is_of_what_decides_the_result_only(simulated: Blueprint) -> None:
    same = simulated.sealed(name="other", seeds=[7], stage=3, hypothesis="x", timeouts={"max_s": 5.0})
    assert same.id == simulated.computed_id()
    assert simulated.sealed(config={"x": 2.0}).id != same.id
    assert simulated.sealed(code={"repo": ".", "commit": "0123abc"}).id != same.id


def test_nested_and_dotted_configuration_are_the_same_blueprint() -> None:
    text = "name: a\nprocesses: [{name: c, main: true, argv: [x]}]\n"
    nested = parse_model(Blueprint, load_strict(text + "config: {optim: {lr: 1e-5}}"))
    flat = parse_model(Blueprint, load_strict(text + "config: {optim.lr: 1e-5}"))
    assert nested.computed_id() == flat.computed_id()
    assert nested.config == {"optim.lr": 1e-5}


def test_yaml_of_a_sealed_blueprint_is_read_back_the_same(simulated: Blueprint) -> None:
    sealed = simulated.sealed(config={"optim.lr": 1e-7}, seeds=[1, 2])
    assert parse_model(Blueprint, load_strict(sealed.to_yaml())) == sealed


def test_edited_id_is_refused(simulated: Blueprint) -> None:
    data = dump(simulated.sealed()) | {"config": {"x": 3.0}}
    with pytest.raises(ValueError, match="not the hash of this content"):
        Blueprint.model_validate_json(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("processes: [{name: c, main: true, argv: ['{pyton}']}]", "did you mean 'python'"),
        ("processes: [{name: c, main: true, argv: ['{port:server}']}]", "resources.ports lacks"),
        ("processes: [{name: c, main: true, argv: ['{oops']}]", "unbalanced braces"),
        ("processes: [{name: c, argv: [a]}]", "exactly one process must have main"),
        ("processes: [{name: c, main: true, argv: 'python train.py'}]", "expected a list"),
        ("processes: [{name: c, main: true, argv: [a], needs: [sever]}, {name: server, argv: [b]}]", "'server'"),
        (
            "processes: [{name: c, main: true, argv: [a], needs: [d]}, {name: d, argv: [b], needs: [c]}]",
            "in a circle",
        ),
        ("processes: [{name: c, main: true, argv: [a]}]\nresources: {kind: gpu}", "kind gpu with gpus 0"),
        ("processes: [{name: c, main: true, argv: [a]}]\nseeds: [1, 1]", "listed twice"),
        ("processes: [{name: c, main: true, argv: [a]}]\ntimeouts: {max_s: 12 parsecs}", "not a duration"),
        ("processes: [{name: c, main: true, argv: [a]}]\ntimeout: {max_s: 1}", "did you mean 'timeouts'"),
        ("processes: [{name: c, main: true, argv: [a]}]\nretry: {infra: -1}", "greater than or equal to 0"),
        (
            "processes: [{name: c, main: true, argv: [a]}]\npreregistered: [{if: 'import os', then: {mark: x}}]",
            "expression",
        ),
        ("processes: [{name: c, main: true, argv: [a]}]\nname: ../../etc", "String should match"),
    ],
)
def test_wrong_blueprint_says_how_to_fix_it(change: str, words: str) -> None:
    text = change if "name: .." in change else f"name: a\n{change}"
    with pytest.raises(FormatError) as found:
        parse_model(Blueprint, load_strict(text, "b.yaml"))
    assert words in str(found.value)
    assert "b.yaml:" in str(found.value)


def test_start_order_respects_needs() -> None:
    text = """
name: a
processes:
  - {name: client, main: true, argv: [a], needs: [server, judge]}
  - {name: server, argv: [b], needs: [judge]}
  - {name: judge, argv: [c]}
"""
    order = parse_model(Blueprint, load_strict(text)).start_order()
    assert [p.name for p in order] == ["judge", "server", "client"]


def test_fill_replaces_placeholders_and_keeps_literal_braces() -> None:
    assert fill("{{x}}:{port:server}/{seed}", {"port:server": "80", "seed": "3"}) == "{x}:80/3"
    with pytest.raises(KeyError):
        fill("{ckpt}", {})


def test_schema_command_stops_before_the_first_run_argument(simulated: Blueprint) -> None:
    assert schema_argv(simulated, "py") == ["py", "-m", "a3r.simulate", "--print-schema"]


def test_client_is_asked_for_its_keys(simulated: Blueprint) -> None:
    schema = client_schema(simulated, ROOT)
    wrong = config_problems({"batch_sise": 4, "x": "one", "batch_size": 0, "sim.fail": "explode"}, schema)
    assert "did you mean 'batch_size'" in wrong["batch_sise"][1]
    assert "not of type number" in wrong["x"][0]
    assert "at least 1" in wrong["batch_size"][0]
    assert "not one of" in wrong["sim.fail"][0]
    assert config_problems({"x": 1, "batch_size": 2}, schema) == {}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["{python}", "-c", "print('hello')"], "did not print a JSON Schema"),
        (["{python}", "-c", "raise SystemExit('no such option')"], "no such option"),
        (["no-such-program-at-all"], "no such program"),
    ],
)
def test_client_that_cannot_say_its_keys(simulated: Blueprint, argv: list[str], words: str) -> None:
    broken = simulated.sealed(processes=[{"name": "c", "main": True, "argv": argv}])
    with pytest.raises(ClientSchemaError, match=words):
        client_schema(broken, ROOT)


def test_nested_schema_with_references_is_flattened() -> None:
    schema: dict[str, Any] = {
        "$defs": {"Optim": {"properties": {"lr": {"type": "number"}}}},
        "properties": {
            "optim": {"$ref": "#/$defs/Optim"},
            "lora": {"anyOf": [{"$ref": "#/$defs/Optim"}, {"type": "null"}]},
            "steps": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
    }
    assert sorted(flat_properties(schema)) == ["lora.lr", "optim.lr", "steps"]
    assert config_problems({"steps": None, "optim.lr": 1}, schema) == {}
    assert "not of type integer" in config_problems({"steps": "3"}, schema)["steps"][0]
