"""One call of ``generate``, checked once: the frozen `Call` that its arguments resolve to."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .drafter import MtpHead
from .fit import check_is_unset, check_tree
from .sampling import HostRules, SamplingArguments
from .settings import (
    MAX_LOGPROBS,
    SETTINGS,
    AnswerGrammar,
    BlockSize,
    GenerateArguments,
    TreeSize,
    check_combination,
    is_list,
    resolve,
    resolve_rules,
    tree_rows,
)
from .streaming import StopFinder, StopMatcher, Streamer, Tokenizer, check_streamer
from .targets import embedding_table, generation_defaults

__all__ = ["Call", "GenerateArguments", "TargetDefaults", "check_stream_arguments"]

_DEFAULT_NEW_TOKENS = 20  # as in transformers
_SAMPLING = SamplingArguments._fields


@dataclass(frozen=True)
class TargetDefaults:
    """Facts about the target that resolving a call needs.

    Attributes:
        settings: from `dflash.targets.generation_defaults`.
        vocab_size: rows of the embedding table.
        device: of the target.
    """

    settings: Mapping[str, Any]
    vocab_size: int
    device: torch.device

    @classmethod
    def of(cls, target: nn.Module) -> TargetDefaults:
        """Read them off a target of transformers."""
        table = embedding_table(target)
        return cls(generation_defaults(target), table.shape[0], table.device)


@dataclass(frozen=True, eq=False)
class Call:
    """One call, checked once: all that the engine needs to know. The settings are those of `GenerateArguments`.

    Attributes:
        ids: ``[batch, length]``, each prompt as often as answers to it are returned.
        prompts: per row ``[tokens]`` int64, what the attention mask leaves.
        longest: tokens of the longest prompt.
        sampling: temperature, filters, sharpness and seed.
        pictures: tensors of the prompts' pictures by name; None for text.
        pad_token_id: pads the answers.
        rules: the logit rules that are on, by name of their setting.
        host_rules: Python processors and criteria; None without any.
        stops: makes what finds stop strings in a row from its prompt's ids; None without any.
        grammars: per row, a `dflash.grammar.Matcher` at the start, or None; empty if no row has a grammar.
    """

    ids: Tensor
    prompts: list[Tensor]
    longest: int
    max_new_tokens: int
    sampling: SamplingArguments
    pictures: Mapping[str, Tensor] | None
    stop_token_ids: list[int]
    pad_token_id: int
    rules: Mapping[str, Any]
    host_rules: HostRules | None
    stops: Callable[[list[int]], StopFinder] | None
    stop_strings: tuple[str, ...]
    tokenizer: Tokenizer | None
    streamer: Streamer | None
    acceptance: str
    denoise_steps: int
    tree: TreeSize
    grammars: tuple[Any, ...]
    logprobs: int | None
    prompt_logprobs: bool
    store: bool

    @classmethod
    def resolve(
        cls, target: TargetDefaults, ids: Tensor, arguments: GenerateArguments, *, denoise_steps: int = 1,
        tree: TreeSize = None,
    ) -> Call:  # fmt: skip
        """Check every argument that can be checked without a drafter, and fill in the defaults; nothing is run.

        Args:
            target: what the call is for.
            ids: ``[batch, length]`` int64 or int32.
            arguments: see `GenerateArguments`.
            denoise_steps: the default for the argument of that name.
            tree: likewise.

        Raises:
            ValueError: an argument is out of range, or two contradict each other.
            TypeError: an argument is unknown or has the wrong type.
        """
        # 1. The prompts.
        if "reuse_prefix" in arguments:
            raise TypeError(
                "a call takes no reuse_prefix: one-shot calls never reuse the caches of an earlier call, and a "
                "Generator decides it when it is made, dflash.Generator(..., reuse_prefix=True)"
            )
        mask = _check_ids(ids, arguments.get("attention_mask"), target.vocab_size, target.device)
        # 2. Every setting by itself.
        if unsupported := target.settings.get("unsupported"):
            listed = ", ".join(f"{name}={value!r}" for name, value in unsupported.items())
            raise ValueError(f"the target's generation_config asks for {listed}, which is not applied: set it to None")
        given: dict[str, Any] = {"denoise_steps": denoise_steps, "tree": tree, **arguments}
        values = resolve(given, _configured(target.settings, given, ids.shape[1]), target.vocab_size)
        rules = resolve_rules(values, target.vocab_size)
        # 3. What they are together.
        _check_together(values)
        sampling = SamplingArguments(*map(values.__getitem__, _SAMPLING))
        repeats, stop, strings = values["num_return_sequences"], values["stop_token_ids"], values["stop_strings"]
        prompts, rows = ids.shape[0], ids.shape[0] * repeats
        if sampling.seed is not None:
            sampling.seeds(rows)  # raises
        if repeats > 1:
            ids, mask = ids.repeat_interleave(repeats, 0), mask.repeat_interleave(repeats, 0)
        if values["streamer"] is not None:
            check_streamer(values["streamer"], rows)
        parts = [row[live].long() for row, live in zip(ids, mask, strict=True)]
        if values["pictures"]:
            _check_pictures(values, mask)
        processors, criteria = values["logits_processor"], values["stopping_criteria"]
        kept: dict[str, Any] = {name: values[name] for name in cls.__dataclass_fields__ if name in SETTINGS}
        kept["stop_token_ids"] = list(stop)
        return cls(
            ids=ids, prompts=parts, longest=max(map(len, parts)), sampling=sampling, rules=rules, **kept,
            pad_token_id=(stop or [0])[0] if (pad := target.settings.get("pad_token_id")) is None else pad,
            host_rules=HostRules(processors, criteria, rows) if processors or criteria else None,
            stops=functools.partial(StopMatcher, values["tokenizer"], strings) if strings else None,
            grammars=() if values["grammar"] is None else _grammars(values, prompts),
        )  # fmt: skip

    def recorded(self) -> dict[str, Any]:
        """Return the settings that a receipt states, by name: those that decide the text, without the seed."""
        own = {**vars(self), **self.sampling._asdict(), "min_new_tokens": 0, **self.rules}
        own["stop_token_ids"] = tuple(self.stop_token_ids)
        own["grammar"] = [matcher and matcher.grammar for matcher in self.grammars]
        return {name: own.get(name, row.off) for name, row in SETTINGS.items() if row.receipt == "stated"}

    def without_pictures(self) -> Call:
        """Return this call as it is kept once its prompts are run: pictures are large, and nothing needs them then."""
        return self if self.pictures is None else dataclasses.replace(self, pictures={})

    def changes_text(self) -> tuple[object, ...]:
        """Return what decides the text and the shapes of a step, with one ``repr`` in every process."""
        return (
            *([prompt.tolist() for prompt in self.prompts], self.recorded(), self.sampling, self.acceptance, self.tree),
            *(self.host_rules is None, self.stops is None),
        )


def check_stream_arguments(arguments: GenerateArguments) -> None:
    """Raise TypeError for arguments of ``generate`` that a stream does not take."""
    for name in ("streamer", "return_dict_in_generate"):
        if name in arguments:
            raise TypeError(f"stream() takes no {name}")


def _check_ids(ids: Tensor, attention_mask: Tensor | None, vocab_size: int, device: torch.device) -> Tensor:
    """Return the mask as bool ``[batch, length]``; raise on any prompt that cannot be run."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids must be a tensor [batch, length] of token ids, got {type(ids).__name__}")
    if ids.dim() != 2:
        raise ValueError(f"ids must be [batch, length], got {ids.dim()} dimensions")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids must be int64 or int32, got {ids.dtype}")
    if ids.device != device:
        raise ValueError(f"ids must be on the target's device, {device}, got {ids.device}")
    if ids.numel() == 0:
        raise ValueError(f"ids must hold at least one token in each row, got shape {list(ids.shape)}")
    mask = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else _check_mask(attention_mask, ids)
    low, high = map(int, ids[mask].aminmax())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"ids must lie in 0 .. {vocab_size - 1} (the target's vocabulary), got {wrong}")
    return mask


