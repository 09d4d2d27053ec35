"""``dflash benchmark``: speed and acceptance on published prompts, one-token decoding beside it in the same run.

Every prompt is answered by one-token decoding and by DFlash, one after the other, the order changing from prompt to
prompt; speeds count the prompts' forward passes. With an output folder each finished prompt is one line of
``DATASET.jsonl`` there, and a run that was stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from .. import ops
from ..drafter import Drafter
from ..files import write_atomically
from ..generator import Generator, Statistics
from ..progress import bars
from ..target import sample_digest
from .datasets import Prompt
from .prompts import prompt_ids

if TYPE_CHECKING:
    pass

_NGRAM = 8
_WARM_UP = 32  # tokens
# ---------------------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Settings:
    """How prompts are posed and answered.

    Attributes:
        max_new_tokens: of one answer at most.
        temperature: alone; top-k, top-p and min-p are off, whatever the generation_config says.
        seed: of every answer.
        block_size: None is the drafter's.
        draft_sharpness: as for :func:`dflash.generate`.
        padded: one-token decoding runs the shapes of a whole block, and bf16 output is then equal bit for bit; slower.
        raw: continue the text itself, without the tokenizer's chat template. So it is where there is no template.
        bos: put the BOS token before a raw prompt.
        thinking: passed on to the chat template as ``enable_thinking``, unless None.
        turns: ``"first"`` asks each prompt's first turn only; ``"all"`` the whole conversation, one-token decoding's
            answers in between.
        compile: run the steps of both through ``torch.compile``.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    block_size: int | None = None
    draft_sharpness: float | Literal["auto"] = "auto"
    padded: bool = False
    raw: bool = False
    bos: bool = False
    thinking: bool | None = None
    turns: Literal["first", "all"] = "first"
    compile: bool = False


def check_settings(settings: Settings, tokenizer: Any) -> None:
    """Raise ``ValueError`` for settings that this tokenizer cannot serve; what the engine checks is left to it."""
    if settings.turns not in ("first", "all"):
        raise ValueError(f"--turns must be first or all, got {settings.turns!r}")
    templated = tokenizer.chat_template is not None and not settings.raw
    if settings.turns == "all" and not templated:
        raise ValueError("--turns all needs a tokenizer with a chat template, and no --raw")
    if settings.thinking is not None and not templated:
        raise ValueError("--no-thinking needs a tokenizer with a chat template, and no --raw")
    if settings.bos and templated:
        raise ValueError("--bos goes with --raw: the chat template has its own")
    if settings.bos and tokenizer.bos_token_id is None:
        raise ValueError("--bos: this tokenizer has no BOS token")


def encode(
    tokenizer: Any, messages: Sequence[str], settings: Settings, history: Sequence[dict[str, str]] = ()
) -> list[int]:
    """Ids of a conversation: what the user and the model said in turn behind ``history``, the user last."""
    if history and settings.raw:
        raise ValueError("--raw continues a text, and a prompt is a conversation")
    if history or not (settings.raw or tokenizer.chat_template is None):
        said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
        prompt: dict[str, Any] = {"messages": [*history, *said]}
    else:
        prompt = {"prompt": messages[-1]}
    template = {} if settings.thinking is None else {"enable_thinking": settings.thinking}
    return prompt_ids(tokenizer, prompt, raw=settings.raw, bos=settings.bos, template=template)


