"""The pair that comes inside the package, and ``dflash demo``: held-out prompts answered three ways in one run.

The pair is a folder with ``target/``, ``draft/`` and ``prompts.jsonl``, one object a line: ``prompt``, ``answer`` (null
where many are right) and ``kind``. No step of either model's training saw these prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..drafter import Drafter
from ..generator import Generator, Statistics
from .pair import ARROW, PAIR, Prompt, demo_pair, demo_prompts, encode
from .report import ACCEPTED, BONUS, print_answer, print_demo

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 3  # answers streamed; the others are only measured

# ---------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Report:
    """What :func:`measure` found; speeds count the prompts' forward passes too.

    Attributes:
        identical: every answer was, token for token, that of one-token decoding with the same seed and, at temperature
            0, that of transformers' greedy ``generate``.
        speedup: ``tokens_per_second / baseline_tokens_per_second``.
        acceptance_length: mean tokens a step, bonus token counted; None when no step ran.
        tokens_per_second: of DFlash, all answers' tokens over all their seconds, as for the others.
        baseline_tokens_per_second: the faster of the next two.
        one_token_tokens_per_second: this package without a drafter.
        transformers_tokens_per_second: the target's own ``generate``.
        histogram: ``histogram[m]`` steps wrote ``m`` tokens.
        prompts, new_tokens: how much was measured.
        right: how many answers were the right one, of the ``answerable`` prompts that have just one.
    """

    identical: bool
    speedup: float
    acceptance_length: float | None
    tokens_per_second: float
    baseline_tokens_per_second: float
    one_token_tokens_per_second: float
    transformers_tokens_per_second: float
    histogram: list[int]
    temperature: float
    seed: int
    prompts: int
    new_tokens: int
    right: int
    answerable: int


def measure(
    target: Any,
    draft: Drafter,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    show: Callable[[str, Tensor, Generator, dict[str, Any]], None] | None = None,
) -> Report:
    """Answer ``prompts`` with transformers' ``generate``, one token a step and DFlash, after a warm-up.

    Args:
        prompts: at least one.
        show: called with the text, ids, generator and arguments of the first few prompts, before anything is timed.

    Raises:
        ValueError: an argument is out of range, or a prompt and ``max_new_tokens`` pass the model's positions.
    """
    ids = [encode(tokenizer, prompt.text) for prompt in prompts]
    longest, positions = max(row.shape[1] for row in ids), target.config.max_position_embeddings
    if longest + max_new_tokens > positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new tokens pass the target's "
            f"max_position_embeddings, {positions}"
        )
    eos = tokenizer.eos_token_id
    # The temperature alone: transformers would add a top_k of 50 unless told otherwise.
    plain = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": 0}
    arguments = {**plain, "seed": seed, "stop_token_ids": [eos]}

    def generator(drafter: Drafter | None) -> Generator:
        return Generator(target, drafter, max_length=longest + max_new_tokens, reuse_prefix=False)

    def ours(generator: Generator) -> Callable[[Tensor], tuple[Tensor, list[int]]]:
        def run(row: Tensor) -> tuple[Tensor, list[int]]:
            out = generator.generate(row, return_dict_in_generate=True, **arguments)
            return out.sequences, out.statistics.acceptance_lengths[0]

        return run

    def theirs(row: Tensor) -> tuple[Tensor, list[int]]:
        sampled = (
            {**plain, "do_sample": True} if temperature else {"max_new_tokens": max_new_tokens, "do_sample": False}
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            mask = torch.ones_like(row)
            out = target.generate(
                row, attention_mask=mask, use_cache=True, eos_token_id=eos, pad_token_id=eos, **sampled
            )
        return out, []

    dflash = generator(draft)
    if show is not None:
        for prompt, row in list(zip(prompts, ids, strict=True))[:_SHOWN]:
            show(prompt.text, row, dflash, arguments)
    runners = {"transformers": theirs, "one-token": ours(generator(None)), "dflash": ours(dflash)}
    order = list(runners)
    for row in {len(row[0]): row for row in (min(ids, key=torch.numel), max(ids, key=torch.numel))}.values():
        for run in runners.values():  # warm up, for nothing
            run(row)
    seconds, tokens = dict.fromkeys(runners, 0.0), dict.fromkeys(runners, 0)
    steps: dict[str, list[int]] = {name: [] for name in runners}
    identical, right = True, 0
    for number, (prompt, row) in enumerate(zip(prompts, ids, strict=True)):
        answers, first = {}, number % len(order)
        for name in order[first:] + order[:first]:  # each goes first in turn
            began = time.perf_counter()
            out, lengths = runners[name](row)
            seconds[name] += time.perf_counter() - began
            answers[name] = out[0, row.shape[1] :].tolist()
            tokens[name] += len(answers[name])
            steps[name] += lengths
        identical &= answers["dflash"] == answers["one-token"]
        identical &= temperature > 0 or answers["dflash"] == answers["transformers"]
        right += prompt.answer == tokenizer.decode(answers["dflash"], skip_special_tokens=True)
    speed = {name: tokens[name] / seconds[name] for name in runners}
    baseline = max(speed["transformers"], speed["one-token"])
    counted = Statistics([steps["dflash"]], dflash.block_size, [tokens["dflash"]], 0.0, seconds["dflash"])
    return Report(
        identical=identical,
        speedup=speed["dflash"] / baseline,
        acceptance_length=counted.acceptance_length if steps["dflash"] else None,
        tokens_per_second=speed["dflash"],
        baseline_tokens_per_second=baseline,
        one_token_tokens_per_second=speed["one-token"],
        transformers_tokens_per_second=speed["transformers"],
        histogram=counted.histogram,
        temperature=temperature,
        seed=seed,
        prompts=len(prompts),
        new_tokens=tokens["dflash"],
        right=right,
        answerable=sum(prompt.answer is not None for prompt in prompts),
    )


# ---------------------------------------------------------------------------------------------- showing


def demo(
    *,
    folder: str | Path = PAIR,
    prompt: str | None = None,
    prompts: int | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    console: Console | None = None,
) -> Report:
    """Load the pair, answer its first ``prompts`` held-out prompts (all), or ``prompt``, and measure.

    With a ``console`` the first few answers are streamed to it, then the table is printed.

    Raises:
        ValueError, FileNotFoundError: as :func:`measure` and :func:`demo_pair` do.
    """
    if prompt is not None and prompts is not None:
        raise ValueError("--prompts counts held-out prompts: it does not go with --prompt")
    if prompts is not None and prompts < 1:
        raise ValueError(f"--prompts must be at least 1, got {prompts}")
    known = demo_prompts(folder)
    if prompt is not None and not prompt.endswith(ARROW) and all(other.text.endswith(ARROW) for other in known):
        prompt += ARROW  # the sign that the pair was trained to answer behind
    asked = [Prompt(prompt)] if prompt is not None else known[:prompts]
    target, draft, tokenizer = demo_pair(folder)
    arguments = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    if console is None:
        return measure(target, draft, tokenizer, asked, **arguments)
    if console.is_terminal:
        console.out("accepted drafts", style=ACCEPTED, end=", ", highlight=False)
        console.out("the target's own tokens", style=BONUS, highlight=False)

    def show(text: str, ids: Tensor, generator: Generator, arguments: dict[str, Any]) -> None:
        print_answer(console, tokenizer, text, ids, generator, arguments)

    report = measure(target, draft, tokenizer, asked, show=show, **arguments)
    size = [sum(parameter.numel() for parameter in model.parameters()) / 1e6 for model in (target, draft)]
    print_demo(console, report, f"target of {size[0]:.1f} M parameters, drafter of {size[1]:.1f} M, float32")
    return report
