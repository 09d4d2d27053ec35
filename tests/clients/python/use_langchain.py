"""LangChain's ChatOpenAI, by chat completions and by responses, and its ChatOllama."""

import json
import sys

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

url, ask, say = sys.argv[1:]


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"12 degrees in {city}"


given = {"model": "scripted", "base_url": url, "api_key": "none", "max_retries": 0}
models = [ChatOpenAI(**given), ChatOpenAI(**given, use_responses_api=True)]
models.append(ChatOllama(model="scripted", base_url=url.removesuffix("/v1")))
answers, streams = [], []
for model in models:
    calling, messages = model.bind_tools([weather]), [HumanMessage(ask)]
    messages.append(calling.invoke(messages))
    messages.append(weather.invoke(messages[-1].tool_calls[0]))
    answers.append(calling.invoke(messages).text)
    streams.append([chunk.text for chunk in model.stream(say)])
print(json.dumps({"answers": answers, "streams": streams}))
