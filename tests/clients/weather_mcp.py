"""A server of the Model Context Protocol with one tool, on standard input and output."""

import json
import sys

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

for line in sys.stdin:
    message = json.loads(line)
    answers = {
        "initialize": lambda given: {
            "protocolVersion": given["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "weather", "version": "1"},
        },
        "tools/list": lambda _: {"tools": [{"name": "weather", "description": "Tell it.", "inputSchema": SCHEMA}]},
        "tools/call": lambda given: {
            "content": [{"type": "text", "text": f"12 degrees in {given['arguments']['city']}"}]
        },
    }
    if "id" in message:
        result = answers.get(message["method"], lambda _: {})(message.get("params"))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
