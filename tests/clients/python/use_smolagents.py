"""smolagents: an agent that calls a tool, and a stream."""

import json
import sys

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

url, ask, say = sys.argv[1:]


@tool
def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: where.
    """
    return f"12 degrees in {city}"


model = OpenAIModel("scripted", api_base=url, api_key="none")
agent = ToolCallingAgent([weather], model, max_steps=1, verbosity_level=LogLevel.OFF)
agent.run(ask)  # the agent ends with a tool of its own, which the script does not call
observed = [found for step in agent.memory.steps if (found := getattr(step, "observations", None))]
pieces = [part.content or "" for part in model.generate_stream([{"role": "user", "content": say}])]
print(json.dumps({"answers": [f"The tool said: {text}" for text in observed], "streams": [pieces]}))
