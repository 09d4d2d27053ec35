"""Requests that the server reads, and the error that refuses one: OpenAI's, which other APIs' are translated to.

Fields that would change the text and cannot be applied are refused by name. Unknown ones and other engines' ways to
sample are left out and named.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from dflash.internals import MAX_STOP_STRINGS, GenerateArguments
from dflash.light import SETTINGS, terminal

NOT_APPLIED = "this server does not apply it: leave it out"


@dataclass(eq=False)
class ApiError(Exception):
    """The answer to a request that cannot be served: its HTTP status, and why; ``param`` is the field that is wrong."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] | None = None


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


@contextlib.contextmanager
def refusing(param: str | None, where: str = "") -> Iterator[None]:
    """Raise a ValueError or a TypeError of the block as a bad request."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise bad_request(f"{where}{error}", param) from error


@contextlib.contextmanager
def refusing_all(param: str, what: str) -> Iterator[None]:
    """Raise whatever a template, a processor or a decoder raises in the block as a bad request."""
    try:
        yield
    except Exception as error:
        raise bad_request(f"{what}: {terminal.first_line(error)}", param) from error


def expect(holds: object, message: str) -> None:
    """Refuse a request whose fields do not go together."""
    if not holds:
        raise PydanticCustomError("pairs", message)


def not_applied(base: type[BaseModel], **fields: tuple[Any, ...]) -> Any:
    """Return a model with fields of OpenAI's API that are not applied, each with the values that ask for nothing.

    null always does. Their JSON schemas say so.
    """

    def field(neutral: tuple[Any, ...]) -> Any:
        def check(value: object) -> None:
            same = (isinstance(value, bool) == isinstance(other, bool) and value == other for other in neutral)
            if value is not None and not any(same):
                raise PydanticCustomError("unsupported", NOT_APPLIED)

        schema = pydantic.WithJsonSchema({"enum": [None, *neutral], "description": "Not applied."})
        return Annotated[Any, AfterValidator(check), schema], None

    return pydantic.create_model(
        "_NotApplied", __base__=base, **{name: field(neutral) for name, neutral in fields.items()}
    )


def _stops(value: object) -> object:
    """Return stop strings as a list, which has clearer errors than a union. An empty one asks for nothing."""
    given = [value] if isinstance(value, str) else value
    return [text for text in given if text != ""] if isinstance(given, list) else given


def parts_of(value: object) -> object:
    """Return a text as the list of parts that it stands for."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def picture(url: str) -> dict[str, Any]:
    """Return a picture as a part of a chat's message."""
    return {"type": "image_url", "image_url": {"url": url}}


def join_texts(parts: Sequence[dict[str, Any]], between: str) -> list[dict[str, Any]]:
    """Return the parts of a message with texts that follow each other as one."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = {**part, "text": f"{joined[-1]['text']}{between}{part['text']}"}
        else:
            joined.append(part)
    return joined


def join_messages(first: dict[str, Any], second: dict[str, Any], between: str) -> dict[str, Any]:
    """Return two neighboring messages of a role as one, with the thoughts and the calls of both."""
    content = [*(first.get("content") or ()), *(second.get("content") or ())]
    joined = {**second, **first, "content": join_texts(content, between)}
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    if thoughts := [said["reasoning_content"] for said in (first, second) if said.get("reasoning_content")]:
        joined["reasoning_content"] = "\n".join(thoughts)
    return joined


def _limit(value: int) -> int:
    expect(value != 0, "it must be at least 1, or -1 for as many as fit")
    return value


_NUMERAL = r"-?[0-9]{1,30}(\.[0-9]{1,30})?(e[+-]?[0-9]{1,3})?"


class _Number(BeforeValidator):
    """Takes 5.0 and texts such as "5" for 5: some clients write numbers so."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "string", "pattern": f"^{_NUMERAL}$"}]}


def _number(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(_NUMERAL, value):
        value = float(value) if {".", "e"} & {*value} else int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


Number = _Number(_number)
Limit = Annotated[int, Field(ge=-1), AfterValidator(_limit), Number]
Text = Annotated[str, Field(min_length=1)]
Stops = Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_stops, str | list[str])]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
# OpenAI's range; numbers near the largest would make logits infinite
Penalty = Annotated[float, Field(ge=-2, le=2), Number]
Repetition = Annotated[float, Field(ge=0.01, le=100), Number]
Bias = Annotated[float, Field(ge=-100, le=100)]
Top = Annotated[int, Field(ge=0, le=20), Number]


