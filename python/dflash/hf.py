"""Ways in from transformers: its ``generate`` running our loop, and our drafter inside its assisted generation."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .cache import KVCache
from .drafter import Drafter, load_draft
from .generator import generate_once, plan
from .streaming import check_streamer
from .target import UnsupportedTargetError, generation_defaults, refusal, transformers_version, unwrap

__all__ = ["as_assistant", "custom_generate"]

# transformers' processors that say what a setting of generation_config says, in the order in which the sampling rule
# applies them: class -> (setting, attribute of the processor).
_SETTINGS = {
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
}
# Those that say what a setting of generation_config says which is a rule of dflash.rules.
_RULES = {
    "SequenceBiasLogitsProcessor": ("sequence_bias", "sequence_bias"),
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", "penalty"),
    "NoRepeatNGramLogitsProcessor": ("no_repeat_ngram_size", "ngram_size"),
    "NoBadWordsLogitsProcessor": ("bad_words_ids", "bad_word_ids"),
    "MinLengthLogitsProcessor": ("min_length", "min_length"),
    "MinNewTokensLengthLogitsProcessor": ("min_new_tokens", "min_new_tokens"),
    "ForcedBOSTokenLogitsProcessor": ("forced_bos_token_id", "bos_token_id"),
    "ForcedEOSTokenLogitsProcessor": ("forced_eos_token_id", "eos_token_id"),
    "SuppressTokensLogitsProcessor": ("suppress_tokens", "suppress_tokens"),
    "SuppressTokensAtBeginLogitsProcessor": ("begin_suppress_tokens", "begin_suppress_tokens"),
}
_NO_EFFECT = ("LogitNormalization",)  # a constant added to all logits changes no choice
# Not functions of a row's ids and scores.
_STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "ConfidenceCriteria")
# Settings beside those of generation_defaults that ask for another decoding or another output: name -> off.
_OFF = {
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "prompt_lookup_num_tokens": (None,),
    "speculation_type": (None,),
    "use_mtp": (None, False),
    "prefill_chunk_size": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
# What transformers prepares for its own forward; it changes no token, or is checked below.
_PREPARED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position")

_STOPS_IN_MID_BLOCK = (5, 18)  # from which version on transformers' loop around a DFlash drafter does


def _is_theirs(thing: object) -> bool:
    return type(thing).__module__.split(".")[0] == "transformers"


def _refuse(what: str) -> ValueError:
    return ValueError(f"dflash.custom_generate does not apply {what}")


def _same(given: object, wanted: object) -> bool:
    """Whether a processor's attribute holds what the setting says."""
    if isinstance(given, Tensor):
        given = given.tolist()
    return given == ([wanted] if isinstance(given, list) and isinstance(wanted, int) else wanted)


def _processors(processors: Sequence[Any], config: Any) -> tuple[dict[str, Any], list[Any]]:
    """The rules that the processors stand for, and the processors that have to be called.

    Raises ``ValueError`` for one that cannot be, and for warpers other than the settings of ``config`` in their order.
    """
    order, last = list(_SETTINGS), -1
    rules: dict[str, Any] = {}
    called: list[Any] = []
    mixed = False
    plain: list[Any] = []
    for processor in processors:
        name = type(processor).__name__ if _is_theirs(processor) else None
        if name in _NO_EFFECT:
            continue
        if name not in _SETTINGS:
            if name in _STATEFUL:
                raise _refuse(f"the logits processor {name}: it is no function of its inputs")
            if last >= 0:
                raise _refuse(f"the logits processor {type(processor).__name__} after {order[last]}")
            plain.append(processor)
            setting, attribute = _RULES.get(name, (None, ""))
            if setting is None or not _same(getattr(processor, attribute), getattr(config, setting)):
                called.append(processor)
            else:
                rules[setting] = getattr(config, setting)
                mixed = mixed or bool(called)
            continue
        setting, attribute = _SETTINGS[name]
        given, wanted = getattr(processor, attribute), getattr(config, setting)
        if given != wanted:
            raise _refuse(f"{name} with {attribute}={given!r} where generation_config.{setting} is {wanted!r}")
        if getattr(processor, "min_tokens_to_keep", 1) > 1 or getattr(processor, "filter_value", -torch.inf) > -1e30:
            raise _refuse(f"{name} with a min_tokens_to_keep or filter_value of its own")
        if order.index(name) < last:
            raise _refuse(f"{name} after {order[last]}: its order is {', '.join(order)}")
        last = order.index(name)
    return ({}, plain) if mixed else (rules, called)  # rules come before what is called