def _check_pictures(values: Mapping[str, Any], mask: Tensor) -> None:
    """Raise ValueError for prompts with pictures that cannot be run as they are."""
    if not mask[:, -1].all():
        raise ValueError('prompts with pictures must be padded on the left: set the tokenizer\'s padding_side="left"')
    for name, only in (("prompt_logprobs", False), ("num_return_sequences", 1)):
        if values[name] != only:
            raise ValueError(f"pictures cannot be combined with {name}={values[name]!r}: leave one of them out")


def _check_mask(attention_mask: Tensor, ids: Tensor) -> Tensor:
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != ids.shape:
        got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(f"attention_mask must have the shape of ids, {list(ids.shape)}, got {got}")
    if attention_mask.device != ids.device:
        raise ValueError(f"attention_mask must be on the target's device, {ids.device}, got {attention_mask.device}")
    if not attention_mask.eq(0).logical_or(attention_mask.eq(1)).all():
        raise ValueError("attention_mask must hold zeros and ones only")
    mask = attention_mask.bool()
    edges = mask[:, 1:].ne(mask[:, :-1]).sum(1) + mask[:, 0] + mask[:, -1]
    if not mask.any(1).all():
        raise ValueError("attention_mask hides a whole row: every row needs at least one token")
    if edges.gt(2).any():
        raise ValueError("attention_mask has holes: a row's ones must be contiguous (pad left or right)")
    return mask


