"""The measuring harness: answer prompts in several ways, and add up what each took."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dflash import Drafter, Generator, Statistics, StreamEvent
from dflash.internals import ops, targets
from dflash.light import OPTIONS

from ..config import Decoding

WARM_UP_TOKENS = 32


class TimedAnswer(NamedTuple):
    """One answer: its tokens, the tokens of each step, all its seconds, and the rows and seconds of each step."""

    ids: list[int]
    steps: list[int]
    seconds: float
    rows: Sequence[int] = ()
    step_seconds: Sequence[float] = ()


Runner = Callable[..., TimedAnswer]  # runner(prompt ids, max_new_tokens=None)


class GeneratorRunner:
    """Answers through this package's `Generator`, made for a batch of one. Answers end at its ``max_length``."""

    def __init__(self, generator: Generator, decoding: Decoding, device: torch.device | str = "cpu") -> None:
        self.generator, self.decoding, self.device = generator, decoding, device

    def __call__(self, ids: Sequence[int], max_new_tokens: int | None = None) -> TimedAnswer:
        began = time.perf_counter()
        out = self.generator.generate(**self._arguments(ids, max_new_tokens), return_dict_in_generate=True)
        new = out.sequences[0, len(ids) :].tolist()  # also waits for the device
        seconds, found = time.perf_counter() - began, out.statistics
        return TimedAnswer(new, found.acceptance_lengths[0], seconds, found.rows, found.step_seconds)

    def stream(self, ids: Sequence[int]) -> Iterator[StreamEvent]:
        """Answer one prompt, event by event."""
        return self.generator.stream(**self._arguments(ids, None))

    def _arguments(self, ids: Sequence[int], max_new_tokens: int | None) -> dict[str, Any]:
        decoding, room = self.decoding, self.generator.max_length - len(ids)
        drafting = {"tree": decoding.tree} if decoding.tree else {"draft_sharpness": decoding.draft_sharpness}
        return {
            "ids": torch.tensor([ids], dtype=torch.int64, device=self.device),
            "max_new_tokens": min(max_new_tokens or decoding.max_new_tokens, decoding.max_new_tokens, room),
            **{"temperature": decoding.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": decoding.seed},
            **{"tree": None, **(drafting if self.generator.draft is not None else {})},
        }


class TransformersRunner:
    """Answers through the target's own ``generate``. Sampling draws other random numbers than this package does."""

    def __init__(self, target: nn.Module, decoding: Decoding) -> None:
        self.target, self.seed, self.max_new_tokens = target, decoding.seed, decoding.max_new_tokens
        # There is no padding, but transformers warns of a missing id.
        self._arguments: dict[str, Any] = {"do_sample": decoding.temperature > 0, "pad_token_id": 0, "use_cache": True}
        if decoding.temperature > 0:  # without top_k=0, transformers would keep the 50 best
            self._arguments |= {"temperature": decoding.temperature, "top_k": 0}

    def __call__(self, ids: Sequence[int], max_new_tokens: int | None = None) -> TimedAnswer:
        new = min(max_new_tokens or self.max_new_tokens, self.max_new_tokens)
        began = time.perf_counter()
        prompt = torch.tensor([ids], dtype=torch.int64, device=self.target.get_input_embeddings().weight.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            mask = torch.ones_like(prompt)
            out = self.target.generate(prompt, attention_mask=mask, max_new_tokens=new, **self._arguments)
        return TimedAnswer(out[0, len(ids) :].tolist(), [], time.perf_counter() - began)


def pair_runners(
    target: nn.Module, draft: Drafter | None, decoding: Decoding, *, padded: bool = False, **options: Any
) -> dict[str, GeneratorRunner]:
    """Return one-token decoding and DFlash for one pair, as ``"one-token"`` and ``"dflash"``.

    The latter drafts chains. If ``decoding`` asks for trees, ``"tree"`` drafts them with the same generator. ``padded``
    runs one-token decoding at the shapes of a whole block; ``options`` are those of `dflash.Generator`.
    """
    chain, device = dataclasses.replace(decoding, tree=None), target.get_input_embeddings().weight.device
    drafting = Generator(target, draft, reuse_prefix=False, tree=decoding.tree, **options)
    shared = {name: value for name, value in options.items() if not OPTIONS[name].of_drafts}
    plain = Generator(target, None, block_size=drafting.block_size if padded else 1, reuse_prefix=False, **shared)
    runners = {"one-token": GeneratorRunner(plain, chain, device), "dflash": GeneratorRunner(drafting, chain, device)}
    if decoding.tree is not None:
        runners["tree"] = GeneratorRunner(drafting, decoding, device)
    return runners


class Comparison:
    """Has every prompt answered by all runners; they take turns in going first."""

    def __init__(self, runners: Mapping[str, Runner]) -> None:
        self.runners, self.is_warm = dict(runners), False
        self._answered = 0

    def warm_up(self, ids: Sequence[int]) -> None:
        """Have every runner write the beginning of an answer, which counts nowhere."""
        for runner in self.runners.values():
            runner(ids, WARM_UP_TOKENS)
        self.is_warm = True

    def answer(self, ids: Sequence[int]) -> dict[str, TimedAnswer]:
        """Return the answers to one prompt, by runner."""
        names = list(self.runners)
        first = self._answered % len(names)
        self._answered += 1
        return {name: self.runners[name](ids) for name in names[first:] + names[:first]}


def add_up(answers: Sequence[TimedAnswer], block_size: int = 1) -> Statistics:
    """Return the statistics of one call that wrote all answers."""
    steps, tokens = [answer.steps for answer in answers], [len(answer.ids) for answer in answers]
    return Statistics(steps, block_size, tokens, 0.0, sum(answer.seconds for answer in answers))


def describe(target: nn.Module, draft: Drafter | None) -> dict[str, Any]:
    """Describe the machine, the versions and the models: what a speed depends on besides the settings."""
    device = target.get_input_embeddings().weight.device
    return {
        "machine": targets.machine_name(device),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "isa": ops.isa(),
        **targets.versions(),
        "python": platform.python_version(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target_parameters": targets.count_weights(target)[0],
        "draft_parameters": sum(weight.shape.numel() for weight in draft.weights().values()) if draft else 0,
    }
