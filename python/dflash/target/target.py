"""The target model: a structural twin of the user's Hugging Face model, with our attention, our cache and taps.

The user's model is never touched. Its twin shares every parameter and buffer and owns everything else: config,
hooks, attention implementation. This is the only module on the hot path that imports transformers.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import json
import types
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, StopStringCriteria

from .. import ops
from ..cache import LazyKVCache
from .fused import FusedDecoder

# The name must not contain "flash" (transformers tests for it), and must have no mask interface: no mask is built.
_ATTENTION = "block_verify"
_PROBE_TOKENS = 24

# Families whose twin is tested token for token against `generate`; any other is probed once, see `Target`.
TESTED_FAMILIES = frozenset(
    [
        *("deepseek_v3", "gemma3_text", "gemma4_text", "glm4_moe", "gpt_oss", "kimi_k25", "llama"),
        *("minimax_m2", "mistral", "qwen2", "qwen3", "qwen3_moe"),
    ]
)
_PROBED: weakref.WeakSet[nn.Module] = weakref.WeakSet()

# How `structure` takes values: these as they are, those by identity.
_PLAIN = {type(None), bool, int, float, str, bytes, torch.dtype, torch.device}
_BY_IDENTITY = (type, Tensor, types.FunctionType, types.BuiltinFunctionType, enum.Enum)

# Of a config: what says nothing of the numbers that the model computes.
_METADATA = frozenset(
    [
        *("_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id"),
        *("id2label", "initializer_range", "is_encoder_decoder", "label2id", "output_attentions"),
        *("output_hidden_states", "output_router_logits", "pad_token_id", "problem_type", "return_dict"),
        *("transformers_version", "use_cache"),
    ]
)


class UnsupportedTargetError(ValueError):
    """The target cannot be run losslessly by this package; the message says why. A ``ValueError``."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    block_lengths: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention interface over the full cache buffers that `_CacheView.update` returned.

    ``query [batch, heads, rows, head_dim]``; ``key``, ``value [batch, kv_heads, capacity, head_dim]``.
    """
    if block_lengths is None or attention_mask is not None or position_bias is not None:
        missing = "the cache lengths were not passed on" if block_lengths is None else "it builds its own mask or bias"
        raise UnsupportedTargetError(f"{type(module).__name__} cannot run on dflash's attention: {missing}")
    if "sliding_window" in kwargs:
        window = kwargs["sliding_window"]
    elif hasattr(module, "sliding_window"):
        window = module.sliding_window
    elif getattr(getattr(module, "config", None), "sliding_window", None) is not None:
        raise UnsupportedTargetError(f"{type(module).__name__} applies its sliding window through a mask alone")
    else:
        window = None
    out = ops.block_attention(
        query.transpose(1, 2),
        key,
        value,
        block_lengths,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        causal=True,
        window=window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out, None


AttentionInterface.register(_ATTENTION, _attention)


class _CacheView:
    """What transformers' attention layers see as ``past_key_values`` during one forward.

    ``update`` writes at device-side positions into the preallocated buffers and returns them whole.
    """

    is_compileable = True

    def __init__(self, cache: LazyKVCache, positions: Tensor) -> None:
        self.cache = cache
        self.positions = positions

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.layer(layer_idx, key, value)
        ops.append_kv_(key, value, self.positions, keys, values)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always passed; nothing may be derived from the buffers


def structural_twin(module: nn.Module) -> nn.Module:
    """A copy of ``module`` that shares its parameters and buffers and owns everything else. Costs milliseconds."""
    memo = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    try:
        twin = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedTargetError(
            f"{type(module).__name__} holds something that cannot be copied: {error}"
        ) from error
    for original, copied in zip(module.modules(), twin.modules(), strict=True):
        forward = original.__dict__.get("forward")
        if forward is None:
            continue
        # An instance-level forward (torch.compile, accelerate) closes over the user's module: undo it on the twin.
        wrapped = getattr(forward, "_torchdynamo_orig_callable", None)
        if wrapped is not None or hasattr(original, "_hf_hook"):
            del copied.__dict__["forward"]
        elif not isinstance(forward, types.MethodType):
            raise UnsupportedTargetError(f"{type(original).__name__}.forward was replaced by {forward!r}")
    return twin.eval()


def structure(module: nn.Module) -> Any:
    """Everything that :func:`structural_twin` would copy, in a form that compares equal while nothing has changed.

    Tensors, functions and classes count by identity and are not kept alive. What cannot be looked into never compares
    equal, not even to itself.
    """
    seen: dict[int, Any] = {}  # keeps what is made on the way alive, so that no identity comes twice

    def frozen(value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, _BY_IDENTITY) or id(value) in seen:
            return id(value)
        if isinstance(value, types.MethodType):
            return id(value.__func__), id(value.__self__)
        seen[id(value)] = value
        if isinstance(value, dict):
            return kind, [(frozen(key), frozen(entry)) for key, entry in value.items()]
        if isinstance(value, (list, tuple)):
            return kind, [frozen(entry) for entry in value]
        try:
            state = value.__reduce_ex__(4)
        except Exception:
            return object()
        return frozen(state) if isinstance(state, tuple) else object()

    return frozen(module)


def first_hook(model: nn.Module) -> str:
    """The name of the first module with a forward hook of the user's; empty when there is none."""
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            # transformers' own, which collect hidden states and attentions, are idle here.
            if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
                return name or type(model).__name__
    return ""


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile(model)``, or ``model`` itself."""
    return getattr(model, "_orig_mod", model)


def _rope_types(config) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {entry.get("rope_type", "default") for entry in (nested or [parameters])}


def refusal(model: nn.Module, *, loaded: bool = True) -> str | None:
    """Why this target cannot be run, or None. Looks at the structure alone and computes nothing.

    ``loaded=False`` leaves out what is about the weights, so that a model built on the meta device can be asked before
    it is loaded.
    """
    if not isinstance(model, PreTrainedModel):
        return f"a transformers PreTrainedModel is needed, got {type(model).__name__}"
    config = text_config(model)
    family = config.model_type
    if getattr(model.config, "is_encoder_decoder", False):
        return f"{family} is an encoder-decoder"
    if model.get_output_embeddings() is None or not model.can_generate():
        return f"{type(model).__name__} has no language-model head"
    devices = {parameter.device for parameter in model.parameters()}
    if loaded and any(device.type == "meta" for device in devices):
        return "some of its weights are on the meta device: they were never loaded"
    if len(devices) > 1:
        return f"its weights are spread over {', '.join(sorted(map(str, devices)))}: one device is needed"
    embedding = model.get_input_embeddings().weight
    if embedding.device.type == "cpu" and embedding.dtype not in (torch.float32, torch.bfloat16):
        return f"its dtype is {embedding.dtype}, the CPU kernels take float32 and bfloat16"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or any("linear" in kind or "mamba" in kind for kind in layer_types):
        return f"{family} has stateful layers (linear attention, convolution): no counter can roll them back"
    if getattr(config, "index_topk", None) is not None:
        return f"{family} selects keys with a sparse-attention indexer"
    if unknown := layer_types - {"full_attention", "sliding_attention"}:
        return f"{family} has layers of type {', '.join(sorted(unknown))}"
    if bad := _rope_types(config) & {"dynamic", "longrope"}:
        return f"its RoPE is {bad.pop()!r}: its frequencies depend on the longest position in the batch"
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        return f"{family} attends in both directions"
    if not getattr(model.get_decoder(), "_supports_attention_backend", False):
        return f"{type(model).__name__} does not take an attention function by name (_supports_attention_backend)"
    return None


def decoder_layers(model: PreTrainedModel, num_layers: int) -> nn.ModuleList:
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UnsupportedTargetError(f"{type(model).__name__}: no list of {num_layers} decoder layers was found")


class Target:
    """The user's target behind the three things the generator needs: embeddings, a head, and a tapped forward.

    Args:
        model: any full-attention causal language model of transformers (docs/targets.md lists the tested ones).
        target_layer_ids: whose outputs are tapped; the last layer's is read after the final norm, as transformers'
            ``hidden_states[-1]`` is.
        fused: run the layers on :mod:`dflash.ops` where the model is one that :mod:`dflash.fused` recognises: True to
            refuse any other, False to keep the model's own forward, ``"auto"`` to do so on CPU alone.

    Raises:
        UnsupportedTargetError: the model cannot be run; nothing was changed.
    """

    def __init__(
        self, model: nn.Module, target_layer_ids: tuple[int, ...] = (), fused: bool | Literal["auto"] = "auto"
    ) -> None:
        model = unwrap(model)
        if reason := refusal(model):
            raise UnsupportedTargetError(f"this target is not supported: {reason}")
        self.config = text_config(model)
        self.model = structural_twin(model)
        for module in self.model.modules():
            if isinstance(module, PreTrainedModel):
                module.config._attn_implementation = _ATTENTION
        text_config(self.model)._attn_implementation = _ATTENTION
        # On a GPU the fused layers have not been measured against the model's own forward, compiled or not.
        wanted = self.device.type == "cpu" if fused == "auto" else fused
        self._fused = FusedDecoder.of(self.model, target_layer_ids) if wanted else None
        if fused is True and self._fused is None:
            raise UnsupportedTargetError(
                f"fused=True cannot be followed: {type(model).__name__} is not exactly a Llama, Mistral, Qwen2 or "
                "Qwen3 of transformers without hooks, its weights dense and of one dtype that the kernels have, each "
                "layer tapped once at most"
            )
        self._taps: list[Tensor | None] = [None] * len(target_layer_ids)
        self._add_taps(target_layer_ids)
        if model.config.model_type not in TESTED_FAMILIES and model not in _PROBED:
            self._probe(model)
            _PROBED.add(model)

    @property
    def embedding_weight(self) -> Tensor:
        """``[vocab, hidden]``, the raw input embeddings (no scale applied)."""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> nn.Module:
        """The language-model head, hidden -> logits, without the family's own scaling."""
        return self.model.get_output_embeddings()

    @property
    def draft_head(self) -> Callable[[Tensor], Tensor]:
        """The head for a drafter's rows: through the kernel where the target's own pass goes through it."""
        return self.head if self._fused is None else self._fused.product

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding_weight.device

    @property
    def max_positions(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    def new_cache(self, batch_size: int, capacity: int) -> LazyKVCache:
        """An empty cache for ``batch_size`` sequences of ``capacity`` positions."""
        if self._fused is not None:
            self._fused.table(capacity)  # now, and not inside a compiled step
        return LazyKVCache(batch_size, capacity)

    def _add_taps(self, target_layer_ids: tuple[int, ...]) -> None:
        if not target_layer_ids:
            return
        num_layers = self.config.num_hidden_layers
        layers = decoder_layers(self.model, num_layers)
        for index, layer_id in enumerate(target_layer_ids):
            module = layers[layer_id]
            if layer_id == num_layers - 1:
                module = getattr(self.model.get_decoder(), "norm", None)
                if module is None:
                    raise UnsupportedTargetError(
                        f"{type(self.model).__name__}: the last layer is tapped, but no final norm was found"
                    )

            def keep(_module, _args, output, taps=self._taps, index=index):  # no reference to self: that is a cycle
                taps[index] = output[0] if isinstance(output, tuple) else output

            module.register_forward_hook(keep)

    def forward(
        self, ids: Tensor, lengths: Tensor, cache: LazyKVCache, logits_to_keep: int | Tensor = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """Run ``ids`` at positions ``lengths[b] + i``, causal behind the cache.

        Args:
            ids: ``[batch, rows]`` int64.
            lengths: ``[batch]`` int64, positions already in the cache.
            cache: takes the K/V of these rows at their positions.
            logits_to_keep: as in transformers: 0 for all rows, n for the last n, or row indices.

        Returns:
            Logits ``[batch, kept rows, vocab]`` and the taps, which side by side are ``[batch, rows, taps * hidden]``:
            one tensor each, or one of all where the decoder is fused.
        """
        if self._fused is not None and self._fused.takes(ids):
            logits, tapped = self._fused.forward(ids, lengths, cache, logits_to_keep)
            return logits, [tapped]
        positions = lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
        # Rows past the end of a request are computed and dropped; they must not index past a learned table.
        limit = self.max_positions
        output = self.model(
            input_ids=ids,
            position_ids=positions if limit is None else positions.clamp(max=limit - 1),
            past_key_values=_CacheView(cache, positions),
            use_cache=True,
            logits_to_keep=logits_to_keep,
            block_lengths=lengths,
        )
        taps = list(self._taps)
        self._taps[:] = [None] * len(taps)
        return self._kept(output.logits, ids.shape[1], logits_to_keep), taps

    def verify(self, block: Any, state: Any) -> Tensor:
        """Run a block and write its features into ``state.context``, the drafter's next input.

        Args:
            block: its ``input_ids [batch, rows]`` are run at positions ``state.length[b] + i``.
            state: its ``target_cache`` takes their K/V.

        Returns:
            ``[batch, rows, vocab]`` logits.
        """
        logits, taps = self.forward(block.input_ids, state.length, state.target_cache)
        if state.context.shape[-1]:
            torch.cat(taps, -1, out=state.context)
        return logits

    def _kept(self, logits: Tensor, rows: int, logits_to_keep: int | Tensor) -> Tensor:
        """The rows that were asked for, of a model that may not have heard of ``logits_to_keep``."""
        asked = logits_to_keep.numel() if isinstance(logits_to_keep, Tensor) else logits_to_keep or rows
        if logits.shape[1] == asked:
            return logits
        if logits.shape[1] != rows:
            raise UnsupportedTargetError(
                f"{type(self.model).__name__} returned {logits.shape[1]} rows of logits, {asked} were asked for"
            )
        return logits[:, logits_to_keep] if isinstance(logits_to_keep, Tensor) else logits[:, -asked:]

    @torch.no_grad()
    def _probe(self, model: PreTrainedModel) -> None:
        """Refuse a family that nobody has tested if the twin's logits differ from the model's own on a few tokens."""
        vocab = self.embedding_weight.shape[0]
        ids = torch.arange(_PROBE_TOKENS, device=self.device)[None] * 7919 % vocab
        half = _PROBE_TOKENS // 2
        expected = structural_twin(model)(input_ids=ids, use_cache=False).logits.float()
        cache = LazyKVCache(1, _PROBE_TOKENS)
        lengths = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            first, _ = self.forward(ids[:, :half], lengths, cache)
            every = torch.arange(half, device=self.device)
            second, _ = self.forward(ids[:, half:], lengths + half, cache, every[1::2])
        except UnsupportedTargetError:
            raise
        except Exception as error:
            raise UnsupportedTargetError(
                f"this target is not supported: {self.config.model_type} failed in a trial run with dflash's cache "
                f"and attention: {type(error).__name__}: {error}"
            ) from error
        got = torch.cat([first, second], 1).float()
        expected = torch.cat([expected[:, :half], expected[:, half + 1 :: 2]], 1)
        difference = float((got - expected).norm() / expected.norm())
        if not difference < (1e-3 if self.dtype == torch.float32 else 5e-2):
            raise UnsupportedTargetError(
                f"this target is not supported: {self.config.model_type} gives other logits with dflash's cache and "
                f"attention (relative difference {difference:.1e} in a trial run)"
            )


_OFF = {
    "num_beams": (None, 1),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
    "guidance_scale": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "max_time": (None,),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
    "remove_invalid_values": (None, False),
    "renormalize_logits": (None, False, True),  # changes no choice
}

_RULES = (
    *("repetition_penalty", "no_repeat_ngram_size", "sequence_bias", "bad_words_ids", "min_length", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
)


def generation_defaults(model: nn.Module) -> dict:
    """What the model's ``generation_config`` says of the arguments of ``generate``, None where it is silent.

    ``rules`` maps the names of :mod:`dflash.rules`, and ``sequence_bias``, to theirs. ``unsupported`` maps every
    setting that would change the text and is not applied here to its value.
    """
    config = model.generation_config
    eos = config.eos_token_id
    vocab = model.get_input_embeddings().weight.shape[0]

    def asks(name: str, off: tuple) -> bool:
        value = getattr(config, name, None)
        return value not in off and not (isinstance(value, (list, tuple, dict)) and len(value) == 0)

    names = (
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "max_length", "pad_token_id"),
        *("stop_strings", "num_return_sequences"),
    )
    return {
        **{name: getattr(config, name, None) for name in names},
        # An id past the vocabulary is never emitted.
        "eos_token_id": [t for t in ([] if eos is None else [eos] if isinstance(eos, int) else eos) if 0 <= t < vocab],
        "rules": {name: getattr(config, name, None) for name in _RULES},
        "unsupported": {name: getattr(config, name) for name, off in _OFF.items() if asks(name, off)},
    }


def transformers_version() -> tuple[int, int]:
    """Major and minor version of the transformers that is imported."""
    major, minor, *_ = transformers.__version__.split(".")
    return int(major), int(minor)


def text_config(model: nn.Module):
    """The configuration of the language model inside ``model``."""
    return model.config.get_text_config(decoder=True)


def stop_string_criterion(tokenizer, stop_strings: list[str]):
    """transformers' own test of a one-token loop, ``StopStringCriteria``: a function of the last tokens of a row."""
    try:
        return StopStringCriteria(tokenizer, stop_strings)
    except ValueError as error:  # it decodes the vocabulary token by token, which not every tokenizer bears
        name = type(tokenizer).__name__
        raise ValueError(f"stop_strings: transformers cannot match strings with this {name}: {error}") from error


class WeightsFingerprint:
    """Notices when a module's tensors were replaced (``.to``, ``load_state_dict(assign=True)``).

    Args:
        module: it is not kept alive.
        values: notice changes in place too (an optimizer's step, ``copy_``), except those made through ``.data``.
    """

    def __init__(self, module: nn.Module, values: bool = False) -> None:
        self._module = weakref.ref(module)
        self._values = values
        self._tensors = self._read(module)

    def _read(self, module: nn.Module) -> tuple:
        tensors = (*module.parameters(), *module.buffers())
        found = tuple((id(t), t.data_ptr(), t.dtype) for t in tensors)
        if self._values:
            found += tuple(0 if t.is_inference() else t._version for t in tensors)
        return found

    def matches(self, module: nn.Module) -> bool:
        """Whether ``module`` is the same one, with the tensors it had."""
        return self._module() is module and self._tensors == self._read(module)

    def replaced(self) -> bool:
        """Whether the module still lives and has other tensors now."""
        module = self._module()
        return module is not None and self._tensors != self._read(module)


def describe_config(target: nn.Module) -> str:
    """The text config as JSON, without what says nothing of the numbers: names, versions, special tokens, dtype."""
    content = text_config(target).to_dict()
    return json.dumps({k: v for k, v in content.items() if k not in _METADATA}, sort_keys=True, default=str)


def sample_digest(model: nn.Module) -> str:
    """A cheap fingerprint of a model's weights: every tensor's name, shape and dtype, and some 64 of its values."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        few = flat[:: max(1, flat.numel() // 64)].float().cpu()
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode() + few.numpy().tobytes())
    return digest.hexdigest()[:16]