def describe(target: nn.Module, draft: Drafter) -> dict[str, Any]:
    """The machine, the versions and the models: all that a speed depends on beside :class:`Settings`."""
    device = target.get_input_embeddings().weight.device
    return {
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "isa": ops.isa(),
        "dflash": _version("dflash-engine"),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target_parameters": sum(parameter.numel() for parameter in target.parameters()),
        "draft_parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "weights": f"{sample_digest(target)}-{sample_digest(draft)}",
        "draft_config": hashlib.sha256(repr(draft.config).encode()).hexdigest()[:16],
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# ---------------------------------------------------------------------------------------------- resuming


class Journal:
    """Finished prompts of one dataset in a file: a first line of settings, then a line each.

    A last line that was torn by a kill is dropped. Nothing is written before the first :meth:`append`.

    Raises:
        ValueError: the file was written with other settings, which the message names, or is no such file.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(settings))
        self.fingerprint = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:16]
        self.done: dict[str, list[dict[str, Any]]] = {}
        self._length = 0  # bytes of whole lines
        if path.exists():
            self._read()

    def _read(self) -> None:
        raw = self.path.read_bytes()
        self._length = raw.rfind(b"\n") + 1
        for number, line in enumerate(raw[: self._length].splitlines(), 1):
            try:
                record = json.loads(line)
                if number == 1:
                    self._compare(record["settings"])
                elif record["fingerprint"] == self.fingerprint:
                    self.done[record["prompt"]] = record["turns"]
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number}, is no line of a benchmark: delete the file") from error

    def _compare(self, theirs: dict[str, Any]) -> None:
        names = [name for name in {**theirs, **self.settings} if theirs.get(name) != self.settings.get(name)]
        if names:
            listed = ", ".join(f"{name} {theirs.get(name)!r}, now {self.settings.get(name)!r}" for name in names)
            raise ValueError(f"{self.path} was measured with {listed}: give another --out, or delete it")

    def append(self, key: str, turns: list[dict[str, Any]]) -> None:
        """Note a finished prompt; it is on disk when this returns."""
        lines = [] if self._length else [{"fingerprint": self.fingerprint, "settings": self.settings}]
        lines.append({"fingerprint": self.fingerprint, "prompt": key, "turns": turns})
        raw = "".join(json.dumps(line) + "\n" for line in lines).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.truncate(self._length)
            file.seek(self._length)
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        self._length += len(raw)
        self.done[key] = turns


# ---------------------------------------------------------------------------------------------- running


def distinct_ngrams(answer: Sequence[int], size: int = _NGRAM) -> tuple[int, int]:
    """How many different runs of ``size`` tokens an answer has, and how many in all."""
    grams = [tuple(answer[start : start + size]) for start in range(len(answer) - size + 1)]
    return len(set(grams)), len(grams)


class Runner:
    """One-token decoding and DFlash for one pair, answering the same conversations.

    Args:
        longest: tokens of a conversation and its last answer together.
    """

    def __init__(self, target: nn.Module, draft: Drafter, tokenizer: Any, settings: Settings, longest: int) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        self.device = target.get_input_embeddings().weight.device
        common = {"max_length": longest, "compile": settings.compile, "reuse_prefix": False}
        self.dflash = Generator(target, draft, block_size=settings.block_size, **common)
        rows = self.dflash.block_size if settings.padded else 1
        self.one_token = Generator(target, None, block_size=rows, **common)
        self._turns = 0

    def answer(self, generator: Generator, ids: list[int], limit: int | None = None) -> tuple[list[int], Any, float]:
        """New ids, statistics and seconds of one answer."""
        began = time.perf_counter()
        out = generator.generate(
            torch.tensor([ids], device=self.device),
            max_new_tokens=limit or self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=self.settings.seed,
            draft_sharpness=self.settings.draft_sharpness if generator is self.dflash else "auto",
            return_dict_in_generate=True,
        )
        return out.sequences[0, len(ids) :].tolist(), out.statistics, time.perf_counter() - began

    def run(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Answer ``prompt`` both ways: a record a turn, up to the first turn that is too long for the model."""
        messages, records = [], []
        for turn in prompt.turns if self.settings.turns == "all" else prompt.turns[:1]:
            messages.append(turn)
            ids = encode(self.tokenizer, messages, self.settings, prompt.history)
            if len(ids) + self.settings.max_new_tokens > self.dflash.max_length:
                break
            generators = (self.one_token, self.dflash)
            if self._turns == 0:
                for generator in generators:  # warm up, for nothing
                    self.answer(generator, ids, min(_WARM_UP, self.settings.max_new_tokens))
            self._turns += 1
            answers = {generator: self.answer(generator, ids) for generator in generators[:: (-1) ** self._turns]}
            expected, _, one_token_seconds = answers[self.one_token]
            new, statistics, seconds = answers[self.dflash]
            records.append(
                {
                    "prompt_tokens": len(ids),
                    "new_tokens": len(new),
                    "seconds": seconds,
                    "one_token_new_tokens": len(expected),
                    "one_token_seconds": one_token_seconds,
                    "acceptance_lengths": statistics.acceptance_lengths[0],
                    "identical": new == expected,
                    "ngrams": list(distinct_ngrams(new)),
                }
            )
            messages.append(self.tokenizer.decode(expected, skip_special_tokens=True))
        return records


def summarise(records: Sequence[Sequence[dict[str, Any]]], block_size: int, wanted: int) -> dict[str, Any]:
    """What a dataset's records say.

    Args:
        records: per prompt, a record a turn, as :meth:`Runner.run` makes them; at least one in all.
        wanted: turns that there are; those without a record were too long for the model.

    Returns:
        tokens_per_second, one_token_tokens_per_second (totals over totals) and speedup, their ratio;
        acceptance_length, mean tokens a step, bonus token counted; ``histogram[m]`` steps wrote ``m`` tokens;
        ``acceptance_per_position[j]``, the share of steps that kept drafted token ``j + 1``, and
        ``conditional_acceptance[j]``, the same of those steps that kept the one before (None where none did);
        identical of ``turns`` answers equal one-token decoding's; distinct_ngrams, the share of 8-grams that were new
        within their answer, which is low where the model loops.
    """
    turns = [turn for prompt in records for turn in prompt]

    def total(name: str) -> float:
        return sum(turn[name] for turn in turns)

    steps = [length for turn in turns for length in turn["acceptance_lengths"]]
    statistics = Statistics([steps], block_size, [total("new_tokens")], 0.0, total("seconds"))
    kept = statistics.acceptance_per_position
    one_token = total("one_token_new_tokens") / total("one_token_seconds")
    distinct, grams = (sum(turn["ngrams"][i] for turn in turns) for i in (0, 1))
    return {
        "prompts": len(records),
        "turns": len(turns),
        "skipped": wanted - len(turns),
        "new_tokens": total("new_tokens"),
        "seconds": total("seconds"),
        "one_token_seconds": total("one_token_seconds"),
        "tokens_per_second": statistics.tokens_per_second,
        "one_token_tokens_per_second": one_token,
        "speedup": statistics.tokens_per_second / one_token,
        "acceptance_length": statistics.acceptance_length if steps else None,
        "acceptance_per_position": kept,
        "conditional_acceptance": [
            share / before if before else None for share, before in zip(kept, [1.0, *kept], strict=False)
        ],
        "histogram": statistics.histogram,
        "identical": sum(turn["identical"] for turn in turns),
        "distinct_ngrams": distinct / grams if grams else None,
    }


def _longest(prompts: Iterable[Prompt], tokenizer: Any, settings: Settings, positions: int | None) -> int:
    """Tokens that the longest conversation that the model can hold may have, 0 if there is none."""
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


def benchmark(
    target: nn.Module,
    draft: Drafter,
    tokenizer: Any,
    datasets: dict[str, list[Prompt]],
    settings: Settings,
    *,
    about: dict[str, str] | None = None,
    out: str | Path | None = None,
    advance: Callable[[str, list[dict[str, Any]]], None] = lambda dataset, records: None,
) -> dict[str, Any]:
    """Run every dataset; with ``out``, go on where an earlier run was stopped.

    Args:
        datasets: prompts by name, as :func:`load_prompts` gives them.
        about: what the header says besides: names of the models, the command.
        out: a folder; gets ``NAME.jsonl`` for each dataset and ``summary.json``.
        advance: called with the name and the records of each prompt that is done, those of an earlier run first.

    Returns:
        ``{"header": ..., "datasets": {name: summarise(...)}}``.

    Raises:
        ValueError: the settings do not fit the tokenizer or the models, ``out`` holds a run with other settings, or no
            prompt of a dataset fits the model.
    """
    check_settings(settings, tokenizer)
    block_size = draft.config.block_size if settings.block_size is None else settings.block_size
    header = {**describe(target, draft), **dataclasses.asdict(settings), "block_size": block_size}
    header["draft_sharpness"] = str(settings.draft_sharpness)  # JSON has no infinity
    positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = {name: _longest(prompts, tokenizer, settings, positions) for name, prompts in datasets.items()}
    for name, tokens in longest.items():
        if not tokens:
            raise ValueError(
                f"no prompt of {name} and {settings.max_new_tokens} new tokens fit the model's {positions} positions"
            )
    folder = None if out is None else Path(out)
    journals = {name: None if folder is None else Journal(folder / f"{name}.jsonl", header) for name in datasets}
    runner = Runner(target, draft, tokenizer, settings, max(longest.values()))
    summaries = {}
    for name, prompts in datasets.items():
        journal, records = journals[name], {}
        if journal is not None:
            records = {prompt.key: journal.done[prompt.key] for prompt in prompts if prompt.key in journal.done}
        for earlier in records.values():
            advance(name, earlier)
        for prompt in prompts:
            if prompt.key in records:
                continue
            records[prompt.key] = runner.run(prompt)
            if journal is not None:
                journal.append(prompt.key, records[prompt.key])
            advance(name, records[prompt.key])
        wanted = sum(len(prompt.turns) if settings.turns == "all" else 1 for prompt in prompts)
        summaries[name] = summarise(list(records.values()), block_size, wanted)
    finished = datetime.now(timezone.utc).isoformat(timespec="seconds")
    report = {"header": {**(about or {}), "finished": finished, **header}, "datasets": summaries}
    if folder is not None:
        write_atomically(folder / "summary.json", lambda path: path.write_text(json.dumps(report, indent=1) + "\n"))
    return report


# ---------------------------------------------------------------------------------------------- showing


@contextlib.contextmanager
def progress_bars(totals: dict[str, int]) -> Iterator[Callable[[str, list[dict[str, Any]]], None]]:
    """A bar on standard error, where that is a terminal; gives what to call with each prompt's records."""
    seen: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in totals}
    with bars(totals) as show:

        def advance(name: str, records: list[dict[str, Any]]) -> None:
            seen[name].append(records)
            steps = [length for part in seen[name] for record in part for length in record["acceptance_lengths"]]
            so_far = f"{sum(steps) / len(steps):.2f} tokens a step" if steps else ""
            show(name, len(seen[name]), totals[name], so_far)

        yield advance
