"""Service behind the server's routes: how a request becomes choices, how these are answered, and counters."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from anyio import to_thread
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from pydantic import BaseModel

from dflash import Statistics, StreamEvent, TokenLogprobs
from dflash.internals import Call, GenerateArguments, RecordedSettings, TextDecoder, fold, targets
from dflash.light import SETTINGS, terminal

from . import requests
from .adopt import Adopter
from .answer_text import AnswerText, AnswerTokens, BlockEvent, BlockWriter, Delta, Pieces, ShownToken
from .prompts import EncodedPrompt, PromptReader, Tools, answer_grammar, grammar_field, read_tools
from .requests import NOT_APPLIED, ApiError, ChatRequest, GenerationRequest, bad_request, leave_out
from .scheduler import Item, QueueFullError, Scheduler, Ticket
from .tool_calls import CallText

if TYPE_CHECKING:
    from .receipts import ReceiptFolder

_ENDS = "the server is about to end: try again later"
_COMPLETION_TOKENS = 16  # OpenAI's default for text completions
_MAX_WARNINGS = 16  # they are a header too
_MAX_NAMES, _MAX_NAME = 1000, 100  # unknown fields that are logged, once each, and characters of one
_STRICT_STOPS = 4  # as in OpenAI's API
_NAMES = {row.request: name for name, row in SETTINGS.items() if row.request}  # of arguments, by field
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LOG = logging.getLogger(__name__)
_STEP_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)


def refusal_of(error: RuntimeError) -> ApiError:
    """Return the refusal of a request that the scheduler does not take, for now or for good."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    return ApiError(503, _ENDS, code="shutting_down")


@dataclass
class Choice:
    """One answer to a request, as OpenAI's API calls it.

    Attributes:
        call: what is run for it.
        text: splits its text.
        shown: decodes it if it is not the engine's text, because marks are special tokens.
        prompt_text: shown before it, for ``echo``.
        calls: splits the tool calls off its content; None if it has none.
        pieces: of the vocabulary; None if no log probabilities are asked for.
        is_empty: only the prompt is asked for. The engine's one token is not shown.
        warnings: what its grammar leaves out of the request's schemas.
        tokens: shown so far, the prompt's first; only with ``pieces``.
        finish_reason: ``"stop"``, ``"length"`` or ``"tool_calls"`` once it has ended.
        statistics: of its last event.
        last_seconds: from the request to this event.
    """

    call: Call
    text: AnswerText
    shown: Any = None
    prompt_text: str = ""
    calls: CallText | None = None
    pieces: Pieces | None = None
    is_empty: bool = False
    warnings: Sequence[str] = ()
    deltas: list[Delta] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    finish_reason: str | None = None
    statistics: Statistics | None = None
    last_seconds: float | None = None

    def __post_init__(self) -> None:
        self._decoder = None if self.shown is None else TextDecoder(self.shown, skip_special_tokens=True)
        if self.pieces is not None:
            self._held = AnswerTokens(self.pieces, self.shown or self.call.tokenizer, len(self.prompt_text))

    @property
    def content(self) -> str:
        return "".join(delta.content for delta in self.deltas)

    @property
    def prompt_tokens(self) -> int:
        return len(self.call.prompts[0])

    @property
    def cached_tokens(self) -> int:
        """Tokens of its prompt that were not run again."""
        return 0 if self.statistics is None else self.prompt_tokens - self.statistics.num_prefilled_tokens[0]

    @property
    def new_tokens(self) -> int:
        return 0 if self.statistics is None or self.is_empty else self.statistics.num_new_tokens[0]

    def add_prompt(self, values: Sequence[TokenLogprobs | None]) -> None:
        """Add the log probabilities of the prompt. Slow for long ones: call it outside of the event loop."""
        self.tokens += self.pieces.of_prompt(self.call.prompts[0].tolist(), values, self.prompt_text)

    def add(self, event: StreamEvent) -> Delta:
        """Add what a step wrote; return what is new of its text."""
        reason = event.finish_reasons[0]
        self.ids += event.ids[0]
        self.statistics = event.statistics
        if self.is_empty:
            self.finish_reason = "length"
            return Delta()
        text = event.text[0] if event.text else ""
        if self._decoder is not None:
            text = self._decoder.push(event.ids[0]) + (self._decoder.finish() if reason is not None else "")
        delta = self.text.push(text, is_last=reason is not None)
        reason = "stop" if self.text.stopped_by else reason
        if self.calls is not None:
            content, calls = self.calls.push(delta.content, is_last=reason is not None)
            delta = delta._replace(content=content, calls=calls)
            reason = "tool_calls" if reason == "stop" and self.calls.is_whole else reason
        if event.logprobs is not None:
            is_whole = reason is not None and not self.text.stopped_by
            shown = self._held.push(event.ids[0], event.logprobs[0], self.text.length, is_whole=is_whole)
            self.tokens += shown
            delta = delta._replace(tokens=shown)
        self.deltas.append(delta)
        self.finish_reason = reason
        return delta


