"""Ollama's package: chats with a tool that is called, and streamed."""

import json
import sys

import ollama

url, ask, say = sys.argv[1:]
client = ollama.Client(host=url.removesuffix("/v1"))


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: where.
    """
    return f"12 degrees in {city}"


name = client.list().models[0].model
messages = [{"role": "user", "content": ask}]
message = client.chat(model=name, messages=messages, tools=[weather]).message
call = message.tool_calls[0].function
messages += [message, {"role": "tool", "tool_name": call.name, "content": weather(**call.arguments)}]
answer = client.chat(model=name, messages=messages, tools=[weather]).message.content
chat = client.chat(model=name, messages=[{"role": "user", "content": say}], stream=True)
pieces = [chunk.message.content or "" for chunk in chat]
text = [chunk.response for chunk in client.generate(model=name, prompt=say, stream=True)]
print(json.dumps({"answers": [answer], "streams": [pieces, text]}))
