"""OpenAI's package: chat completions and responses, each with a tool that is called, and streamed."""

import json
import sys

import openai

url, ask, say = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
function = {"name": "weather", "description": "Tell the weather.", "parameters": schema}


def weather(arguments: str) -> str:
    return f"12 degrees in {json.loads(arguments)['city']}"


# 1. Chat completions
messages = [{"role": "user", "content": ask}]
chat = {"model": "scripted", "messages": messages, "tools": [{"type": "function", "function": function}]}
message = client.chat.completions.create(**chat).choices[0].message
call = message.tool_calls[0]
messages += [message, {"role": "tool", "tool_call_id": call.id, "content": weather(call.function.arguments)}]
answer = client.chat.completions.create(**chat).choices[0].message.content
stream = client.chat.completions.create(
    model="scripted", messages=[{"role": "user", "content": say}], stream=True, stream_options={"include_usage": True}
)
pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]

# 2. Responses
given = {"model": "scripted", "tools": [{"type": "function", **function, "strict": True}]}
given["tools"][0]["parameters"] = {**schema, "additionalProperties": False}
first = client.responses.create(**given, input=ask)
call = next(item for item in first.output if item.type == "function_call")
result = {"type": "function_call_output", "call_id": call.call_id, "output": weather(call.arguments)}
second = client.responses.create(**given, input=[result], previous_response_id=first.id)
with client.responses.stream(model="scripted", input=say) as events:
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
print(json.dumps({"answers": [answer, second.output_text], "streams": [pieces, deltas]}))
