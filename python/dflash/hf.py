"""Entry points for transformers: its ``generate`` running our loop, our drafter in its assisted generation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .api import Draft, OneShot, generate_call
from .cache import KVCache
from .call import Call, TargetDefaults
from .drafter import Drafter, check_draft_weights, quantized_draft
from .loading.drafters import load_draft
from .options import OPTIONS, OneShotOptions, resolve_options
from .outputs import GenerateOutput
from .settings import SETTINGS, LogitsProcessor, StoppingCriterion, WeightStorage
from .streaming import Streamer
from .targets import check_target, transformers_version

if TYPE_CHECKING:
    from transformers import GenerationConfig

# ------------------------------------------------------------------------------------------- our loop in its generate

# transformers' processors for settings of a call: class -> (setting, attribute). The warpers are in the
# order in which token choice applies them.
_WARPERS, _RULES = (
    {row.processor[0]: (name, row.processor[1]) for name, row in SETTINGS.items() if row.kind == kind and row.processor}
    for kind in ("sampling", "rule")
)
_RULE_NAMES = {name for name, _ in _RULES.values()}
_NO_EFFECT = ("LogitNormalization",)  # a constant added to all logits changes no choice
# Not functions of a row's ids and scores.
_STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "ConfidenceCriteria")
_NO_TOKEN = 2**31 - 1  # past every vocabulary; transformers takes it for a token that matches nothing
# What transformers prepares for its own forward; it does not change a token, or is checked below.
_PREPARED = (
    *("attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"),
    *("cache", "past_key_values"),  # the second is its name before transformers 5.24
    *("mm_encoder_outputs", "mm_token_type_ids"),  # of models that also take images
)

# The settings of a call that transformers has no name for.
_OWN_SETTINGS = ("seed", "draft_sharpness", "acceptance", "denoise_steps", "tree")


def _is_theirs(thing: object) -> bool:
    return type(thing).__module__.split(".")[0] == "transformers"


def _refuse(what: str) -> ValueError:
    return ValueError(f"dflash.custom_generate does not apply {what}")


def _processors(processors: Sequence[Any], config: Any, defaults: TargetDefaults) -> tuple[dict[str, Any], list[Any]]:
    """Return the rules that the processors stand for, and those that have to be called. Warpers must be as set.

    Rules come before what is called, so a processor after one that is called is called too.
    """
    order, last = list(_WARPERS), -1
    rules: dict[str, Any] = {}
    called: list[Any] = []
    for processor in processors:
        name = type(processor).__name__ if _is_theirs(processor) else None
        if name in _NO_EFFECT:
            continue
        if name in _WARPERS:
            _check_warper(processor, name, config)
            if order.index(name) < last:
                raise _refuse(f"{name} after {order[last]}: its order is {', '.join(order)}")
            last = order.index(name)
            continue
        if name in _STATEFUL:
            raise _refuse(f"the logits processor {name}: it is not a function of its inputs")
        if last >= 0:
            raise _refuse(f"the logits processor {type(processor).__name__} after {order[last]}")
        setting, attribute = _RULES.get(name or "", ("", ""))
        given, wanted = getattr(processor, attribute, None), setting and getattr(config, SETTINGS[setting].config)
        given = given.tolist() if isinstance(given, Tensor) else given
        is_rule = setting and given == ([wanted] if isinstance(given, list) and isinstance(wanted, int) else wanted)
        if is_rule and not called:
            rules[setting] = defaults.settings[setting]
        else:
            called.append(processor)
    return rules, called


def _check_warper(warper: Any, name: str, config: Any) -> None:
    """Raise unless the warper is what the settings say."""
    setting, attribute = _WARPERS[name]
    given, wanted = getattr(warper, attribute), getattr(config, setting)
    if given != wanted:
        raise _refuse(f"{name} with {attribute}={given!r} where generation_config.{setting} is {wanted!r}")
    if getattr(warper, "min_tokens_to_keep", 1) > 1 or getattr(warper, "filter_value", -torch.inf) > -1e30:
        raise _refuse(f"{name} with a min_tokens_to_keep or filter_value of its own")


def _criteria(criteria: Sequence[Any], ids: Tensor) -> tuple[int | None, list[int], list[Any], list[Any]]:
    """Sort stopping criteria into the most new tokens, stop ids, stop-string criteria, and those that are called."""
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
            raise _refuse(f"the stopping criterion {name}: it is not a function of the ids")
        else:
            called.append(criterion)
    return new, stop, strings, called


class _StopCriteria:
    """Finds a row's end by ``StopStringCriteria``: transformers hands no tokenizer to a callable (seen in 5.24)."""

    def __init__(self, criteria: Sequence[Any], prompt: list[int]) -> None:
        self._criteria, self._width = criteria, max(criterion.maximum_token_len for criterion in criteria)
        self._ids = [_NO_TOKEN] * self._width + prompt

    def push(self, new: list[int]) -> int | None:
        """See `StopFinder`."""
        ids = self._ids[-self._width :] + new
        rows = [ids[at : at + self._width] for at in range(1, len(new) + 1)]
        self._ids = rows[-1]
        found = [criterion(torch.tensor(rows, device="cpu"), None).tolist() for criterion in self._criteria]
        return next((count for count, stops in enumerate(zip(*found, strict=True), 1) if any(stops)), None)


