"""``dflash benchmark``: speed and acceptance on datasets of prompts, next to one-token decoding in the same run."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import nn

from dflash import Drafter, Statistics
from dflash.internals import context_bucket, files, mean_acceptance, targets

from ..config import BenchmarkConfig
from .compare import Comparison, TimedAnswer, describe, pair_runners
from .datasets import Conversation
from .progress import bars

_NGRAM = 8
Record = dict[str, Any]  # one turn of a conversation, as answered in each way
StepCounts = dict[str, list[float]]  # steps, tokens, rows and seconds, by the first context length of a bucket


# ---------------------------------------------------------------------------------------------- records of answers


def distinct_ngrams(answer: Sequence[int], size: int = _NGRAM) -> tuple[int, int]:
    """Count the different runs of ``size`` tokens in an answer, and all of them."""
    grams = [tuple(answer[start : start + size]) for start in range(len(answer) - size + 1)]
    return len(set(grams)), len(grams)


def count_steps(prompt_tokens: int, answer: TimedAnswer) -> StepCounts:
    """Count the steps of an answer, each in the bucket of the position that it starts from."""
    starts = itertools.accumulate(answer.steps, initial=prompt_tokens)  # the first token comes from the prompt
    steps = zip(starts, answer.steps, answer.rows, answer.step_seconds, strict=False)  # no step starts at the end
    return _total((str(context_bucket(start)), [1, *numbers]) for start, *numbers in steps)


def _total(counts: Iterable[tuple[str, Sequence[float]]]) -> StepCounts:
    total: StepCounts = {}
    for bucket, numbers in counts:
        total[bucket] = [a + b for a, b in zip(total.get(bucket, (0, 0, 0, 0.0)), numbers, strict=True)]
    return total


def _record(prompt: Sequence[int], answers: Mapping[str, TimedAnswer]) -> Record:
    expected, chain = answers["one-token"], answers["dflash"]

    def drafted(answer: TimedAnswer) -> Record:
        return {
            "new_tokens": len(answer.ids),
            "seconds": answer.seconds,
            "acceptance_lengths": answer.steps,
            "identical": answer.ids == expected.ids,
            "by_context": count_steps(len(prompt), answer),
        }

    return {
        "prompt_tokens": len(prompt),
        **drafted(chain),
        "one_token_new_tokens": len(expected.ids),
        "one_token_seconds": expected.seconds,
        "one_token_by_context": count_steps(len(prompt), expected),
        "ngrams": list(distinct_ngrams(chain.ids)),
        **({"tree": drafted(answers["tree"])} if "tree" in answers else {}),
    }


def summarize(records: Sequence[Sequence[Record]], block_size: int, wanted: int) -> dict[str, Any]:
    """Add up the records of a dataset.

    Args:
        records: per prompt, one record per turn; at least one in all.
        block_size: rows that a step verified.
        wanted: turns that there are. Those without a record were too long for the model.

    Returns:
        Speeds, totals over totals, and their ratio, speedup; acceptance_length, mean tokens per step, bonus token
        counted; ``histogram[m]`` steps wrote ``m`` tokens; ``acceptance_per_position[j]``, the share of steps that kept
        drafted token ``j + 1``, and ``conditional_acceptance[j]``, the same among the steps that kept the one before;
        identical of ``turns`` answers equal those of one-token decoding; distinct_ngrams, the share of 8-grams that
        were new within their answer; by_context, see `summarize_steps`. All of these are of chains; ``tree`` has the
        same of trees, or is None.
    """
    turns = [turn for prompt in records for turn in prompt]
    trees = [turn["tree"] for turn in turns if "tree" in turn]
    one_token_seconds = sum(turn["one_token_seconds"] for turn in turns)
    one_token_speed = sum(turn["one_token_new_tokens"] for turn in turns) / one_token_seconds
    distinct, grams = (sum(turn["ngrams"][i] for turn in turns) for i in (0, 1))

    def drafted(answers: Sequence[Record]) -> dict[str, Any]:
        steps, tokens = ([answer[key] for answer in answers] for key in ("acceptance_lengths", "new_tokens"))
        statistics = Statistics(steps, block_size, tokens, 0.0, sum(answer["seconds"] for answer in answers))
        shares = statistics.acceptance_per_position
        given = [share / before if before else None for share, before in zip(shares, [1.0, *shares], strict=False)]
        return {
            "new_tokens": sum(tokens),
            "seconds": statistics.seconds,
            "tokens_per_second": statistics.tokens_per_second,
            "speedup": statistics.tokens_per_second / one_token_speed,
            "acceptance_length": mean_acceptance(statistics),
            "acceptance_per_position": shares,
            "conditional_acceptance": given,
            "histogram": statistics.histogram,
            "identical": sum(answer["identical"] for answer in answers),
            "by_context": summarize_steps(
                (answer["by_context"] for answer in answers), (turn["one_token_by_context"] for turn in turns)
            ),
        }

    return {
        "prompts": len(records),
        "turns": len(turns),
        "skipped": wanted - len(turns),
        "one_token_seconds": one_token_seconds,
        "one_token_tokens_per_second": one_token_speed,
        **drafted(turns),
        "distinct_ngrams": distinct / grams if grams else None,
        "tree": drafted(trees) if trees else None,
    }


def summarize_steps(drafted: Iterable[StepCounts], one_token: Iterable[StepCounts]) -> list[dict[str, Any]]:
    """Add up the steps of answers, by DFlash and by one-token decoding, per bucket in ascending order.

    ``from`` is a bucket's first context length; rows, times and acceptance_length are means per step; the speedup is
    of steps only, None where one-token decoding took no step.
    """
    ours, theirs = (_total(item for counts in answers for item in counts.items()) for answers in (drafted, one_token))
    buckets = []
    for start, (steps, tokens, rows, seconds) in sorted(ours.items(), key=lambda bucket: int(bucket[0])):
        bucket = {"from": int(start), "steps": steps, "acceptance_length": tokens / steps, "rows": rows / steps}
        bucket |= {"step_seconds": seconds / steps, "one_token_step_seconds": None, "speedup": None}
        if start in theirs:
            each = theirs[start][3] / theirs[start][0]
            bucket |= {"one_token_step_seconds": each, "speedup": each * tokens / seconds}
        buckets.append(bucket)
    return buckets


# ---------------------------------------------------------------------------------------------- a whole run


def answer_conversation(
    comparison: Comparison, tokenizer: Any, config: BenchmarkConfig, conversation: Conversation, longest: int
) -> list[Record]:
    """Answer a conversation in each way: one record per turn, up to the first that passes ``longest`` tokens."""
    messages: list[str] = []
    records = []
    for turn in config.asked(conversation):
        messages.append(turn)
        ids = config.encode(tokenizer, messages, conversation.history)
        if len(ids) + config.max_new_tokens > longest:
            break
        if not comparison.is_warm:
            comparison.warm_up(ids)
        answers = comparison.answer(ids)
        records.append(_record(ids, answers))
        messages.append(tokenizer.decode(answers["one-token"].ids, skip_special_tokens=True))
    return records


def _longest(prompts: Iterable[Conversation], tokenizer: Any, config: BenchmarkConfig, positions: int | None) -> int:
    """Return the tokens of the longest conversation that fits the model, with its answers; 0 if none fits."""
    longest, new = 0, config.max_new_tokens
    for prompt in prompts:
        needed = len(config.encode(tokenizer, prompt.turns[:1], prompt.history)) + new
        if positions is not None and needed > positions:
            continue
        if config.turns == "all":
            messages = [text for turn in prompt.turns for text in (turn, "")][:-1]
            answers = len(prompt.turns) * new
            # An answer that is read again may have a few more tokens than were written.
            needed = max(needed, len(config.encode(tokenizer, messages, prompt.history)) + answers + answers // 4)
        longest = max(longest, needed)
    return longest if positions is None else min(longest, positions)


def run_benchmark(
    target: nn.Module,
    draft: Drafter | None,
    tokenizer: Any,
    datasets: Mapping[str, list[Conversation]],
    config: BenchmarkConfig,
    *,
    about: Mapping[str, str] | None = None,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Run every dataset, with a progress bar for each on a terminal's standard error.

    Args:
        target: the causal language model.
        draft: its drafter.
        tokenizer: the target's.
        datasets: prompts by name, from `dflash_tools.measure.datasets.load_conversations`.
        config: how they are asked and answered.
        about: further entries of the header: names of the models, the command.
        out: a folder; gets ``NAME.jsonl`` of each finished dataset, a line per prompt, and ``summary.json``.

    Returns:
        ``{"header": ..., "datasets": {name: summarize(...)}}``.

    Raises:
        ValueError: the settings do not fit, or no prompt of a dataset fits the model.
    """
    config.check(tokenizer)
    # 1. Find what fits the model, and build the generators
    positions, new = targets.max_positions(target), config.max_new_tokens
    longest = {name: _longest(prompts, tokenizer, config, positions) for name, prompts in datasets.items()}
    for name, tokens in longest.items():
        if not tokens:
            raise ValueError(f"no prompt of {name} and {new} new tokens fit the model's {positions} positions")
    most, settings = max(longest.values()), dataclasses.asdict(config)
    settings |= settings.pop("generator")
    runners = pair_runners(
        target, draft, config, max_length=most, padded=config.padded, compile=config.compile, **config.generator
    )
    comparison, block_size = Comparison(runners), runners["dflash"].generator.block_size
    # 2. Answer every prompt, dataset by dataset
    folder, summaries = None if out is None else Path(out), {}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with bars(datasets) as show:
        for name, prompts in datasets.items():
            records: list[list[Record]] = []
            steps: list[int] = []
            for prompt in prompts:
                records.append(answer_conversation(comparison, tokenizer, config, prompt, most))
                steps += [length for turn in records[-1] for length in turn["acceptance_lengths"]]
                mean = f"{sum(steps) / len(steps):.2f} tokens per step" if steps else ""
                show(name, len(records), len(prompts), mean)
            summaries[name] = summarize(records, block_size, sum(len(config.asked(prompt)) for prompt in prompts))
            if folder is not None:
                _write(folder / f"{name}.jsonl", "".join(json.dumps({"turns": turns}) + "\n" for turns in records))
    # 3. Report
    header = {**(about or {}), "finished": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    header |= {**describe(target, draft), **settings, "block_size": block_size}
    # The sharpness may be infinite, which JSON has no number for.
    header |= {"auto_width": settings.get("block_size") == "auto", "draft_sharpness": str(config.draft_sharpness)}
    report = {"header": header, "datasets": summaries}
    if folder is not None:
        _write(folder / "summary.json", json.dumps(report, indent=1) + "\n")
    return report


def _write(path: Path, text: str) -> None:
    files.write_atomically(path, lambda unfinished: unfinished.write_text(text))
