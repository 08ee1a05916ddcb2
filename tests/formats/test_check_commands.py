"""`goal check`, `blueprint check`, `schema export`; every file shipped in blueprints/ passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from a3r.check_cli import blueprint_app, goal_app, report_app, schema_app

ROOT = Path(__file__).resolve().parents[2]
BLUEPRINTS = sorted((ROOT / "blueprints").glob("*.yaml"))
GOALS = sorted((ROOT / "blueprints" / "goals").glob("*.md"))


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    made = typer.Typer()
    for name, part in (
        ("goal", goal_app),
        ("blueprint", blueprint_app),
        ("report", report_app),
        ("schema", schema_app),
    ):
        made.add_typer(part, name=name)
    return made


def invoke(app: typer.Typer, *words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, list(words))
    return found.exit_code, found.output


@pytest.mark.parametrize("path", BLUEPRINTS, ids=lambda p: p.name)
def test_shipped_blueprint_is_good(app: typer.Typer, path: Path) -> None:
    code, output = invoke(app, "blueprint", "check", str(path), "--root", str(ROOT))
    assert code == 0, output


@pytest.mark.parametrize("path", GOALS, ids=lambda p: p.name)
def test_shipped_goal_is_good(app: typer.Typer, path: Path) -> None:
    code, output = invoke(app, "goal", "check", str(path), "--root", str(ROOT))
    assert code == 0, output


def test_unknown_key_is_refused_with_its_line_and_the_nearest(app: typer.Typer, tmp_path: Path) -> None:
    text = (ROOT / "blueprints" / "simulated.yaml").read_text()
    path = tmp_path / "b.yaml"
    path.write_text(text.replace("total_training_steps: 6", "total_trainig_steps: 6"))
    line = next(i for i, row in enumerate(path.read_text().splitlines(), 1) if "total_trainig_steps" in row)
    code, output = invoke(app, "blueprint", "check", str(path), "--root", str(ROOT))
    assert code == 1
    assert f"b.yaml:{line}:" in output
    assert "did you mean 'total_training_steps'" in output


def test_goal_with_open_questions_ends_with_2_and_lists_them(app: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "g.md"
    path.write_text("Find the minimum batch_size that still trains (batch_size from 1 to 8).\n")
    code, output = invoke(app, "goal", "check", str(path))
    assert code == 2
    assert "question.criterion" in output
    assert "base: Which blueprint" in output


def test_answers_are_taken_from_the_command_line(app: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "g.md"
    path.write_text("Find the minimum batch_size that still trains (batch_size from 1 to 8).\n")
    (tmp_path / "base.yaml").write_text((ROOT / "blueprints" / "simulated.yaml").read_text())
    code, output = invoke(
        app, "goal", "check", str(path), "--root", str(ROOT), "--set", "base=base.yaml", "--show",
        "--set", "question.criterion={metric: reward/mean, at: {last_k: 2}, rule: {at_least: 0.5}}",
    )  # fmt: skip
    assert code == 0, output
    assert "compiled by parser" in output
    assert "a3r/goal-lock/v1" in output


def test_missing_file(app: typer.Typer) -> None:
    code, output = invoke(app, "goal", "check", "none.md")
    assert code == 1
    assert "no such file" in output


def test_schemas_of_all_formats_are_exported(app: typer.Typer, tmp_path: Path) -> None:
    code, _ = invoke(app, "schema", "export", str(tmp_path))
    assert code == 0
    names = {p.name.removesuffix(".schema.json") for p in tmp_path.iterdir()}
    assert names == {"goal", "goal-lock", "blueprint", "result", "plan", "decision", "report", "stage-report"}
    schema = json.loads((tmp_path / "blueprint.schema.json").read_text())
    assert "processes" in schema["properties"]
    assert "schema" in schema["properties"]


def test_verify_of_something_else_fails(app: typer.Typer, tmp_path: Path) -> None:
    code, output = invoke(app, "report", "verify", str(tmp_path))
    assert code == 1
    assert "no report" in output