def _check_called(called: Sequence[Any], mask: Tensor | None, rows: int) -> None:
    """Raise for processors and criteria that would see something else than in transformers: rows come one by one."""
    for thing in called:
        name = type(thing).__name__
        if mask is not None and not mask.all():
            raise _refuse(f"{name} in a padded batch: it would be called for each row alone, without its padding")
        if rows > 1 and _is_theirs(thing) and name == "PrefixConstrainedLogitsProcessor":
            raise _refuse(f"{name} to {rows} rows: it asks for the row's number")


def _not_handed_on() -> dict[str, Any]:
    """Return ``streamer`` and ``assistant_model`` of the transformers ``generate`` that called.

    It takes them, puts the prompt into the streamer, and then hands neither to a callable (seen in 5.23). They are read
    from its frame; otherwise they would be ignored.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == "transformers.generation.utils":
            return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model")}
        frame = frame.f_back
    return {}


def custom_generate(
    model: nn.Module, input_ids: Tensor, logits_processor: Sequence[LogitsProcessor] | None = None,
    stopping_criteria: Sequence[StoppingCriterion] | None = None, generation_config: GenerationConfig | None = None,
    synced_gpus: bool = False, streamer: Streamer | None = None, draft: Draft = None, **arguments: object,
) -> Tensor | GenerateOutput:  # fmt: skip
    """Run our loop from transformers' own ``generate``.

    Call ``model.generate(ids, custom_generate=dflash.custom_generate, draft=draft, ...)``. transformers prepares
    inputs, settings, processors and criteria as for its own decoding, and this runs them: lengths, stop tokens,
    ``stopping_criteria=[StopStringCriteria(...)]``, ``do_sample``, temperature, top-k, top-p, min-p,
    ``num_return_sequences``, ``streamer`` and the logit rules of `dflash.call.GenerateArguments`. Any other
    processor or criterion must be a function of its inputs and is called for one token of one row at a time, which is
    slower. Note that transformers samples with ``top_k=50`` where neither the call nor the model says anything.
    Whatever else would change the text is refused by name.

    transformers passes the arguments up to ``streamer``, and what its models take. Others are given in the call of
    ``model.generate``: ``draft``, ``seed``, ``draft_sharpness``, ``acceptance``, ``denoise_steps`` and ``tree``, as in
    `dflash.call.GenerateArguments`, and those of `dflash.options.OneShotOptions`.

    Returns:
        ``[batch, length + longest answer]`` int64; with ``return_dict_in_generate=True`` a
        `dflash.GenerateOutput`, which holds them as ``sequences``.

    Raises:
        ValueError: as `dflash.generate`, and for what is not applied.
        TypeError: as `dflash.generate`.
    """
    # 1. What is not applied is refused.
    target, config = check_target(model), generation_config
    if config is None:
        raise TypeError("custom_generate is called by transformers: model.generate(..., custom_generate=...)")
    outer = _not_handed_on()
    prompt_was_put = outer.get("streamer") is not None
    streamer = outer.get("streamer") or streamer
    if outer.get("assistant_model") is not None:
        raise _refuse("assistant_model: pass the drafter as draft=")
    if synced_gpus:
        raise _refuse("synced_gpus=True")
    own: Any = {name: arguments.pop(name, None) for name in _OWN_SETTINGS}
    options: Any = {name: arguments.pop(name, OPTIONS[name].off) for name in OneShotOptions.__annotations__}
    asked: Any = types.SimpleNamespace(generation_config=config, get_input_embeddings=target.get_input_embeddings)
    defaults = TargetDefaults.of(asked)
    for name, value in defaults.settings["unsupported"].items():
        raise _refuse(f"generation_config.{name}={value!r}")
    _check_model_arguments(arguments, input_ids)
    # 2. What transformers made of the settings, as our arguments.
    mask: Any = arguments.get("attention_mask")
    new, stop, strings, criteria = _criteria(stopping_criteria or (), input_ids)
    rules, processors = _processors(logits_processor or (), config, defaults)
    _check_called([*processors, *criteria], mask, input_ids.shape[0])
    settings = {name: value for name, value in defaults.settings.items() if name not in _RULE_NAMES} | rules
    given: Any = own | {"attention_mask": mask, "max_new_tokens": new, "streamer": streamer}
    given |= {"logits_processor": processors or None, "stopping_criteria": criteria or None}
    given |= {"stop_strings": (), "num_return_sequences": 1}  # they come as criteria; the rows have been repeated
    given["stop_token_ids"] = [token for token in stop if 0 <= token < defaults.vocab_size]  # others are never emitted
    call = Call.resolve(dataclasses.replace(defaults, settings=settings), input_ids, given)
    if strings:
        call = dataclasses.replace(call, stops=functools.partial(_StopCriteria, strings))
    # 3. Run it.
    output = generate_call(OneShot(target, draft, call, options, is_checked=True), prompt_was_put)
    return output if config.return_dict_in_generate else output.sequences


def _with_named(function: Callable[..., Any], names: Iterable[str]) -> inspect.Signature:
    """Return a signature that names keyword arguments: transformers hands on what it finds there."""
    signature = inspect.signature(function)
    *first, rest = signature.parameters.values()
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=object) for name in names]
    return signature.replace(parameters=[*first, *named, rest])


_names = [*_OWN_SETTINGS, *OneShotOptions.__annotations__]
custom_generate.__signature__ = _with_named(custom_generate, _names)  # type: ignore[attr-defined]


def _check_model_arguments(given: Mapping[str, Any], ids: Tensor) -> None:
    """Raise for arguments of the model's forward that would change the text."""
    if media := ", ".join(given.get("mm_encoder_outputs") or ()):  # transformers has run their encoders
        raise _refuse(f"{media} inputs: prompts must be text")
    for name, value in given.items():
        if name not in _PREPARED and value is not None:
            raise _refuse(f"{name}, an argument of the model's forward")
    kinds = given.get("mm_token_type_ids")
    if kinds is not None and kinds.any():
        raise _refuse("mm_token_type_ids other than 0, which are those of text: prompts must be text")
    for name in ("cache", "past_key_values"):
        if (past := given.get(name)) is not None and past.get_seq_length():
            raise _refuse(f"{name} that holds tokens, {past.get_seq_length()} here")
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is not None:
        live = (torch.ones_like(ids) if mask is None else mask).bool()
        # m-RoPE has them several times, [3 or 4, batch, length]: text is at the same position in each.
        is_theirs = positions.dim() in (2, 3) and positions.shape[-2:] == ids.shape
        if not is_theirs or (positions - live.long().cumsum(-1) + 1)[..., live].any():
            raise _refuse("position_ids other than 0, 1, 2 ... over the tokens that attention_mask leaves")