class Fields(BaseModel):
    """Takes unknown fields too, see `leave_out`."""

    model_config = pydantic.ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


# Fields that are not applied, with values that ask for nothing: of OpenAI's API, and how other engines sample.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "annotations": ([],), "include_obfuscation": (False,), "service_tier": ("auto", "default"),
    "dry_multiplier": (0,), "dynatemp_range": (0,), "length_penalty": (1,), "mirostat": (0,), "mirostat_mode": (0,),
    "tfs_z": (1,), "top_a": (0,), "typical_p": (1,), "xtc_probability": (0,),
}  # fmt: skip


def leave_out(model: BaseModel, place: str = "") -> dict[str, str]:
    """Take the fields that its types do not know out of a request. Return their names, such as ``messages[].id``.

    Each comes with the reason: "unknown", or "not applied" for those of `_HARMLESS`. null, and what else asks for
    nothing, is not named.
    """
    extra, found = model.__pydantic_extra__ or {}, {}
    for name, value in extra.items():
        if value not in (None, *_HARMLESS.get(name, ())):
            found[f"{place}{name}"] = "not applied" if name in _HARMLESS else "unknown"
    extra.clear()
    for name in model.model_fields_set & type(model).model_fields.keys():
        value = getattr(model, name)
        inside = f"{place}{name}[]." if isinstance(value, list) else f"{place}{name}."
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, BaseModel):
                found |= leave_out(part, inside)
    return found


class StreamOptions(Fields):
    """Options of a stream. Extensions: ``continuous_usage_stats``, as in vLLM, and ``include_drafts``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_drafts: bool | None = None


class JsonSchema(Fields):
    """The schema of an answer. What of it cannot be followed is refused only with ``strict``."""

    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        is_schema, has_schema = self.type == "json_schema", self.json_schema is not None
        expect(is_schema == has_schema, "json_schema belongs to the type json_schema, and must be given there")
        return self


def schema_format(**fields: Any) -> dict[str, Any]:
    """Return the format of an answer that follows a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", **fields}}


_KINDS = {name: get_args(annotation)[0] for name, annotation in GenerateArguments.__annotations__.items()}
_PLAIN: Any = {
    row.request: (Annotated[_KINDS[name], Number], None)
    for name, row in SETTINGS.items()
    if row.kind and row.request and _KINDS[name] in (int | None, float | None)
}


class SamplingFields(pydantic.create_model("_Numbers", __base__=Fields, **_PLAIN)):
    """How tokens are chosen, in every API: the engine's settings that are numbers. Some have ranges of OpenAI's."""

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), Number] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    repeat_penalty: Repetition | None = None  # llama.cpp's and Ollama's name
    min_tokens: Annotated[int, Field(ge=0), Number] | None = None
    store: bool | None = None  # False: the server must not learn from the answer

    def sampling(self) -> dict[str, Any]:
        """Return those that are given."""
        return {name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None}


# Settings of other servers (vLLM, SGLang, llama.cpp) that would change the text.
_OtherSettings = not_applied(
    SamplingFields, add_generation_prompt=(True,), allowed_token_ids=([],), bad_words=([],), chat_template=(),
    continue_final_message=(False,), documents=([],), ebnf=(), enable_thinking=(), grammar=("",), guided_choice=(),
    include_stop_str_in_output=(False,), json_schema=(), logits_processors=([],), lora_path=(), no_stop_trim=(False,),
    regex=("",), skip_special_tokens=(True,), stop_regex=([], ""), suppress_tokens=([],), thinking=(),
    truncate_prompt_tokens=(), use_beam_search=(False,),
)  # fmt: skip


