"""Requests as Open WebUI sends them: a chat with its own tools, and its side requests after the first answer.

`open_webui.json` is written after its source code: its `tools` stand for the word "all" in a request.
"""

import json
from pathlib import Path

import httpx
import pytest

RECORDED = json.loads(Path(__file__).with_name("open_webui.json").read_text())


def joined(response: httpx.Response) -> dict:
    """Join a stream's pieces to a message, as the page does."""
    *events, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert done == "[DONE]"
    content, calls = "", []
    for event in map(json.loads, events):
        for delta in [choice["delta"] for choice in event["choices"]]:
            content += delta.get("content") or ""
            for piece in delta.get("tool_calls") or []:
                if piece["index"] == len(calls):
                    calls.append({"name": piece["function"]["name"], "arguments": ""})
                calls[piece["index"]]["arguments"] += piece["function"].get("arguments") or ""
    return {"content": content, "calls": calls}


@pytest.mark.parametrize("recorded", RECORDED["requests"], ids=lambda recorded: recorded["name"])
def test_a_request_is_answered(recorded, server):
    body = recorded["body"] | ({"tools": RECORDED["tools"]} if "tools" in recorded["body"] else {})
    response = httpx.post(f"{server.url}/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert "X-DFlash-Warnings" not in response.headers
    found = joined(response) if body["stream"] else response.json()["choices"][0]["message"]
    assert (found["content"], found.get("calls", [])) == (recorded["content"], recorded.get("calls", []))


def test_the_model_is_listed(server):
    found = httpx.get(f"{server.url}/models").json()["data"]
    assert [(model["id"], model["object"]) for model in found] == [("scripted", "model")]
