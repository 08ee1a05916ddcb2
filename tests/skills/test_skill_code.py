"""What skills say runs, runs: their blocks, in order, in a fresh folder, as a person at a terminal would run them.

The server behind SWARMTUNE_URL has the scripted engine. Commands and options that skills quote are looked up by
`a3r skills check`; here the helper scripts are asked for theirs.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from skill_stage import LIMIT_S, environment, play

from a3r.skill_checks import blocks, texts
from a3r.skills import Skill, shipped

SKILLS = {skill.name: skill for skill in shipped()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SKILLS)
def test_every_block_that_claims_to_run_ends_as_it_says(name: str, commands: Path, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    ran = play(SKILLS[name], folder, environment(commands, url, tmp_path / "home"))
    for block in ran:
        assert block.status == block.block.status, block.words
    assert len(ran) == sum(block.runs for block in blocks(SKILLS[name].body)) > 0


SCRIPTS = [(skill, path) for skill in SKILLS.values() for path in skill.files() if path.parts[0] == "scripts"]


@pytest.mark.parametrize(("skill", "script"), SCRIPTS, ids=lambda value: getattr(value, "name", str(value)))
def test_options_quoted_of_a_helper_are_in_its_help(skill: Skill, script: Path, variables: dict[str, str]) -> None:
    quoted = {
        option
        for _, text, _ in texts(skill)
        for line in re.findall(rf"{script.as_posix()}([^\n|;`]*)", text)
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", line.split(" -- ")[0])
    }
    done = subprocess.run(
        ["python", str(skill.folder / script), "--help"], env=variables, capture_output=True, text=True, timeout=LIMIT_S
    )
    missing = {option for option in quoted if option not in done.stdout + done.stderr}
    assert not missing
