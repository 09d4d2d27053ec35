"""The target model: a structural twin of the user's Hugging Face model, with our attention, our cache and taps.

The user's model is never touched. Its twin shares every parameter and buffer and owns everything else: config,
hooks, attention implementation. This is the only module on the hot path that imports transformers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..cache import LazyKVCache
from .attention import _ATTENTION, _CacheView
from .fused import FusedDecoder
from .support import TESTED_FAMILIES, UnsupportedTargetError, decoder_layers, refusal, text_config
from .twin import structural_twin, unwrap

_PROBE_TOKENS = 24
_PROBED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


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
