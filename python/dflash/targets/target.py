"""The target: a structural copy of the user's Hugging Face model, with our attention, our cache and taps.

The user's model is never touched. Its copy shares every parameter and buffer and owns everything else: config,
hooks, attention implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..ops import WeightStorage
from ..state import KVCache, RecurrentCache, Tree
from .copies import CacheView, structural_copy, use_attention
from .fingerprint import describe_config, sample_digest
from .fused import FusedTarget, recognize, use_experts_op
from .model import (
    UnsupportedTargetError,
    cache_argument,
    embedding_table,
    global_hooks,
    max_positions,
    tapped_modules,
    text_config,
)
from .parallel import Ranks, mesh_of
from .quantized import is_quantized
from .recurrent import clamps_prompts, has_recurrent_layers, take_over
from .support import replaced_function
from .trial import Trial


class OneProcess:
    """A target that one process holds: `Ranks` with nobody to agree with."""

    count = 1

    def share_(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def share_rows(self, rows: list[int], _like: Tensor) -> list[int]:
        """Return the rows."""
        return rows

    def compare(self, what: str, value: Callable[[], object]) -> None:
        """Do nothing."""

    def all(self, flag: bool) -> bool:
        """Return the flag."""
        return flag

    def whole(self, weight: Tensor) -> Tensor:
        """Return the weight."""
        return weight

    def refresh(self) -> None:
        """Do nothing."""


class Target:
    """What the engine needs of the user's model: embeddings, a head, a cache and a forward pass with taps.

    Args:
        model: a causal language model that `check_target` has returned. It is not judged again.
        target_layer_ids: the tapped layers. The last layer's output is read after the final norm, like transformers'
            ``hidden_states[-1]``.
        fused: True to run the layers on `dflash.ops` (see `dflash.targets.fused`) and refuse other models,
            False to use the model's own forward, ``"auto"`` to run them on the ops where the kernels take them. Unless
            False, mixtures of experts run on their op where its kernels take them, in other models too.
        weights: ``"int8"`` to multiply by copies of the weights in 8 bits, those of the decoder layers and of the head.

    Attributes:
        weights: how they are stored.
        ranks: the processes that the model is spread over.
        fused_reason: why the layers run in the model's own forward; empty if they run on the ops.
        is_recurrent: True if layers keep a state that no counter trims; its caches are then a `RecurrentCache`.
        runs_ops: True if layers, or experts in them, run on `dflash.ops`.
        tree_obstacle: what went wrong in the trial run of a tree; empty if nothing did.
        compiled_forward: what :meth:`verify` runs instead of :meth:`forward`, if it is set; prompts are never compiled.

    Raises:
        UnsupportedTargetError: the model cannot be run. It was not changed.
    """

    def __init__(
        self, model: nn.Module, target_layer_ids: tuple[int, ...] = (), fused: bool | Literal["auto"] = "auto",
        weights: WeightStorage = None,
    ) -> None:  # fmt: skip
        self.config, self.weights = text_config(model), weights
        self.compiled_forward: Callable[..., tuple[Tensor, list[Tensor]]] | None = None
        # 1. Build it and try it; what goes wrong on our ops may go well in the model's own modules.
        replaced = replaced_function(model)
        trial = Trial(model, replaced)
        self._build(model, target_layer_ids, fused, replaced, trial)
        verdict = trial.verdict(self)
        if verdict.fault and self.runs_ops:
            if fused is True:
                raise UnsupportedTargetError(_NOT_FUSED.format(model=f"{type(model).__name__}, which {verdict.fault}"))
            self._build(model, target_layer_ids, False, replaced, trial)
            self.fused_reason, verdict = f"it {verdict.fault}", trial.verdict(self)
        if verdict.fault:
            raise UnsupportedTargetError(f"this target is not supported: {self.config.model_type} {verdict.fault}")
        self.tree_obstacle = verdict.tree_fault
        # 2. Store it as int8. Its logits are then others than the model's.
        if weights is not None:
            check_int8(model, _int8_obstacle(model, self._fused, self.fused_reason))
            self._fused.store_as_int8()

    def _build(
        self, model: nn.Module, target_layer_ids: tuple[int, ...], fused: bool | Literal["auto"], replaced: str,
        trial: Trial,
    ) -> None:  # fmt: skip
        """Copy the model and give the copy our attention, ops, recurrences and taps."""
        self.model = structural_copy(model)
        mesh = mesh_of(self.model)
        self.ranks = OneProcess() if mesh is None else Ranks(mesh, embedding_table(self.model).device)
        self.ranks.compare("its weights or config", lambda: (describe_config(model), sample_digest(model)))
        trial.observe(self.model)
        use_attention(self.model)
        self._fused, self.fused_reason = _fuse(self.model, target_layer_ids, fused, replaced)
        if fused is True and self._fused is None:
            raise UnsupportedTargetError(_NOT_FUSED.format(model=type(model).__name__))
        self._cache_argument = cache_argument(self.model)
        self.is_recurrent = has_recurrent_layers(self.model)
        self._pass = take_over(self.model)
        may_run_ops = fused is not False and not replaced and not global_hooks()
        self.runs_ops = (may_run_ops and use_experts_op(self.model)) or self._fused is not None
        self._taps: list[Tensor | None] = [None] * len(target_layer_ids)
        for index, module in enumerate(tapped_modules(self.model, target_layer_ids)):
            module.register_forward_hook(_tap_hook(self._taps, index))

    @property
    def embedding_weight(self) -> Tensor:
        """``[vocab, hidden]``, the raw input embeddings (no scale applied)."""
        return self.ranks.whole(self.model.get_input_embeddings().weight)

    @property
    def head(self) -> nn.Module:
        """The language-model head, hidden -> logits, without the family's own scaling."""
        return self.model.get_output_embeddings()

    @property
    def draft_head(self) -> Callable[[Tensor], Tensor]:
        """The head for a drafter's rows: our kernel if the target's own pass uses it."""
        return self.head if self._fused is None else self._fused.logits

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embeddings."""
        return self.embedding_weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the embeddings."""
        return self.embedding_weight.device

    @property
    def is_fused(self) -> bool:
        """True if passes of few rows run on `dflash.ops`."""
        return self._fused is not None

    @property
    def fused_windows(self) -> dict[int, int]:
        """The window of each layer of attention that runs on `dflash.ops`; 0 for none."""
        layers = self._fused.stack.layers if self._fused is not None else ()
        return {index: layer.window for index, layer in enumerate(layers) if not layer.is_recurrent}

    def forget_values(self) -> None:
        """Read all weights again at the next `refresh` if there are copies of them."""
        if self._fused is not None:
            self._fused.forget_values()

    def new_cache(self, batch_size: int, capacity: int, block_size: int) -> KVCache:
        """Return an empty cache for ``batch_size`` sequences of ``capacity`` positions, lookahead slots included.

        ``block_size`` is the most rows of a pass whose ``keep`` is None.
        """
        cache = KVCache(batch_size, capacity)
        if self.is_recurrent:
            goes_on = not clamps_prompts(self.model)
            cache = RecurrentCache(batch_size, capacity, block_size, goes_on=goes_on, device=self.device)
        self.refresh(cache)
        return cache

    def refresh(self, cache: KVCache) -> None:
        """Notice changed weights, and fit a cache that may be an earlier target's. Called once per call."""
        self.ranks.refresh()
        if self._fused is not None:
            self._fused.refresh(cache)

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor,
        cache: KVCache,
        logits_to_keep: int | Tensor = 0,
        keep: Tensor | None = None,
        tree: Tree | None = None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run rows at positions ``lengths[b] + i``. Each sees the cache's positions and the rows before it.

        A tree's rows are at positions ``lengths[b] + depth``, and each sees its ancestors instead.

        Args:
            ids: ``[batch, rows]`` int64; -1, where nothing is proposed, is run as 0.
            lengths: ``[batch]`` int64, positions already in the cache.
            cache: from `new_cache`. The K/V of row i are written to slot ``lengths[b] + i``.
            logits_to_keep: as in transformers: 0 for all rows, n for the last n, or row indices.
            keep: ``[batch]`` int64, how many leading rows certainly belong to the sequence: those of a prompt. None
                for a block, whose rows will be accepted or not.
            tree: which row continues which; None for a chain.
            features: ``[batch, rows, taps * hidden]``, contiguous, or None: where the taps may be written.

        Returns:
            Logits ``[batch, asked rows, vocab]``, and the taps: tensors that concatenate along the last dimension to
            ``[batch, rows, taps * hidden]``; none if they are written to ``features``.
        """
        if tree is not None and self.is_recurrent:
            raise UnsupportedTargetError(
                f"a tree needs a target without recurrent layers, whose states follow one path, got "
                f"{type(self.model).__name__}: verify chains"
            )
        cache.begin_pass_(lengths, keep)
        if self._fused is not None and self._fused.handles(ids):
            logits, tapped = self._fused.forward(ids, lengths, cache, logits_to_keep, tree, features)
            taps = [tapped] if features is None else []
        else:
            logits, taps = self._run_modules(ids, lengths, cache, logits_to_keep, keep is not None, tree)
        cache.end_pass_(lengths)
        return logits, taps

    def _run_modules(
        self, ids: Tensor, lengths: Tensor, cache: KVCache, logits_to_keep: int | Tensor, is_prompt: bool,
        tree: Tree | None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Run the copy's own modules as `forward` does."""
        slots = lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
        positions = slots if tree is None else lengths[:, None] + tree.depth
        # Rows past the end of a request are computed and dropped. They must not index past a learned table.
        limit = max_positions(self.model)
        self._pass.cache, self._pass.lengths, self._pass.is_prompt = cache, lengths, is_prompt
        try:
            output = self.model(
                input_ids=ids.clamp(min=0),
                position_ids=positions if limit is None else positions.clamp(max=limit - 1),
                **{self._cache_argument: CacheView(cache, slots)},
                use_cache=True,
                logits_to_keep=logits_to_keep,
                block_lengths=lengths,
                **({} if tree is None else {"block_ancestors": tree.ancestors}),
            )
        finally:  # the modules' classes are cycles, which would keep the cache until Python collects them
            self._pass.cache = self._pass.lengths = None
        taps = list(self._taps)
        self._taps[:] = [None] * len(taps)
        return self._select_rows(output.logits, ids.shape[1], logits_to_keep), taps

    def verify(self, block: Any, state: Any) -> Tensor:
        """Run a block, and write its features into ``state.features(block)`` for the drafter's next pass.

        Returns its logits ``[batch, rows, vocab]``. The rows are at positions ``state.length[b] + i``, those of a tree
        at ``state.length[b] + depth[i]``; ``state.target_cache`` takes their K/V.
        """
        for part in (block.ids, *(block.tree or ())):
            self.ranks.share_(part)
        forward = self.compiled_forward or self.forward
        features = state.features(block) if state.context.shape[-1] else None
        out = features if features is not None and features.is_contiguous() else None
        logits, taps = forward(block.ids, state.length, state.target_cache, 0, None, block.tree, out)
        if out is not None and taps:
            torch.cat(taps, -1, out=out)
        elif features is not None and taps:  # the first rows of each sequence's: torch.compile takes no such `out`
            features.copy_(torch.cat(taps, -1))
        return logits

    def _select_rows(self, logits: Tensor, rows: int, logits_to_keep: int | Tensor) -> Tensor:
        """Return the rows asked for, from a model that may ignore ``logits_to_keep``."""
        asked = logits_to_keep.numel() if isinstance(logits_to_keep, Tensor) else logits_to_keep or rows
        if logits.shape[1] == asked:
            return logits
        if logits.shape[1] != rows:
            raise UnsupportedTargetError(
                f"{type(self.model).__name__} returned {logits.shape[1]} rows of logits, {asked} were asked for"
            )
        return logits[:, logits_to_keep] if isinstance(logits_to_keep, Tensor) else logits[:, -asked:]


