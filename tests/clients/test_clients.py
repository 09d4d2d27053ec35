"""Programs that speak to the server, each in its own environment: one tool call, its result, and an answer as a stream.

`.ci/run clients` installs them in the folder DFLASH_CLIENTS. A client that is missing fails its test.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from served import CHAT, TRIP, chat, chunks, live, serve, wait_until

ROOT = Path(__file__).parents[2]
CLIENTS = Path(os.environ.get("DFLASH_CLIENTS", "clients"))
ASK = 'Please call weather {"city": "Oslo"} now.'
TEXT = "Streams come in pieces: ünïcödé, 🙂, and the end."
SAY = f"Please write [[{TEXT}]]"
PLACE = {"city": "Oslo", "country": "Norway"}
PYTHON = ("openai", "anthropic", "ollama", "litellm", "langchain", "pydantic_ai", "smolagents")
PYTHON = dict.fromkeys(PYTHON, "python")
PYTHON["instructor"] = "instructor"


@pytest.fixture
def run(server, tmp_path):
    """Return a function that runs a program in an empty home and returns what it prints.

    Nothing that the program asks the server for may be refused.
    """
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    keep = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}

    def refused() -> list[str]:
        lines = server.service.metrics.page().decode().splitlines()
        return [line for line in lines if line.startswith("dflash_requests_total") and "completed" not in line]

    def call(*command, given="", **environment) -> str:
        before = refused()
        done = subprocess.run(
            [*map(str, command)], cwd=home / "work", env={**keep, "HOME": str(home), **environment}, input=given,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert (done.returncode, refused()) == (0, before), done.stdout + done.stderr
        return done.stdout

    call.home = home
    return call


def use(run, url, *command) -> dict:
    """Run a script of one of the folders; check its answers and streams."""
    found = json.loads(run(*command, url, ASK, SAY).splitlines()[-1])
    assert set(found.get("answers", [])) <= {"The tool said: 12 degrees in Oslo"}
    for pieces in found.get("streams", []):
        assert "".join(pieces) == TEXT
        assert len(pieces) > 3
    return found


@pytest.mark.parametrize("name", PYTHON)
def test_python(name, run, server):
    found = use(run, server.url, CLIENTS / PYTHON[name] / "bin/python", Path(__file__).parent / f"python/use_{name}.py")
    assert found.get("answers") or found["cities"] == ["Oslo"] * 4


@pytest.mark.parametrize("name", ["openai", "ai_sdk", "ollama"])
def test_node(name, run, server):
    found = use(run, server.url, "node", CLIENTS / f"node/use_{name}.mjs")
    assert found["answers"]
    assert {*found.get("cities", [])} <= {"Oslo"}


def sglang_router(urls, port, _folder):
    launch = ["launch", "--worker-urls", *urls, "--policy", "round_robin", "--prometheus-port", str(port + 1)]
    return [CLIENTS / "router/bin/sglang-router", *launch], "/readiness"


def litellm(urls, _port, folder, names=("pair", "pair")):
    entries = []
    for name, url in zip(names, urls, strict=True):
        entries.append({"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_key": "none"}})
        entries[-1]["litellm_params"]["api_base"] = f"{url}/v1"
    (folder / "litellm.yaml").write_text(json.dumps({"model_list": entries}))  # JSON is YAML
    return [CLIENTS / "proxy/bin/litellm", "--config", folder / "litellm.yaml"], "/health/readiness"


@contextlib.contextmanager
def started(command, port, ready, **variables):
    """Start a program and wait until its port answers at ``ready``; yield its address."""
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT, env={**os.environ, **variables}) as program:
        try:
            wait_until(lambda: answers(url + ready))
            yield url
        finally:
            program.terminate()


def assert_same_texts(url) -> None:
    # A server is drawn for each: that it is one for all of them has a probability of 2e-6.
    bodies = [chat(TRIP, seed=5, temperature=1, max_tokens=60, stream=number > 9) for number in range(20)]
    found = [httpx.post(url + CHAT, json=body, timeout=120) for body in bodies]
    whole = {answer.json()["choices"][0]["message"]["content"] for answer in found[:10]}
    deltas = [[chunk["choices"][0]["delta"] for chunk in chunks(answer)] for answer in found[10:]]
    streamed = {"".join(delta.get("content") or "" for delta in each) for each in deltas}
    assert len(whole) == 1
    assert streamed == whole


@pytest.mark.parametrize("start", [sglang_router, litellm])
def test_replicas_behind_a_router_write_the_same_texts(start, tmp_path):
    """docs/scale.md: any server may answer."""
    with live() as first, live() as second:
        port, servers = free_port(), (first, second)
        command, ready = start([server.url.removesuffix("/v1") for server in servers], port, tmp_path)
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with started(command, port, ready, LITELLM_LOCAL_MODEL_COST_MAP="True") as url:  # or it asks the network
            assert_same_texts(url)
        pages = [server.service.metrics.page().decode() for server in servers]
        assert all('dflash_requests_total{outcome="completed"} ' in page for page in pages)


def test_a_proxy_finds_the_server_of_a_model(tmp_path):
    services, names = [serve(), serve()], ("large", "small")
    services[0].name, services[1].name = names
    with live(service=services[0]) as first, live(service=services[1]) as second:
        port, urls = free_port(), [server.url.removesuffix("/v1") for server in (first, second)]
        command, ready = litellm(urls, port, tmp_path, names)
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with started(command, port, ready, LITELLM_LOCAL_MODEL_COST_MAP="True") as url:
            bodies = [chat(max_tokens=4) | {"model": name} for name in ("small", "large", "small")]
            assert [httpx.post(url + CHAT, json=body, timeout=120).status_code for body in bodies] == [200] * 3
        pages = [service.metrics.page().decode() for service in services]
    for count, page in zip((1, 2), pages, strict=True):
        assert f'dflash_requests_total{{outcome="completed"}} {count}.0' in page


def test_replicas_of_ray_serve_write_the_same_texts(tmp_path):
    port, config = free_port(), tmp_path / "serve.yaml"
    replicas = {"import_path": "deploy.ray_serve:replicas", "route_prefix": "/"}
    config.write_text(json.dumps({"http_options": {"port": port}, "applications": [replicas]}))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of the command dflash
    variables = {"DFLASH_NAME": "pair", "HOME": str(tmp_path), "PATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [CLIENTS / "ray/bin/serve", "run", config]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # of sockets: their paths must be short
        started(command, port, "/health", RAY_TMPDIR=folder, **variables) as url,
    ):
        assert_same_texts(url)
        pages = [httpx.get(f"{url}/metrics").text for _ in range(20)]
    assert len({re.search(r"^process_start_time_seconds (.+)", page, re.M)[1] for page in pages}) == 2


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def answers(url) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


# ---------------------------------------------------------------------------------------------- commands


def shell(tool, key, **more) -> str:
    """Return a request to run a command by an agent's tool. Its result, 42, is not in the request."""
    return f"Please call {tool} {json.dumps({key: 'echo $((6 * 7))', **more})} now."


