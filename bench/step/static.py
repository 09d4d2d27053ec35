"""The static peer: what torch.compile and StaticCache make of a step of the same pair."""

from collections.abc import Sequence

import harness
import torch
from internals import ForcedStep, cache_layers, find_layers, make_runner, structural_copy
from random_pair import BLOCK, MASK
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import StaticCache

from .ours import Launcher, launches
from .setting import Run, Setting


class StaticStep:
    """A step over transformers' StaticCache, all in one compiled graph.

    StaticCache has one counter per layer, so all rows of a batch must be at the same position; forced acceptance keeps
    them there. One more kernel after the compiled graph sets the counters back to what was accepted. Attention is SDPA
    with a mask over the whole cache and repeated K/V heads, as transformers does it for a static cache.

    Args:
        ours: filled; its tokens, features and caches are copied, its drafter and forced acceptance used.
        target: the pair's target.
        compile: whether to compile the step.
    """

    def __init__(self, ours: ForcedStep, target: nn.Module, compile: bool) -> None:
        self.drafter, self.force, self.model = ours.drafter, ours.force, structural_copy(target)
        batch, capacity = ours.state.tokens.shape
        device = ours.state.tokens.device
        # 1. Copies of the caches
        self._copy_caches(ours, batch, capacity)
        # 2. State at fixed addresses
        self.tokens, self.context = ours.state.tokens.clone(), ours.state.context.clone()
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.num_context = torch.zeros_like(self.length)
        self.offsets = torch.arange(BLOCK, device=device)
        self.masks = self.tokens.new_full((batch, BLOCK - 1), MASK)
        self.slots = torch.arange(capacity, device=device)
        self.report = self.tokens.new_zeros(batch, 1 + 2 * BLOCK)
        self.qkv = [_stacked(layer.self_attn, "qkv") for layer in self.drafter.layers]
        self.gate_up = [_stacked(layer.mlp, ("gate", "up")) for layer in self.drafter.layers]
        # 3. Hooks for the taps, and what launches the step
        self.taps: dict[int, Tensor] = {}
        self._hook_taps()
        self.runner = make_runner(self.report)
        self._run = torch.compile(self.step, fullgraph=True, dynamic=False) if compile else self.step

    def _copy_caches(self, ours: ForcedStep, batch: int, capacity: int) -> None:
        config = self.model.config
        self.cache = StaticCache(config=config, max_cache_len=capacity)
        heads = config.num_key_value_heads, config.head_dim
        self.cache.early_initialization(batch, *heads, ours.drafter.dtype, ours.drafter.device)
        for layer, keys, values in zip(self.cache.layers, *cache_layers(ours.state.target_cache), strict=True):
            layer.keys.copy_(keys)
            layer.values.copy_(values)
        self.counters = [layer.cumulative_length for layer in self.cache.layers]
        draft_keys, draft_values = cache_layers(ours.state.draft_cache)
        self.draft_keys, self.draft_values = [k.clone() for k in draft_keys], [v.clone() for v in draft_values]

    def _hook_taps(self) -> None:
        layers = find_layers(self.model)
        for tap in self.drafter.config.target_layer_ids:

            def keep(_module, _args, output, tap=tap):
                self.taps[tap] = output[0] if isinstance(output, tuple) else output

            layers[tap].register_forward_hook(keep)

    def place_(self, context: int, accepted: int) -> None:
        """Put every row between two steps at length ``context``, the last of which emitted ``accepted`` tokens."""
        self.length.fill_(context)
        self.num_context.fill_(accepted)
        for counter in self.counters:
            counter.fill_(context)

    @torch.no_grad()
    def launched(self) -> None:
        """Run the step and set the cache's counters."""
        self._run()
        torch._foreach_copy_(self.counters, [self.length] * len(self.counters))

    def step(self) -> None:
        """Draft one block, verify it, and emit what was accepted."""
        # 1. Draft
        ahead = self.length + self.offsets
        anchor = self.tokens.index_select(1, self.length[None])
        hidden = self._draft(torch.cat([anchor, self.masks], 1), ahead)
        block = torch.cat([anchor, self.model.lm_head(hidden[:, 1:].flatten(0, 1)).argmax(-1).view_as(self.masks)], 1)
        # 2. Verify
        positions = ahead[None].expand(len(block), -1)
        output = self.model(input_ids=block, position_ids=positions, past_key_values=self.cache, use_cache=True)
        self.context.copy_(torch.cat([self.taps[tap] for tap in self.drafter.config.target_layer_ids], -1))
        posterior = self.force(block, output.logits.argmax(-1))
        # 3. Accept
        matches = (block[:, 1:] == posterior[:, :-1]).long().cumprod(1).sum(1)
        emitted = matches.min() + 1
        self.tokens.index_copy_(1, ahead + 1, posterior)
        self.num_context.copy_(emitted)
        self.length.add_(emitted)
        self.report.copy_(torch.cat([self.length.expand(len(block), 1), posterior, block], 1))
        self.taps.clear()

    def _draft(self, block: Tensor, ahead: Tensor) -> Tensor:
        """Run the drafter in plain torch; returns its hidden states ``[batch, rows, hidden]``."""
        draft, config = self.drafter, self.drafter.config
        heads, kv_heads = config.num_attention_heads, config.num_kv_heads
        # 1. Positions, mask and inputs. Past num_context the block's rows overwrite what `before` wrote.
        before = self.length - self.num_context + self.offsets
        cos, sin = harness.full_width(*draft.rotary(torch.cat([before, ahead])[None]), draft.dtype)
        mask = (self.slots < self.length + BLOCK)[None, None, None]
        features = draft.hidden_norm(draft.fc(self.context))
        residual = F.embedding(block, self.model.get_input_embeddings().weight)
        for i, layer in enumerate(draft.layers):
            # 2. q of the block, k and v of context and block
            attention, mlp = layer.self_attn, layer.mlp
            qkv = F.linear(torch.cat([features, layer.input_layernorm(residual)], 1), self.qkv[i])
            qkv = qkv.unflatten(2, (-1, config.head_dim)).transpose(1, 2)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
            q = harness.rotate(attention.q_norm(q[:, :, BLOCK:]), cos[:, :, BLOCK:], sin[:, :, BLOCK:])
            k = harness.rotate(attention.k_norm(k), cos, sin)
            # 3. Append, then attend over the whole cache
            repeated = []
            for buffer, new in ((self.draft_keys[i], k), (self.draft_values[i], v)):
                buffer.index_copy_(2, before, new[:, :, :BLOCK])
                buffer.index_copy_(2, ahead, new[:, :, BLOCK:])
                repeated.append(buffer.repeat_interleave(heads // kv_heads, 1))
            out = F.scaled_dot_product_attention(q, *repeated, attn_mask=mask)
            residual = residual + attention.o_proj(out.transpose(1, 2).flatten(2))
            # 4. MLP
            gate, up = F.linear(layer.post_attention_layernorm(residual), self.gate_up[i]).chunk(2, -1)
            residual = residual + mlp.down_proj(F.silu(gate) * up)
        return draft.norm(residual)


def _stacked(module: nn.Module, names: Sequence[str]) -> Tensor:
    return torch.cat([module.get_submodule(f"{name}_proj").weight for name in names])


def static(setting: Setting) -> Run:
    """Run the static step, launched and read as ours is."""
    step = StaticStep(setting.ours, setting.pair.target, setting.compile)
    return launches(setting, Launcher(step.place_, step.length, step.runner, step.launched, lambda: "static"))
