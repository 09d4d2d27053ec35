"""Examine a pair: answer prompts, then look for a wiring that accepts more drafts than the configured one."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dflash import Drafter, Generator, Statistics, load_draft
from dflash.internals import ChainProposer, Sampling, gguf, mean_acceptance, prompt_ids, targets
from dflash.light import terminal

from ..config import Decoding
from ..measure.compare import GeneratorRunner, add_up
from ..train.data import load_prompts
from ..train.features import TargetFeatures
from .wiring import Facts, Variant, Wiring, variants

Show = Callable[..., None]  # show(name, done, total, text)

RAW_LAST = -1  # the last layer, before the final norm
_NORMAL_TOKEN = 1  # kind of token in a GGUF file
_CACHE_BYTES = 2**28  # of the drafter's caches and logits in one pass
_COUNT = 8  # of the prompts next to a target
_MOST = 32  # of --prompts: the target's states over all answers are kept in memory
_OWN = (
    "Write a Python function that merges two sorted lists.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Explain step by step.",
    "Summarize the plot of Romeo and Juliet in five sentences.",
    "Translate into French: The weather was so bad that we stayed at home and read.",
    "List the planets of the solar system in order, with one fact about each.",
    "Write a SQL query for the ten customers with the largest total of orders in 2023.",
    "Explain to a child why the sky is blue.",
    "Solve 3x + 7 = 25 and check the result.",
)


class Pair(NamedTuple):
    """A causal language model, its drafter, the drafter's parsed ``config.json``, and its GGUF file if it has one.

    The head in a target's own files has no config: ``keys`` are empty.
    """

    target: Any
    drafter: Drafter
    keys: Mapping[str, Any]
    file: gguf.GgufFile | None = None


class Answered(NamedTuple):
    """The token ids of a prompt with the target's answer to it, and the length of the prompt."""

    ids: list[int]
    prompt_length: int


class Answers(NamedTuple):
    """Prompts with their answers, what they took, and the generator that wrote them."""

    sequences: list[Answered]
    total: Statistics
    generator: Generator

    @property
    def acceptance_length(self) -> float:
        return mean_acceptance(self.total) or 0.0


@dataclass(frozen=True)
class Prompts:
    """Prompts for a pair, and how they are encoded.

    Attributes:
        rows: each ``{"prompt": text}`` or ``{"messages": [...]}``.
        template: arguments of the chat template.
        bos: put a BOS token before a prompt without chat template.
        origin: where the prompts come from, in words.
    """

    rows: Sequence[Mapping[str, Any]]
    tokenizer: Any
    template: Mapping[str, Any] = field(default_factory=dict)
    bos: bool = False
    origin: str = ""

    @functools.cached_property
    def ids(self) -> list[list[int]]:
        """Token ids of each prompt. Raises ``ValueError`` if one cannot be encoded."""
        return [list(prompt_ids(self.tokenizer, row, template=self.template, bos=self.bos)) for row in self.rows]

    def check_room(self, target: Any) -> None:
        """Raise ``ValueError`` if a prompt cannot be encoded, or is too long for the target, which may be empty."""
        longest = max(map(len, self.ids))
        most = targets.max_positions(target)
        if most is not None and longest + 2 > most:
            raise ValueError(f"a prompt of {longest} tokens does not fit the target's {most} positions: shorten it")


def find_prompts(file: str | None, model: str) -> tuple[list[dict[str, Any]], str]:
    """Return the prompts to answer, each ``{"prompt"}`` or ``{"messages"}``, and where they come from in words.

    Args:
        file: JSON lines with ``prompt``, ``question``, ``turns`` (of which the first is asked) or ``messages``. Of more
            than 32, 32 from all over the file are used. None for eight of ``prompts.jsonl`` next to the target's
            folder, if it is there, else of our own.
        model: the target's folder or hub id.

    Raises:
        ValueError: the file is missing, holds no prompt, or one of its lines is wrong.
    """
    if file is not None:
        return _read(Path(file), _MOST, f"--prompts {file!r}")
    path = Path(model).absolute().parent / "prompts.jsonl"
    if Path(model).is_dir() and path.is_file():
        try:
            return _read(path, _COUNT)
        except ValueError as error:
            raise ValueError(f"{error} (the file stands next to the target; --prompts names another)") from error
    return [{"prompt": text} for text in _OWN], f"{len(_OWN)} of the doctor's own"


