"""Examine a pair: measure acceptance, then look for a wiring that accepts more than the configured one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..drafter import Drafter, is_speculators
from ..evaluate import Decoding, GeneratorRunner, Total, prompt_ids
from ..generator import Generator
from ..target import embedding_table, text_config
from .checks import Finding, check_features, check_positions, check_weights
from .faults import Pair, Variant, variants
from .recording import Answered, record
from .replay import Replay, Score
from .wiring import Wiring

__all__ = ["Diagnosis", "Effort", "Patient", "diagnose"]

Show = Callable[..., None]  # show(name, done, total, text)

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
class Effort:
    """How much is measured.

    Attributes:
        max_new_tokens: per answer.
        places: of each answer at which variants draft.
    """

    max_new_tokens: int = 128
    places: int = 32


@dataclass(frozen=True)
class Patient:
    """A pair, as it was loaded, and how its prompts are encoded.

    Attributes:
        target: the causal language model.
        drafter: its drafter.
        keys: the drafter's ``config.json``.
        tokenizer: the target's.
        template: arguments of the chat template.
        bos: put a BOS token before a prompt without chat template.
    """

    target: Any
    drafter: Drafter
    keys: Mapping[str, Any]
    tokenizer: Any
    template: Mapping[str, Any] = field(default_factory=dict)
    bos: bool = False

    def encode(self, prompt: Mapping[str, Any]) -> list[int]:
        """Return the ids of a prompt."""
        return list(prompt_ids(self.tokenizer, prompt, template=self.template, bos=self.bos))


@dataclass
class Diagnosis:
    """What was found. ``dflash doctor --json`` prints these names.

    Attributes:
        acceptance_length: tokens per step in real decoding, as configured.
        acceptance_per_position: share of the steps that keep drafted token 1, 2, ... and all before it.
        block_size: the drafter's.
        prompts, new_tokens: answered and written for it.
        places: where the drafter drafted again.
        replayed: tokens per step there, as configured; what variants are compared with.
        findings: empty if no fault was found.
        trials: change -> tokens per step, of the variants of the first round that were measured at all places.
        tried: how many variants there were in all rounds.
        notes: what could not be examined, and why.
        seconds: that it took.
    """

    acceptance_length: float
    acceptance_per_position: list[float]
    block_size: int
    prompts: int
    new_tokens: int
    places: int = 0
    replayed: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    trials: dict[str, float] = field(default_factory=dict)
    tried: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def diagnose(
    patient: Patient, prompts: Sequence[Mapping[str, Any]], effort: Effort | None = None, show: Show | None = None
) -> Diagnosis:
    """Examine a pair on a few prompts, answered greedily.

    Args:
        patient: the pair.
        prompts: each ``{"prompt": text}`` or ``{"messages": [...]}``.
        effort: how much is measured.
        show: told of progress, as `dflash.progress.bars` yields it.

    Raises:
        ValueError: the two do not fit, or a prompt does not fit the target.
    """
    began = time.perf_counter()
    effort, show = effort or Effort(), show or (lambda *_: None)
    # 1. Answer the prompts with the pair as it is
    answers = _answer(patient, prompts, effort, show)
    out = answers.diagnosis()
    wiring = Wiring.read(patient.keys)
    out.findings += check_weights(patient.drafter)
    out.findings += check_positions(wiring, answers.longest_prompt, answers.longest)
    # 2. Record the target's states over the answers, and look at them
    recording = record(patient.target, answers.sequences, _layers(wiring, patient.target))
    replay = Replay(recording, answers.generator.engine.target, patient.drafter, effort.places)
    out.findings += check_features(replay, wiring)
    out.places = len(replay.anchors)
    # 3. Undo one fault after another, as long as a variant accepts more
    if any(finding.fault in ("not finite", "near zero") for finding in out.findings):
        out.notes.append("no other wiring was tried: weights or features are broken")
    elif out.places < _LEAST_PLACES:
        out.notes.append(
            f"no other wiring was tried: the answers have {out.places} places to draft at, and {_LEAST_PLACES} are "
            "needed to tell a fault from chance; give more prompts, or such with longer answers"
        )
    else:
        _search(out, replay, wiring, _pair_of(patient, answers.longest), show)
        _compare_encodings(out, patient, prompts, effort, show)
        _explain_low_acceptance(out)
    out.seconds = time.perf_counter() - began
    return out


def _layers(wiring: Wiring, target: Any) -> list[int]:
    """Return the tapped layers and their neighbors."""
    last, reach = text_config(target).num_hidden_layers - 1, range(-_REACH, _REACH + 1)
    return sorted({tap + i for tap in wiring.config.target_layer_ids for i in reach if 0 <= tap + i <= last})


def _pair_of(patient: Patient, longest: int) -> Pair:
    target, config = patient.target, text_config(patient.target)
    return Pair(
        config.to_dict(),
        config.num_hidden_layers,
        patient.tokenizer,
        is_speculators(patient.keys),
        longest,
        embedding_table(target).shape[0],
        patient.drafter.dtype,
    )


# ---------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class _Answers:
    """Prompts with their answers, what they took, and the generator that wrote them."""

    sequences: list[Answered]
    total: Total
    generator: Generator

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(one.prompt_length for one in self.sequences)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(one.ids) for one in self.sequences)

    def diagnosis(self) -> Diagnosis:
        """Return what real decoding tells."""
        block_size, total = self.generator.block_size, self.total
        shares = total.statistics(block_size).acceptance_per_position
        return Diagnosis(total.acceptance_length or 0.0, shares, block_size, len(self.sequences), total.tokens)


def _answer(patient: Patient, prompts: Sequence[Mapping[str, Any]], effort: Effort, show: Show) -> _Answers:
    """Answer every prompt greedily by the real decoding loop."""
    ids = [patient.encode(prompt) for prompt in prompts]
    longest = max(map(len, ids))
    positions = getattr(text_config(patient.target), "max_position_embeddings", None)
    if positions is not None and longest + 2 > positions:
        raise ValueError(f"a prompt of {longest} tokens does not fit the target's {positions} positions")
    room = longest + effort.max_new_tokens
    generator = Generator(patient.target, patient.drafter, max_length=min(room, positions or room))
    runner = GeneratorRunner(generator, Decoding(effort.max_new_tokens), patient.drafter.device)
    total, sequences = Total(), []
    for number, row in enumerate(ids):
        show("answers", number, len(ids), "")
        one = runner(row)
        total.add(len(one.ids), one.seconds, one.steps)
        sequences.append(Answered([*row, *one.ids], len(row)))
    show("answers", len(ids), len(ids), "")
    return _Answers(sequences, total, generator)


# ---------------------------------------------------------------------------------------------- wirings


def _search(out: Diagnosis, replay: Replay, wiring: Wiring, pair: Pair, show: Show) -> None:
    """Replace the wiring by the variant that accepts most, until none accepts more."""
    score = replay.score(wiring)
    out.replayed = score.mean
    for number in range(_MOST_FAULTS):
        best = _best(out if number == 0 else None, replay, wiring, pair, show)
        out.tried += best.tried
        if not _is_more(score, best.score, replay.rows):
            break
        variant = best.variant
        found = f"{variant.change}: more drafts are accepted"
        finding = Finding(variant.fault, found, variant.advice, score.mean, best.score.mean, variant.config)
        out.findings.append(finding)
        wiring, score = variant.wiring, best.score
    if score.valid < 1:
        out.findings.append(_overflow(replay, score))


def _overflow(replay: Replay, score: Score) -> Finding:
    """Return the finding for logits that are NaN in any wiring."""
    largest = max(weight.abs().max().item() for weight in replay.drafter.parameters())
    found = f"{1 - score.valid:.0%} of the drafter's rows of logits are NaN, its weights are not"
    advice = f"its products overflow {str(replay.drafter.dtype).removeprefix('torch.')}: look at its weights, of which "
    return Finding("overflow", found, f"{advice}the largest is {largest:.2g}", score.mean)


@dataclass(frozen=True)
class _Best:
    variant: Variant
    score: Score
    tried: int


def _best(out: Diagnosis | None, replay: Replay, wiring: Wiring, pair: Pair, show: Show) -> _Best:
    """Return the variant that accepts most; `out` gets the trials."""
    every = [variant for variant in variants(wiring, pair) if replay.can_read(variant.wiring)]
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
    if out is not None:
        out.trials = {variant.change: score.mean for score, variant in scored}
    enough = (1 - _SAME) * max(score.mean for score, _ in scored)
    score, variant = next((score, variant) for score, variant in scored if score.mean >= enough)
    return _Best(variant, score, len(every))


def _is_more(configured: Score, other: Score, answers: Tensor) -> bool:
    """True if the other wiring accepts more at the same places: more than by chance, and not in one answer only."""
    difference = other.tokens - configured.tokens
    error = difference.std() / len(difference) ** 0.5
    if difference.mean() <= max(_LEAST_GAIN * configured.mean, _LEAST_Z * error.item()):
        return False
    others = answers != answers.bincount(difference).argmax()  # the places of one answer are not independent
    return not others.any() or difference[others].mean() > _LEAST_GAIN * configured.tokens[others].mean()


# ---------------------------------------------------------------------------------------------- encodings


def _encodings(patient: Patient, prompt: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Patient]]:
    """Yield other ways to encode prompts: the fault that one would undo, what differs, the advice, the patient."""
    for thinking in (False, True):
        name = f"enable_thinking={thinking}"
        advice = f"the drafter was trained on texts with {name}: ask for such answers"
        other = replace(patient, template={**patient.template, "enable_thinking": thinking})
        yield "template", f"the chat template with {name}", advice + ("" if thinking else " (--no-thinking)"), other
    if patient.tokenizer.bos_token_id is not None and "prompt" in prompt:
        advice = "the drafter was trained on texts that begin with the BOS token: begin prompts with it (--bos)"
        yield "template", "a BOS token before the prompt", advice, replace(patient, bos=True)


def _compare_encodings(
    out: Diagnosis, patient: Patient, prompts: Sequence[Mapping[str, Any]], effort: Effort, show: Show
) -> None:
    """Compare how prompts are encoded with the chat template's thinking switched on and off, and with a BOS token."""
    if any(finding.after is not None for finding in out.findings):
        out.notes.append("other ways to encode prompts were not compared: repair the wiring first")
        return
    plain = patient.encode(prompts[0])
    for fault, change, advice, other in _encodings(patient, prompts[0]):
        if other.encode(prompts[0]) == plain:
            continue
        length = _answer(other, prompts, effort, show).total.acceptance_length or 0.0
        out.trials[change] = length
        if length > (1 + _LEAST_ENCODING_GAIN) * out.acceptance_length:
            found = f"{change}: more drafts are accepted"
            out.findings.append(Finding(fault, found, advice, out.acceptance_length, length))


def _explain_low_acceptance(out: Diagnosis) -> None:
    """Add a note if few drafts are accepted and no fault explains it."""
    first = out.acceptance_per_position[:1]
    if not out.findings and first and first[0] < _LOW_FIRST:
        out.notes.append(
            f"few drafts are accepted (the first one in {first[0]:.0%} of the steps), and no other wiring helps: the "
            "drafter may know nothing of prompts like these, belong to another version of the target (fine-tuned or "
            "quantized), or be trained too little"
        )
