"""``dflash demo``: held-out prompts answered three ways in one run, within a number of seconds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash import Drafter
from dflash.internals import PAIR, check_folder, mean_acceptance, prompt_ids, targets, text_ids

from ..config import Decoding
from .compare import Comparison, GeneratorRunner, TransformersRunner, add_up, pair_runners
from .datasets import read_jsonl

SECONDS = 12.0  # on two busy cores, imports and the last answers included, the demo then ends within a minute
_STREAMED = 3  # answers that are shown; the others are only measured
LEAST_TEMPERATURE = 1e-30  # transformers' generate divides logits by it, and must not get infinities
QUESTIONS = (  # to models other than the package's own
    "Why is the sky blue in the day and red in the evening?",
    "A shop sells pens at 3 dollars and books at 12. What do 4 pens and 2 books cost together? Explain each step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a short letter to a neighbor who watered the plants.",
    "List five things to check before a long bicycle tour, each with a reason.",
    "What is the difference between weather and climate?",
)
ARROW = "\n=>\n"  # the end of every prompt that the package's pair was trained on


class Prompt(NamedTuple):
    """A held-out prompt, its answer if only one is right, and the kind of task."""

    text: str
    answer: str | None = None
    kind: str = ""


Show = Callable[[Prompt, GeneratorRunner, Sequence[int]], None]  # the runner and the prompt's ids


def demo_prompts(folder: str | Path = PAIR) -> list[Prompt]:
    """Load the pair's held-out prompts: the first of each kind, then the second of each kind, and so on."""
    kinds: dict[str, list[Prompt]] = {}
    for _, _, record in read_jsonl(check_folder(folder) / "prompts.jsonl"):
        prompt = Prompt(record["prompt"], record.get("answer"), record.get("kind") or "")
        kinds.setdefault(prompt.kind, []).append(prompt)
    return [prompt for row in itertools.zip_longest(*kinds.values()) for prompt in row if prompt is not None]


def encode(tokenizer: Any, text: str) -> Tensor:
    """Encode a prompt as the pair was trained to read it: the BOS token, then ``text``, as ids ``[1, length]``."""
    return torch.tensor([text_ids(tokenizer, text, bos=True)], dtype=torch.int64, device="cpu")


class TimeLimit:
    """Seconds to spend, from now on; None is no limit. ``clock`` gives seconds from any start."""

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.clock, self.began = seconds, clock, clock()

    def is_spent(self, share: float = 1.0) -> bool:
        """Return True if this share of the time has passed."""
        return self.seconds is not None and self.clock() - self.began >= share * self.seconds


def measure(
    target: Any,
    draft: Drafter,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    *,
    encode: Callable[[Any, str], Tensor] = encode,
    budget: TimeLimit | None = None,
    show: Show | None = None,
) -> dict[str, Any]:
    """Answer prompts with transformers' ``generate``, one token per step, DFlash and, if asked for, DFlash with trees.

    Args:
        target: the causal language model.
        draft: its drafter.
        tokenizer: the target's.
        prompts: at least one. The first is always answered, another only while the budget lasts.
        decoding: how they are answered.
        encode: makes a prompt's ids ``[1, length]`` of its text, with the tokenizer; by default as for the package's
            own pair.
        budget: None for no limit.
        show: called for each of the first few prompts, before anything is timed, to stream its answer.

    Returns:
        What ``dflash demo --json`` prints. ``identical`` is True if every answer was, token for token, that of
        one-token decoding with the same seed and, at temperature 0 in float32, that of transformers' greedy
        ``generate``, as ``compared`` says. The baseline is the faster of both. ``right`` counts among the
        ``answerable`` prompts, which have one right answer.

    Raises:
        ValueError: an argument is out of range, or a prompt and its answer may pass the model's positions.
    """
    budget = budget or TimeLimit()
    # 1. Encode all prompts, and build what answers them.
    ids = [encode(tokenizer, prompt.text)[0].tolist() for prompt in prompts]
    shortest, longest = min(ids, key=len), max(ids, key=len)
    new, positions = decoding.max_new_tokens, targets.max_positions(target)
    needed = len(longest) + new
    if positions is not None and needed > positions:
        raise ValueError(f"{len(longest)} tokens of a prompt and {new} new ones pass the {positions} positions")
    ours = pair_runners(target, draft, decoding, max_length=needed)
    comparison = Comparison({"transformers": TransformersRunner(target, decoding), **ours})
    # 2. Stream a few answers, for at most a quarter of the time.
    for number, prompt in enumerate(prompts[:_STREAMED] if show is not None else []):
        if number == 0 or not budget.is_spent(0.25):
            show(prompt, ours.get("tree", ours["dflash"]), ids[number])
    # 3. Warm up at both ends of the lengths, for at most half of the time.
    comparison.warm_up(longest)
    if len(shortest) < len(longest) and not budget.is_spent(0.5):
        comparison.warm_up(shortest)
    # 4. Answer prompts until the time is spent.
    answered = []
    for row in ids:
        if answered and budget.is_spent():
            break
        answered.append(comparison.answer(row))
    # 5. Compare: sampled, transformers' generate draws other random numbers, and in few bits it rounds otherwise.
    is_exact = decoding.temperature == 0 and target.dtype == torch.float32
    compared = [name for name in comparison.runners if name != "transformers" or is_exact]
    texts = [tokenizer.decode(answers["dflash"].ids, skip_special_tokens=True) for answers in answered]
    # 6. Report
    block_size = ours["dflash"].generator.block_size
    totals = {name: add_up([answers[name] for answers in answered], block_size) for name in comparison.runners}
    speeds = {name: found.tokens_per_second for name, found in totals.items()}
    dflash, baseline = totals["dflash"], max(speeds["transformers"], speeds["one-token"])
    return {
        "compared": compared,
        "identical": all(answers[name].ids == answers["one-token"].ids for answers in answered for name in compared),
        "speedup": speeds["dflash"] / baseline,
        "acceptance_length": mean_acceptance(dflash),
        "tokens_per_second": speeds["dflash"],
        "baseline_tokens_per_second": baseline,
        "one_token_tokens_per_second": speeds["one-token"],
        "transformers_tokens_per_second": speeds["transformers"],
        "histogram": dflash.histogram,
        "temperature": decoding.temperature,
        "seed": decoding.seed,
        "prompts": len(answered),
        "available": len(prompts),
        "new_tokens": sum(dflash.num_new_tokens),
        "right": sum(prompt.answer == text for prompt, text in zip(prompts, texts, strict=False)),
        "answerable": sum(prompt.answer is not None for prompt in prompts[: len(answered)]),
        "tree": decoding.tree,
        "tree_tokens_per_second": speeds.get("tree"),
        "tree_acceptance_length": mean_acceptance(totals["tree"]) if "tree" in totals else None,
    }


def encode_message(tokenizer: Any, text: str) -> Tensor:
    """Encode a user's message, or the text itself where there is no chat template."""
    return torch.tensor([prompt_ids(tokenizer, {"prompt": text})], dtype=torch.int64, device="cpu")
