"""What the server's routes share: the scheduler, the tokenizer, and how a request becomes calls."""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..evaluate.description import machine_name
from ..generator import Generator
from ..sampling import Grammar, fold
from ..targets import describe_config, sample_digest, version_of
from .arguments import generate_arguments, named_as_asked
from .errors import ApiError, bad_request
from .logprobs import Pieces
from .metrics import Metrics
from .prompts import Prompt, PromptReader
from .protocol import ChatRequest, CompletionRequest, GenerationRequest
from .reasoning import AnswerText
from .receipts import ReceiptFolder
from .run import Answer, Run
from .scheduler import Scheduler
from .structured import answer_grammar
from .tools import Tools, read_tools

__all__ = ["Service"]

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