def check_int8(model: nn.Module, obstacle: str | None = None) -> None:
    """Raise UnsupportedTargetError if `int8_obstacle`, which may be given, returns an obstacle."""
    if obstacle := int8_obstacle(model) if obstacle is None else obstacle:
        raise UnsupportedTargetError(
            "weights='int8' needs a target on CPU whose dense layers run on the ops of this package (see fused), got "
            f"{type(model).__name__}: {obstacle}. Leave weights out"
        )


def int8_obstacle(model: nn.Module) -> str:
    """Return why the weights of a target cannot be stored as int8; empty if they can, if they are finite.

    Takes about as long as a copy, milliseconds: no value is read.
    """
    copied = structural_copy(model)
    use_attention(copied)
    return _int8_obstacle(model, *_fuse(copied, (), "auto", replaced_function(model)))


def _int8_obstacle(model: nn.Module, fused: FusedTarget | None, reason: str) -> str:
    """Do what `int8_obstacle` does for a model with this fused form, or with none for this reason."""
    device = embedding_table(model).device
    if device.type != "cpu":
        return f"it is on {device}"
    if fused is not None:
        return fused.int8_obstacle
    return "its weights are quantized already" if is_quantized(model) else reason


_NOT_FUSED = (
    "fused=True needs exactly a Llama, Mistral, Qwen2, Qwen3 (with experts or without), Qwen3-Next or Qwen3.5 of "
    "transformers, with no function replaced and no hooks, with dense weights of one dtype that the kernels take and "
    'each layer tapped at most once, got {model}: pass fused=False or "auto"'
)


def _fuse(
    model: nn.Module, target_layer_ids: tuple[int, ...], fused: bool | Literal["auto"], replaced: str
) -> tuple[FusedTarget | None, str]:
    """Return a model's fused form, or None and why there is none; ``replaced`` is a replaced function's name."""
    if fused is False:
        return None, "fused=False was asked for"
    if foreign := replaced or ("a hook on every module" if global_hooks() else ""):
        return None, f"{foreign} is not transformers' own"
    if (found := recognize(model, target_layer_ids)) is None:
        return None, f"{type(model).__name__} is not one of the models that are recognized, or it was changed"
    reason = "" if fused is True else found.obstacle
    return (None if reason else found), reason


def _tap_hook(taps: list[Tensor | None], index: int) -> Callable[..., None]:
    """Return a forward hook that stores a module's output. It holds no target, which would be a reference cycle."""

    def store(_module: nn.Module, _arguments: tuple, output: Any) -> None:
        taps[index] = output[0] if isinstance(output, tuple) else output

    return store
