"""Agent frameworks of the extra `frameworks`, unmodified, each through every dialect it speaks.

The same sum as in test_sdk_clients, but with the framework's own agent loop. What differs between them is how the
model's turn comes back, and so what is claimed: with call ids, one row by ids; a framework that writes turns anew
(smolagents) gets a row for each, and nothing that the model did not sample is ever trained.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from agent_runs import END, Stage, call, found, in_thread

from swarmtune.protocol import EpisodeGrant

QUESTION = "What is 17 + 25?"
LINES = (
    call("add", '{ "b": 25,"a" : 17 }', before=" Ich zähle. "),
    found(r"sum is (\d+)", " It is {}.\n\n"),
)

Agent = Callable[[EpisodeGrant], Awaitable[str]]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Nothing is read from or written to the person's home, and nothing is reported to anyone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("OPENAI_AGENTS_DISABLE_TRACING", "ANONYMIZED_TELEMETRY", "LANGSMITH_TRACING"):
        monkeypatch.setenv(name, "1" if "DISABLE" in name else "false")


def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: One number.
        b: The other number.
    """
    return f"the sum is {a + b}"


# -- LangChain


async def _langchain(grant: EpisodeGrant, *, stream: bool = False, **options: Any) -> str:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(model="gpt-x", base_url=grant.base_url, api_key=grant.api_key, **options)
    adder = tool(add)
    armed = llm.bind_tools([adder])
    messages: list = [HumanMessage(QUESTION)]
    while True:
        if stream:
            answer = None
            async for chunk in armed.astream(messages):
                answer = chunk if answer is None else answer + chunk
        else:
            answer = await armed.ainvoke(messages)
        assert answer is not None
        messages.append(answer)
        if not answer.tool_calls:
            return answer.text if isinstance(answer.text, str) else answer.text()
        messages += [await adder.ainvoke(made) for made in answer.tool_calls]


async def langchain_chat(grant: EpisodeGrant) -> str:
    return await _langchain(grant)


async def langchain_chat_streamed(grant: EpisodeGrant) -> str:
    return await _langchain(grant, stream=True)


async def langchain_responses(grant: EpisodeGrant) -> str:
    return await _langchain(grant, use_responses_api=True)


async def langchain_continued(grant: EpisodeGrant) -> str:
    return await _langchain(grant, use_responses_api=True, use_previous_response_id=True)


async def langchain_responses_streamed(grant: EpisodeGrant) -> str:
    return await _langchain(grant, stream=True, use_responses_api=True)


# -- AgentScope


async def _agentscope(model: Any) -> str:
    from agentscope.agent import Agent as ScopeAgent
    from agentscope.message import UserMsg
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import FunctionTool, Toolkit

    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="It only adds.")
    toolkit = Toolkit(tools=[FunctionTool(add, permission=allowed)])
    agent = ScopeAgent(name="calculator", system_prompt="You calculate.", model=model, toolkit=toolkit)
    answer = await agent.reply(UserMsg(name="user", content=QUESTION))
    return answer.get_text_content() or ""


async def agentscope_chat(grant: EpisodeGrant) -> str:
    from agentscope.credential import OpenAICredential
    from agentscope.model import OpenAIChatModel

    credential = OpenAICredential(api_key=grant.api_key, base_url=grant.base_url)
    return await _agentscope(OpenAIChatModel(credential, "m", stream=False))


async def agentscope_chat_streamed(grant: EpisodeGrant) -> str:
    from agentscope.credential import OpenAICredential
    from agentscope.model import OpenAIChatModel

    return await _agentscope(OpenAIChatModel(OpenAICredential(api_key=grant.api_key, base_url=grant.base_url), "m"))


async def agentscope_responses(grant: EpisodeGrant) -> str:
    from agentscope.credential import OpenAICredential
    from agentscope.model import OpenAIResponseModel

    return await _agentscope(OpenAIResponseModel(OpenAICredential(api_key=grant.api_key, base_url=grant.base_url), "m"))


async def agentscope_anthropic(grant: EpisodeGrant) -> str:
    from agentscope.credential import AnthropicCredential
    from agentscope.model import AnthropicChatModel

    credential = AnthropicCredential(api_key=grant.api_key, base_url=grant.anthropic_base_url)
    return await _agentscope(AnthropicChatModel(credential, "m"))


# -- openai-agents


async def _openai_agents(grant: EpisodeGrant, kind: str, *, stream: bool) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=grant.base_url, api_key=grant.api_key)
    model = getattr(agents, kind)(model="m", openai_client=client)
    agent = agents.Agent(
        name="calculator", instructions="You calculate.", model=model, tools=[agents.function_tool(add)]
    )
    if not stream:
        return (await agents.Runner.run(agent, QUESTION)).final_output
    run = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in run.stream_events():
        pass
    return run.final_output


async def openai_agents_responses(grant: EpisodeGrant) -> str:
    return await _openai_agents(grant, "OpenAIResponsesModel", stream=False)


async def openai_agents_responses_streamed(grant: EpisodeGrant) -> str:
    return await _openai_agents(grant, "OpenAIResponsesModel", stream=True)


async def openai_agents_chat(grant: EpisodeGrant) -> str:
    return await _openai_agents(grant, "OpenAIChatCompletionsModel", stream=False)


