"""``dflash benchmark``: speed and acceptance on datasets of prompts, compared with one-token decoding in the same run.

Every prompt is answered by one-token decoding and by DFlash, with chains and, if asked for, draft trees; each goes
first in turn. Speeds count the prompts' forward passes. With an output folder each finished prompt is one line of
``DATASET.jsonl``, and the same command continues a run that was stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import nn

from ..drafter import Drafter
from ..files import write_atomically
from ..fit import check_block_size
from ..ops import WeightStorage
from ..terminal import bars
from .by_context import StepCounts, count_steps, summarize_steps
from .compare import Answer, Comparison, Decoding, Total, pair_runners
from .datasets import Prompt
from .description import describe
from .journal import Journal
from .prompts import prompt_ids

__all__ = [
    "PairRunner",
    "Settings",
    "check_settings",
    "describe",
    "distinct_ngrams",
    "encode",
    "progress_bars",
    "run_benchmark",
    "summarize",
]

_NGRAM = 8
Record = dict[str, Any]  # one turn of a conversation, as PairRunner.run makes it
Advance = Callable[[str, list[Record]], None]

# ---------------------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Settings:
    """How prompts are asked and answered. The texts are the help of the command's options."""

    max_new_tokens: Annotated[int, "New tokens at most."] = 512
    temperature: Annotated[float, "0 is greedy; top-k, top-p and min-p are off."] = 0.0
    seed: Annotated[int, "The same seed writes the same text."] = 0
    block_size: Annotated[int | Literal["auto"] | None, "Rows that a step of a chain verifies."] = None
    draft_sharpness: Annotated[float, "See dflash.generate; of chains."] = 1.0
    tree: Annotated[int | Literal["auto"] | None, "Rows of draft trees, measured next to chains."] = None
    padded: Annotated[bool, "One-token decoding at the block's shapes: equal bit for bit in bf16 too."] = False
    raw: Annotated[bool, "Continue the text itself, without a chat template."] = False
    bos: Annotated[bool, "Put the tokenizer's BOS token before a raw prompt."] = False
    thinking: Annotated[bool | None, "The chat template's enable_thinking; None does not pass it."] = None
    weights: Annotated[WeightStorage, "How the target's weights are stored."] = None
    draft_weights: Annotated[WeightStorage, "How the drafter's weights are stored."] = None
    turns: Annotated[str, "first, or all: the whole conversation of a prompt."] = "first"
    compile: Annotated[bool, "Compile the steps; the start takes long."] = False


def check_settings(settings: Settings, tokenizer: Any) -> None:
    """Raise ``ValueError`` for settings that do not fit the tokenizer. The engine checks the others."""
    if settings.turns not in ("first", "all"):
        raise ValueError(f"--turns must be first or all, got {settings.turns!r}")
    has_template = tokenizer.chat_template is not None and not settings.raw
    if settings.turns == "all" and not has_template:
        raise ValueError("--turns all needs a tokenizer with a chat template, and no --raw")
    if settings.thinking is not None and not has_template:
        raise ValueError("--no-thinking needs a tokenizer with a chat template, and no --raw")
    if settings.bos and has_template:
        raise ValueError("--bos goes with --raw: the chat template has its own")
    if settings.bos and tokenizer.bos_token_id is None:
        raise ValueError("--bos: this tokenizer has no BOS token")


def encode(
    tokenizer: Any, messages: Sequence[str], settings: Settings, history: Sequence[dict[str, str]] = ()
) -> list[int]:
    """Encode a conversation as token ids.

    Args:
        tokenizer: the target's.
        messages: what the user and the model said in turn, the user last.
        settings: how they are asked.
        history: messages before these.
    """
    if history and settings.raw:
        raise ValueError("--raw continues a text, and a prompt is a conversation")
    if history or not (settings.raw or tokenizer.chat_template is None):
        said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
        prompt: dict[str, Any] = {"messages": [*history, *said]}
    else:
        prompt = {"prompt": messages[-1]}
    template = {} if settings.thinking is None else {"enable_thinking": settings.thinking}
    return prompt_ids(tokenizer, prompt, raw=settings.raw, bos=settings.bos, template=template)


