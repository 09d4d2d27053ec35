"""guidellm's load on ``dflash serve`` with the package's pair: guidellm's own tables, or its JSON.

    python3 -m venv VENV && VENV/bin/pip install guidellm==0.8.1    # it brings a torch of its own
    python bench/load_serve.py --guidellm VENV/bin/guidellm [--clients 1 4 8] [--requests 40] [--json FILE]

Streamed chats with the pair's own prompts, since few drafts are accepted in random text.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path

import package_pair
from bench_serve import FIRST, command, started

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    package_pair.add_option(parser)
    parser.add_argument("--guidellm", default="guidellm", help="the command")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--requests", type=int, default=40, help="per number of clients")
    parser.add_argument("--rows", type=int, default=4, help="of the server")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    url, tokenizer = f"http://127.0.0.1:{arguments.port}", str(arguments.pair / "target")
    options = {
        "backend": {"kind": "openai_http", "target": url, "request_format": "/v1/chat/completions"},
        "profile": {"kind": "concurrent", "streams": arguments.clients},
        "constraint": {"kind": "max_requests", "count": arguments.requests},
        "tokenizer": {"kind": "huggingface_auto", "model": tokenizer},
        "data": {"kind": "json_file", "path": str(arguments.pair / "prompts.jsonl")},
        "output": {"kind": "json", "path": str(arguments.json.resolve())} if arguments.json else {"kind": "console"},
    }
    given = [part for name, option in options.items() for part in (f"--{name}", json.dumps(option))]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    with started(command(FIRST, arguments.pair, arguments.rows, arguments.port), arguments.port):
        subprocess.run([arguments.guidellm, "run", *given, "--disable-progress"], check=True, env=environment)