async def openai_agents_chat_streamed(grant: EpisodeGrant) -> str:
    return await _openai_agents(grant, "OpenAIChatCompletionsModel", stream=True)


# -- Pydantic AI


async def _pydantic_ai(model: Any, *, stream: bool = False) -> str:
    from pydantic_ai import Agent as PydanticAgent

    agent = PydanticAgent(model, instructions="You calculate.", tools=[add])
    if not stream:
        return (await agent.run(QUESTION)).output
    async with agent.run_stream(QUESTION) as run:
        return await run.get_output()


def _openai_provider(grant: EpisodeGrant) -> Any:
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIProvider(base_url=grant.base_url, api_key=grant.api_key)


async def pydantic_ai_chat(grant: EpisodeGrant) -> str:
    from pydantic_ai.models.openai import OpenAIChatModel

    return await _pydantic_ai(OpenAIChatModel("m", provider=_openai_provider(grant)))


async def pydantic_ai_responses(grant: EpisodeGrant) -> str:
    from pydantic_ai.models.openai import OpenAIResponsesModel

    return await _pydantic_ai(OpenAIResponsesModel("m", provider=_openai_provider(grant)))


async def pydantic_ai_anthropic(grant: EpisodeGrant) -> str:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(base_url=grant.anthropic_base_url, api_key=grant.api_key)
    return await _pydantic_ai(AnthropicModel("m", provider=provider))


AGENTS: dict[str, tuple[Agent, ...]] = {
    "langchain_openai": (
        langchain_chat,
        langchain_chat_streamed,
        langchain_responses,
        langchain_continued,
        langchain_responses_streamed,
    ),
    "agentscope": (agentscope_chat, agentscope_chat_streamed, agentscope_responses, agentscope_anthropic),
    "agents": (
        openai_agents_responses,
        openai_agents_responses_streamed,
        openai_agents_chat,
        openai_agents_chat_streamed,
    ),
    "pydantic_ai": (pydantic_ai_chat, pydantic_ai_responses, pydantic_ai_anthropic),
}


@pytest.mark.parametrize(
    ("package", "agent"),
    [(package, agent) for package, agents in AGENTS.items() for agent in agents],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_framework_that_sends_calls_back_gets_one_row_of_what_was_sampled(
    stage: Stage, package: str, agent: Agent
):
    pytest.importorskip(package, reason="extra frameworks is not installed")
    stage.model.play(*LINES)
    grant = await stage.claim()
    assert (await agent(grant)).strip() == "It is 42."
    trained = stage.trained(grant)
    assert trained.answers == [text + END for text in stage.model.said] and len(stage.model.said) == 2
    assert trained.report["rows"] == {"none": 2, "token": 1, "text": 1}
    assert trained.report["recognised"] == {"none": 1, "ids": 1}
    assert trained.report["left_out"] == {} and trained.report["breaks"] == []
    assert (await stage.local.end(grant.episode_id)).outcome == "admitted"


# -- smolagents


async def _smolagents(grant: EpisodeGrant, kind: str, *, stream: bool) -> str:
    import smolagents

    model = smolagents.OpenAIModel("m", api_base=grant.base_url, api_key=grant.api_key)
    agent = getattr(smolagents, kind)(
        tools=[smolagents.tool(add)], model=model, stream_outputs=stream, max_steps=4, verbosity_level=0
    )
    return str(await in_thread(agent.run, QUESTION))


@pytest.mark.parametrize("stream", [False, True])
async def test_smolagents_with_tools_gets_a_row_for_each_turn_that_it_writes_anew(stage: Stage, stream: bool):
    pytest.importorskip("smolagents", reason="extra frameworks is not installed")
    stage.model.play(
        call("add", '{ "b": 25,"a" : 17 }', before=" I add. "),
        found(r"sum is (\d+)", call("final_answer", '{"answer": "It is {}."}')),
    )
    grant = await stage.claim()
    assert await _smolagents(grant, "ToolCallingAgent", stream=stream) == "It is 42."
    trained = stage.trained(grant)
    assert sorted(trained.answers) == sorted(text + END for text in stage.model.said)
    assert trained.report["rows"]["text"] == len(stage.model.said) == 2
    assert {item["reason"] for item in trained.report["breaks"]} <= {"edited_history", "sub_agent", "compaction"}
    assert trained.report["breaks"], "a rewritten turn is a break"
    assert (await stage.local.end(grant.episode_id)).outcome == "admitted"


@pytest.mark.parametrize("stream", [False, True])
async def test_smolagents_writing_code_stops_at_its_stop_strings(stage: Stage, stream: bool):
    pytest.importorskip("smolagents", reason="extra frameworks is not installed")
    stage.model.play(
        "Thought: I add.\n<code>\nprint(add(b=25, a=17))\n</code>\nObservation: made up",
        found(r"sum is (\d+)", "Thought: done.\n<code>\nfinal_answer('It is {}.')\n</code> and more"),
        tools=False,
    )
    grant = await stage.claim()
    assert await _smolagents(grant, "CodeAgent", stream=stream) == "It is 42."
    trained = stage.trained(grant)
    assert len(trained.answers) == 2 and all(answer.endswith("</code>") for answer in trained.answers)
    assert (await stage.local.end(grant.episode_id)).outcome == "admitted"
