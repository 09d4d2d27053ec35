"""Anthropic's package: a tool that is called by hand and by its runner, and a stream."""

import json
import sys

import anthropic

url, ask, say = sys.argv[1:]
client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"name": "weather", "description": "Tell the weather.", "input_schema": schema}

# 1. By hand
messages = [{"role": "user", "content": ask}]
given = {"model": "scripted", "max_tokens": 200, "tools": [tool], "system": "Be brief."}
message = client.messages.create(**given, messages=messages)
call = next(block for block in message.content if block.type == "tool_use")
result = {"type": "tool_result", "tool_use_id": call.id, "content": f"12 degrees in {call.input['city']}"}
messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
answer = client.messages.create(**given, messages=messages).content[0].text


# 2. By its runner
@anthropic.beta_tool
def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: where.
    """
    return f"12 degrees in {city}"


runner = client.beta.messages.tool_runner(
    model="scripted", max_tokens=200, tools=[weather], messages=[{"role": "user", "content": ask}]
)
run = runner.until_done().content[0].text

# 3. Streamed
with client.messages.stream(model="scripted", max_tokens=200, messages=[{"role": "user", "content": say}]) as stream:
    pieces = list(stream.text_stream)
print(json.dumps({"answers": [answer, run], "streams": [pieces]}))
