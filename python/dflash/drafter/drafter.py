"""The drafter: one denoising pass over a block of masks. After the DFlash paper (arXiv 2602.06036, section 4)."""

from __future__ import annotations

import copy
import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .. import ops
from ..cache import KVCache, SlidingCache
from ..decoder import BlockConv, DecoderLayer, DecoderStack, product, products, rotation
from ..ops import NotFiniteError, PackedWeight, Weight, format_of, packed_layer, reference
from ..settings import WeightStorage
from ..targets import PackedEmbedding, PackedLinear, not_finite
from ..targets.model import KERNEL_DTYPES, modules_of, tensors_of, weight_of
from .config import DFlash2Config, DraftConfig

_Draft = TypeVar("_Draft")


class Drafter(nn.Module):
    """The draft model, under the parameter names of published checkpoints. See `load_draft`; a new one has no values.

    Args:
        config: its shape and rules.
        dtype: dtype of every parameter.
        device: device of every parameter.
    """

    def __init__(
        self, config: DraftConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        like = torch.empty(0, dtype=dtype, device=device)
        # 1. What fuses the target's features.
        self.fc = linear_of(like.new_empty(hidden, len(config.target_layer_ids) * hidden))
        self.hidden_norm = self._norm(like, hidden)
        # 2. The layers.
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self.layers = nn.ModuleList(self._make_layer(like) for _ in range(config.num_hidden_layers))
        self.norm = self._norm(like, hidden)
        # 3. What links the tokens of a block.
        self.candidate_selector: CandidateSelector | None = None
        if config.dflash2 is not None:
            self.candidate_selector = CandidateSelector(config.dflash2, hidden, config.vocab_size, like)
        self.markov_head: MarkovHead | None = None
        if config.markov_rank:
            self.markov_head = MarkovHead(config.markov_rank, config.vocab_size, config.draft_vocab_size, like)
        # 4. What it does not share with the target.
        if "embed_tokens" in config.own_parts:
            self.embed_tokens = Holder(like, config.vocab_size, hidden)
        if "lm_head" in config.own_parts:
            self.lm_head = Holder(like, config.draft_vocab_size or config.vocab_size, hidden)
        if "mask_embedding" in config.own_parts:
            self.mask_embedding = empty_parameter(like, hidden)
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", like.new_zeros(config.draft_vocab_size, dtype=torch.int64))
        self.shared_parts: set[str] = set()  # those that are the target's tensors, see `share_`
        self._stack: DecoderStack | None = None
        self._stacked: list[Tensor] = []  # the tensors that it runs, or that it was made of
        self._versions: list[object] = []  # and theirs
        self._restack()

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden_norm.weight.device

    @property
    def selector(self) -> CandidateSelector | MarkovHead | None:
        """The module that links the tokens of a block; None if each is predicted without the others."""
        return self.candidate_selector if self.markov_head is None else self.markov_head

    def new_cache(self, batch_size: int, capacity: int, slides: bool = False) -> KVCache:
        """Return an empty cache for ``batch_size`` sequences of ``capacity`` positions, lookahead included.

        With ``slides`` it holds only the last positions if all layers have windows; see `SlidingCache`.
        """
        config = self.config
        cache = KVCache(batch_size, capacity, self.rotary(torch.arange(capacity, device=self.device)))
        if slides and min(config.window):
            sliding = SlidingCache(batch_size, cache.rotary, max(config.window), config.rows_per_pass)
            cache = min(cache, sliding, key=operator.attrgetter("capacity"))
        return cache.allocate(
            config.num_hidden_layers, config.num_kv_heads, config.head_dim, dtype=self.dtype, device=self.device
        )

    def rewired(self, config: DraftConfig) -> Drafter:
        """Return a drafter with these weights, in the same memory, under another config of the same shapes.

        Parts of its own stay its own: a ``config.json`` need not list them. ``attention_value_scale`` must be the same.
        """
        other = copy.copy(self)
        other.config, other._stack = dataclasses.replace(config, own_parts=self.config.own_parts), None
        other._buffers = {**self._buffers, "inv_freq": other._frequencies(self.device)}
        other._restack()
        return other

    @torch.no_grad()
    def reorder_interleaved_(self) -> Drafter:
        """Reorder rows of q, k and their norms that are for RoPE over neighbors to rows for halves. Returns itself."""
        size = self.config.head_dim
        order = torch.arange(size, device=self.device).view(-1, 2).T.flatten()  # even rows of a head, then odd ones
        for layer in self.layers:
            attention: Any = layer.self_attn
            for projection, norm in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm)):
                for tensor in (projection.weight, projection.bias, norm.weight):
                    if tensor is not None:
                        tensor.copy_(tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1))
        return self

    def refresh(self) -> None:
        """Notice parameters that were replaced and, where copies of them run, written to. Called once per call."""
        tensors = tensors_of(modules_of(self))
        # By identity: an `id` may be that of a freed tensor, and `==` compares values.
        is_same = len(tensors) == len(self._stacked) and all(map(operator.is_, tensors, self._stacked))
        if is_same and (not self._runs_copies() or self._versions == list(map(_version, tensors))):
            self._stack.refresh()
            return
        self._restack()
        self._stacked = tensors_of(modules_of(self))
        self._versions = list(map(_version, self._stacked))

    def forget_values(self) -> None:
        """Make copies of weights again at the next `refresh`, whether they are known to have changed or not."""
        self._stacked = []

    # ------------------------------------------------------------------------------------------ the forward pass

    def fuse(self, context: Tensor, num_context: Tensor) -> Tensor:
        """Return the context features of tapped target states: ``hidden_norm(fc(context))``, ``[batch, rows, hidden]``.

        Args:
            context: ``[batch, rows, taps * hidden]``, the taps in the order of ``target_layer_ids``.
            num_context: ``[batch]`` int64. Rows at or past it may hold anything and come back as zeros.
        """
        weight, norm = self._fc_weight(), (self.hidden_norm.weight, self.config.rms_norm_eps)
        if isinstance(weight, Tensor):
            return ops.fuse_features(context, num_context, weight, *norm)
        return ops.rms_norm(product(context, weight), *norm, num_context)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(cos, sin)``, each ``[..., head_dim / 2]`` float32, for ``positions [...]``."""
        return rotation(positions, self.inv_freq, self.config.rope.attention_scaling)

    def inject_(self, features: Tensor, positions: Tensor, cache: KVCache) -> None:
        """Append the K/V of context rows to every layer at once (prefill).

        Args:
            features: ``[batch, rows, hidden]``, from `fuse`.
            positions: ``[batch, rows]`` int64, absolute. A negative one skips its row.
            cache: written at ``positions``, those that it holds.
        """
        rows, each = features.flatten(0, 1), []
        for layer in self.layers:
            key, value = layer.self_attn.k_proj, layer.self_attn.v_proj
            biases = () if key.bias is None else (key.bias, value.bias)
            each.append(products(rows, (key.weight, value.weight), biases))
        cos, sin = self.rotary(positions)
        norms = torch.stack([layer.self_attn.k_norm.weight for layer in self.layers])
        ops.append_context_kv_(
            torch.stack(each).unflatten(1, features.shape[:2]), cache.slots_(positions), cos, sin, norms,
            self.config.rms_norm_eps, list(cache.keys.values()), list(cache.values.values()),
        )  # fmt: skip

    def follow_(self, context: Tensor, num_context: Tensor, length: Tensor, cache: KVCache) -> None:
        """Append the K/V of the target's features of tokens that it lacks: a pass over a block of no rows.

        Args:
            context: ``[batch, rows, taps * hidden]``; row i is at position ``length - num_context + i``.
            num_context: ``[batch]`` int64; rows at or past it are off.
            length: ``[batch]`` int64.
            cache: written at these positions.
        """
        features = self.fuse(context, num_context)
        self(features, num_context, features[:, :0], length, cache)

    def forward(
        self, features: Tensor, num_context: Tensor, block_embeds: Tensor, length: Tensor, cache: KVCache
    ) -> Tensor:
        """Run one draft pass. Appends the context rows; the block's rows are overwritten by the next pass.

        Args:
            features: ``[batch, context_rows, hidden]``, from `fuse`. Row i is at position
                ``length - num_context + i``; rows at or past ``num_context`` are off. Every layer takes K/V from these
                features as they are, without its input norm.
            num_context: ``[batch]`` int64.
            block_embeds: ``[batch, rows, hidden]``, scaled embeddings of the anchor and the masks. Row j is at
                ``length + j``.
            length: ``[batch]`` int64, the anchor's position. The cache holds ``length - num_context`` positions.
            cache: from `new_cache`, with room for ``length + rows`` positions.

        Returns:
            ``[batch, rows, hidden]`` after the final norm. Row j > 0 predicts the token at ``length + j``; row j that
            at ``length + j + 1`` if the config has ``predicts_from_anchor``.
        """
        hidden, _ = self._stack(block_embeds, length, cache, features, num_context)
        return hidden

    def can_leave_out(self, rows: int) -> bool:
        """Return True if a pass of so many rows, the context's included, can be one of some sequences of its cache."""
        return self._stack.is_one_op(rows, self.norm.weight)

    def logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return draft logits ``[..., vocab]`` of rows ``[..., hidden]``, -inf for tokens that its own head lacks.

        A drafter without a head uses the target's. Its own multiplier and softcap apply.
        """
        config = self.config
        logits = product(hidden, self._head_weight()) if "lm_head" in config.own_parts else head(hidden)
        logits = scale_logits(logits, config.output_multiplier, config.final_logit_softcapping)
        if config.draft_vocab_size is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], config.vocab_size), -torch.inf)
        return full.index_copy_(-1, target_ids(self.d2t), logits)

    def embed_block(
        self, tokens: Tensor, length: Tensor, num_drafts: int, table: Tensor, drafts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(embeds, anchor, positions)`` of a block after each sequence's last token: see `ops.draft_rows`.

        Args:
            tokens: ``[batch, capacity]`` int64.
            length: ``[batch]`` int64, the place of each last token.
            num_drafts: positions that are drafted.
            table: ``[vocab, hidden]``, the target's raw embeddings; a drafter with its own table uses that.
            drafts: ``[batch, num_drafts]`` int64; None for masks.
        """
        config = self.config
        if "embed_tokens" in config.own_parts:
            table = self.embed_tokens if isinstance(self.embed_tokens, PackedEmbedding) else self.embed_tokens.weight
        mask_embedding = self.mask_embedding if "mask_embedding" in config.own_parts else None
        rows = num_drafts if config.predicts_from_anchor else num_drafts + 1
        mask = (config.mask_token_id, num_drafts, rows, mask_embedding, config.input_embedding_scale)
        rows_of = ops if isinstance(table, Tensor) else reference
        return rows_of.draft_rows(tokens, length, drafts, table, *mask)

    @torch.no_grad()
    def share_(self, embedding: Tensor, head: nn.Module) -> None:
        """Let own parts that equal the target's be its tensors until `load_state_dict`; write to neither in place."""
        for part, theirs in (("embed_tokens", embedding), ("lm_head", getattr(head, "weight", None))):
            # Tensors that are spread, quantized, without values, or made in inference mode stay the target's own.
            plain = type(theirs) in (Tensor, nn.Parameter) and not theirs.is_meta and not theirs.is_inference()
            if part in self.config.own_parts and plain:
                ours = getattr(self, part).weight
                if not isinstance(ours, nn.Parameter):  # it is packed
                    continue
                alike = (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
                if alike and ours.data_ptr() != theirs.data_ptr() and torch.equal(ours, theirs):
                    ours.data = theirs.data
                    self.shared_parts.add(part)

    def scale_embeddings(self, embeds: Tensor) -> Tensor:
        """Scale the target's raw embeddings ``[..., hidden]`` by ``input_embedding_scale``."""
        scale = self.config.input_embedding_scale
        return embeds if scale == 1.0 else embeds * scale

    # ------------------------------------------------------------------------------------------ construction

    def _make_layer(self, like: Tensor) -> nn.Module:
        """Return one layer's modules, of new tensors ``like`` this one."""
        config = self.config
        hidden, head_dim, heads = config.hidden_size, config.head_dim, config.num_attention_heads
        query, kv, width = heads * head_dim, config.num_kv_heads * head_dim, config.intermediate_size
        layer, attention, mlp = nn.Module(), nn.Module(), nn.Module()
        layer.input_layernorm = self._norm(like, hidden)
        layer.self_attn = attention
        for name, rows, columns in (("q", query, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, query)):
            bias = like.new_empty(rows) if config.attention_bias else None
            attention.add_module(f"{name}_proj", linear_of(like.new_empty(rows, columns), bias))
        if config.attention_value_scale != 1.0:
            attention.scaled_o = DerivedWeight(torch.empty_like(attention.o_proj.weight))
        attention.q_norm = self._norm(like, head_dim)
        attention.k_norm = self._norm(like, head_dim)
        if config.attention_sinks:
            attention.attention_sink_bias = empty_parameter(like, heads)
        layer.post_attention_layernorm = self._norm(like, hidden)
        layer.mlp = mlp
        for name, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            mlp.add_module(f"{name}_proj", linear_of(like.new_empty(rows, columns)))
        if config.dflash2 is not None:
            layer.attention_conv = GroupedConv(config.dflash2, hidden, like)
            layer.mlp_conv = GroupedConv(config.dflash2, hidden, like)
        return layer

    def _norm(self, like: Tensor, size: int) -> nn.RMSNorm:
        module = nn.RMSNorm(size, self.config.rms_norm_eps, device="meta", dtype=like.dtype)
        module.weight = empty_parameter(like, size)
        return module

    def _frequencies(self, device: torch.device | str) -> Tensor:
        return self.config.rope.inverse_frequencies(self.config.head_dim).to(device)

    @torch.no_grad()
    def _restack(self) -> None:
        """Run the parameters as they are now, and what follows from them; a compiled step keeps its stack."""
        # 1. Compute the weights that follow from others, in copies: as good as scaling all values
        scale, head = self.config.attention_value_scale, self.markov_head
        for layer in self.layers if scale != 1.0 else ():
            layer.self_attn.scaled_o.set_(layer.self_attn.o_proj.weight * scale)
        if head is not None and head.spread_w2 is not None:
            full = torch.zeros_like(head.spread_w2.weight, dtype=self.dtype, device=self.device)
            head.spread_w2.set_(full.index_copy_(0, target_ids(self.d2t), head.markov_w2.weight))
        # 2. Put them and the others into the stack
        self._stacked = []
        layers, norm = self._stack_layers(), self.norm.weight
        if self._stack is not None:
            self._stack.replace(layers, norm)
            return
        eps, scale = self.config.rms_norm_eps, self.config.head_dim**-0.5
        self._stack = DecoderStack(layers, norm, eps=eps, scale=scale)

    def _fc_weight(self) -> Weight:
        return self.fc.weight

    def _head_weight(self) -> Weight:
        return self.lm_head.weight

    def _stack_layers(self) -> list[DecoderLayer]:
        """Return the layers as the ops take them."""
        return [self._stack_layer(index, layer, layer.self_attn, layer.mlp) for index, layer in enumerate(self.layers)]

    def _stack_layer(self, index: int, layer: Any, attention: Any, mlp: Any) -> DecoderLayer:
        convs = () if self.config.dflash2 is None else ("attention_conv", "mlp_conv")
        return DecoderLayer(
            input_norm=layer.input_layernorm.weight, post_norm=layer.post_attention_layernorm.weight,
            q_norm=attention.q_norm.weight, k_norm=attention.k_norm.weight,
            o=getattr(attention, "scaled_o", attention.o_proj).weight,
            **{name: getattr(attention, f"{name}_proj").weight for name in "qkv"},
            **{f"{name}_bias": getattr(attention, f"{name}_proj").bias for name in "qkvo"},
            **{name: getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down")},
            sinks=getattr(attention, "attention_sink_bias", None),
            causal=self.config.causal[index], window=self.config.window[index],
            **{name: getattr(layer, name).weights() for name in convs},
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------ packed weights

    def can_pack(self, name: str) -> bool:
        """Return True if `pack_` takes a weight in place of a parameter."""
        names = "v" if self.config.stores_interleaved else "qkv"  # rows of q and k are reordered
        names += "o" if self.config.attention_value_scale == 1.0 else ""  # else o is scaled
        pattern = rf"(fc|embed_tokens|lm_head|layers\.\d+\.(self_attn\.[{names}]|mlp\.(gate|up|down))_proj)\.weight"
        return re.fullmatch(pattern, name) is not None

    @torch.no_grad()
    def pack_(self, weights: Mapping[str, PackedWeight]) -> None:
        """Multiply by packed weights from now on, by the names of the parameters that they replace."""
        for name, weight in weights.items():
            path = name.removesuffix(".weight")
            bias = getattr(self.get_submodule(path), "bias", None)
            is_table = path == "embed_tokens"
            self.set_submodule(path, PackedEmbedding(weight, self.dtype) if is_table else PackedLinear(weight, bias))
        self._restack()

    def packed_weights(self) -> dict[str, PackedWeight]:
        """Return what `pack_` was given."""
        kinds = (PackedLinear, PackedEmbedding)
        return {f"{name}.weight": weight_of(x) for name, x in self.named_modules() if isinstance(x, kinds)}

    def weights(self) -> dict[str, Tensor | PackedWeight]:
        """Return the state dict, but packed weights under the names of the parameters that they replace."""
        dense = {name: tensor for name, tensor in self.state_dict().items() if not name.endswith(".blocks")}
        return dense | self.packed_weights()

    # ------------------------------------------------------------------------------------------ moves, copies, loads

    def _runs_copies(self) -> bool:
        """Return True if weights run as copies, which do not change with them."""
        is_spread = self.markov_head is not None and self.markov_head.spread_w2 is not None
        return is_spread or self.config.attention_value_scale != 1.0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Drafter:
        frequencies = self.inv_freq
        super()._apply(fn, recurse)
        if frequencies.device != self.device:
            frequencies = self._frequencies(self.device)
        self._buffers["inv_freq"] = frequencies  # float32 whatever the parameters are
        self._restack()
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ) -> tuple[list[str], list[str]]:
        """Load parameters as `torch.nn.Module.load_state_dict` does, and run them."""
        with torch.no_grad():  # parts that are the target's tensors get memory of their own again
            for part in self.shared_parts:
                weight = getattr(self, part).weight
                weight.data = weight.data.clone()
        self.shared_parts.clear()
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self._restack()
        return result

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stack": None, "_stacked": []}  # the copy runs its own parameters

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._restack()


def scale_logits(logits: Tensor, multiplier: float, cap: float) -> Tensor:
    """Return ``logits * multiplier``, softly capped at ``cap``; 1 and 0 change nothing."""
    if multiplier != 1.0:
        logits = logits * multiplier
    return torch.tanh(logits / cap) * cap if cap else logits


# ---------------------------------------------------------------------------------------------- parts


def empty_parameter(like: Tensor, *shape: int) -> nn.Parameter:
    """Return an uninitialized parameter with the dtype and device of ``like``."""
    return nn.Parameter(like.new_empty(shape), requires_grad=False)


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a linear module whose parameters are these tensors, or views of the same storage."""
    out, size = weight.shape
    linear = nn.Linear(size, out, bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class Holder(nn.Module):
    """A module that only gives its parameter ``weight`` a name."""

    def __init__(self, like: Tensor, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = empty_parameter(like, rows, columns)


# ---------------------------------------------------------------------------------------------- DFlash 2


class GroupedConv(nn.Module):
    """The parameters of a convolution over a block's rows, one side in front of a sublayer and one after it."""

    def __init__(self, config: DFlash2Config, hidden: int, like: Tensor) -> None:
        super().__init__()
        taps, groups = config.conv_kernel_size, hidden // config.conv_group_size
        self.base_kernel = empty_parameter(like, 2, taps, hidden)
        self.kernel_projection = linear_of(like.new_empty(2 * taps * groups, hidden))

    def weights(self) -> BlockConv:
        """Return the parameters as a decoder stack takes them."""
        return BlockConv(self.base_kernel, self.kernel_projection.weight)


class PairWeights(NamedTuple):
    """Weights that score a candidate c after the token a: ``sum over r of A[a, r] * query[r] * B[c, r]``."""

    predecessors: Tensor  # A, [vocab, rank]
    queries: Tensor  # [batch, drafts, rank], one per position
    successors: Tensor  # B, [vocab, rank]


class CandidateSelector(nn.Module):
    """Scores each of the ``top_k`` candidates of a position by the token that was drafted before it."""

    def __init__(self, config: DFlash2Config, hidden: int, vocab: int, like: Tensor) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = empty_parameter(like, vocab, config.selector_rank)
        self.successor_codebook = empty_parameter(like, vocab, config.selector_rank)
        self.hidden_projection = linear_of(like.new_empty(config.selector_rank, hidden))

    def pair_weights(self, hidden: Tensor) -> PairWeights:
        """Return what scores the pairs of a block, from the rows that predict, ``[batch, drafts, hidden]``."""
        queries = ops.linear(hidden, self.hidden_projection.weight)
        return PairWeights(self.predecessor_codebook, queries, self.successor_codebook)


# ---------------------------------------------------------------------------------------------- DSpark


class MarkovHead(nn.Module):
    """Adds ``W2 W1[a]`` to the logits that follow the token ``a``: a candidate selector whose queries are all ones.

    It was trained over the whole vocabulary, so its candidates are as many as the ops take.
    """

    def __init__(self, rank: int, vocab: int, draft_vocab: int | None, like: Tensor) -> None:
        super().__init__()
        self.top_k = min(vocab, ops.MAX_CANDIDATES)
        self.markov_w1, self.markov_w2 = Holder(like, vocab, rank), Holder(like, draft_vocab or vocab, rank)
        self.spread_w2 = None if draft_vocab is None else DerivedWeight(like.new_zeros(vocab, rank))

    def pair_weights(self, hidden: Tensor) -> PairWeights:
        """Return what scores the pairs of a block, from the rows that predict, ``[batch, drafts, hidden]``."""
        successors = (self.markov_w2 if self.spread_w2 is None else self.spread_w2).weight
        queries = hidden.new_ones(*hidden.shape[:-1], successors.shape[1])
        return PairWeights(self.markov_w1.weight, queries, successors)


def target_ids(d2t: Tensor) -> Tensor:
    """Return the target's id of each token of a reduced vocabulary: ``d2t`` stores the difference."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


# ---------------------------------------------------------------------------------------------- derived weights


class DerivedWeight(nn.Module):
    """A weight that follows from others, at a fixed address and outside of the state dict."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)

    def set_(self, value: Tensor) -> None:
        """Take a value. An equal one is not written: whoever compares versions would see other weights."""
        if (value.dtype, value.device) != (self.weight.dtype, self.weight.device):
            self.weight = value
        elif not value.is_meta and not torch.equal(self.weight, value):
            self.weight.copy_(value)


def _version(tensor: Tensor) -> object:
    """Return what differs once a tensor was written to, moved or reshaped, and always if torch counts no writes to it.

    torch counts none through ``tensor.data``, nor to tensors that were made in inference mode.
    """
    return tensor.data_ptr(), tensor.dtype, tensor.shape, object() if tensor.is_inference() else tensor._version


# ---------------------------------------------------------------------------------------------- packed weights


def check_draft_weights(weights: WeightStorage, draft: Drafter | None) -> None:
    """Raise ValueError unless a drafter's weights can be stored so, if they are finite; None for no drafter."""
    if weights is None:
        return
    if draft is None:
        raise ValueError(f"draft_weights={weights!r} needs a drafter, got draft=None or block_size=1: leave it out")
    device = draft.device.type
    if not format_of(weights, device) or draft.dtype not in KERNEL_DTYPES[device]:
        raise ValueError(
            f"draft_weights={weights!r} needs a drafter on CPU in float32 or bfloat16, or on CUDA in bfloat16 or "
            f"float16, got one on {draft.device} in {draft.dtype}: leave it out"
        )


def quantized_draft(weights: WeightStorage, draft: _Draft) -> _Draft:
    """Return the drafter itself, or with ``weights="int8"`` an `Int8Drafter` of its parameters, in the same memory.

    Raises:
        ValueError: a weight is infinite or NaN.
    """
    return draft if weights is None else _sharing(Int8Drafter, draft, draft.config)


def windowed_draft(window: int | None, draft: _Draft) -> _Draft:
    """Return a drafter of the same parameters, in the same memory, with a window in its full layers.

    Each row of a block sees the block and at least the last ``window`` positions before it, the first row up to a block
    more: windows end at the row. None changes nothing, and layers with windows of their own keep them.
    """
    if window is None:
        return draft
    size = window + draft.config.rows_per_pass
    windows = tuple(own or size for own in draft.config.window)
    return _sharing(type(draft), draft, dataclasses.replace(draft.config, window=windows))


def _sharing(kind: type[Drafter], draft: Drafter, config: DraftConfig) -> Drafter:
    other = kind.__new__(kind)
    other.__dict__.update(draft.__dict__, config=config, _stack=None, _stacked=[])
    other.refresh()
    return other


class Int8Drafter(Drafter):
    """A drafter with another's parameters, which multiplies by copies of its weights in 8 bits.

    A selector's weights run as they are, and so do those of prompts' K/V.
    """

    _fc: PackedWeight
    _lm_head: PackedWeight

    def _fc_weight(self) -> Weight:
        return self._fc

    def _head_weight(self) -> Weight:
        return self._lm_head

    def _runs_copies(self) -> bool:
        return True

    def _stack_layers(self) -> list[DecoderLayer]:
        """Return the layers in 8 bits, and copy the weights around them: all as they are now."""
        name = format_of("int8", self.device.type)
        try:
            self._fc = PackedWeight.of(self.fc.weight, name)
            if "lm_head" in self.config.own_parts:
                self._lm_head = PackedWeight.of(self.lm_head.weight, name)
            return [packed_layer(layer, name) for layer in super()._stack_layers()]
        except NotFiniteError as error:
            raise ValueError(not_finite("draft_weights", self, error)) from error