# ---------------------------------------------------------------------------------------------- answering


def distinct_ngrams(answer: Sequence[int], size: int = _NGRAM) -> tuple[int, int]:
    """Count the different runs of ``size`` tokens in an answer, and all of them."""
    grams = [tuple(answer[start : start + size]) for start in range(len(answer) - size + 1)]
    return len(set(grams)), len(grams)


class PairRunner:
    """Answers conversations with one-token decoding and with DFlash: chains, and trees if the settings ask for them.

    Args:
        target, draft, tokenizer: the pair.
        settings: how prompts are asked and answered.
        longest: tokens of a conversation and its last answer together.
    """

    def __init__(self, target: nn.Module, draft: Drafter, tokenizer: Any, settings: Settings, longest: int) -> None:
        self.tokenizer, self.settings, self.longest = tokenizer, settings, longest
        shared = ("max_new_tokens", "temperature", "seed", "draft_sharpness", "tree")
        runners = pair_runners(
            target,
            draft,
            Decoding(**{name: getattr(settings, name) for name in shared}),
            block_size=settings.block_size,
            padded=settings.padded,
            max_length=longest,
            compile=settings.compile,
            weights=settings.weights,
            draft_weights=settings.draft_weights,
        )
        self.comparison = Comparison(runners)
        self._is_warm = False

    def run(self, prompt: Prompt) -> list[Record]:
        """Answer a prompt in each way: one record per turn, up to the first turn that is too long for the model."""
        messages, records = [], []
        for turn in prompt.turns if self.settings.turns == "all" else prompt.turns[:1]:
            messages.append(turn)
            ids = encode(self.tokenizer, messages, self.settings, prompt.history)
            if len(ids) + self.settings.max_new_tokens > self.longest:
                break
            if not self._is_warm:
                self.comparison.warm_up(ids)
                self._is_warm = True
            answers = self.comparison.answer(ids)
            records.append(_record(ids, answers))
            messages.append(self.tokenizer.decode(answers["one-token"].ids, skip_special_tokens=True))
        return records


def _record(prompt: Sequence[int], answers: Mapping[str, Answer]) -> Record:
    expected = answers["one-token"]
    trees = {"tree": _drafted(prompt, answers["tree"], expected)} if "tree" in answers else {}
    return {
        "prompt_tokens": len(prompt),
        **_drafted(prompt, answers["dflash"], expected),
        "one_token_new_tokens": len(expected.ids),
        "one_token_seconds": expected.seconds,
        "one_token_by_context": count_steps(len(prompt), expected),
        "ngrams": list(distinct_ngrams(answers["dflash"].ids)),
        **trees,
    }


def _drafted(prompt: Sequence[int], answer: Answer, expected: Answer) -> Record:
    return {
        "new_tokens": len(answer.ids),
        "seconds": answer.seconds,
        "acceptance_lengths": answer.steps,
        "identical": answer.ids == expected.ids,
        "by_context": count_steps(len(prompt), answer),
    }


