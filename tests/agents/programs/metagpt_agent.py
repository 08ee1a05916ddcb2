"""MetaGPT: a role with one action of two questions, through its own `llm`. Works in a fresh folder: it writes there."""

import asyncio
import os
from pathlib import Path

config = Path.home() / ".metagpt" / "config2.yaml"
config.parent.mkdir(exist_ok=True)
config.write_text(
    f"""\
llm:
  api_type: openai
  model: swarm
  base_url: {os.environ["BASE_URL"]}
  api_key: {os.environ["API_KEY"]}
  temperature: 1.0
  calc_usage: false
"""
)

from metagpt.actions import Action  # noqa: E402 - it reads the file at import
from metagpt.roles import Role  # noqa: E402


class Calculate(Action):
    name: str = "Calculate"

    async def run(self, question: str) -> str:
        return await self._aask(f"{question} Reply with a sentence.", ["You calculate."])


class Calculator(Role):
    name: str = "Ada"
    profile: str = "Calculator"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.set_actions([Calculate])

    async def _act(self):
        from metagpt.schema import Message

        answer = await self.rc.todo.run(self.get_memories(k=1)[0].content)
        message = Message(content=answer, role=self.profile, cause_by=Calculate)
        self.rc.memory.add(message)
        return message


async def main() -> None:
    result = await Calculator().run("What is 17 + 25?")
    print("ANSWER:", result.content)


asyncio.run(main())
