"""Frameworks whose requirements contradict ours, each run as a program in an environment of its own.

scripts/agents makes the environments; a framework that is not there is skipped. The programs are in programs/. What is
claimed is that of test_python_frameworks.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agent_runs import END, ROOT, Stage, call, found

from swarmtune.protocol import EpisodeGrant

ENVIRONMENTS = Path(os.environ.get("A3R_AGENTS", ROOT / ".venv-agents"))
USES_A_TOOL = (
    call("add", '{ "b": 25,"a" : 17 }', before=" Ich zähle. "),
    found(r"sum is (\d+)", " It is {}.\n\n"),
)

pytestmark = [pytest.mark.agents, pytest.mark.timeout(300)]


async def answer_of(stage: Stage, grant: EpisodeGrant, program: str, *arguments: str) -> str:
    """What the program says the agent answered."""
    environment = program.removesuffix("_agent")
    python = ENVIRONMENTS / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{environment} is not installed: scripts/agents {environment}")
    outcome = await stage.program(program, grant, *arguments, python=str(python))
    assert outcome.status == 0 and "ANSWER:" in outcome.stdout, outcome.words
    return outcome.stdout.partition("ANSWER:")[2].strip()


@pytest.mark.parametrize(
    "command",
    [
        ["autogen_agent", "chat"],
        ["autogen_agent", "stream"],
        ["autogen_agent", "anthropic"],
        ["crewai_agent", "calls"],
        ["crewai_agent", "calls", "stream"],
    ],
    ids=" ".join,
)
async def test_an_agent_that_sends_calls_back_gets_one_row_of_what_was_sampled(stage: Stage, command):
    stage.model.play(*USES_A_TOOL)
    grant = await stage.claim()
    assert await answer_of(stage, grant, *command) == "It is 42."
    trained = stage.trained(grant)
    assert trained.answers == [text + END for text in stage.model.said] and len(stage.model.said) == 2
    assert trained.report["rows"] == {"none": 2, "token": 1, "text": 1}
    assert trained.report["recognised"] == {"none": 1, "ids": 1}
    assert trained.report["left_out"] == {}
    assert (await stage.local.end(grant.episode_id)).outcome == "admitted"


async def test_autogen_reflecting_without_tools_goes_on_with_its_main_conversation(stage: Stage):
    stage.model.play(*USES_A_TOOL, tools=False)
    grant = await stage.claim()
    assert await answer_of(stage, grant, "autogen_agent", "reflect") == "It is 42."
    trained = stage.trained(grant)
    assert sorted(trained.answers) == sorted(text + END for text in stage.model.said) and len(trained.answers) == 2
    assert trained.report["left_out"] == {} and trained.report["recognised"] == {"none": 1, "ids": 1}
    assert (await stage.local.end(grant.episode_id)).outcome == "admitted"


@pytest.mark.parametrize("arguments", [["react"], ["react", "stream"]], ids=" ".join)
async def test_crewai_with_tools_as_text_stops_at_the_observation_and_never_trains_one(stage: Stage, arguments):
    acts = 'Thought: I add.\nAction: add\nAction Input: {"b": 25,  "a": 17}\nObservation:'
    stage.model.play(
        f"{acts} made up",
        found(r"sum is (\d+)", "Thought: I now know the final answer\nFinal Answer: It is {}."),
        tools=False,
    )
    grant = await stage.claim()
    assert await answer_of(stage, grant, "crewai_agent", *arguments) == "It is 42."
    trained = stage.trained(grant)
    assert sorted(trained.answers) == sorted([acts, stage.model.said[1] + END])
    assert "made up" not in stage.model.heard[1][-1]["content"], "what comes after a stop string was not delivered"
    assert trained.report["break_counts"] == {"edited_history": 1}
    assert (await stage.local.end(grant.episode_id)).outcome == "admitted"


async def test_metagpt_trains_what_was_sampled_at_the_temperature_of_its_configuration(stage: Stage):
    stage.model.play(" It is 42.\n", tools=False)
    grant = await stage.claim()
    assert await answer_of(stage, grant, "metagpt_agent") == "It is 42."
    trained = stage.trained(grant)
    assert trained.answers == [text + END for text in stage.model.said] and len(stage.model.said) == 1
    (turn,) = trained.report["turns"]
    assert (turn["asked"]["temperature"], turn["used"]["temperature"]) == (1.0, 1.0), "0.0 unless told otherwise"
    assert (await stage.local.end(grant.episode_id)).outcome == "admitted"
