"""Skills are put where assistants look, and nothing of the user's is ever lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from skill_stage import LIMIT_S, ROOT
from typer.testing import CliRunner

from a3r import skill_install
from a3r.skill_install import FOLDERS, MARKER, Action, InstallError, carry_out, digests, plan, source_digests
from a3r.skills import Skill, read_skill, shipped
from a3r.skills_cli import app

TEXT = "---\nname: {name}\ndescription: Does {name}. Use when asked. Do not use when not.\n---\n{name} {word}\n"


def make(folder: Path, name: str, word: str = "one") -> Skill:
    place = folder / name
    (place / "scripts").mkdir(parents=True, exist_ok=True)
    (place / "evals").mkdir(exist_ok=True)
    (place / "SKILL.md").write_text(TEXT.format(name=name, word=word))
    (place / "scripts" / "tool.sh").write_text("exit 0\n")
    (place / "scripts" / "tool.sh").chmod(0o755)
    (place / "evals" / "evals.yaml").write_text("answers\n")
    return read_skill(place)


@pytest.fixture
def skills(tmp_path: Path) -> list[Skill]:
    return [make(tmp_path / "source", name) for name in ("paint", "plaster")]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


def put(skills: list[Skill], project: Path, *assistants: str, link: bool = False, force: bool = False) -> list[Action]:
    steps = plan(skills, project, assistants or ("claude",), link=link, force=force)
    if not any(step.action is Action.REFUSE for step in steps):
        carry_out(steps, link=link, version="1")
    return [step.action for step in steps]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_every_assistant_gets_its_folder_without_the_evals(skills: list[Skill], project: Path) -> None:
    assert put(skills, project, *FOLDERS) == [Action.ADD] * 8
    for folder in FOLDERS.values():
        placed = project / folder / "paint"
        assert digests(placed) == source_digests(skills[0])
        assert not (placed / "evals").exists()
        assert os.access(placed / "scripts" / "tool.sh", os.X_OK)
        assert json.loads((placed / MARKER).read_text())["version"] == "1"


def test_installing_again_changes_nothing(skills: list[Skill], project: Path) -> None:
    put(skills, project)
    before = tree(project)
    assert put(skills, project) == [Action.KEEP] * 2
    assert tree(project) == before


def test_what_we_put_there_is_updated_with_files_that_went(skills: list[Skill], project: Path, tmp_path: Path) -> None:
    put(skills, project)
    (tmp_path / "source" / "paint" / "scripts" / "tool.sh").unlink()
    newer = [make_changed(tmp_path, "paint"), skills[1]]
    assert put(newer, project) == [Action.UPDATE, Action.KEEP]
    assert "two" in (project / ".claude/skills/paint/SKILL.md").read_text()
    assert not (project / ".claude/skills/paint/scripts").exists()


def make_changed(tmp_path: Path, name: str) -> Skill:
    (tmp_path / "source" / name / "SKILL.md").write_text(TEXT.format(name=name, word="two"))
    return read_skill(tmp_path / "source" / name)


@pytest.mark.parametrize("change", ["edited", "added", "removed", "of their own", "a link of theirs", "a file"])
def test_a_folder_with_something_of_the_users_is_refused_and_nothing_is_installed(
    change: str, skills: list[Skill], project: Path, tmp_path: Path
) -> None:
    place = project / ".claude/skills/paint"
    if change in {"edited", "added", "removed"}:
        put(skills, project)
        make_changed(tmp_path, "paint")
    else:
        place.parent.mkdir(parents=True)
    if change == "edited":
        (place / "SKILL.md").write_text("mine")
    elif change == "added":
        (place / "notes.md").write_text("mine")
    elif change == "removed":
        (place / "scripts" / "tool.sh").unlink()
    elif change == "of their own":
        place.mkdir()
        (place / "SKILL.md").write_text("mine")
    elif change == "a link of theirs":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.write_text("mine")
    before = tree(project)
    assert Action.REFUSE in put([read_skill(tmp_path / "source" / "paint"), skills[1]], project)
    assert tree(project) == before
    assert put([read_skill(tmp_path / "source" / "paint")], project, force=True) == [Action.REPLACE]
    assert digests(place) == source_digests(read_skill(tmp_path / "source" / "paint"))
    if change == "a link of theirs":
        assert (tmp_path / "elsewhere").is_dir()


def test_the_same_files_without_our_marker_are_left_alone(skills: list[Skill], project: Path) -> None:
    put(skills, project)
    for marker in project.rglob(MARKER):
        marker.unlink()
    assert put(skills, project) == [Action.KEEP] * 2


def test_links_lead_to_the_installation_and_may_become_copies(skills: list[Skill], project: Path) -> None:
    assert put(skills, project, link=True) == [Action.ADD] * 2
    place = project / ".claude/skills/paint"
    assert place.is_symlink() and place.resolve() == skills[0].folder.resolve()
    assert put(skills, project, link=True) == [Action.KEEP] * 2
    assert put(skills, project) == [Action.UPDATE] * 2
    assert not place.is_symlink() and skills[0].file.exists()
    assert put(skills, project, link=True) == [Action.UPDATE] * 2
    assert place.is_symlink()


def test_other_skills_of_the_user_are_not_touched(skills: list[Skill], project: Path) -> None:
    theirs = project / ".claude" / "skills" / "theirs"
    theirs.mkdir(parents=True)
    (theirs / "SKILL.md").write_text("mine")
    (project / ".claude" / "settings.json").write_text("{}")
    put(skills, project, force=True)
    assert (theirs / "SKILL.md").read_text() == "mine"
    assert sorted(p.name for p in (project / ".claude").iterdir()) == ["settings.json", "skills"]


@pytest.mark.parametrize("at", range(1, 6))
def test_a_failure_at_any_copy_or_rename_leaves_everything_as_it_was(
    at: int, skills: list[Skill], project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(skills[:1], project)
    newer = [make_changed(tmp_path, "paint"), skills[1]]
    before = tree(project)
    calls = iter(range(1, 100))

    def fail(real):
        def once(*arguments, **options):
            if next(calls) == at:
                raise OSError(28, "No space left on device", "skills")
            return real(*arguments, **options)

        return once

    monkeypatch.setattr(skill_install, "_copy", fail(skill_install._copy))
    monkeypatch.setattr(Path, "rename", fail(Path.rename))
    with pytest.raises(InstallError, match="No space left on device; nothing was installed"):
        put(newer, project, "claude")
    monkeypatch.undo()
    assert tree(project) == before
    assert put(newer, project, "claude") == [Action.UPDATE, Action.ADD]


def test_folders_that_a_link_makes_one_are_filled_once(project: Path) -> None:
    (project / ".claude").mkdir()
    (project / ".codex").symlink_to(".claude")
    status, said = command("install", "--project", project)
    assert status == 0 and f"codex     {project}/.codex/skills: the same folder by a link" in said
    assert (project / ".codex" / "skills" / "write-goal" / "SKILL.md").is_file()


def test_what_a_killed_installation_left_is_cleared_up(project: Path) -> None:
    root = project / FOLDERS["claude"]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    living, theirs = f".write-goal.part-{os.getpid()}", f".mine.old-{dead.pid}"
    for name in (f".write-goal.part-{dead.pid}", f".write-report.old-{dead.pid}", living, theirs):
        (root / name).mkdir(parents=True)
        (root / name / "SKILL.md").write_text("mine")
    status, said = command("install", "--for", "claude", "--project", project)
    assert status == 2 and "write-report: not touched" in said, "what was moved aside is back, and still the user's"
    assert (root / "write-report" / "SKILL.md").read_text() == "mine"
    assert {p.name for p in root.iterdir()} == {"write-report", living, theirs}


@pytest.mark.parametrize("blocker", [".claude", ".claude/skills"])
def test_a_file_where_a_folder_belongs_is_named(blocker: str, skills: list[Skill], project: Path) -> None:
    (project / blocker).parent.mkdir(exist_ok=True)
    (project / blocker).write_text("mine")
    with pytest.raises(InstallError, match="is a file where a folder belongs; move it away"):
        put(skills, project)
    with pytest.raises(InstallError, match="is no folder"):
        put(skills, project / "nowhere")


# ---- the command -----------------------------------------------------------------------------------------------------


def command(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(map(str, words)))
    return done.exit_code, done.output


def test_the_command_installs_for_all_and_says_where(project: Path) -> None:
    status, said = command("install", "--project", project)
    count = len(shipped())
    assert status == 0 and [line.split()[0] for line in said.splitlines()] == [*FOLDERS, "Claude"]
    assert said.count(f"{count} added") == 4
    assert command("install", "--project", project, "--for", "qwen")[1].endswith(f"{count} the same already\n")


def test_the_command_refuses_what_it_would_overwrite_and_names_it(project: Path) -> None:
    mine = project / ".codex" / "skills" / "write-goal"
    mine.mkdir(parents=True)
    (mine / "SKILL.md").write_text("mine")
    status, said = command("install", "--project", project)
    assert status == 2 and str(mine) in said and "nothing was installed" in said
    assert not (project / ".claude").exists()
    assert command("install", "--project", project, "--force")[0] == 0


def test_wrong_words_are_answered_with_what_there_is(project: Path) -> None:
    assert command("install", "--for", "emacs", "--project", project) == (
        2,
        "--for emacs: no such assistant; known: claude, opencode, codex, qwen, all\n",
    )
    assert "did you mean: write-goal" in command("install", "--skill", "write-gaol", "--project", project)[1]
    assert command("show", "nothing-like-it")[0] == 2


def test_list_show_and_check_speak_of_the_skills_that_ship() -> None:
    status, said = command("list")
    assert status == 0 and re.findall(r"^\S+", said, re.M) == [s.name for s in shipped()]
    assert [row["name"] for row in json.loads(command("list", "--json")[1])] == [s.name for s in shipped()]
    status, said = command("show", "monitor-training")
    assert status == 0 and said.startswith("---\nname: monitor-training\n") and "scripts/wait.py" in said
    assert command("check") == (0, f"{len(shipped())} skills: good\n")


def test_check_of_a_bad_skill_fails_with_its_problems(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "SKILL.md").write_text("no front matter")
    status, said = command("check", tmp_path / "bad")
    assert status == 1 and "make `---` its first line" in said and "1 problem" in said


# ---- the wheel -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_wheel_ships_the_same_skills_and_its_command_finds_them(tmp_path: Path) -> None:
    built = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(built, check=True, timeout=LIMIT_S)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {n.removeprefix("a3r/_skills/") for n in archive.namelist() if n.startswith("a3r/_skills/")}
        archive.extractall(tmp_path / "site")
    ours = {f"{skill.name}/{file.as_posix()}" for skill in shipped() for file in skill.files()}
    assert inside == ours
    code = "import sys; sys.argv = ['a3r', *sys.argv[1:]]; from a3r.cli import main; main()"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}

    def installed(*words: str) -> str:
        argv = [sys.executable, "-P", "-c", code, "skills", *words]
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert installed("check") == f"{len(shipped())} skills: good\n"
    assert str(tmp_path / "site" / "a3r" / "_skills") in installed("show", "write-goal")
    installed("install", "--for", "claude", "--project", str(tmp_path))
    placed = tmp_path / ".claude" / "skills" / "write-goal"
    assert digests(placed) == source_digests(read_skill(ROOT / "skills" / "write-goal"))