def _criteria(criteria: Sequence[Any], ids: Tensor) -> tuple[int | None, list[int], list[Any], list[Any]]:
    """Of stopping criteria: new tokens at most, stop token ids, stop-string criteria, and those that are called."""
    new, stop, strings, called = None, [], [], []
    for criterion in criteria:
        name = type(criterion).__name__ if _is_theirs(criterion) else None
        if name == "MaxLengthCriteria":
            room = max(criterion.max_length - ids.shape[1], 1)
            new = room if new is None else min(new, room)
        elif name == "EosTokenCriteria":
            stop += criterion.eos_token_id.tolist()
        elif name == "StopStringCriteria":
            strings.append(criterion)
        elif name in _STATEFUL:
            raise _refuse(f"the stopping criterion {name}: it is no function of the ids")
        else:
            called.append(criterion)
    return new, stop, strings, called


def _check_called(called: Sequence[Any], mask: Tensor | None, rows: int) -> None:
    """Raise for processors and criteria that would not see what they see in transformers: each row comes alone."""
    for thing in called:
        name = type(thing).__name__
        if mask is not None and not mask.all():
            raise _refuse(f"{name} in a padded batch: it would be called for each row alone, without its padding")
        if rows > 1 and _is_theirs(thing) and name == "PrefixConstrainedLogitsProcessor":
            raise _refuse(f"{name} to {rows} rows: it asks for the row's number")


def _check_positions(positions: Tensor, mask: Tensor | None, ids: Tensor) -> None:
    live = torch.ones_like(ids) if mask is None else mask
    expected = live.long().cumsum(-1) - 1
    if positions.shape != ids.shape or not torch.equal(positions[live.bool()], expected[live.bool()]):
        raise _refuse("position_ids other than 0, 1, 2 ... over the tokens that attention_mask leaves")


def _not_handed_on() -> dict[str, Any]:
    """``streamer`` and ``assistant_model`` of the transformers ``generate`` that called.

    It takes them, puts the prompt into the streamer, and then hands neither on to a callable (seen in 5.23): they are
    read where they are, or they would be ignored.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == "transformers.generation.utils":
            return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model")}
        frame = frame.f_back
    return {}


def custom_generate(
    model: nn.Module,
    input_ids: Tensor,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    draft: nn.Module | None = None,
    seed: int | Sequence[int] | None = None,
    draft_sharpness: float | Literal["auto"] = "auto",
    block_size: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Our loop behind transformers' own ``generate``: ``model.generate(ids, custom_generate=dflash.custom_generate,
    draft=draft, ...)``.

    transformers prepares inputs, settings, processors and criteria as for its own decoding, and this runs them: the
    lengths, stop tokens, ``stopping_criteria=[StopStringCriteria(...)]``, ``do_sample``, temperature, top-k, top-p,
    min-p, ``num_return_sequences``, ``streamer`` and the rules of :mod:`dflash.rules`; any other processor or criterion
    must be a function of its inputs and is called for one token of one row at a time, which is slower. Note that
    transformers samples with ``top_k=50`` where neither the call nor the model says anything. Whatever else would
    change the text is refused by name.

    Args:
        draft, seed, draft_sharpness, block_size: as for :func:`dflash.generate`, in the call of ``model.generate``.
        model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs:
            what transformers passes.

    Returns:
        ``[batch, length + longest answer]`` int64; with ``return_dict_in_generate=True`` a
        :class:`dflash.GenerateOutput`, whose ``sequences`` they are.

    Raises:
        ValueError, TypeError: as :func:`dflash.generate` does, and for what is not applied.
    """
    target, config = unwrap(model), generation_config
    if reason := refusal(target):
        raise UnsupportedTargetError(f"this target is not supported: {reason}")
    if config is None:
        raise TypeError("custom_generate is called by transformers: model.generate(..., custom_generate=...)")
    outer = _not_handed_on()
    prompt_was_put = outer.get("streamer") is not None
    streamer = outer.get("streamer") or streamer
    if outer.get("assistant_model") is not None:
        raise _refuse("assistant_model: pass the drafter as draft=")
    if synced_gpus:
        raise _refuse("synced_gpus=True")
    asked = types.SimpleNamespace(generation_config=config, get_input_embeddings=target.get_input_embeddings)
    defaults = generation_defaults(asked)
    others = {name: value for name, off in _OFF.items() if (value := getattr(config, name, None)) not in off}
    for name, value in (defaults["unsupported"] | others).items():
        raise _refuse(f"generation_config.{name}={value!r}")
    if getattr(config, "cache_implementation", None) == "quantized":
        raise _refuse("generation_config.cache_implementation='quantized'")
    for name, value in model_kwargs.items():
        if name not in _PREPARED and value is not None:
            raise _refuse(f"{name}, an argument of the model's forward")
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length():
        raise _refuse(f"past_key_values that hold tokens, {past.get_seq_length()} here")
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if positions is not None:
        _check_positions(positions, mask, input_ids)
    if streamer is not None:
        check_streamer(streamer, input_ids.shape[0])
    embedding = target.get_input_embeddings().weight
    new, stop, strings, criteria = _criteria(stopping_criteria or (), input_ids)
    rules, processors = _processors(logits_processor or (), config)
    _check_called([*processors, *criteria], mask, input_ids.shape[0])
    call = plan(
        defaults | {"rules": rules},
        embedding.shape[0],
        embedding.device,
        input_ids,
        attention_mask=mask,
        max_new_tokens=new,
        seed=seed,
        draft_sharpness=draft_sharpness,
        stop_token_ids=[token for token in stop if 0 <= token < embedding.shape[0]],  # others are never emitted
        stop_strings=(),  # they come as a criterion
        streamer=streamer,
        num_return_sequences=1,  # the rows have been repeated
        logits_processor=processors or None,
        stopping_criteria=criteria or None,
    )
    call = dataclasses.replace(call, stop=tuple(strings))
    with_statistics = bool(config.return_dict_in_generate)
    return generate_once(target, draft, call, block_size, with_statistics, prompt_was_put)


