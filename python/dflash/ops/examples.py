"""A call of every op, at sizes of choice: what kernels are compared with their twins on, and tests spoil one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sizes(NamedTuple):
    """Sizes of the tensors.

    Attributes:
        batch: sequences, at least 2.
        rows: of a block, 3 at least.
        hidden, heads, kv_heads, dim: of a layer; ``dim`` is even.
        width: of the hidden layer of a feed-forward part.
        capacity: slots of a cache, at least ``3 * rows + 3``.
        vocab: at least 5 for each row of each sequence.
    """

    batch: int
    rows: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    width: int
    capacity: int
    vocab: int


Call = dict[str, Any]  # arguments by name


def ints(*values: int) -> Tensor:
    """Return a tensor of int64."""
    return torch.tensor(values, dtype=torch.int64)


def calls(sizes: Sizes, generator: torch.Generator | None = None) -> dict[str, Callable[[], Call]]:
    """Return, by the names of ops, functions that make a call: float32 on the CPU, drawn from ``generator``.

    Two ops are left out, which have no kernel of their own: `decoder_layers`, and `log_sum_exp` on a GPU.
    """
    batch, rows, hidden, heads, kv_heads, dim, width, capacity, vocab = sizes
    options = {"generator": generator, "dtype": torch.float32}
    normal, uniform = (functools.partial(draw, **options) for draw in (torch.randn, torch.rand))
    block = batch, rows, hidden
    long = capacity - rows  # the most that may be ahead of a block
    lengths = ints(*(long - 2 * i for i in range(batch)))
    alternating = ints(0, 1).repeat(batch)[:batch]  # by sequence: the first of two settings, the second, ...
    numbered = torch.arange(batch * rows).view(batch, rows)

    def either(first: float, second: float) -> Tensor:
        return torch.tensor([first, second], dtype=torch.float32)[alternating]

    def cache(size: int = dim) -> Tensor:
        return normal(batch, kv_heads, capacity, size)

    def caches(size: int = dim) -> list[Tensor]:
        return [cache(), cache(size)]

    def some_positions() -> Tensor:  # the first or the last is outside of the cache, where nothing is written
        return torch.arange(rows) + ints(-1, capacity - rows + 1)[alternating][:, None]

    def ids(count: int, high: int = vocab) -> Tensor:
        return torch.randint(0, high, (batch, count), generator=generator)

    def settings() -> Call:
        return {
            "positions": numbered, "seeds": ints(*range(batch)), "temperature": either(0.0, 0.8),
            "top_k": alternating * 9, "top_p": either(1.0, 0.9), "min_p": either(0.0, 0.01),
            "sharpness": either(1.0, 1.0),
        }  # fmt: skip

    def without(call: Call, *names: str) -> Call:
        return {name: value for name, value in call.items() if name not in names}

    def candidates() -> Tensor:
        return torch.arange(batch * rows * 5).view(batch, rows, 5)

    def convolution() -> Call:
        return {"x": normal(block), "base": normal(2, hidden), "dynamic": normal(batch, rows, 2, 4)}

    def ends() -> Call:  # of an answer
        return {
            "stop_token_ids": ints(5, 50).repeat(batch, 1), "limits": torch.full((batch,), 100),
            "tokens": torch.full((batch, capacity), -7), "length": 3 + alternating,
            "num_context": torch.zeros(batch, dtype=torch.int64), "done": torch.zeros(batch, dtype=torch.int64),
        }  # fmt: skip

    def tree() -> Tensor:  # parents: a chain in one sequence, a bush in the next
        chain, bush = torch.arange(-1, rows - 1), torch.tensor([-1, *(i // 2 for i in range(rows - 1))])
        return torch.stack([chain, bush])[alternating]

    def attention() -> Call:
        return {
            "q": normal(batch, rows, heads, dim), "k_cache": cache(), "v_cache": cache(),
            "lengths": long - ints(*range(batch)) * (long - 1), "scale": dim**-0.5, "causal": True, "window": 0,
            "softcap": 0.0, "sinks": normal(heads), "ancestors": None,
        }  # fmt: skip

    def qkv() -> Call:
        return {
            "qkv": normal(batch, rows, (heads + 2 * kv_heads) * dim), "lengths": lengths - rows,
            "num_context": 1 - alternating, "depth": (numbered - numbered[:, :1])[:, 1:] // 2,
            "cos": uniform(capacity, dim // 2), "sin": uniform(capacity, dim // 2), "q_norm_weight": normal(dim),
            "k_norm_weight": normal(dim), "eps": 1e-6, "q_out": normal(batch, rows - 1, heads, dim),
            "k_cache": cache(), "v_cache": cache(),
        }  # fmt: skip

    def context() -> Call:
        cos, sin = uniform(2, batch, rows, dim // 2)
        return {
            "kv": normal(2, batch, rows, 2 * kv_heads * dim), "positions": some_positions(), "cos": cos, "sin": sin,
            "k_norm_weight": normal(2, dim), "eps": 1e-6, "k_caches": caches(), "v_caches": caches(),
        }  # fmt: skip

    def waiting() -> Call:  # rows of a recurrent layer that wait in front of a block, and rows of it to keep
        return {"pending": 3 * (1 - alternating), "keep": 2 * alternating}

    def recurrence() -> Call:
        keys, values = (kv_heads, dim), (heads, 5)
        return {
            "q": normal(batch, rows, *keys), "k": torch.nn.functional.normalize(normal(batch, rows, *keys), dim=-1),
            "v": normal(batch, rows, *values), "log_decay": -uniform(batch, rows, heads),
            "beta": uniform(batch, rows, heads), "state": normal(batch, heads, dim, 5),
            "saved_k": torch.nn.functional.normalize(normal(batch, rows + 1, *keys), dim=-1),
            "saved_d": normal(batch, rows + 1, *values), "saved_a": uniform(batch, rows + 1, heads), **waiting(),
        }  # fmt: skip

    return {
        "rms_norm": lambda: {
            "x": normal(block), "weight": normal(hidden), "eps": 1e-6, "counts": rows - 2 * alternating,
            "front": normal(batch, 2, hidden)},
        "add_rms_norm": lambda: {
            "x": normal(block), "residual": normal(block), "weight": normal(hidden), "eps": 1e-6,
            "tap": normal(block), "front": normal(batch, 2, hidden)},
        "dynamic_conv": lambda: convolution() | {"front": normal(batch, 2, hidden)},
        "conv_add_rms_norm": lambda: convolution() | {
            "residual": normal(block), "weight": normal(hidden), "eps": 1e-6, "tap": normal(block)},
        "draft_rows": lambda: {
            "tokens": ids(capacity), "length": 3 + 4 * alternating, "drafts": ids(rows),
            "table": normal(vocab, hidden), "mask_id": 5, "num_drafts": rows, "rows": rows + 1,
            "mask_embedding": normal(hidden), "scale": 1.5},
        "silu_mul": lambda: {"gate_up": normal(batch, rows, 2 * hidden)},
        "swiglu": lambda: {
            "x": normal(rows, hidden), "gate": normal(width, hidden), "up": normal(width, hidden), "prefetch": False},
        "sigmoid_mul": lambda: {"x": normal(rows, heads, dim), "gate": normal(rows, heads, dim)},
        "delta_net_inputs": lambda: {
            "qkv": normal(batch, rows, (2 * kv_heads + heads) * dim), "b": normal(batch, rows, heads),
            "a": normal(batch, rows, heads), "a_log": normal(heads), "dt_bias": normal(heads),
            "key_heads": kv_heads, "key_dim": dim},
        "gated_rms_norm": lambda: {
            "x": normal(batch, rows, heads, dim), "z": normal(batch, rows, heads * dim), "weight": normal(dim),
            "eps": 1e-6},
        "fuse_features": lambda: {
            "context": normal(batch, rows, 2 * hidden), "num_context": rows - 2 * alternating,
            "fc_weight": normal(hidden, 2 * hidden), "norm_weight": normal(hidden), "eps": 1e-6},
        "linear": lambda: {
            "x": normal(rows, hidden), "weight": normal(width, hidden), "bias": normal(width), "prefetch": False},
        "linears": lambda: {
            "x": normal(rows, hidden), "weights": [normal(width, hidden), normal(5, hidden)],
            "biases": [normal(width), normal(5)], "prefetch": False},
        "experts": lambda: {
            "x": normal(rows, hidden), "ids": torch.arange(2 * rows).view(rows, 2) % 3, "scores": uniform(rows, 2),
            "gate_up": normal(3, 2 * width, hidden) / hidden**0.5, "down": normal(3, hidden, width) / width**0.5,
            "gate_up_bias": normal(3, 2 * width), "down_bias": normal(3, hidden), "gate": "silu", "alpha": 1.0,
            "limit": 1.0, "transposed": False},
        "block_attention": attention,
        "append_kv_": lambda: {
            "key": normal(batch, kv_heads, rows, dim), "value": normal(batch, kv_heads, rows, dim),
            "positions": some_positions(), "k_cache": cache(), "v_cache": cache()},
        "qkv_norm_rope_append_": qkv,
        "append_context_kv_": context,
        "select_tokens": lambda: {"logits": normal(batch, rows, vocab), **settings()},
        "tree_candidates": lambda: {
            "logits": normal(batch, rows, vocab), **without(settings(), "top_k", "top_p", "min_p", "sharpness"),
            "count": 5, "noise_weight": 0.1},
        "top_candidates": lambda: {
            "logits": normal(batch, rows, vocab), **without(settings(), "top_k", "top_p", "min_p"), "count": 5},
        "walk_candidates": lambda: {
            "hidden": normal(batch, rows, dim), "predecessors": normal(vocab, dim), "successors": normal(vocab, dim),
            "anchor": 3 + alternating, "ids": candidates(), "logits": normal(batch, rows, 5), **settings(),
            "stream": 0},
        "link_candidates": lambda: {
            "hidden": normal(batch, rows, dim), "predecessors": normal(vocab, dim), "successors": normal(vocab, dim),
            "anchor": 3 + alternating, "ids": candidates(), "scores": -2 - uniform(batch, rows, 5)},
        "build_tree": lambda: {
            "anchor": 3 + alternating, "ids": candidates(),
            "scores": -uniform(batch, rows, 5, 5).sort().values, "rows": 3 * rows,
            "order": uniform(batch, rows, 5, 5).argsort(-1).to(torch.uint8)},
        "accept_prefix_": lambda: {"block_ids": ids(rows, 2), "posterior": ids(rows, 2), **ends()},
        "accept_path_": lambda: {
            "ids": ids(rows, 2), "parents": tree(), "choices": ids(rows, 2), **ends(),
            **{name: torch.zeros(batch, 2, dtype=torch.int64) for name in ("path", "chain_choices", "chain_ids")}},
        "compact_kv_": lambda: {
            "path": torch.tensor([[0, 2, 3], [0, 1, 4]])[alternating], "counts": torch.full((batch,), 3),
            "first": lengths - 3, "k_caches": caches(), "v_caches": caches(5)},
        "gather_rows_": lambda: {
            "x": normal(block), "path": torch.tensor([[0, 2], [1, 1]])[alternating],
            "out": normal(batch, 2, hidden)},
        "gated_recurrence_": recurrence,
        "causal_conv_": lambda: {
            "x": normal(block), "weight": normal(hidden, 4), "bias": normal(hidden), "silu": True,
            "window": normal(batch, 3 + rows + 1, hidden), **waiting()},
    }  # fmt: skip
