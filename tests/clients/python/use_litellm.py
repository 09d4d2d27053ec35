"""LiteLLM: chats and responses by OpenAI's API, and messages by Anthropic's."""

import json
import sys

import litellm

url, ask, say = sys.argv[1:]
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
function = {"name": "weather", "description": "Tell the weather.", "parameters": schema}
answers, streams = [], []
for model, base in (("hosted_vllm/scripted", url), ("anthropic/scripted", url.removesuffix("/v1"))):
    given = {"model": model, "api_base": base, "api_key": "none", "max_retries": 0}
    messages = [{"role": "user", "content": ask}]
    tools = [{"type": "function", "function": function}]
    message = litellm.completion(**given, messages=messages, tools=tools).choices[0].message
    call = message.tool_calls[0]
    result = f"12 degrees in {json.loads(call.function.arguments)['city']}"
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answers.append(litellm.completion(**given, messages=messages, tools=tools).choices[0].message.content)
    stream = litellm.completion(**given, messages=[{"role": "user", "content": say}], stream=True)
    streams.append([chunk.choices[0].delta.content or "" for chunk in stream])
given = {"model": "openai/scripted", "api_base": url, "api_key": "none"}
events = litellm.responses(**given, input=say, stream=True)
streams.append([event.delta for event in events if event.type == "response.output_text.delta"])
print(json.dumps({"answers": answers, "streams": streams}))