def summarize(records: Sequence[Sequence[Record]], block_size: int, wanted: int) -> dict[str, Any]:
    """Add up the records of a dataset.

    Args:
        records: per prompt, one record per turn; at least one in all.
        block_size: rows that a step verified.
        wanted: turns that there are. Those without a record were too long for the model.

    Returns:
        tokens_per_second, one_token_tokens_per_second (totals over totals) and speedup, their ratio;
        acceptance_length, mean tokens per step, bonus token counted; ``histogram[m]`` steps wrote ``m`` tokens;
        ``acceptance_per_position[j]``, the share of steps that kept drafted token ``j + 1``, and
        ``conditional_acceptance[j]``, the same among the steps that kept the one before (None if none did);
        identical of ``turns`` answers equal those of one-token decoding; distinct_ngrams, the share of 8-grams that
        were new within their answer, which is low if the model loops; by_context, see `summarize_steps`. All of these
        are of chains. ``tree`` has some of the same names for trees, or is None without.
    """
    turns = [turn for prompt in records for turn in prompt]
    one_token = Total()
    for turn in turns:
        one_token.add(turn["one_token_new_tokens"], turn["one_token_seconds"])
    trees = [turn["tree"] for turn in turns if "tree" in turn]
    one_token_steps = [turn["one_token_by_context"] for turn in turns]
    distinct, grams = (sum(turn["ngrams"][i] for turn in turns) for i in (0, 1))
    return {
        "prompts": len(records),
        "turns": len(turns),
        "skipped": wanted - len(turns),
        "one_token_seconds": one_token.seconds,
        "one_token_tokens_per_second": one_token.tokens_per_second,
        **_summarize_drafted(turns, block_size, one_token, one_token_steps),
        "distinct_ngrams": distinct / grams if grams else None,
        "tree": _summarize_drafted(trees, block_size, one_token, one_token_steps) if trees else None,
    }


def _summarize_drafted(
    turns: Sequence[Record], block_size: int, one_token: Total, one_token_steps: Sequence[StepCounts]
) -> dict[str, Any]:
    total = Total()
    for turn in turns:
        total.add(turn["new_tokens"], turn["seconds"], turn["acceptance_lengths"])
    statistics = total.statistics(block_size)
    shares = statistics.acceptance_per_position
    given = [share / before if before else None for share, before in zip(shares, [1.0, *shares], strict=False)]
    return {
        "new_tokens": total.tokens,
        "seconds": total.seconds,
        "tokens_per_second": total.tokens_per_second,
        "speedup": total.tokens_per_second / one_token.tokens_per_second,
        "acceptance_length": total.acceptance_length,
        "acceptance_per_position": shares,
        "conditional_acceptance": given,
        "histogram": statistics.histogram,
        "identical": sum(turn["identical"] for turn in turns),
        "by_context": summarize_steps((turn["by_context"] for turn in turns), one_token_steps),
    }


# ---------------------------------------------------------------------------------------------- a whole run


