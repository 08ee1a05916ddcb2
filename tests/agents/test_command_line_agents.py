"""Coding agents from npm, unmodified: each reads a file with its own tool and reports what it says.

What is claimed for each: it ends by itself with the right words; the tokens that would train are those the model
sampled in the main conversation and no others; calls beside it are marked; all turns are one row; the episode is
admitted. They are installed with scripts/agents; one that is not there is skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from agent_runs import END, ROOT, Stage, call, found, run_agent

from swarmtune.protocol import EpisodeGrant

TASK = "Read notes.txt and tell me the code."
BIN = Path(os.environ.get("A3R_AGENTS", ROOT / ".venv-agents")) / "node_modules" / ".bin"

pytestmark = [pytest.mark.agents, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Play:
    """How one agent is run, and how the model plays its part."""

    argv: list[str]
    environment: Mapping[str, str]
    tool: str
    arguments: str
    dialect: str
    made_up: int = 0


def claude(grant: EpisodeGrant, folder: Path) -> Play:
    return Play(
        ["claude", "-p", TASK, "--model", "swarm", "--dangerously-skip-permissions"],
        {
            "ANTHROPIC_BASE_URL": grant.anthropic_base_url,
            "ANTHROPIC_AUTH_TOKEN": grant.api_key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        },
        "Read",
        json.dumps({"limit": 10, "file_path": str(folder / "notes.txt")}),
        "anthropic",
    )


CODEX_CONFIG = """\
model = "swarm"
model_provider = "swarm"
model_context_window = 400000
check_for_update_on_startup = false

[model_providers.swarm]
name = "swarm"
base_url = "{base_url}"
env_key = "SWARM_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""


def codex(grant: EpisodeGrant, folder: Path) -> Play:
    home = folder / "codex"
    home.mkdir()
    (home / "config.toml").write_text(CODEX_CONFIG.format(base_url=grant.base_url))
    return Play(
        ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
        {"CODEX_HOME": str(home), "SWARM_KEY": grant.api_key},
        "exec_command",
        '{ "cmd" : "cat notes.txt" }',
        "responses",
    )


def _opencode(grant: EpisodeGrant, folder: Path, package: str, dialect: str) -> Play:
    config = {
        "provider": {
            "swarm": {
                "npm": package,
                "options": {"baseURL": grant.base_url, "apiKey": "{env:SWARM_KEY}"},
                "models": {"swarm": {"limit": {"context": 400_000, "output": 4096}}},
            }
        },
        "share": "disabled",
        "autoupdate": False,
    }
    (folder / "opencode.json").write_text(json.dumps(config))
    return Play(
        ["opencode", "run", "--auto", "--model", "swarm/swarm", TASK],
        {"SWARM_KEY": grant.api_key, "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        "read",
        json.dumps({"filePath": str(folder / "notes.txt")}),
        dialect,
    )


def opencode(grant: EpisodeGrant, folder: Path) -> Play:
    return _opencode(grant, folder, "@ai-sdk/openai-compatible", "chat")


def opencode_responses(grant: EpisodeGrant, folder: Path) -> Play:
    return _opencode(grant, folder, "@ai-sdk/openai", "responses")


def opencode_anthropic(grant: EpisodeGrant, folder: Path) -> Play:
    return _opencode(grant, folder, "@ai-sdk/anthropic", "anthropic")


def qwen(grant: EpisodeGrant, folder: Path) -> Play:
    return Play(
        ["qwen", "--auth-type", "openai", "--model", "swarm", "--yolo", TASK],
        {"OPENAI_BASE_URL": grant.base_url, "OPENAI_API_KEY": grant.api_key},
        "read_file",
        json.dumps({"file_path": str(folder / "notes.txt")}),
        "chat",
        made_up=1,
    )


def qwen_anthropic(grant: EpisodeGrant, folder: Path) -> Play:
    return Play(
        ["qwen", "--auth-type", "anthropic", "--model", "swarm", "--yolo", TASK],
        {
            "ANTHROPIC_BASE_URL": grant.anthropic_base_url,
            "ANTHROPIC_API_KEY": grant.api_key,
            "ANTHROPIC_MODEL": "swarm",
        },
        "read_file",
        json.dumps({"file_path": str(folder / "notes.txt")}),
        "anthropic",
        made_up=1,
    )


AGENTS = (claude, codex, opencode, opencode_responses, opencode_anthropic, qwen, qwen_anthropic)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_the_agent_uses_its_tool_and_exactly_its_main_conversation_trains(stage: Stage, agent):
    (stage.folder / "notes.txt").write_text("The code is KÄSE-4711 today.\n")
    grant = await stage.claim()
    play = agent(grant, stage.folder)
    program = BIN / play.argv[0]
    if not program.exists():
        pytest.skip(f"{play.argv[0]} is not installed: scripts/agents {play.argv[0]}")
    stage.model.play(
        call(play.tool, play.arguments, before=" I look.\n\n"),
        found(r"code is (\S+) today", "The code is {}.\n"),
        beside='{"title": "Codes"}',
        made_up=play.made_up,
    )
    outcome = await run_agent([str(program), *play.argv[1:]], stage.folder, play.environment)
    assert outcome.status == 0 and "The code is KÄSE-4711." in outcome.stdout, outcome.words

    trained = stage.trained(grant)
    assert trained.answers == [text + END for text in stage.model.said] and len(stage.model.said) == 2
    assert trained.report["rows"] == {"none": 2, "token": 1, "text": 1}
    assert trained.report["recognised"] == {"none": 1, "ids": 1} and trained.report["breaks"] == []
    assert trained.report["left_out"].get("side", 0) == len(stage.model.said_beside)
    assert {turn["dialect"] for turn in trained.report["turns"]} == {play.dialect}
    assert (await stage.local.end(grant.episode_id)).outcome == "admitted"
