"""What the server's routes share: the scheduler, the tokenizer, the counters, and how a request becomes calls."""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..call import GenerateArguments
from ..evaluate.description import machine_name
from ..generator import Generator
from ..sampling import Grammar, fold
from ..targets import describe_config, sample_digest, version_of
from .completion import Answer, Run
from .logprobs import Pieces
from .prompts import Prompt, PromptReader, Tools, read_tools
from .protocol import ApiError, ChatRequest, CompletionRequest, GenerationRequest, bad_request
from .receipts import ReceiptFolder
from .scheduler import Scheduler
from .structured import answer_grammar
from .text import AnswerText

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


_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """Counters of one server, in a registry of their own.

    Args:
        scheduler: tells how many requests wait and run, and the time of each step.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._registry = CollectorRegistry()
        own, block_size = {"registry": self._registry}, scheduler.generator.block_size
        # 1. Requests.
        self.requests = Counter("dflash_requests", "Requests by how they ended.", ["outcome"], **own)
        waiting = Gauge("dflash_answers_waiting", "Answers that wait for a row.", **own)
        waiting.set_function(lambda: scheduler.waiting)
        running = Gauge("dflash_answers_running", "Answers that have a row.", **own)
        running.set_function(lambda: scheduler.running)
        # 2. Tokens.
        self._prompt = Counter("dflash_prompt_tokens", "Prompt tokens of answers that began.", **own)
        self._cached = Counter("dflash_cached_prompt_tokens", "Those that a row's caches already held.", **own)
        self._new = Counter("dflash_new_tokens", "Tokens of answers.", **own)
        self._step_tokens = Histogram(
            "dflash_step_tokens", "Tokens that a step added to an answer: accepted drafts and the bonus token.",
            buckets=range(1, block_size + 1), **own,
        )  # fmt: skip
        # 3. Times.
        self._first = Histogram(
            "dflash_first_token_seconds", "From a request to its first token.", buckets=_SECONDS, **own
        )
        self._request = Histogram("dflash_request_seconds", "From a request to its end.", buckets=_SECONDS, **own)
        step = Histogram("dflash_step_seconds", "Time of a step of all rows.", buckets=_STEP_SECONDS, **own)
        scheduler.on_step = step.observe

    def ended(self, run: Run, outcome: str) -> None:
        """Take note that a request has ended: ``completed``, ``failed`` or ``cancelled``."""
        self.requests.labels(outcome).inc()
        self._request.observe(run.seconds())
        if run.first_token_seconds is not None:
            self._first.observe(run.first_token_seconds)
        for answer in run.answers:
            if (found := answer.statistics) is None:
                continue  # it never began
            self._prompt.inc(answer.prompt_tokens)
            self._cached.inc(answer.cached_tokens)
            self._new.inc(answer.new_tokens)
            for tokens in found.acceptance_lengths[0]:
                self._step_tokens.observe(tokens)

    def page(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)


_COMPLETION_TOKENS = 16  # OpenAI's default for text completions


@dataclass
class Service:
    """A target that is served.

    Attributes:
        scheduler: runs its answers.
        tokenizer: the target's.
        name: of the model, for clients.
        version: of this package.
        timeout: seconds that a request may take, waiting included.
        receipts: where receipts are written; None for none.
    """

    scheduler: Scheduler
    tokenizer: Any
    name: str
    version: str
    timeout: float = 600.0
    receipts: ReceiptFolder | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    is_ending: bool = False

    def __post_init__(self) -> None:
        self.reader, self.metrics = PromptReader(self.tokenizer), Metrics(self.scheduler)
        self._pieces = Pieces(self.tokenizer)
        weights = self.receipts and self.receipts.fingerprints.weights
        self.fingerprint = _fingerprint(self.scheduler.generator, self.version, weights)

    @property
    def most_answers(self) -> int:
        """The most answers of one request: more could never be queued."""
        return self.scheduler.generator.batch_size + self.scheduler.max_waiting

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request asks for another model."""
        if name is not None and name != self.name:
            raise ApiError(
                404, f"this server has the model {self.name!r}, not {name!r}", param="model", code="model_not_found"
            )

    def read_chat(self, request: ChatRequest) -> list[Answer]:
        """Return the answers that a request asks for, checked; nothing is run. Call it outside of the event loop.

        Raises:
            ApiError: the request cannot be served.
        """
        self.check_model(request.model)
        tools = read_tools(request, self.reader.tool_form)
        prompt = self.reader.read_chat(request, tools)
        return self._answers(request, [prompt], self.scheduler.generator.max_length, self.reader.thinks, tools)

    def read_completion(self, request: CompletionRequest) -> list[Answer]:
        """Return the answers that a request asks for, as `read_chat` does: all of the first prompt, then the next."""
        self.check_model(request.model)
        return self._answers(request, self.reader.read_completion(request), _COMPLETION_TOKENS, False)

    def _answers(
        self,
        request: GenerationRequest,
        prompts: Sequence[Prompt],
        default: int,
        thinks: bool,
        tools: Tools | None = None,
    ) -> list[Answer]:
        count = request.n or 1
        if count * len(prompts) > self.most_answers:
            raise bad_request(
                f"one request may ask for {self.most_answers} answers, this one asks for {count * len(prompts)}", "n"
            )
        # Drawn here, so that several answers differ as those of one `generate` with num_return_sequences do.
        seed = secrets.randbits(63) if request.seed is None else request.seed
        echoes = getattr(request, "echo", None)
        answers = []
        for prompt in prompts:
            grammar = answer_grammar(request, prompt, tools)
            for number in range(count):
                call = self._call(request, prompt, default, fold(seed, number), grammar)
                text = AnswerText(request.stop or (), thinks=thinks, is_thinking=prompt.is_thinking)
                calls = None if tools is None else tools.text()
                pieces = None if call.logprobs is None else self._pieces
                echo = prompt.text if echoes else ""
                answers.append(Answer(call, text, echo, calls, pieces, is_empty=request.new_tokens == 0))
        return answers

    def _call(
        self, request: GenerationRequest, prompt: Prompt, default: int, seed: int, grammar: Grammar | None
    ) -> Any:
        generator = self.scheduler.generator
        arguments = generate_arguments(request, len(prompt.ids), default, generator.max_length)
        ids = torch.tensor([prompt.ids], dtype=torch.int64, device=generator.engine.target.device)
        try:
            call = self.scheduler.resolve(ids, seed=seed, tokenizer=self.tokenizer, grammar=grammar, **arguments)
            if self.receipts is not None:
                self.receipts.check_call(call)
            return call
        except (ValueError, TypeError) as error:
            raise bad_request(str(error), named_as_asked(request, str(error))) from error

    def run(self, answers: Sequence[Answer], completion: str) -> Run:
        """Queue the answers of a completion.

        Raises:
            ApiError: too many requests wait already, or the server ends.
        """
        keep = None if self.receipts is None else functools.partial(self.receipts.write, completion)
        return Run(self.scheduler, answers, self.timeout, keep)

    def receipts_or_refuse(self) -> ReceiptFolder:
        """Return where receipts are; raise ApiError if the server writes none."""
        if self.receipts is None:
            raise ApiError(
                404, "this server writes no receipts: start it with --receipts FOLDER", code="receipts_are_off"
            )
        return self.receipts


def _fingerprint(generator: Generator, version: str, weights: str | None = None) -> str:
    """Return a digest of what a text depends on besides its request: weights, versions, device and shapes.

    The drafter is no part of it: the text is the same with any, and without one. Without a digest of all ``weights``,
    a sample of them is read.
    """
    target = generator.engine.target
    facts = (
        *(weights or sample_digest(target.model), describe_config(target.model)),
        *(version, torch.__version__, torch.version.cuda, version_of("llguidance"), machine_name(target.device)),
        *(generator.block_size, generator.prefill_chunk, generator.fused_reason, generator.weights),
    )
    return f"fp_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