class _AssistantConfig:
    """What transformers reads of a drafter's configuration. Its cache gets no layers: the adapter keeps its own."""

    def __init__(self, draft: Drafter) -> None:
        self.target_layer_ids = list(draft.config.target_layer_ids)
        self.block_size = draft.config.block_size
        self.mask_token_id = draft.config.mask_token_id
        self.num_hidden_layers = 0
        self.layer_types: list[str] = []
        self.per_layer_config: list[Any] = []

    def get_text_config(self, *args: Any, **kwargs: Any) -> _AssistantConfig:
        return self


class _Assistant:
    """Our drafter as transformers' DFlash candidate generator calls one; see :func:`as_assistant`."""

    def __init__(self, draft: Drafter) -> None:
        self.draft = draft
        self.config = _AssistantConfig(draft)

    @property
    def device(self) -> torch.device:
        return self.draft.device

    @property
    def dtype(self) -> torch.dtype:
        return self.draft.dtype

    @torch.no_grad()
    def __call__(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Any,
    ) -> Any:
        """One draft pass.

        Args:
            noise_embeds: ``[1, block_size, hidden]``, the anchor and the masks as the target's module embeds them.
            context_hidden_states: ``[1, rows, taps * hidden]`` of the tokens before the anchor that are new.
            position_ids: ``[1, rows + block_size]``.
            attention_mask: ``[1, all tokens + block_size]`` of zeros and ones, or None.
            past_key_values: one object per call of ``generate``; our cache travels with it.

        Returns:
            An object whose ``last_hidden_state`` is ``[1, block_size, hidden]``.
        """
        draft, (rows, block) = self.draft, (context_hidden_states.shape[1], noise_embeds.shape[1])
        if noise_embeds.dtype != draft.dtype:
            raise ValueError(f"the drafter's dtype is {draft.dtype}, the target embeds in {noise_embeds.dtype}")
        length = position_ids[:, rows].contiguous()
        positions = position_ids[:, :rows]
        if attention_mask is not None:
            live = attention_mask[:, -(rows + block) : -block]
            positions = torch.where(live.bool(), positions, -1)  # padding is no context
        cache = self._cache(past_key_values, int(length) + block)
        none = torch.zeros_like(length)
        features = draft.fuse(context_hidden_states, none + rows)
        draft.inject_(features, positions, cache)
        hidden = draft(features[:, :0], none, noise_embeds, length, cache) * draft.config.output_multiplier
        return types.SimpleNamespace(last_hidden_state=hidden)

    def _cache(self, holder: Any, capacity: int) -> KVCache:
        """The call's cache, grown to ``capacity`` positions at least."""
        old = getattr(holder, "dflash_cache", None)
        if old is not None and old.capacity >= capacity:
            return old
        cache = self.draft.new_cache(1, 2 * capacity)
        if old is not None:
            for new, held in zip(cache.buffers, old.buffers, strict=True):
                new[:, :, : old.capacity] = held
        holder.dflash_cache = cache
        return cache


def as_assistant(draft: Any) -> _Assistant:
    """Our drafter for transformers' own assisted generation: ``model.generate(ids,
    assistant_model=dflash.as_assistant(draft), speculation_type="dflash")``.

    The loop, its limits (a batch of one, a dynamic cache) and its sampling are transformers'. The embeddings arrive as
    the target's own module gives them, so that a target that scales them has done so, and a softcap of the drafter's
    logits is not applied: that changes what is drafted when sampling, never the text's distribution.

    Args:
        draft: what :func:`dflash.load_draft` takes.

    Returns:
        An object for ``assistant_model``; calls may share it, one after another.

    Raises:
        ValueError, TypeError, FileNotFoundError: as :func:`dflash.load_draft` does. RuntimeError: transformers is older
            than 5.18, whose loop writes on behind a stop token that is not the last of those a step accepts.
    """
    version = transformers_version()
    if version < _STOPS_IN_MID_BLOCK:
        raise RuntimeError(
            "as_assistant needs transformers >= 5.18: the assisted generation of this version, "
            f"{'.'.join(map(str, version))}, writes on behind a stop token that was accepted in mid-block; "
            "model.generate(..., custom_generate=dflash.custom_generate, draft=draft) stops there"
        )
    return _Assistant(load_draft(draft))
