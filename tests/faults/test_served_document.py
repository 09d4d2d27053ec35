"""No request that the OpenAPI document of the server describes, or nearly describes, makes the server fail."""

import collections

import httpx
import pytest
import schemathesis
import served
from examples import examples
from hypothesis import given
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance  # ranges and the context are checked later

PATHS = {
    "/v1/chat/completions": "POST", "/v1/completions": "POST", "/v1/responses": "POST", "/v1/messages": "POST",
    "/v1/messages/count_tokens": "POST", "/api/chat": "POST", "/api/generate": "POST", "/api/show": "POST",
    "/api/tags": "GET", "/api/ps": "GET", "/api/version": "GET", "/v1/receipts/{completion}": "GET",
    "/v1/receipts/{completion}/verify": "POST", "/v1/models": "GET", "/v1/models/{name}": "GET", "/health": "GET",
    "/metrics": "GET", "/tokenize": "POST", "/detokenize": "POST", "/version": "GET",
}  # fmt: skip
CASES = [(path, GenerationMode.POSITIVE) for path in PATHS]
ANSWERED = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"
)  # fmt: skip
CASES += [(path, GenerationMode.NEGATIVE) for path in ANSWERED]
LIMITS, LONGEST = {"max_tokens", "max_completion_tokens", "max_output_tokens"}, 8  # tokens of an answer


@pytest.fixture(scope="module")
def root():
    with served.live(rows=2) as server:
        yield server.url.removesuffix("/v1")


@pytest.fixture(scope="module")
def document(root):
    return schemathesis.openapi.from_dict(httpx.get(f"{root}/openapi.json").json())


def shorten(body: object) -> None:
    """Make a request one for the model that is served, with a short answer."""
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = "pair"
    if body.get("options") is None:
        body["options"] = {}  # Ollama's; unknown elsewhere
    if isinstance(body["options"], dict) and type(body["options"].get("num_predict", 0)) is int:
        body["options"]["num_predict"] = LONGEST
    limits = [name for name in LIMITS if type(body.get(name)) is int]
    for name in limits:
        body[name] = min(body[name], LONGEST) if body[name] >= 0 else LONGEST
    if not limits:
        body.setdefault("max_output_tokens" if "input" in body else "max_tokens", LONGEST)


def simplify(body: object) -> None:
    """Leave out what only the template, a grammar or the room can judge, which is nearly always wrong."""
    if not isinstance(body, dict):
        return
    for name in LIMITS & body.keys():
        body[name] = LONGEST
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": "add 1 and 2"}]
    if "input" in body:
        body["input"] = "add 1 and 2"
    fields = ("tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs")
    for name in (*fields, "system", "instructions", "text", "output_config", "output_format", "previous_response_id"):
        body.pop(name, None)
    for name in [name for name in body if name.startswith("guided_")]:
        del body[name]


def test_every_path_is_tried(document):
    assert {path: [*methods] for path, methods in document.raw_schema["paths"].items()} == {
        path: [method.lower()] for path, method in PATHS.items()
    }


@pytest.mark.long
@pytest.mark.parametrize(("path", "mode"), CASES)
def test_no_request_makes_the_server_fail(document, root, path, mode):
    statuses = collections.Counter()

    @examples(20 if PATHS[path] == "POST" else 5)
    @given(document[path][PATHS[path]].as_strategy(generation_mode=mode))
    def explore(case):
        shorten(case.body)
        for is_simple in (False, True)[: 1 + (mode is GenerationMode.POSITIVE)]:
            if is_simple:
                simplify(case.body)
            response = case.call(base_url=root, timeout=120)
            case.validate_response(response, excluded_checks=[positive_data_acceptance])
            statuses[response.status_code] += 1

    explore()
    if mode is GenerationMode.POSITIVE and "{" not in path:
        assert statuses[200] >= statuses.total() / 10, f"few requests get far: {statuses}"
