"""The target: a structural copy of the user's Hugging Face model, with our attention, our cache and taps.

The user's model is never touched. Its copy shares every parameter and buffer and owns everything else: config,
hooks, attention implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..cache import KVCache, RecurrentCache
from ..ops import reference
from ..settings import WeightStorage
from ..state import Block, State, Tree, scatter_rows
from .copies import CacheView, structural_copy, use_attention
from .fingerprint import describe_config, sample_digest
from .fused import NOT_FUSED, fuse, use_experts_op
from .int8 import Int8Weights, check_int8
from .masked_attention import ATTENTION
from .model import (
    UnsupportedTargetError,
    cache_argument,
    embedding_table,
    has_global_hooks,
    max_positions,
    tap_,
    text_config,
)
from .packed import PackedEmbedding
from .parallel import Ranks, mesh_of
from .pictures import PicturePrompts, picture_arguments, takes_pictures
from .recurrent import bind_to_cache, clamps_prompts, has_recurrent_layers
from .sparse import sparse_family
from .support import replaced_function
from .trial import run_trial


class Target:
    """The user's model as the engine uses it: embeddings, a head, a cache and a forward pass with taps.

    Args:
        model: a causal language model that `check_target` has returned. It is not judged again.
        target_layer_ids: the tapped layers. The last layer's output is read after the final norm, like transformers'
            ``hidden_states[-1]``.
        fused: True to run the layers on `dflash.ops` (see `dflash.targets.fused`) and refuse other models,
            False to use the model's own forward, ``"auto"`` to run them on the ops where the kernels take them. Unless
            False, mixtures of experts run on their op where its kernels take them, in other models too.
        weights: ``"int8"`` to multiply by copies of the weights in 8 bits, those of the decoder and of the head.

    Attributes:
        weights: how they are stored.
        ranks: the processes that the model is spread over.
        fused_reason: why the layers run in the model's own forward; empty if they run on the ops.
        is_recurrent: True if layers keep a state that no counter trims; its caches are then a `RecurrentCache`.
        runs_ops: True if layers, or experts in them, run on `dflash.ops`.
        draft_head: the head for a drafter's rows: our kernel if the target's own pass uses it.
        tree_obstacle: what went wrong in the trial run of a tree; empty if nothing did.
        compile_obstacle: why steps cannot be compiled; empty if they can.
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
        self._int8: Int8Weights | None = None
        # 1. Build it and try it; what goes wrong on our ops may go well in the model's own modules.
        replaced = replaced_function(model)
        self._build(model, target_layer_ids, fused, replaced)
        verdict = run_trial(self, model, replaced)
        if verdict.fault and self.runs_ops:
            if fused is True:
                raise UnsupportedTargetError(NOT_FUSED.format(model=f"{type(model).__name__}, which {verdict.fault}"))
            self._build(model, target_layer_ids, False, replaced)
            self.fused_reason, verdict = f"it {verdict.fault}", run_trial(self, model, replaced)
        if verdict.fault:
            raise UnsupportedTargetError(f"this target is not supported: {self.config.model_type} {verdict.fault}")
        self.tree_obstacle = verdict.tree_fault
        is_whole = weights is None and self.ranks.count == 1 and not self.makes_masks
        self._picture_prompts = PicturePrompts(model, target_layer_ids) if takes_pictures(model) and is_whole else None
        # 2. Store it as int8. Its logits are then others than the model's.
        if weights is not None:
            check_int8(model)
            self._int8 = Int8Weights(self.model, self._fused)
            self._int8.refresh()

    def _build(
        self, model: nn.Module, target_layer_ids: tuple[int, ...], fused: bool | Literal["auto"], replaced: str
    ) -> None:
        """Copy the model and give the copy our attention, ops, recurrences and taps."""
        self.model = structural_copy(model)
        self.ranks = Ranks(mesh_of(self.model), embedding_table(self.model).device)
        self.ranks.compare("its weights or config", lambda: (describe_config(model), sample_digest(model)))
        use_attention(self.model)
        self._fused, self.fused_reason = fuse(self.model, target_layer_ids, fused, replaced)
        if fused is True and self._fused is None:
            raise UnsupportedTargetError(NOT_FUSED.format(model=type(model).__name__))
        self._cache_argument = cache_argument(self.model)
        self.is_recurrent = has_recurrent_layers(self.model)
        self._pass, self._window, self.compile_obstacle = bind_to_cache(self.model), 0, ""
        self._sparse = sparse = sparse_family(self.model)
        if sparse is not None:
            self.compile_obstacle = sparse.compile_obstacle
            self._window = getattr(self.config, sparse.window) if sparse.window else 0
            if sparse.forward is not None:
                sparse.bind_to_cache(self.model, self._pass)
            use_attention(self.model, ATTENTION)
        may_run_ops = fused is not False and not replaced and not has_global_hooks()
        self.runs_ops = (may_run_ops and use_experts_op(self.model)) or self._fused is not None
        self.draft_head: Callable[[Tensor], Tensor] = self.head if self._fused is None else self._fused.logits
        self._taps = tap_(self.model, target_layer_ids)

    @property
    def embedding_weight(self) -> Tensor:
        """``[vocab, hidden]``, the raw input embeddings (no scale applied)."""
        weight = self.model.get_input_embeddings().weight
        return weight if self.ranks.count == 1 else self.ranks.whole(weight)

    @property
    def embedding_rows(self) -> Tensor | PackedEmbedding:
        """What ``[ids]`` gives raw embeddings of: `embedding_weight`, or where that is packed, what unpacks it."""
        embeddings = self.model.get_input_embeddings()
        return embeddings if isinstance(embeddings, PackedEmbedding) else self.embedding_weight

    @property
    def head(self) -> nn.Module:
        """The language-model head, hidden -> logits, without the family's own scaling."""
        return self.model.get_output_embeddings()

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding_weight.device

    @property
    def makes_masks(self) -> bool:
        """True if what a row sees is a mask that is made here, and not a window that modules apply."""
        return self._sparse is not None

    @property
    def fused_windows(self) -> dict[int, int]:
        """The window of each layer of attention that runs on `dflash.ops`; 0 for none."""
        layers = self._fused.stack.layers if self._fused is not None else ()
        return {index: layer.window for index, layer in enumerate(layers) if not layer.is_recurrent}

    def forget_values(self) -> None:
        """Read all weights again at the next `refresh` if there are copies of them."""
        if self._int8 is not None:
            self._int8.forget_values()

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
        if self._int8 is not None:
            self._int8.refresh()
        if self._fused is not None:
            self._fused.refresh(cache)

    def is_exact_for(self, rows: int) -> bool:
        """Return True if a pass over so many rows, or fewer, gives each the bits that it has alone, in any threads.

        It does not with experts, whose routers are transformers' modules.
        """
        return self._fused is not None and self._fused.handles(rows) and not self._fused.has_experts

    def forward(
        self, ids: Tensor, lengths: Tensor, cache: KVCache, logits_to_keep: int | Tensor = 0,
        keep: Tensor | None = None, tree: Tree | None = None, features: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
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
            ends: ``[batch]`` int64, the positions of the prompts that these rows are of, later chunks included.

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
        if self._fused is not None and self._fused.handles(ids.numel()):
            logits, tapped = self._fused.forward(ids, lengths, cache, logits_to_keep, tree, features)
            taps = [tapped] if features is None else []
        else:
            logits, taps = self._run_modules(ids, lengths, cache, logits_to_keep, keep is not None, tree, ends)
        cache.end_pass_(lengths)
        return logits, taps

    def decode(self, embeds: Tensor, lengths: Tensor, cache: KVCache) -> Tensor:
        """Run the decoder on embeddings ``[batch, rows, hidden]``, at positions ``lengths[b] + i``, without its head.

        Returns ``[batch, rows, hidden]`` after the final norm. Not for recurrent targets.
        """
        if self._fused is not None and self._fused.handles(embeds.shape[0] * embeds.shape[1]):
            return self._fused.stack(embeds, lengths, cache)[0]
        decoder, rows = self.model.get_decoder(), embeds.shape[1]
        return self._call(decoder, {"inputs_embeds": embeds}, rows, lengths, cache).last_hidden_state

    def _run_modules(
        self, ids: Tensor, lengths: Tensor, cache: KVCache, logits_to_keep: int | Tensor, is_prompt: bool,
        tree: Tree | None, ends: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Run the copy's own modules as `forward` does."""
        inputs = {"input_ids": ids.clamp(min=0), "logits_to_keep": logits_to_keep}
        output = self._call(self.model, inputs, ids.shape[1], lengths, cache, is_prompt, tree, ends)
        taps = list(self._taps)
        self._taps[:] = [None] * len(taps)
        # The model may ignore `logits_to_keep`.
        is_tensor, logits = isinstance(logits_to_keep, Tensor), output.logits
        asked = logits_to_keep.numel() if is_tensor else logits_to_keep or ids.shape[1]
        if logits.shape[1] != asked:
            logits = logits[:, logits_to_keep if is_tensor else slice(-asked, None)]
        return logits, taps

    def _call(
        self, module: nn.Module, inputs: dict[str, Any], rows: int, lengths: Tensor, cache: KVCache,
        is_prompt: bool = False, tree: Tree | None = None, ends: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Call the copy, or its decoder, with ``inputs`` of so many rows, positions and our cache."""
        slots = lengths[:, None] + torch.arange(rows, device=lengths.device)
        positions = slots if tree is None else lengths[:, None] + tree.depth
        # Rows past the end of a request are computed and dropped. They must not index past a learned table.
        if (limit := max_positions(self.model)) is not None:
            positions = positions.clamp(max=limit - 1)
        view, sparse = CacheView if self._sparse is None else self._sparse.view, self._sparse
        options: dict[str, Any] = {self._cache_argument: view(cache, slots, self.config), "block_lengths": lengths}
        if sparse is not None and sparse.mask_type is not None:
            if self._window and tree is not None:
                raise UnsupportedTargetError(f"{type(self.model).__name__} pools rows of one path: verify chains")
            ancestors = None if tree is None else tree.ancestors
            mask = reference.visible(lengths, rows, cache.capacity, window=self._window, ancestors=ancestors)
            options["attention_mask"] = {sparse.mask_type: mask[:, None]}
        elif tree is not None:
            options["block_ancestors"] = tree.ancestors
        running = self._pass
        running.cache, running.lengths, running.is_prompt, running.ends = cache, lengths, is_prompt, ends
        try:
            return module(**inputs, position_ids=positions, use_cache=True, **options)
        finally:  # the modules' classes are cycles, which would keep the cache until Python collects them
            running.cache = running.lengths = running.ends = None

    def run_pictures(
        self, ids: Tensor, lengths: Tensor, pictures: Mapping[str, Tensor], cache: KVCache
    ) -> tuple[Tensor, list[Tensor]]:
        """Run whole prompts with pictures into an empty cache; see `dflash.targets.pictures.PicturePrompts.run`."""
        if self.is_recurrent:  # a pass of which nothing is kept, for the buffers of recurrent layers
            nothing = torch.zeros_like(lengths)
            self.forward(ids[:, -1:], nothing, cache, keep=nothing)
        return self._picture_prompts.run(ids, lengths, pictures, cache)

    def picture_obstacle(self, pictures: Mapping[str, Tensor]) -> str:
        """Return why prompts cannot have these pictures; empty if they can."""
        name = type(self.model).__name__
        if not takes_pictures(self.model):
            return f"{name} has no vision tower"
        if self._int8 is not None:
            return 'the prompt would run in other weights than weights="int8" stores'
        if self.makes_masks:
            return f"{name} keeps more of a prompt than keys, values and states"
        if self._picture_prompts is None:
            return f"{name} is spread over processes"
        known = picture_arguments(self.model)
        strange = [given for given in pictures if given not in known]
        return f"{name} takes {', '.join(known)}, and no {', '.join(strange)}" if strange else ""

    def verify(self, block: Block, state: State) -> Tensor:
        """Run a block, and write its features into ``state.features(block)`` for the drafter's next pass.

        Returns its logits ``[batch, rows, vocab]``. The rows are at positions ``state.length[b] + i``, those of a tree
        at ``state.length[b] + depth[i]``; ``state.target_cache`` takes their K/V. Where one op runs all layers, it runs
        only those in ``state.live``: logits of others are -inf.
        """
        if self.ranks.count > 1:
            for part in (block.ids, *(block.tree or ())):
                self.ranks.share_(part)
        if state.live is not None and self._can_leave_out(block, state.live):
            return self._verify_live(block, state)
        forward = self.compiled_forward or self.forward
        features = state.features(block) if state.context.shape[-1] else None
        out = features if features is not None and features.is_contiguous() else None
        logits, taps = forward(block.ids, state.length, state.target_cache, 0, None, block.tree, out)
        if out is not None and taps:
            torch.cat(taps, -1, out=out)
        elif features is not None and taps:  # the first rows of each sequence's: torch.compile takes no such `out`
            features.copy_(torch.cat(taps, -1))
        return logits

    def _can_leave_out(self, block: Block, live: Tensor) -> bool:
        """Return True if a pass over a block can leave out sequences. The others' bits do not depend on it."""
        is_packed = self._fused is not None and self._fused.is_packed
        sequences = live if is_packed else block.ids  # with more rows other products are torch's
        return self.can_leave_out(len(sequences) * block.ids.shape[1])

    def can_leave_out(self, rows: int) -> bool:
        """Return True if a pass of so many rows can be one of some sequences of its cache."""
        if self._fused is None or self.is_recurrent:
            return False
        return self._fused.stack.is_one_op(rows, self.embedding_weight)

    def _verify_live(self, block: Block, state: State) -> Tensor:
        """Run `verify` for the sequences in ``state.live``."""
        live, cache = state.live, state.target_cache.only(state.live)
        tree = None if block.tree is None else Tree(*(part[live] for part in block.tree))
        found, tapped = self._fused.forward(block.ids[live], state.length[live], cache, 0, tree)
        if tapped.shape[-1]:
            state.features(block).index_copy_(0, live, tapped)
        return scatter_rows(found, live, len(block.ids), -torch.inf)
