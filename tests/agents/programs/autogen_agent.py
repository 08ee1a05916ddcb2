"""AutoGen: an AssistantAgent with one tool. Modes: chat, stream, anthropic; reflect: no tools for the last answer."""

import asyncio
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo

INFO = ModelInfo(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"the sum is {a + b}"


def client(mode: str):
    if mode == "anthropic":
        from autogen_ext.models.anthropic import AnthropicChatCompletionClient

        return AnthropicChatCompletionClient(
            model="swarm", base_url=os.environ["ANTHROPIC_BASE_URL"], api_key=os.environ["API_KEY"], model_info=INFO
        )
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    return OpenAIChatCompletionClient(
        model="swarm", base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], model_info=INFO
    )


async def main(mode: str) -> None:
    agent = AssistantAgent(
        "calculator",
        client(mode),
        tools=[add],
        max_tool_iterations=1 if mode == "reflect" else 3,
        reflect_on_tool_use=mode == "reflect",
        model_client_stream=mode == "stream",
    )
    result = await agent.run(task="What is 17 + 25?")
    print("ANSWER:", result.messages[-1].to_text())


asyncio.run(main(sys.argv[1]))