class Completion:
    """Queues the choices of a request, and passes on their events in the event loop.

    Events wait in memory until they are read, so a client that reads slowly holds up nobody. Make one in the event
    loop, and `end` it.

    Raises:
        ApiError: too many requests wait already, or the server ends.
    """

    def __init__(self, service: Service, choices: Sequence[Choice], id: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.choices, self._service, self._id, self._began = choices, service, id, self._loop.time()
        self._items: asyncio.Queue[tuple[int, Item]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._has_failed = False
        self.first_token_seconds: float | None = None
        try:
            for index, choice in enumerate(choices):
                emit = functools.partial(self._emit, index)
                self._tickets.append(service.scheduler.submit(choice.call, emit))
        except RuntimeError as error:
            self._cancel()
            raise refusal_of(error) from error

    def _emit(self, index: int, item: Item) -> None:
        """Pass an item to the event loop; called by the scheduler's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody reads any more
            self._loop.call_soon_threadsafe(self._items.put_nowait, (index, item))

    @property
    def outcome(self) -> str:
        """How it ended: completed, failed or cancelled."""
        if all(choice.finish_reason for choice in self.choices):
            return "completed"
        return "failed" if self._has_failed else "cancelled"

    def _cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()

    def end(self) -> None:
        """Free the rows of choices that have not ended, and count the request."""
        self._cancel()
        self._service.metrics.add(self)
        _LOG.info("%s: %s", self._id, self._sent(), extra={"fields": self._numbers()})

    def _numbers(self) -> dict[str, Any]:
        """Return for programs what `_sent` says."""
        kinds = ("prompt", "cached", "new")
        counts = {f"{kind}_tokens": sum(getattr(each, f"{kind}_tokens") for each in self.choices) for kind in kinds}
        times = {"seconds": self.seconds(), "first_token_seconds": self.first_token_seconds}
        return {"answer": self._id, "outcome": self.outcome, **counts, **times}

    def _sent(self) -> str:
        """Say in a line how it went."""
        begun = [choice for choice in self.choices if choice.statistics is not None]
        if not begun or self.first_token_seconds is None:
            return f"{self.outcome} before it began, after {self.seconds():.2f} s"
        prompt, cached = (sum(getattr(choice, f"{kind}_tokens") for choice in begun) for kind in ("prompt", "cached"))
        steps = [count for choice in begun for count in choice.statistics.acceptance_lengths[0]]
        new, seconds = sum(choice.new_tokens for choice in begun), self.seconds()
        first, ends = self.first_token_seconds, {choice.finish_reason or self.outcome for choice in self.choices}
        counts = f"{prompt} prompt tokens ({cached} cached), {new} new in {seconds:.2f} s (first after {first:.2f} s)"
        if steps:
            mean = sum(steps) / len(steps)
            counts += f", {new / max(seconds - first, 1e-6):.0f} tokens/s, {mean:.1f} tokens per step"
        return f"{counts}: {', '.join(sorted(ends))}"

    async def finish(self) -> None:
        async for _ in self.deltas():
            pass

    async def deltas(self) -> AsyncIterator[tuple[int, Delta, StreamEvent]]:
        """Yield what each step adds: the choice's index, its text, the event.

        Raises:
            ApiError: a choice failed, took too long, or the server ends.
        """
        while self.outcome != "completed":
            index, event = await self._next()
            choice, receipts = self.choices[index], self._service.receipts
            if self.first_token_seconds is None:
                self.first_token_seconds = self.seconds()
            self._count(choice, len(event.ids[0]))
            if event.prompt_logprobs is not None:
                await to_thread.run_sync(choice.add_prompt, event.prompt_logprobs[0])
            delta = choice.add(event)
            if choice.finish_reason is not None:
                if receipts is not None and (reason := event.finish_reasons[0]) is not None:
                    await to_thread.run_sync(receipts.write, self._id, choice, index, reason)
                self._tickets[index].cancel()  # the text may show a stop string that the tokens do not
            yield index, delta, event

    def _count(self, choice: Choice, tokens: int) -> None:
        """Count new tokens of a choice, and the time since those before."""
        metrics, now = self._service.metrics, self.seconds()
        metrics.fresh_tokens += tokens
        for _ in range(tokens if choice.last_seconds is not None else 0):
            metrics.token_seconds.observe((now - choice.last_seconds) / tokens)
        choice.last_seconds = now

    async def blocks(self) -> AsyncIterator[list[BlockEvent]]:
        """Yield what each step does to the blocks of the one answer. The last thing is the end of its last block.

        Raises:
            ApiError: as `deltas`.
        """
        (choice,), blocks = self.choices, BlockWriter()
        async for _, delta, _ in self.deltas():
            happened = [*blocks.push(delta)]
            yield [*happened, *blocks.close()] if choice.finish_reason is not None else happened

    async def _next(self) -> tuple[int, StreamEvent]:
        timeout = self._service.timeout
        while True:
            try:
                index, item = await asyncio.wait_for(self._items.get(), max(timeout - self.seconds(), 0.001))
            except asyncio.TimeoutError:
                raise self._failure(503, f"the answer was not ready after {timeout:g} s", "timeout") from None
            if self.choices[index].finish_reason is not None:
                continue
            if isinstance(item, StreamEvent):
                return index, item
            if item is None:
                raise self._failure(503, _ENDS, "shutting_down")
            raise self._failure(500, f"the answer failed: {item}", "engine_error") from item

    def _failure(self, status: int, message: str, code: str) -> ApiError:
        self._has_failed = True
        return ApiError(status, message, code=code)

    def seconds(self) -> float:
        return self._loop.time() - self._began


class Metrics:
    """Counters of one server for Prometheus, in a registry of their own."""

    def __init__(self, scheduler: Scheduler, adopter: Adopter | None = None) -> None:
        self._adopter = adopter
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.fresh_tokens = 0  # of answers, counted as they are written
        own: dict[str, Any] = {"registry": self._registry}
        # 1. Requests.
        self.requests = Counter("dflash_requests", "Requests by how they ended.", ["outcome"], **own)
        waiting, running = "Answers that wait for a row.", "Answers that have a row."
        Gauge("dflash_answers_waiting", waiting, **own).set_function(lambda: scheduler.waiting)
        Gauge("dflash_answers_running", running, **own).set_function(lambda: scheduler.running)
        # 2. Tokens.
        self._prompt = Counter("dflash_prompt_tokens", "Prompt tokens of answers that began.", **own)
        self._cached = Counter("dflash_cached_prompt_tokens", "Those that were not run again.", **own)
        self._new = Counter("dflash_new_tokens", "Tokens of answers.", **own)
        help = "Tokens that a step added to an answer: accepted drafts and the bonus token."
        sizes = range(1, scheduler.generator.block_size + 1)
        self._step_tokens = Histogram("dflash_step_tokens", help, buckets=sizes, **own)
        if adopter is not None:
            help = "The drafter that is served: 0, or the number of one that was learned."
            Gauge("dflash_drafter", help, **own).set_function(lambda: adopter.number)
            help = "Mean tokens per step of the last 500 answers with this drafter, and with the one before."
            pace = Gauge("dflash_drafter_step_tokens", help, ["drafter"], **own)
            pace.labels("now").set_function(lambda: adopter.now.mean)
            pace.labels("before").set_function(lambda: adopter.before.mean)
        if scheduler.session.prefix is not None:
            used, most = "Bytes of cached prompts.", "Bytes that cached prompts may have."
            Gauge("dflash_prompt_cache_bytes", used, **own).set_function(lambda: scheduler.session.prefix.num_bytes)
            Gauge("dflash_prompt_cache_max_bytes", most, **own).set(scheduler.session.prefix.max_bytes)
        # 3. Times.
        first, step = "From a request to its first token.", "Time of a step of all rows."
        self._first = Histogram("dflash_first_token_seconds", first, buckets=_SECONDS, **own)
        queue, token = "From a request to its row.", "From a token to the next; those of a step share its time."
        scheduler.on_admit = Histogram("dflash_queue_seconds", queue, buckets=_SECONDS, **own).observe
        self.token_seconds = Histogram("dflash_token_seconds", token, buckets=_STEP_SECONDS, **own)
        self._request = Histogram("dflash_request_seconds", "From a request to its end.", buckets=_SECONDS, **own)
        scheduler.on_step = Histogram("dflash_step_seconds", step, buckets=_STEP_SECONDS, **own).observe

    def add(self, completion: Completion) -> None:
        self.requests.labels(completion.outcome).inc()
        self._request.observe(completion.seconds())
        if completion.first_token_seconds is not None:
            self._first.observe(completion.first_token_seconds)
        for choice in completion.choices:
            if choice.statistics is None:
                continue  # it never began
            self._prompt.inc(choice.prompt_tokens)
            self._cached.inc(choice.cached_tokens)
            self._new.inc(choice.new_tokens)
            steps = choice.statistics.acceptance_lengths[0]
            for tokens in steps:
                self._step_tokens.observe(tokens)
            if self._adopter is not None:
                self._adopter.observe(steps)

    def name(self, **labels: str) -> None:
        """Add labels of the model that is served."""
        Info("dflash_model", "The model that is served.", registry=self._registry).info(labels)

    def page(self) -> bytes:
        return generate_latest(self._registry)


@dataclass(kw_only=True)
class Service:
    """A target that is served, under the ``name`` that clients see.

    Attributes:
        reader: encodes prompts; its tokenizer is the target's.
        timeout: seconds that a request may take, waiting included.
        receipts: where receipts are written; None for none.
        aliases: further names that requests may ask for.
        takes_any_name: requests may ask for any model, and get this one.
        is_strict: refuse unknown fields, more than four stop strings, and more tokens than fit.
        adopter: swaps the drafter; None if it stays.
        fingerprint: digest of what a text depends on besides its request: weights, versions, device and shapes. The
            drafter is not part of it: the text is the same with any, and without one.
    """

    scheduler: Scheduler
    reader: PromptReader
    name: str
    version: str
    timeout: float = 600.0
    receipts: ReceiptFolder | None = None
    aliases: Sequence[str] = ()
    takes_any_name: bool = False
    is_strict: bool = False
    adopter: Adopter | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    is_ending: bool = False

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.scheduler, self.adopter)
        self._said: set[str] = set()  # unknown fields that the log has
        self._pieces = Pieces(self.reader.tokenizer)
        generator = self.scheduler.generator
        target = generator.engine.target
        weights = self.receipts.fingerprints.weights if self.receipts else targets.sample_digest(target.model)
        facts = (
            weights, targets.describe_config(target.model), self.version, torch.__version__, torch.version.cuda,
            targets.version_of("llguidance"), targets.machine_name(target.device), generator.block_size,
            generator.prefill_chunk, generator.fused_reason, generator.weights,
        )  # fmt: skip
        self.fingerprint = f"fp_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
        self.metrics.name(model=self.name, fingerprint=self.fingerprint, version=self.version)

    def name_of(self, asked: str | None) -> str:
        """Return the model's name for a request that asks for ``asked``, to which Ollama's clients add ``:latest``.

        Raises:
            ApiError: it is another model.
        """
        names = (self.name, *self.aliases)
        if asked is None or asked in names or asked.removesuffix(":latest") in names or self.takes_any_name:
            return asked or self.name
        advice = "ask for that, or start the server with --any-name, or --name"
        message = f"this server has the model {' and '.join(map(repr, names))}, not {asked!r}: {advice}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def check_fields(self, request: BaseModel) -> list[str]:
        """Take fields that are not applied out of a request; return warnings that name them, or raise ApiError."""
        found = leave_out(request)
        for name, why in found.items():
            if self.is_strict:
                message = "Extra inputs are not permitted" if why == "unknown" else NOT_APPLIED
                raise bad_request(f"{name}: {message}", name.split("[")[0].split(".")[0])
            if name not in self._said and len(self._said) < _MAX_NAMES:
                self._said.add(name)
                _LOG.warning("requests have the field %s, which is %s: it is left out", terminal.named(name), why)
        return [f"{name[:_MAX_NAME]}: {why}, left out" for name, why in found.items()]

    def _prompts(self, request: GenerationRequest, warnings: list[str]) -> tuple[list[EncodedPrompt], Tools | None]:
        """Return a request's prompts, and its tools."""
        if not isinstance(request, ChatRequest):
            return self.reader.read_completion(request), None
        tools = read_tools(request, self.reader.tool_form, warnings)
        return [self.reader.read_chat(request, tools, warnings)], tools

    def tokenize(self, request: requests.TokenizeRequest) -> list[int]:
        """Return the tokens of a text or a conversation; raises ApiError if it cannot be encoded."""
        self.name_of(request.model)
        self.check_fields(request)
        if request.messages is None:
            is_plain = request.add_special_tokens is False
            return list(self.reader.tokenizer(request.prompt, add_special_tokens=not is_plain).input_ids)
        fields = {name: value for name, value in request if name in ChatRequest.model_fields}
        return self.encode(ChatRequest.model_construct(**fields))

    def detokenize(self, request: requests.DetokenizeRequest) -> str:
        """Return the text of tokens; raises ApiError if there is no such token."""
        self.name_of(request.model)
        self.check_fields(request)
        return self.reader.decode(request.tokens, "tokens")

    def encode(self, request: ChatRequest) -> list[int]:
        """Return the prompt of a conversation; raises ApiError if it cannot be encoded."""
        self.name_of(request.model)
        return self._prompts(request, [])[0][0].ids

    def read(self, request: GenerationRequest, warnings: Sequence[str] = ()) -> list[Choice]:
        """Return the choices that a request asks for, checked: all of the first prompt, then those of the next.

        Nothing is run, but long prompts are slow to encode: call it outside of the event loop. ``warnings`` are those
        of the request that this one was made of.

        Raises:
            ApiError: the request cannot be served.
        """
        self.name_of(request.model)
        warnings = [*warnings, *self.check_fields(request)]
        if request.repeat_penalty not in (None, 1):
            warnings.append("repeat_penalty: counts the whole text, as repetition_penalty does, not its last tokens")
        generator, count = self.scheduler.generator, request.n or 1
        if self.is_strict and len(request.stop or ()) > _STRICT_STOPS:
            raise bad_request(f"stop: there may be {_STRICT_STOPS} at most, got {len(request.stop or ())}", "stop")
        # 1. The prompts.
        prompts, tools = self._prompts(request, warnings)
        is_chat = isinstance(request, ChatRequest)
        default = generator.max_length if is_chat else _COMPLETION_TOKENS
        form, specials = (self.reader.reasoning, self.reader.specials) if is_chat else (None, {})
        most = generator.batch_size + self.scheduler.max_waiting  # more could never be queued
        if count * len(prompts) > most:
            raise bad_request(f"one request may ask for {most} answers, this one asks for {count * len(prompts)}", "n")
        # 2. The calls. The seed is drawn here, so that choices differ as those of num_return_sequences do.
        seed = secrets.randbits(63) if request.seed in (None, -1) else request.seed
        choices = []
        for prompt in prompts:
            grammar = answer_grammar(request, prompt, tools, warnings, form, specials)
            limit = self._limit(request, len(prompt.ids), default, warnings)
            arguments = _arguments(request) | {"max_new_tokens": max(1, limit), "pictures": prompt.pictures}
            arguments |= {"tokenizer": self.reader.tokenizer, "grammar": grammar}
            ids = torch.tensor([prompt.ids], dtype=torch.int64, device=generator.engine.target.device)
            for number in range(count):
                try:
                    call = self.scheduler.session.resolve(ids, seed=fold(seed, number), **arguments)
                    if self.receipts is not None:
                        RecordedSettings.of(call)  # a receipt can state it
                except (ValueError, TypeError) as error:
                    message, found = str(error), _field_named(request, str(error))
                    if found is None and grammar is not None:  # it passes a limit with this vocabulary
                        found = grammar_field(request)
                        message = f"{found}: {message}"
                    raise bad_request(message, found) from error
                text = AnswerText(request.stop or (), form=form, is_thinking=prompt.reasoning == "begun")
                calls = None if tools is None else tools.text()
                pieces = None if call.logprobs is None else self._pieces
                echo = prompt.text if request.echo else ""
                is_empty, found = request.max_tokens == 0, [*dict.fromkeys(warnings)][:_MAX_WARNINGS]
                shown = self.reader.shown if specials else None
                choices.append(Choice(call, text, shown, echo, calls, pieces, is_empty, found))
        return choices

    def _limit(self, request: GenerationRequest, prompt_length: int, default: int, warnings: list[str]) -> int:
        """Return how many tokens an answer may have; ``default`` if the request does not say.

        More than fit is cut to what fits, with a warning.
        """
        asked, room = request.max_tokens, self.scheduler.generator.max_length
        if asked == 0 and not request.echo:
            raise bad_request("max_tokens must be at least 1, or echo true", "max_tokens")
        needed = max(1, asked or 1) if self.is_strict else 1
        if prompt_length + needed > room:
            answer = f" and {asked} are asked for" if needed > 1 else ", and an answer needs at least one"
            field = "messages" if "messages" in type(request).model_fields else "prompt"
            message = f"this server's context is {room} tokens: the prompt has {prompt_length}{answer}"
            raise bad_request(message, field, "context_length_exceeded")
        left = room - prompt_length
        if asked is None or asked < 0:
            return left if asked is not None else min(default, left)
        if (request.min_tokens or 0) > asked:
            raise bad_request(f"min_tokens must be at most max_tokens, {asked}, got {request.min_tokens}", "min_tokens")
        if asked > left:
            warnings.append(f"max_tokens: {asked} are asked for, {left} fit after the prompt")
        return min(asked, left)


def _arguments(request: GenerationRequest) -> GenerateArguments:
    """Return a request's arguments for ``generate``, without seed, tokenizer, grammar and the most new tokens."""
    given = {name: getattr(request, field) for field, name in _NAMES.items() if field != "seed"}
    arguments: Any = {name: value for name, value in given.items() if value is not None}
    if request.repeat_penalty is not None:
        arguments.setdefault("repetition_penalty", request.repeat_penalty)
    arguments["num_return_sequences"] = 1  # several answers are several calls, each with its seed
    if arguments.get("top_k") == -1:
        arguments["top_k"] = 0  # how vLLM writes that it is off
    if arguments.get("top_p") == 0:
        arguments["top_p"], arguments["top_k"] = 1.0, 1  # the smallest nucleus is the best token
    if request.ignore_eos:
        arguments["stop_token_ids"] = []
    if request.most_logprobs is not None:
        arguments["logprobs"], arguments["prompt_logprobs"] = request.most_logprobs, bool(request.echo)
    if request.logit_bias is not None:
        arguments["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
    return arguments


def _field_named(request: GenerationRequest, message: str) -> str | None:
    """Return the field of a request that an engine's message begins with, if any."""
    name = message.split(maxsplit=1)[0] if message else ""
    name = next((field for field, argument in {**_NAMES, "prompt": "ids"}.items() if argument == name), name)
    return name if name in type(request).model_fields else None