# ------------------------------------------------------------------------------------------- our drafter in its loop

_STOPS_IN_MID_BLOCK = (5, 18)  # the first transformers whose loop around a DFlash drafter does


class _AssistantConfig(types.SimpleNamespace):
    """An assistant's configuration, as transformers reads it."""

    @property
    def vocab_size(self) -> int:
        """Raise ValueError: transformers compares it unless the call says that this is a DFlash drafter."""
        raise ValueError(
            'as_assistant needs speculation_type="dflash" in the call, which transformers takes for another kind of '
            'assistant: model.generate(ids, assistant_model=dflash.as_assistant(draft), speculation_type="dflash")'
        )

    def get_text_config(self, *_: Any, **__: Any) -> _AssistantConfig:
        return self


class _Assistant:
    """Our drafter, as transformers' DFlash candidate generator calls one; see `as_assistant`."""

    def __init__(self, draft: Drafter) -> None:
        self.draft = draft
        # transformers' cache gets no layers: we keep our own.
        self.config = _AssistantConfig(
            target_layer_ids=list(draft.config.target_layer_ids), block_size=draft.config.block_size,
            mask_token_id=draft.config.mask_token_id, num_hidden_layers=0, layer_types=[], per_layer_config=[],
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        return self.draft.device

    @property
    def dtype(self) -> torch.dtype:
        return self.draft.dtype

    @torch.no_grad()
    def __call__(
        self, noise_embeds: Tensor, context_hidden_states: Tensor, position_ids: Tensor, attention_mask: Tensor | None,
        cache: Any = None, past_key_values: Any = None,
    ) -> Any:  # fmt: skip
        """Draft a block: ``noise_embeds [1, block_size, hidden]`` are its anchor and masks as the target embeds them.

        ``context_hidden_states [1, rows, taps * hidden]`` are of the new tokens before the anchor. Our cache travels
        with ``cache``, one object per call of ``generate``; before transformers 5.24 that is ``past_key_values``.
        """
        draft, (rows, block) = self.draft, (context_hidden_states.shape[1], noise_embeds.shape[1])
        if noise_embeds.dtype != draft.dtype:
            raise ValueError(f"the drafter's dtype is {draft.dtype}, the target embeds in {noise_embeds.dtype}")
        holder = past_key_values if cache is None else cache
        if position_ids.dim() != 2:  # M-RoPE, of which transformers 5.24 cuts off the batch: count tokens
            first = getattr(holder, "dflash_length", 0)
            position_ids = torch.arange(first, first + rows + 1, device=noise_embeds.device)[None]
        length = position_ids[:, rows].contiguous()
        positions = position_ids[:, :rows]
        holder.dflash_length = int(length)
        if attention_mask is not None:
            live = attention_mask[:, -(rows + block) : -block]
            positions = torch.where(live.bool(), positions, -1)  # padding is no context
        own = self._cache(holder, int(length) + block)
        none = torch.zeros_like(length)
        features = draft.fuse(context_hidden_states, none + rows)
        draft.inject_(features, positions, own)
        hidden = draft(features[:, :0], none, noise_embeds, length, own) * draft.config.output_multiplier
        return types.SimpleNamespace(last_hidden_state=hidden)

    def _cache(self, holder: Any, capacity: int) -> KVCache:
        """Return the call's cache, grown to at least ``capacity`` positions."""
        old = getattr(holder, "dflash_cache", None)
        if old is None:  # a call begins
            self.draft.refresh()
        elif old.capacity >= capacity:
            return old
        cache = holder.dflash_cache = self.draft.new_cache(1, 2 * capacity)
        if old is not None:
            for new, held in zip(cache.buffers, old.buffers, strict=True):
                new[:, :, : old.capacity] = held
        return cache


def as_assistant(draft: str | os.PathLike[str] | nn.Module, *, draft_weights: WeightStorage = None) -> _Assistant:
    """Return our drafter for transformers' own assisted generation.

    Call ``model.generate(ids, assistant_model=dflash.as_assistant(draft), speculation_type="dflash")``. The loop, its
    limits (a batch of one, a dynamic cache) and its sampling are transformers'. The embeddings arrive as the target's
    own module gives them, so a target that scales them has done so. A softcap of the drafter's logits is not applied:
    that changes what is drafted when sampling, never the distribution of the text.

    transformers refuses targets with a recurrent state (Qwen3.5, Qwen3-Next, Nemotron-H, ...) before it looks at the
    drafter: "assisted generation is not supported with stateful models". Its caches cannot take a state back to where
    the rejected drafts began. `dflash.custom_generate` and `dflash.generate` can.

    Args:
        draft: what `dflash.load_draft` takes.
        draft_weights: ``"int8"`` for its layers' weights in 8 bits, see `dflash.Generator`.

    Returns:
        An object for ``assistant_model``; calls may share it, one after another.

    Raises:
        ValueError: as `dflash.load_draft`, this is a DFlash 2 or DSpark drafter, it has its own head, embedding or
            mask embedding, or its weights cannot be stored as ``draft_weights`` says.
        TypeError: as `dflash.load_draft`.
        FileNotFoundError: as `dflash.load_draft`.
        RuntimeError: transformers is older than 5.18, whose loop continues after a stop token that is not the last of
            those a step accepts.
    """
    loaded = load_draft(draft)
    # 1. Refuse drafters that no version of transformers runs, so that nobody upgrades for them
    instead = "model.generate(..., custom_generate=dflash.custom_generate, draft=draft) drafts with it"
    if loaded.selector is not None or loaded.config.predicts_from_anchor:
        raise ValueError(
            "as_assistant takes drafters of the first generation, got a DFlash 2 or DSpark drafter: transformers' loop "
            f"has no candidate selector, and drafts no token from the anchor's row. {instead}"
        )
    if own := loaded.config.own_parts:
        raise ValueError(f"as_assistant uses the target's parts, this drafter has its own {', '.join(own)}. {instead}")
    resolve_options({"draft_weights": draft_weights})
    check_draft_weights(draft_weights, loaded)
    # 2. Refuse versions that do not stop where they should
    version = transformers_version()
    if version < _STOPS_IN_MID_BLOCK:
        raise RuntimeError(
            "as_assistant needs transformers >= 5.18: the assisted generation of this version, "
            f"{'.'.join(map(str, version))}, continues after a stop token that was accepted in the middle of a block. "
            f"{instead}, and stops there"
        )
    return _Assistant(quantized_draft(draft_weights, loaded))