def _longest(prompts: Iterable[Prompt], tokenizer: Any, settings: Settings, positions: int | None) -> int:
    """Return the tokens of the longest conversation that fits the model, with its answers; 0 if none fits."""
    longest, new = 0, settings.max_new_tokens
    for prompt in prompts:
        needed = len(encode(tokenizer, prompt.turns[:1], settings, prompt.history)) + new
        if positions is not None and needed > positions:
            continue
        if settings.turns == "all":
            messages = [text for turn in prompt.turns for text in (turn, "")][:-1]
            answers = len(prompt.turns) * new
            # An answer that is read again may have a few more tokens than were written.
            needed = max(needed, len(encode(tokenizer, messages, settings, prompt.history)) + answers + answers // 4)
        longest = max(longest, needed)
    return longest if positions is None else min(longest, positions)


def run_benchmark(
    target: nn.Module,
    draft: Drafter,
    tokenizer: Any,
    datasets: Mapping[str, list[Prompt]],
    settings: Settings,
    *,
    about: Mapping[str, str] | None = None,
    out: str | Path | None = None,
    advance: Advance | None = None,
) -> dict[str, Any]:
    """Run every dataset. With ``out``, continue an earlier run that was stopped.

    Args:
        target: the causal language model.
        draft: its drafter.
        tokenizer: the target's.
        datasets: prompts by name, from `dflash.evaluate.datasets.load_prompts`.
        settings: how they are asked and answered.
        about: further entries of the header: names of the models, the command.
        out: a folder; gets ``NAME.jsonl`` for each dataset and ``summary.json``.
        advance: called with the name and the records of each finished prompt, those of an earlier run first.

    Returns:
        ``{"header": ..., "datasets": {name: summarize(...)}}``.

    Raises:
        ValueError: the settings do not fit the tokenizer or the models, ``out`` holds a run with other settings, or no
            prompt of a dataset fits the model.
    """
    check_settings(settings, tokenizer)
    # 1. Find what fits the model, and build the generators.
    block_size = check_block_size(target, draft, settings.block_size)
    header = {**describe(target, draft), **dataclasses.asdict(settings), "block_size": block_size}
    header["auto_width"] = settings.block_size == "auto"
    header["draft_sharpness"] = str(settings.draft_sharpness)  # JSON has no infinity
    positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = {name: _longest(prompts, tokenizer, settings, positions) for name, prompts in datasets.items()}
    for name, tokens in longest.items():
        if not tokens:
            raise ValueError(
                f"no prompt of {name} and {settings.max_new_tokens} new tokens fit the model's {positions} positions"
            )
    runner = PairRunner(target, draft, tokenizer, settings, max(longest.values()))
    # 2. Open all journals before the first prompt: one of another run is refused at once.
    folder, summaries = None if out is None else Path(out), {}
    with contextlib.ExitStack() as stack:
        journals = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            journals = {name: stack.enter_context(Journal(folder / f"{name}.jsonl", header)) for name in datasets}
        # 3. Answer what no journal has, dataset by dataset.
        for name, prompts in datasets.items():
            show = functools.partial(advance or _show_nothing, name)
            records = _run_dataset(runner, prompts, journals.get(name), show)
            wanted = sum(len(prompt.turns) if settings.turns == "all" else 1 for prompt in prompts)
            summaries[name] = summarize(records, block_size, wanted)
    # 4. Report.
    finished = datetime.now(timezone.utc).isoformat(timespec="seconds")
    report = {"header": {**(about or {}), "finished": finished, **header}, "datasets": summaries}
    if folder is not None:
        write_atomically(folder / "summary.json", lambda path: path.write_text(json.dumps(report, indent=1) + "\n"))
    return report


def _show_nothing(_dataset: str, _records: list[Record]) -> None:
    """Stand in for a progress bar."""


def _run_dataset(
    runner: PairRunner, prompts: Sequence[Prompt], journal: Journal | None, advance: Callable[[list[Record]], None]
) -> list[list[Record]]:
    """Return the records of every prompt, those from the journal first."""
    finished = {} if journal is None else _read_journal(journal)
    records = [finished[prompt.key] for prompt in prompts if prompt.key in finished]
    for earlier in records:
        advance(earlier)
    for prompt in prompts:
        if prompt.key in finished:
            continue
        records.append(runner.run(prompt))
        if journal is not None:
            journal.append([{"prompt": prompt.key, "turns": records[-1]}])
        advance(records[-1])
    return records


def _read_journal(journal: Journal) -> dict[str, list[Record]]:
    """Return the records of the finished prompts by their keys."""
    finished = {}
    for number, record in journal.read():
        try:
            finished[record["prompt"]] = record["turns"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{journal.path}, line {number}: not a prompt of a benchmark; delete the file") from error
    return finished


@contextlib.contextmanager
def progress_bars(totals: Mapping[str, int]) -> Iterator[Advance]:
    """Show a bar per dataset on a terminal's standard error; yields what to call with each prompt's records."""
    seen: dict[str, list[list[Record]]] = {name: [] for name in totals}
    with bars(totals) as show:

        def advance(name: str, records: list[Record]) -> None:
            seen[name].append(records)
            steps = [length for part in seen[name] for record in part for length in record["acceptance_lengths"]]
            text = f"{sum(steps) / len(steps):.2f} tokens per step" if steps else ""
            show(name, len(seen[name]), totals[name], text)

        yield advance
