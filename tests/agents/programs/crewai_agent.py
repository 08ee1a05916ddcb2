"""CrewAI: one agent, one task. Modes: calls, and react (through LiteLLM: tools as text); each with `stream` or not."""

import os
import sys

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",  # it fetches the table of prices otherwise
}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"the sum is {a + b}"


mode, stream = sys.argv[1], "stream" in sys.argv[2:]
llm = LLM(
    model="openai/swarm",
    base_url=os.environ["BASE_URL"],
    api_key=os.environ["API_KEY"],
    stream=stream,
    is_litellm=mode == "react",
)
agent = Agent(role="Calculator", goal="Calculate.", backstory="You calculate.", llm=llm, tools=[add], verbose=False)
task = Task(description="What is 17 + 25?", expected_output="A sentence.", agent=agent)
print("ANSWER:", Crew(agents=[agent], tasks=[task], verbose=False).kickoff().raw)