class GenerationRequest(_OtherSettings):
    """The fields of both chat and text completions. Extensions of OpenAI's API are named as in vLLM."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    n: Annotated[int, Field(ge=1, le=128), Number] | None = None
    stop: Stops | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Bias] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    structured_outputs: dict[Literal["json", "regex", "grammar"], Any] | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> GenerationRequest:
        expect(self.stream or self.stream_options is None, "stream_options needs stream=true")
        expect(not (self.ignore_eos and self.stop_token_ids), "ignore_eos cannot be combined with stop_token_ids")
        return self


class TextPart(Fields):
    type: Literal["text"]
    text: str


class ImageUrl(Fields):
    url: str
    detail: Literal["auto", "low", "high"] | None = None  # the processor decides


class ImagePart(Fields):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Function(Fields):
    """A function that the model may call. What of its schema cannot be followed is refused only with ``strict``."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


def function(**fields: Any) -> dict[str, Any]:
    """Return a function as chats write it: one that may be called, is asked for, or was called."""
    return {"type": "function", "function": fields}


class NamedFunction(Fields):
    name: str


class NamedChoice(Fields):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Fields):
    """A function that was called. Its arguments are JSON text; clients also send an object, null or nothing."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Fields):
    """A call as it was answered. Clients that join the pieces of a stream may send its ``index`` too, or no type."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int | None, Field(exclude=True), Number] = None


class Message(not_applied(Fields, refusal=(), audio=(), function_call=("none",))):
    """A message of a conversation. The chat template decides which roles it takes, and what it shows of a name."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part], BeforeValidator(parts_of, str | list[Part])] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, AfterValidator(lambda calls: calls or None)] = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> Message:
        expect(self.role == "assistant" or not self.tool_calls, "tool_calls belong to messages of the assistant")
        is_result, has_id = self.role == "tool", self.tool_call_id is not None
        expect(is_result == has_id, "tool_call_id belongs to messages of the role tool, which must have it")
        is_text = not any(isinstance(part, ImagePart) for part in self.content or ())
        expect(is_text or self.role in ("user", "tool"), "pictures belong to messages of the roles user and tool")
        return self


_ChatFields = not_applied(
    GenerationRequest, functions=([],), function_call=("none",), audio=(), modalities=(["text"],),
    verbosity=("medium",), web_search_options=(),
)  # fmt: skip


class Thinking(Fields):
    """Turns thoughts on or off, as Anthropic's API does. With ``"adaptive"`` the template decides."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Any, AfterValidator(lambda _: None)] = None  # the model ends its thoughts itself


class ChatRequest(_ChatFields):
    """A request of ``/v1/chat/completions``. ``chat_template_kwargs`` and ``enable_thinking`` are extensions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: Limit | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    echo: ClassVar[None] = None  # completions have it

    @pydantic.field_validator("top_logprobs")
    @classmethod
    def _check_logprobs(cls, value: int | None, info: pydantic.ValidationInfo) -> int | None:
        expect(not value or info.data.get("logprobs"), "it needs logprobs=true")
        return value

    @model_validator(mode="after")
    def _join_fields(self) -> ChatRequest:
        """Keep the most tokens of an answer in ``max_tokens``, and thinking in ``enable_thinking``."""
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        expect(len(given) < 2, "max_tokens and max_completion_tokens differ: give one of them")
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if self.thinking is not None and self.thinking.type != "adaptive" and self.enable_thinking is None:
            self.enable_thinking = self.thinking.type == "enabled"
        return self

    @property
    def most_logprobs(self) -> int | None:
        """The probable tokens that are asked for at each position; None if no log probabilities are."""
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(not_applied(GenerationRequest, best_of=(1,))):
    """A request of ``/v1/completions``. With ``echo``, ``max_tokens`` may be 0, and ``logprobs`` has the prompt's.

    With a ``suffix``, the answer is what stands between the prompt and it.
    """

    prompt: str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1)]
    suffix: str | None = None
    max_tokens: Annotated[int, Field(ge=-1), Number] | None = None
    echo: bool | None = None
    logprobs: Top | None = None

    @property
    def most_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeRequest(Fields):
    """A request of ``/tokenize``, as in vLLM: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> TokenizeRequest:
        expect((self.prompt is None) != (self.messages is None), "give one of prompt and messages")
        return self


class DetokenizeRequest(Fields):
    """A request of ``/detokenize``, as in vLLM."""

    model: str | None = None
    tokens: TokenIds