def answer(pair: Pair, prompts: Prompts, max_new_tokens: int, show: Show) -> Answers:
    """Answer every prompt greedily. Raises ``ValueError`` as `Prompts.check_room`."""
    prompts.check_room(pair.target)
    room = max(map(len, prompts.ids)) + max_new_tokens
    positions = targets.max_positions(pair.target)
    generator = Generator(pair.target, pair.drafter, max_length=min(room, positions or room))
    runner = GeneratorRunner(generator, Decoding(max_new_tokens), pair.drafter.device)
    answers = []
    for number, row in enumerate(prompts.ids):
        show("answers", number, len(prompts.ids), "")
        answers.append(runner(row))
    show("answers", len(prompts.ids), len(prompts.ids), "")
    sequences = [Answered([*row, *found.ids], len(row)) for row, found in zip(prompts.ids, answers, strict=True)]
    return Answers(sequences, add_up(answers, generator.block_size), generator)


def _read(path: Path, most: int, name: str = "") -> tuple[list[dict[str, Any]], str]:
    """Return up to ``most`` prompts from all over a file, and where they come from; ``name`` is for errors."""
    if not path.is_file():
        raise ValueError(f"{name or path} is not a file: name a file of JSON lines, each with a prompt")
    found = load_prompts(path)
    count = min(most, len(found))
    which = f"all {count}" if count == len(found) else f"{count} of the {len(found)}"
    return [found[index * len(found) // count] for index in range(count)], f"{which} in {path}"


# ---------------------------------------------------------------------------------------------- drafting again


class Recording(NamedTuple):
    ids: Tensor  # [length]
    prompt_length: int
    states: dict[int, Tensor]  # layer -> [length, hidden]; `RAW_LAST` is the last before the final norm


@torch.no_grad()
def record(target: nn.Module, sequences: Sequence[Answered], layers: Collection[int]) -> list[Recording]:
    """Run the target once over each sequence; it is not changed.

    The outputs of ``layers`` are kept; the last layer's twice, after the final norm and before it.
    """
    compute, config = TargetFeatures(target, tuple(layers)), targets.text_config(target)
    before_norm: list[Tensor] = []

    def keep(_layer: nn.Module, _arguments: tuple, output: Any) -> None:
        raw: Tensor = output[0] if isinstance(output, tuple) else output
        streams = raw[0].flatten(1).unflatten(-1, (-1, config.hidden_size))  # one, or those of hyper-connections
        before_norm.append(streams.mean(1))  # as the engine taps them

    if config.num_hidden_layers - 1 in layers:
        targets.find_layers(compute.model)[-1].register_forward_hook(keep)
    recordings = []
    for one in sequences:  # one by one: padding would cost memory, and on a CPU more time than it saves
        ids = torch.tensor(one.ids, dtype=torch.int64, device=compute.embedding_weight.device)
        states = dict(zip(layers, compute(ids[None])[0].chunk(len(layers), -1), strict=True))
        if before_norm:
            states[RAW_LAST] = before_norm.pop()
        recordings.append(Recording(ids, one.prompt_length, states))
    return recordings


class Score(NamedTuple):
    """Tokens per step of one wiring."""

    tokens: Tensor  # [places], tokens per step: the accepted drafts and the target's own
    valid: float  # share of the rows that draft a token; a NaN drafts none

    @property
    def mean(self) -> float:
        return self.tokens.mean().item()


class DraftReplay:
    """Drafts at the same places of the same answers for every wiring, as a step does: one pass of the proposer each.

    Args:
        recordings: of the target's greedy answers.
        target: the copy whose embeddings and head the drafter shares.
        drafter: its weights.
        per_prompt: places of each answer at most, spread evenly.

    Attributes:
        anchors: ``[places]`` int64, the position of each place's last token before the drafts.
        rows: ``[places]`` int64, its answer; in ascending order.
    """

    def __init__(
        self, recordings: Sequence[Recording], target: targets.Target, drafter: Drafter, per_prompt: int
    ) -> None:
        self.recordings, self.target, self.drafter = recordings, target, drafter
        self.last_layer = target.config.num_hidden_layers - 1
        where: list[tuple[int, int]] = []
        for row, recording in enumerate(recordings):
            first, length = recording.prompt_length, len(recording.ids)
            count = min(per_prompt, length - 1 - first)  # every anchor has a token after it
            spread = torch.linspace(first, length - 2, max(count, 0), dtype=torch.float32, device="cpu")
            where.extend((row, place) for place in spread.long().unique().tolist())
        places = torch.tensor(where, dtype=torch.int64, device=drafter.device).view(-1, 2)
        self.rows, self.anchors = places.unbind(1)

    def layers(self, wiring: Wiring) -> list[int]:
        """Return the recorded layers that the wiring taps."""
        is_raw = wiring.raw_last_tap
        return [RAW_LAST if is_raw and tap == self.last_layer else tap for tap in wiring.config.target_layer_ids]

    @torch.no_grad()
    def score(self, wiring: Wiring, every: int = 1) -> Score:
        """Draft at every ``every``-th place, and compare with the target's answer."""
        drafter, layers = wiring.apply(self.drafter), self.layers(wiring)
        target: Any = self.target if drafter.dtype == self.target.dtype else _cast(self.target, drafter.dtype)
        rows, anchors = self.rows[::every], self.anchors[::every]
        accepted, drafts = [], []
        for row, recording in enumerate(self.recordings):
            places = anchors[rows == row]
            if not len(places):
                continue
            context = torch.cat([recording.states[layer] for layer in layers], -1)[None].to(drafter.dtype)
            drafts.append(_draft(drafter, target, recording.ids, context, places))
            accepted.append(_accepted(drafts[-1], recording.ids, places))
        return Score(1.0 + torch.cat(accepted).float(), (torch.cat(drafts) >= 0).float().mean().item())


def _accepted(drafts: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
    """Return the length of the longest prefix of ``drafts [places, count]`` that the sequence continues with."""
    ahead = _positions(anchors, drafts.shape[1])
    inside = ahead < len(ids)
    return ((drafts == ids[ahead.clamp(max=len(ids) - 1)]) & inside).long().cumprod(1).sum(1)


def _draft(drafter: Drafter, target: targets.Target, ids: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
    """Draft ``[places, block - 1]`` after each anchor of a sequence, as a step does; -1 where a logit is NaN.

    ``ids`` are ``[length]``, ``context`` has its tapped states ``[1, length, taps * hidden]``.
    """
    # 1. Compute the keys and values of the whole context once
    block_size, length = drafter.config.block_size, torch.tensor([len(ids)], dtype=torch.int64, device=ids.device)
    whole = drafter.new_cache(1, len(ids) + block_size)
    drafter.inject_(drafter.fuse(context, length), torch.arange(len(ids), device=ids.device)[None], whole)
    # 2. Draft at as many places at a time as memory allows
    per_place = sum(buffer.numel() * buffer.element_size() for buffer in whole.buffers)
    per_place += block_size * target.embedding_weight.shape[0] * 8
    drafts = []
    for part in anchors.split(max(1, _CACHE_BYTES // per_place)):
        count = len(part)
        cache = drafter.new_cache(count, whole.capacity)
        for copies, buffer in zip(cache.buffers, whole.buffers, strict=True):
            copies.copy_(buffer.expand_as(copies))
        state: Any = SimpleNamespace(  # what a proposer reads of the engine's state
            tokens=ids.expand(count, -1),
            anchor=ids[part][:, None],
            length=part,
            waiting_features=lambda part=part: context[0, part - 1][:, None],  # of the token before each anchor
            num_context=torch.ones_like(part),
            sampling=Sampling.create(count, part.device),
            draft_cache=cache,
            live=None,
            block=part.new_empty(count, block_size),
            positions=functools.partial(_positions, part),
        )
        drafts.append(ChainProposer(drafter, target, block_size).propose(state).ids[:, 1:])
    return torch.cat(drafts)


def _positions(anchors: Tensor, rows: int) -> Tensor:
    """Return ``[places, rows]`` int64, the positions after each anchor's."""
    return anchors[:, None] + torch.arange(1, rows + 1, device=anchors.device)


def _cast(target: targets.Target, dtype: torch.dtype) -> Any:
    """Return what a proposer reads of a target, for a drafter of another dtype."""
    rows = target.embedding_rows
    table = rows.to(dtype) if isinstance(rows, Tensor) else targets.PackedEmbedding(rows.packed, dtype)
    return SimpleNamespace(
        config=target.config,
        head=target.head,
        embedding_weight=table if isinstance(table, Tensor) else table.weight,
        embedding_rows=table,
        draft_head=lambda hidden: target.draft_head(hidden.to(target.dtype)).to(dtype),
    )


_TARGET_DTYPE = "run the pair in bfloat16 or float32 (--dtype)"
_TARGET_WEIGHTS = "these are not the weights of the model that the drafter was trained on"
_REWRITE = (
    "the drafter is a GGUF file: dflash export --format published makes a folder with such a config.json, and --format "
    "gguf a file again; the taps there are target_layers, counted from 1"
)
_UNFAMILIAR = (
    "the drafter may know nothing of prompts like these, belong to another version of the target (fine-tuned or "
    "quantized), or be trained too little"
)
_NEAR_ZERO = 1e-10  # mean square of a tap or of fused features; those of trained pairs are from 1e-4 on

_LEAST_GAIN = 0.05  # of the tokens per step as configured
_LEAST_Z = 3.0  # standard errors of the paired difference: among fifty variants chance makes one of 2.5
_LEAST_PLACES = 16
_SAME = 0.02  # what accepts so little less than the best is as good, and the simpler variant counts
_FINALISTS = 4
_SCREENING = 4  # the first look at a variant takes every fourth place
_MOST_FAULTS = 3
_REACH = 2  # layers around the taps that are recorded, for taps that are shifted
_LEAST_ENCODING_GAIN = 0.25  # other prompts make other answers: more than chance between those
_LOW_FIRST = 0.6  # share of the steps that keep the first draft; that of healthy pairs is above


@dataclass(frozen=True)
class Finding:
    """A fault.

    Attributes:
        fault: its name, one of a fixed set (docs/doctor.md).
        found: what was seen.
        advice: what to do, such as the line for ``config.json``.
        before, after: tokens per step as configured and without the fault; None if there is nothing to compare.
        config: the keys of the drafter's ``config.json`` to write; None if none repair it.
    """

    fault: str
    found: str
    advice: str
    before: float | None = None
    after: float | None = None
    config: dict[str, Any] | None = None


@dataclass
class Diagnosis:
    """Result of an examination. ``dflash doctor --json`` prints these names.

    Attributes:
        acceptance_length: tokens per step in real decoding, as configured.
        acceptance_per_position: share of the steps that keep drafted token 1, 2, ... and all before it.
        block_size: the drafter's.
        prompts, new_tokens: answered and written for it.
        prompts_from: where the prompts come from, in words.
        places: where the drafter drafted again.
        replayed: tokens per step there, as configured; what variants are compared with.
        findings: empty if no fault was found.
        trials: change -> tokens per step there, of the variants of the first round that were measured at all places.
        tried: how many variants there were in all rounds.
        encodings: other way to encode the prompts -> tokens per step in real decoding, with new answers each.
        notes: what could not be examined, and why.
        seconds: that it took.
    """

    acceptance_length: float
    acceptance_per_position: list[float]
    block_size: int
    prompts: int
    new_tokens: int
    prompts_from: str = ""
    places: int = 0
    replayed: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    trials: dict[str, float] = field(default_factory=dict)
    tried: int = 0
    encodings: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def diagnose(
    pair: Pair, prompts: Prompts, max_new_tokens: int = 128, places: int = 32, show: Show = lambda *_: None
) -> Diagnosis:
    """Examine a pair on a few prompts, answered greedily.

    Args:
        pair: the pair to examine.
        prompts: what it answers.
        max_new_tokens: per answer.
        places: of each answer, at which other wirings draft.
        show: told of progress, as that of `bars`.

    Raises:
        ValueError: the two do not fit, or a prompt does not fit the target.
    """
    began = time.perf_counter()
    # 1. Answer the prompts with the pair as it is
    answers = answer(pair, prompts, max_new_tokens, show)
    block_size, shares = answers.generator.block_size, answers.total.acceptance_per_position
    counts = len(answers.sequences), sum(answers.total.num_new_tokens)
    out = Diagnosis(answers.acceptance_length, shares, block_size, *counts, prompts.origin)
    longest = max(len(one.ids) for one in answers.sequences)
    if not pair.keys:
        out.findings += check_finite_weights(pair.drafter)
        _compare_encodings(out, pair, prompts, max_new_tokens, show)
        out.notes.append("no other wiring was tried: a head in the target's own files has one")
        out.seconds = time.perf_counter() - began
        return out
    wiring, dense = Wiring.read(pair.keys), load_draft(pair.drafter, keeps_blocks=False)
    out.notes += describe_packed(pair.drafter)
    out.findings += check_finite_weights(dense)
    out.findings += check_positions(pair.keys, max(one.prompt_length for one in answers.sequences), longest)
    if pair.file is not None:
        out.findings += check_file(pair.file, targets.text_config(pair.target), prompts.tokenizer)
    # 2. Record the target's states over the answers, and look at them
    target, reach = targets.text_config(pair.target), range(-_REACH, _REACH + 1)
    layers = range(target.num_hidden_layers)
    taps = sorted({tap + i for tap in wiring.config.target_layer_ids for i in reach if tap + i in layers})
    recordings = record(pair.target, answers.sequences, taps)
    replay = DraftReplay(recordings, answers.generator.engine.target, dense, places)
    out.findings += check_features(replay, wiring)
    out.places = len(replay.anchors)
    # 3. Undo one fault after another, as long as a variant accepts more
    if any(finding.fault in ("not finite", "near zero") for finding in out.findings):
        out.notes.append("no other wiring was tried: weights or features are broken")
    elif out.places < _LEAST_PLACES:
        few = f"the answers have {out.places} places to draft at, and {_LEAST_PLACES} are needed to tell a fault from"
        out.notes.append(f"no other wiring was tried: {few} chance; give more prompts, or prompts with longer answers")
    else:
        facts = Facts(
            target.to_dict(), len(layers), prompts.tokenizer, longest,
            targets.embedding_table(pair.target).shape[0], pair.drafter.dtype,
        )  # fmt: skip
        _search(out, replay, wiring, facts, show)
        _compare_encodings(out, pair, prompts, max_new_tokens, show)
        first = out.acceptance_per_position[:1]
        if not out.findings and first and first[0] < _LOW_FIRST:
            few = f"few drafts are accepted (the first one in {first[0]:.0%} of the steps), and no other wiring helps"
            out.notes.append(f"{few}: {_UNFAMILIAR}")
    if pair.file is not None and any(finding.config for finding in out.findings):
        out.notes.append(_REWRITE)
    out.seconds = time.perf_counter() - began
    return out


# ---------------------------------------------------------------------------------------------- wirings


def _search(out: Diagnosis, replay: DraftReplay, wiring: Wiring, facts: Facts, show: Show) -> None:
    """Replace the wiring by the variant that accepts most, until none accepts more."""
    score = replay.score(wiring)
    out.replayed = score.mean
    for _ in range(_MOST_FAULTS):
        variant, other = _best(out, replay, wiring, facts, show)
        if not _is_more(score, other, replay.rows):
            break
        found, gain = f"{variant.change}: more drafts are accepted", (score.mean, other.mean)
        out.findings.append(Finding(variant.fault, found, variant.advice, *gain, variant.config or None))
        wiring, score = variant.wiring, other
    if score.valid < 1:  # logits are NaN in any wiring
        largest = max(weight.abs().max().item() for weight in replay.drafter.parameters())
        found = f"{1 - score.valid:.0%} of the drafter's rows of logits are NaN, its weights are not"
        dtype = str(replay.drafter.dtype).removeprefix("torch.")
        advice = f"its products overflow {dtype}: look for weights that are too large (the largest is {largest:.2g})"
        out.findings.append(Finding("overflow", found, advice, score.mean))


def _best(out: Diagnosis, replay: DraftReplay, wiring: Wiring, facts: Facts, show: Show) -> tuple[Variant, Score]:
    """Return the variant that accepts most; ``out`` gets the trials of the first round."""
    recorded = replay.recordings[0].states
    every = [variant for variant in variants(wiring, facts) if recorded.keys() >= {*replay.layers(variant.wiring)}]
    # 1. A short look at all of them
    first = []
    for number, variant in enumerate(every):
        show("wirings", number, len(every), variant.change)
        first.append(replay.score(variant.wiring, _SCREENING).mean)
    # 2. The best of them at all places, in the order of `variants`
    ranked = sorted(range(len(first)), key=lambda index: -first[index])
    finalists = [every[index] for index in sorted(ranked[:_FINALISTS])]
    scored = [(replay.score(variant.wiring), variant) for variant in finalists]
    show("wirings", len(every), len(every), "")
    if not out.tried:
        out.trials = {variant.change: score.mean for score, variant in scored}
    enough = (1 - _SAME) * max(score.mean for score, _ in scored)
    out.tried += len(every)
    return next((variant, score) for score, variant in scored if score.mean >= enough)


def _is_more(configured: Score, other: Score, answers: Tensor) -> bool:
    """True if the other wiring accepts more at the same places: more than by chance, and not in one answer only."""
    difference = other.tokens - configured.tokens
    error = difference.std() / len(difference) ** 0.5
    if difference.mean() <= max(_LEAST_GAIN * configured.mean, _LEAST_Z * error.item()):
        return False
    others = answers != answers.bincount(difference).argmax()  # the places of one answer are not independent
    return not others.any() or bool(difference[others].mean() > _LEAST_GAIN * configured.tokens[others].mean())


# ---------------------------------------------------------------------------------------------- encodings


def _encodings(prompts: Prompts) -> Iterator[tuple[str, str, Prompts]]:
    """Yield other ways to encode prompts: what differs, the advice, the prompts."""
    for thinking, option in ((False, " (--no-thinking)"), (True, "")):
        name, other = f"enable_thinking={thinking}", {**prompts.template, "enable_thinking": thinking}
        advice = f"the drafter was trained on texts with {name}: ask for such answers{option}"
        yield f"the chat template with {name}", advice, replace(prompts, template=other)
    if prompts.tokenizer.bos_token_id is not None and any("prompt" in row for row in prompts.rows):
        advice = "the drafter was trained on texts that begin with the BOS token: begin prompts with it (--bos)"
        yield "a BOS token before the prompt", advice, replace(prompts, bos=True)


def _compare_encodings(out: Diagnosis, pair: Pair, prompts: Prompts, max_new_tokens: int, show: Show) -> None:
    """Compare how prompts are encoded with the chat template's thinking switched on and off, and with a BOS token."""
    if any(finding.after is not None for finding in out.findings):
        out.notes.append("other ways to encode prompts were not compared: repair the wiring first")
        return
    for change, advice, other in _encodings(prompts):
        try:
            other.check_room(pair.target)
        except ValueError as error:  # the template refuses the prompt, or makes it too long
            out.notes.append(f"{change} was not tried: {error}")
            continue
        if other.ids == prompts.ids:
            continue
        length = answer(pair, other, max_new_tokens, show).acceptance_length
        out.encodings[change] = length
        if length > (1 + _LEAST_ENCODING_GAIN) * out.acceptance_length:
            found = f"{change}: more drafts are accepted"
            out.findings.append(Finding("template", found, advice, out.acceptance_length, length))


# ---------------------------------------------------------------------------------------------- checks


def describe_packed(drafter: Drafter) -> Iterator[str]:
    """Say which of a drafter's weights are packed."""
    found: dict[str, dict[str, None]] = {}
    for name, weight in drafter.packed_weights().items():
        found.setdefault(weight.format.upper(), {})[re.sub(r"layers\.\d+", "layers.*", name)] = None
    for format, names in found.items():
        yield f"the drafter's weights in {format} stay packed: {', '.join(names)}"


def check_finite_weights(drafter: Drafter) -> Iterator[Finding]:
    """Find weights that are NaN or infinite."""
    broken = [name for name, weight in drafter.named_parameters() if not weight.isfinite().all()]
    if broken:
        advice = "download or convert the checkpoint again; a conversion to float16 makes infinities of large values"
        yield Finding("not finite", f"weights that are NaN or infinite: {terminal.listed(broken)}", advice)


@torch.no_grad()
def check_features(replay: DraftReplay, wiring: Wiring) -> Iterator[Finding]:
    """Find taps and fused features that are not finite or near zero."""
    layers, every = replay.layers(wiring), [recording.states for recording in replay.recordings]
    # 1. The target's states
    for tap, layer in zip(wiring.config.target_layer_ids, layers, strict=True):
        if not all(states[layer].isfinite().all() for states in every):
            yield Finding("not finite", f"the target's layer {tap} has states that are NaN or infinite", _TARGET_DTYPE)
        elif _mean_square(states[layer].float() for states in every) < _NEAR_ZERO:
            yield Finding("near zero", f"the target's layer {tap} has states near zero", _TARGET_WEIGHTS)
    # 2. What the drafter makes of them; NaN is not below anything
    weight, scale = replay.drafter.fc.weight.float(), replay.drafter.hidden_norm.weight.float()
    contexts = (torch.cat([states[layer] for layer in layers], 1).float() for states in every)
    if _mean_square(nn.functional.linear(context, weight) * scale for context in contexts) < _NEAR_ZERO:
        advice = "fc.weight or hidden_norm.weight was not trained or not converted: look at them in the checkpoint"
        yield Finding("near zero", "the features that the drafter makes of the target's states are near zero", advice)


def _mean_square(tensors: Iterable[Tensor]) -> float:
    sums = [(tensor.square().sum().item(), tensor.numel()) for tensor in tensors]
    return sum(square for square, _ in sums) / sum(count for _, count in sums)


def check_positions(keys: Mapping[str, Any], longest_prompt: int, longest: int) -> Iterator[Finding]:
    """Find prompts and answers that pass the positions that the drafter's ``config.json`` states."""
    section = keys.get("transformer_layer_config", keys)  # of the speculators layout
    positions = section.get("max_position_embeddings")  # a layout's default says nothing of this drafter
    if positions is None or longest <= positions:
        return
    is_prompt = longest_prompt > positions
    what, length = ("a prompt", longest_prompt) if is_prompt else ("a prompt with its answer", longest)
    found = f"{what} has {length} tokens, the drafter's max_position_embeddings is {positions}"
    advice = "if the drafter was trained on texts this long, max_position_embeddings in its config.json is wrong; if "
    yield Finding("positions", found, advice + "not, expect low acceptance there")


def check_file(file: gguf.GgufFile, target: Any, tokenizer: Any) -> Iterator[Finding]:
    """Find in a drafter's GGUF file another target's tokenizer, and what llama.cpp misses. ``target`` is a config."""
    # 1. Ordinary tokens: others are written differently by some converters
    tokens, kinds = (file.metadata.get(f"tokenizer.ggml.{key}") or () for key in ("tokens", "token_type"))
    theirs = tokenizer.convert_ids_to_tokens(list(range(min(len(tokens), len(tokenizer)))))
    rows = enumerate(zip(tokens, theirs, kinds, strict=False))
    if other := [index for index, (token, text, kind) in rows if kind == _NORMAL_TOKEN and text and token != text]:
        there, here = (terminal.shortened(names[other[0]]) for names in (tokens, theirs))
        first = f"token {other[0]} is {there} there and {here} here"
        found = f"{len(other)} of {len(theirs)} tokens of the drafter's file are not the target's: {first}"
        yield Finding("vocabulary", found, "it was made for another target, or for another revision of this one")
    # 2. Without sections llama.cpp rotates drafts by other positions than the target's
    sections = f"{file.architecture}.rope.dimension_sections"
    if "mrope_section" in (getattr(target, "rope_parameters", None) or {}) and sections not in file.metadata:
        found = f"the target has M-RoPE, and {sections} is missing: llama.cpp cannot follow its positions"
        advice = "export the drafter again, with this target (dflash export --format gguf)"
        yield Finding("rope sections", found, advice)