def assert_ran(found) -> None:
    assert "The tool said: " in found
    assert "42" in found.rpartition("The tool said: ")[2]


def test_codex(run, server):
    provider = f'{{name="dflash",base_url="{server.url}",wire_api="responses"}}'
    tools = f'{{command="{sys.executable}",args=["{Path(__file__).with_name("weather_mcp.py")}"]}}'
    options = [
        "model=scripted",
        "model_provider=dflash",
        f"model_providers.dflash={provider}",
        f"mcp_servers.w={tools}",
    ]
    options = [word for option in options for word in ("-c", option)]
    options += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    codex = [CLIENTS / "node/node_modules/.bin/codex", "exec", *options]
    assert_ran(run(*codex, shell("exec_command", "cmd")))
    assert "12 degrees in Oslo" in run(*codex, ASK.replace("weather", "mcp__w__weather"))


def test_claude_code(run, server):
    asked = shell("Bash", "command", description="Multiply.")
    environment = {"ANTHROPIC_BASE_URL": server.url.removesuffix("/v1"), "ANTHROPIC_AUTH_TOKEN": "none"}
    environment["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    program = CLIENTS / "node/node_modules/.bin/claude"
    assert_ran(run(program, "-p", "--allowedTools", "Bash", given=asked, **environment))


def test_opencode(run, server):
    model = {"name": "scripted", "limit": {"context": 65536, "output": 4096}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": server.url}, "models": {"scripted": model}}
    config = {"model": "dflash/scripted", "autoupdate": False, "provider": {"dflash": provider}}
    (run.home / "work/opencode.json").write_text(json.dumps(config))
    program, offline = CLIENTS / "node/node_modules/.bin/opencode", {"OPENCODE_DISABLE_MODELS_FETCH": "1"}
    assert_ran(run(program, "run", given=shell("bash", "command"), **offline))


def test_qwen_code(run, server):
    environment = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none", "OPENAI_MODEL": "scripted"}
    asked, program = shell("run_shell_command", "command", is_background=False), CLIENTS / "node/node_modules/.bin/qwen"
    assert_ran(run(program, "--auth-type", "openai", "--yolo", "-p", asked, **environment))


def test_aider(run, server):
    file = run.home / "work/hello.txt"
    file.write_text("old\n")
    environment = {"OPENAI_API_BASE": server.url, "OPENAI_API_KEY": "none"}
    options = ["--model", "openai/scripted", "--edit-format", "whole", "--no-git", "--yes-always"]
    options += ["--no-check-update", "--no-show-model-warnings", "--analytics-disable"]
    message = "Please write [[hello.txt\n```\nnew\n```\n]]"
    run(CLIENTS / "aider/bin/aider", *options, "--message", message, file, **environment)
    assert file.read_text() == "new\n"


def test_llm(run, server):
    names = {"model_id": "dflash", "model_name": "scripted", "api_base": server.url}
    model = {**names, "supports_tools": True, "supports_schema": True}
    (run.home / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
    (run.home / "tools.py").write_text("def weather(city: str) -> str:\n    return f'12 degrees in {city}'\n")

    def llm(*options) -> str:
        command = [CLIENTS / "python/bin/llm", "-m", "dflash", "--key", "none"]
        return run(*command, *options, LLM_USER_PATH=str(run.home)).strip()

    assert llm("--functions", run.home / "tools.py", ASK) == "The tool said: 12 degrees in Oslo"
    assert llm(SAY) == TEXT
    assert json.loads(llm("--schema", "city, country", f"write [[{json.dumps(PLACE)}]]")) == PLACE
