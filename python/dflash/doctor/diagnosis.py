"""Examine a pair: measure acceptance, then look for a wiring that accepts more than the configured one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
_SAME = 0.02  # what accepts so little less than the best is as good, and the simpler variant counts
_FINALISTS = 4
_SCREENING = 4  # the first look at a variant takes every fourth anchor
_MOST_FAULTS = 3
_REACH = 2  # layers around the taps that are recorded, for taps that are shifted


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        max_new_tokens: per answer.
        anchors: of each answer at which variants draft.
    """

    max_new_tokens: int = 128
    anchors: int = 32


@dataclass(frozen=True)
class Patient:
    """A pair, as it was loaded.

    Attributes:
        target: the causal language model.
        drafter: its drafter.
        keys: the drafter's ``config.json``.
        tokenizer: the target's.
    """

    target: Any
    drafter: Drafter
    keys: Mapping[str, Any]
    tokenizer: Any


@dataclass
class Diagnosis:
    """What was found.

    Attributes:
        acceptance_length: tokens per step in real decoding, as configured.
        prompts, new_tokens: answered and written for it.
        replayed: tokens per step at the anchors, as configured; what variants are compared with.
        findings: empty if no fault was found.
        trials: change -> tokens per step, of the variants of the first round that were measured at all anchors.
        tried: how many variants there were in all rounds.
        notes: what could not be examined, and why.
        seconds: that it took.
    """

    acceptance_length: float
    prompts: int
    new_tokens: int
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
        ValueError: the two do not fit, a prompt does not fit the target, or no answer is long enough.
    """
    began = time.perf_counter()
    effort, show = effort or Effort(), show or (lambda *_: None)
    # 1. Answer the prompts with the pair as it is
    answers = answer(patient, patient.drafter, prompts, effort, {}, show)
    out = Diagnosis(answers.total.acceptance_length or 0.0, len(prompts), answers.total.tokens)
    wiring = Wiring.read(patient.keys)
    out.findings += check_weights(patient.drafter)
    longest_prompt = max(one.prompt_length for one in answers.sequences)
    longest = max(len(one.ids) for one in answers.sequences)
    out.findings += check_positions(wiring, longest_prompt, longest)
    # 2. Record the target's states over the answers, and look at them
    taps, last = wiring.config.target_layer_ids, text_config(patient.target).num_hidden_layers - 1
    reach = range(-_REACH, _REACH + 1)
    layers = sorted({tap + i for tap in taps for i in reach if 0 <= tap + i <= last})
    recording = record(patient.target, answers.sequences, layers)
    replay = Replay(recording, answers.generator.engine.target, patient.drafter, effort.anchors)
    out.findings += check_features(replay, wiring)
    out.replayed = replay.score(wiring).mean
    # 3. Undo one fault after another, as long as a variant accepts more
    if any(finding.fault in ("not finite", "near zero") for finding in out.findings):
        out.notes.append("no variants were tried: weights or features are broken")
    else:
        _search(out, replay, wiring, _pair_of(patient, longest), show)
        _compare_templates(out, patient, prompts, effort, show)
    out.seconds = time.perf_counter() - began
    return out


def _pair_of(patient: Patient, longest: int) -> Pair:
    target = patient.target
    return Pair(
        text_config(target).to_dict(),
        patient.tokenizer,
        is_speculators(patient.keys),
        longest,
        embedding_table(target).shape[0],
        patient.drafter.dtype,
    )


# ---------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Answers:
    """Prompts with their answers, what they took, and the generator that wrote them."""

    sequences: list[Answered]
    total: Total
    generator: Generator


def answer(
    patient: Patient,
    drafter: Drafter,
    prompts: Sequence[Mapping[str, Any]],
    effort: Effort,
    template: Mapping[str, Any],
    show: Show,
) -> Answers:
    """Answer every prompt greedily by the real decoding loop."""
    ids = [list(prompt_ids(patient.tokenizer, prompt, template=template)) for prompt in prompts]
    positions = getattr(text_config(patient.target), "max_position_embeddings", None)
    room = max(map(len, ids)) + effort.max_new_tokens
    if positions is not None and max(map(len, ids)) + 2 > positions:
        raise ValueError(f"a prompt of {max(map(len, ids))} tokens does not fit the target's {positions} positions")
    generator = Generator(patient.target, drafter, max_length=min(room, positions or room))
    runner = GeneratorRunner(generator, Decoding(effort.max_new_tokens), drafter.device)
    total, sequences = Total(), []
    for number, row in enumerate(ids):
        show("answers", number, len(ids), "")
        one = runner(row)
        total.add(len(one.ids), one.seconds, one.steps)
        sequences.append(Answered([*row, *one.ids], len(row)))
    show("answers", len(ids), len(ids), "")
    return Answers(sequences, total, generator)


# ---------------------------------------------------------------------------------------------- variants


def _search(out: Diagnosis, replay: Replay, wiring: Wiring, pair: Pair, show: Show) -> None:
    """Replace the wiring by the variant that accepts most, until none accepts more."""
    score = replay.score(wiring)
    for number in range(_MOST_FAULTS):
        best = _best(out if number == 0 else None, replay, wiring, pair, show)
        out.tried += best.tried
        if not _is_more(score, best.score):
            break
        variant = best.variant
        finding = Finding(variant.fault, f"{variant.change} accepts more", variant.advice, score.mean, best.score.mean)
        out.findings.append(finding)
        wiring, score = variant.wiring, best.score
    if score.finite < 1:
        out.findings.append(_overflow(replay, score))


def _overflow(replay: Replay, score: Score) -> Finding:
    """Return the finding for logits that are not finite in any wiring."""
    largest = max(weight.abs().max().item() for weight in replay.drafter.parameters())
    found = f"{1 - score.finite:.0%} of the drafter's rows of logits are NaN or infinite, its weights are not"
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
    # 2. The best of them at all anchors, in the order of `variants`
    ranked = sorted(range(len(first)), key=lambda index: -first[index])
    finalists = [every[index] for index in sorted(ranked[:_FINALISTS])]
    scored = [(replay.score(variant.wiring), variant) for variant in finalists]
    show("wirings", len(every), len(every), "")
    if out is not None:
        out.trials = {variant.change: score.mean for score, variant in scored}
    enough = (1 - _SAME) * max(score.mean for score, _ in scored)
    score, variant = next((score, variant) for score, variant in scored if score.mean >= enough)
    return _Best(variant, score, len(every))


def _is_more(configured: Score, other: Score) -> bool:
    """True if the other wiring accepts more at the same anchors by more than chance."""
    difference = other.tokens - configured.tokens
    if len(difference) < 2:
        return False
    error = difference.std() / len(difference) ** 0.5
    return difference.mean() > max(_LEAST_GAIN * configured.mean, _LEAST_Z * error.item())


# ---------------------------------------------------------------------------------------------- templates


def _compare_templates(
    out: Diagnosis, patient: Patient, prompts: Sequence[Mapping[str, Any]], effort: Effort, show: Show
) -> None:
    """Compare the chat template as it is with thinking switched on and off, if it knows the switch."""
    if any(finding.after is not None for finding in out.findings):
        out.notes.append("chat templates were not compared: repair the wiring first")
        return
    if patient.tokenizer.chat_template is None:
        return
    plain = prompt_ids(patient.tokenizer, prompts[0])
    for thinking in (False, True):
        template = {"enable_thinking": thinking}
        if prompt_ids(patient.tokenizer, prompts[0], template=template) == plain:
            continue
        other = answer(patient, patient.drafter, prompts, effort, template, show)
        length = other.total.acceptance_length or 0.0
        out.trials[f"enable_thinking {thinking}"] = length
        if length > 1.25 * out.acceptance_length:
            advice = f"the drafter was trained on texts with enable_thinking={thinking}: ask for such answers"
            advice += " (--no-thinking)" if not thinking else ""
            found = f"the chat template with enable_thinking={thinking} accepts more"
            out.findings.append(Finding("template", found, advice, out.acceptance_length, length))
