"""Pydantic AI: agents with a tool, by chat completions and by responses."""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, ask, say = sys.argv[1:]


async def use(kind) -> tuple[str, list[str]]:
    agent = Agent(kind("scripted", provider=OpenAIProvider(base_url=url, api_key="none")), retries=0)

    @agent.tool_plain
    def weather(city: str) -> str:
        """Tell the weather."""
        return f"12 degrees in {city}"

    answer = (await agent.run(ask)).output
    async with agent.run_stream(say) as run:
        return answer, [piece async for piece in run.stream_text(delta=True, debounce_by=None)]


found = [asyncio.run(use(kind)) for kind in (OpenAIChatModel, OpenAIResponsesModel)]
print(json.dumps({"answers": [answer for answer, _ in found], "streams": [pieces for _, pieces in found]}))