def _configured(settings: Mapping[str, Any], given: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return what the generation_config asks for; its filters count where it samples, or the caller does.

    If it has no stop token and every row has a grammar, which needs one, that is the tokenizer's EOS.
    """
    found, grammar = dict(settings), given.get("grammar")
    eos = getattr(given.get("tokenizer"), "eos_token_id", None)
    has_grammars = isinstance(grammar, AnswerGrammar) or (isinstance(grammar, list | tuple) and None not in grammar)
    if has_grammars and eos is not None and not found.get("stop_token_ids"):
        found["stop_token_ids"] = eos
    if found.get("max_new_tokens") is None:
        total = found.get("max_length")
        found["max_new_tokens"] = _DEFAULT_NEW_TOKENS if total is None else total - length
        if given.get("max_new_tokens") is None and found["max_new_tokens"] < 1:
            raise ValueError(f"the prompt has {length} tokens, generation_config.max_length is {total}")
    samples = found.get("do_sample")
    if samples and found.get("temperature") is None:
        found["temperature"] = 1.0
    for name in _SAMPLING:
        if not samples and (name == "temperature" or not given.get("temperature")):
            found.pop(name, None)
    return found


def _check_together(values: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that cannot be combined."""
    steps, sharpness, repeats = values["denoise_steps"], values["draft_sharpness"], values["num_return_sequences"]
    if repeats > 1 and not values["temperature"]:
        raise ValueError(f"at temperature 0 every answer is the same: num_return_sequences must be 1, got {repeats}")
    if values["acceptance"] == "rejection":
        reason = ""
        if steps > 1:
            reason = f"needs denoise_steps=1, got {steps}: the tokens would be biased"
        elif sharpness != 1:
            reason = (
                f"draws drafts from the drafter's own distribution: draft_sharpness must be 1 there, got {sharpness!r}"
            )
        elif values["logits_processor"] or values["stopping_criteria"]:
            reason = "cannot be combined with logits_processor or stopping_criteria"
        elif values["grammar"] is not None:
            reason = "cannot be combined with grammar: the drafts are not masked"
        if reason:
            raise ValueError(f'acceptance="rejection" {reason}')
    check_combination(values["tree"], None, steps, values["acceptance"], sharpness)
    tokenizer = values["tokenizer"]
    if values["stop_strings"] and not hasattr(tokenizer, "convert_tokens_to_ids"):
        got = "" if tokenizer is None else f", got {type(tokenizer).__name__}"
        strings = list(values["stop_strings"])
        raise ValueError(f"stop_strings {strings} need the target's tokenizer{got}: pass tokenizer=")
    if values["logprobs"] is None and values["prompt_logprobs"]:
        raise ValueError(f"prompt_logprobs=True needs logprobs too, a number from 0 to {MAX_LOGPROBS}")
    if values["logprobs"] is not None and values["tree"] is not None:
        raise ValueError(f"logprobs cannot be combined with tree={values['tree']!r}: pass tree=None")


def _grammars(values: Mapping[str, Any], prompts: int) -> tuple[Any, ...]:
    """Return, per row, where it starts in its grammar, or None without one; empty if no row has a grammar."""
    given, tokenizer, stop_token_ids = values["grammar"], values["tokenizer"], values["stop_token_ids"]
    grammars = [given] * prompts if isinstance(given, AnswerGrammar) else given
    is_known = is_list(grammars) and isinstance(grammars, Sequence)
    if not is_known or not all(item is None or isinstance(item, AnswerGrammar) for item in grammars):
        raise TypeError(
            f"grammar must be a dflash.Grammar, or a list with one or None per prompt, got {given!r}: "
            "make one with dflash.Grammar.json_schema(...), .regex(...) or .lark(...)"
        )
    if len(grammars) != prompts:
        raise ValueError(f"grammar must be one dflash.Grammar or one per prompt, {prompts} in all, got {len(grammars)}")
    if not any(grammars):
        return ()
    if tokenizer is None:
        raise ValueError("a grammar needs the target's tokenizer: pass tokenizer=")
    if not stop_token_ids:
        raise ValueError("a grammar ends with a stop token, and stop_token_ids is empty: name the tokenizer's EOS")
    starts = [grammar and grammar.begin(tokenizer, stop_token_ids) for grammar in grammars]
    return tuple(start for start in starts for _ in range(values["num_return_sequences"]))


# ----------------------------------------------------------------------------------------------- drafts for a call


def check_room(call: Call, batch_size: int, max_length: int, tree: TreeSize) -> None:
    """Raise ValueError unless a generator with these sizes has room for a call."""
    batch, longest = len(call.prompts), call.longest
    if batch > batch_size:
        raise ValueError(f"ids has {batch} rows, this generator was made for {batch_size}")
    if longest + call.max_new_tokens > max_length:
        raise ValueError(
            f"a prompt of {longest} tokens and {call.max_new_tokens} new tokens do not fit this generator's "
            f"max_length, {max_length}"
        )
    if call.tree is not None and tree_rows(call.tree) > tree_rows(tree):
        raise ValueError(
            f"tree={call.tree!r} takes up to {tree_rows(call.tree)} rows, this generator was made with tree={tree!r}: "
            f"make one with tree={call.tree!r}"
        )


def check_drafts(call: Call, target: nn.Module, draft: object, block_size: BlockSize) -> None:
    """Raise ValueError if a call needs drafts that ``draft`` cannot give; None for no drafter."""
    if call.acceptance == "rejection" and draft is None:
        raise ValueError('acceptance="rejection" needs drafts to reject, got draft=None or block_size=1')
    check_combination(call.tree, block_size, acceptance=call.acceptance)
    if isinstance(draft, MtpHead):
        check_is_unset("denoise_steps", call.denoise_steps, 1)
    if call.tree is not None:
        check_tree(target, call.tree, draft)
