"""The arguments of ``generate`` that a request asks for."""

from __future__ import annotations

from ..call import GenerateArguments
from .errors import bad_request
from .protocol import GenerationRequest

__all__ = ["generate_arguments", "named_as_asked"]

_SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("no_repeat_ngram_size", "stop_token_ids"),
)


def generate_arguments(request: GenerationRequest, prompt_length: int, default: int, room: int) -> GenerateArguments:
    """Return a request's arguments, without seed and tokenizer.

    Args:
        request: checked by pydantic. The engine checks the ranges of numbers.
        prompt_length: its prompt's tokens.
        default: new tokens if the request does not say.
        room: the most tokens of prompt and answer together.

    Raises:
        ApiError: prompt and answer are too long, or nothing is asked for.
    """
    asked, echoes = request.new_tokens, bool(getattr(request, "echo", None))
    if asked == 0 and not echoes:
        raise bad_request("max_tokens must be at least 1, or echo true", "max_tokens")
    if prompt_length + (asked or 1) > room:
        answer = f" and {asked} are asked for" if asked else ", and an answer needs at least one"
        raise bad_request(
            f"this server's context is {room} tokens: the prompt has {prompt_length}{answer}",
            "messages" if "messages" in type(request).model_fields else "prompt",
            "context_length_exceeded",
        )
    if asked is not None and (request.min_tokens or 0) > asked:
        raise bad_request(f"min_tokens must be at most max_tokens, {asked}, got {request.min_tokens}", "min_tokens")
    arguments = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    arguments["max_new_tokens"] = min(default, room - prompt_length) if asked is None else max(1, asked)
    arguments["num_return_sequences"] = 1  # several answers are several calls, each with its seed
    if request.stop:
        arguments["stop_strings"] = request.stop
    if request.ignore_eos:
        arguments["stop_token_ids"] = []
    if request.most_logprobs is not None:
        arguments["logprobs"], arguments["prompt_logprobs"] = request.most_logprobs, echoes
    if request.min_tokens is not None:
        arguments["min_new_tokens"] = request.min_tokens
    if request.logit_bias is not None:
        arguments["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
    return arguments


def named_as_asked(request: GenerationRequest, message: str) -> str | None:
    """Return the field of a request that an engine's message begins with, if any."""
    name = message.split(maxsplit=1)[0] if message else ""
    name = {"ids": "prompt", "stop_strings": "stop"}.get(name, name)
    return name if name in type(request).model_fields else None
