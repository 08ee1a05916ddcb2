"""Command-line agents find the skills that `a3r skills install` put into the project, copied or linked.

What is claimed for each: its first request shows the model every skill once, by name and description. Claude Code needs
the setting that `a3r skills install` tells; without it, it shows some by name only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from agent_runs import Stage, run_agent
from test_command_line_agents import BIN, claude, codex, opencode, qwen

from a3r.skill_install import CLAUDE_SETTING, FOLDERS, carry_out, plan
from a3r.skills import shipped

pytestmark = [pytest.mark.agents, pytest.mark.timeout(300)]


@pytest.mark.parametrize("link", [False, True], ids=["copied", "linked"])
@pytest.mark.parametrize("agent", [claude, codex, opencode, qwen], ids=lambda agent: agent.__name__)
async def test_the_assistant_is_shown_every_skill(agent, link: bool, stage: Stage) -> None:
    if not (BIN / agent.__name__).exists():
        pytest.skip(f"{agent.__name__} is not installed: scripts/agents {agent.__name__}")
    skills = shipped()
    carry_out(plan(skills, stage.folder, [agent.__name__], link=link, force=False), link=link, version="test")
    if agent is claude:
        (stage.folder / ".claude" / "settings.json").write_text(json.dumps(CLAUDE_SETTING))
    assert (stage.folder / FOLDERS[agent.__name__] / "write-goal").exists()
    grant = await stage.claim()
    play = agent(grant, stage.folder)
    stage.model.play("Seen.", beside='{"title": "Skills"}', made_up=play.made_up)
    outcome = await run_agent([str(BIN / play.argv[0]), *play.argv[1:]], stage.folder, play.environment)
    assert outcome.status == 0, outcome.words
    shown = " ".join("\n".join(message["content"] for message in stage.model.heard[0]).split())
    for skill in skills:
        beginning = re.escape(" ".join(skill.description.split())[:40])
        assert len(re.findall(beginning, shown)) == 1, skill.name


def test_every_assistant_has_a_folder_of_its_own() -> None:
    assert len({Path(folder) for folder in FOLDERS.values()}) == 4
