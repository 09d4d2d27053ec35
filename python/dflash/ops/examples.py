"""A call of every op, at sizes of choice: what kernels are compared with their twins on, and tests spoil one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .registry import OPS


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

    Tensors that are not given below are drawn in the shapes of the op's contract. Two ops are left out, which have no
    kernel of their own: `decoder_layers`, and `log_sum_exp` on a GPU.
    """
    batch, rows, hidden, heads, kv_heads, dim, width, capacity, vocab = sizes
    options = {"generator": generator, "dtype": torch.float32}
    normal, uniform = (functools.partial(draw, **options) for draw in (torch.randn, torch.rand))
    long = capacity - rows  # the most that may be ahead of a block
    lengths = ints(*(long - 2 * i for i in range(batch)))
    alternating = ints(0, 1).repeat(batch)[:batch]  # by sequence: the first of two settings, the second, ...
    numbered = torch.arange(batch * rows).view(batch, rows)
    known = sizes._asdict() | {
        "rows_per_sequence": rows, "block_rows": rows, "length": rows, "slots": rows, "depths": rows, "front_rows": 2,
        "num_heads": heads, "num_kv_heads": kv_heads, "key_heads": kv_heads, "head_dim": dim, "v_head_dim": dim,
        "key_dim": dim, "rank": dim, "value_dim": 5, "codes": vocab, "count": 5,
    }  # fmt: skip

    def drawn(name: str, own: dict[str, int], given: Call) -> Call:
        contract, symbols = OPS[name].op.contract, known | own
        call = dict(given)
        for spec in contract.tensors:
            is_float = spec.dtype in (None, "W", "float") or contract.parameters[spec.name].default is Parameter.empty
            if spec.name not in call and is_float:
                shape = [symbols[spec.leading]] if spec.leading else []
                shape += [contract.size_of(size, symbols | call) for size in spec.sizes]
                count = symbols[spec.count] if spec.count else 0
                call[spec.name] = [normal(shape) for _ in range(count)] if count else normal(shape)
        return call

    def either(first: float, second: float) -> Tensor:
        return torch.tensor([first, second], dtype=torch.float32)[alternating]

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    def ids(count: int, high: int = vocab) -> Tensor:
        return torch.randint(0, high, (batch, count), generator=generator)

    settings = {
        "positions": numbered, "seeds": ints(*range(batch)), "temperature": either(0.0, 0.8),
        "top_k": alternating * 9, "top_p": either(1.0, 0.9), "min_p": either(0.0, 0.01),
        "sharpness": either(1.0, 1.0),
    }  # fmt: skip
    noise = {name: settings[name] for name in ("positions", "seeds", "temperature")}
    # The first or the last is outside of the cache, where nothing is written
    some_positions = torch.arange(rows) + ints(-1, capacity - rows + 1)[alternating][:, None]
    candidates = torch.arange(batch * rows * 5).view(batch, rows, 5)
    chain, bush = torch.arange(-1, rows - 1), torch.tensor([-1, *(i // 2 for i in range(rows - 1))])
    # Rows of a recurrent layer that wait in front of a block, and rows of it to keep
    waiting = {"pending": 3 * (1 - alternating), "keep": 2 * alternating}

    def ends() -> Call:  # of an answer
        return {
            "stop_token_ids": ints(5, 50).repeat(batch, 1), "limits": torch.full((batch,), 100),
            "tokens": torch.full((batch, capacity), -7), "length": 3 + alternating,
            "num_context": torch.zeros(batch, dtype=torch.int64), "done": torch.zeros(batch, dtype=torch.int64),
        }  # fmt: skip

    def qkv() -> Call:
        return {
            "lengths": lengths - rows, "num_context": 1 - alternating,
            "depth": (numbered - numbered[:, :1])[:, 1:] // 2, "cos": uniform(capacity, dim // 2),
            "sin": uniform(capacity, dim // 2), "eps": 1e-6, "gated": False,
        }  # fmt: skip

    def paths() -> Call:
        return {name: torch.zeros(batch, 2, dtype=torch.int64) for name in ("path", "chain_choices", "chain_ids")}

    def recurrence() -> Call:
        return {
            "k": unit(batch, rows, kv_heads, dim), "saved_k": unit(batch, rows + 1, kv_heads, dim),
            "log_decay": -uniform(batch, rows, heads), "beta": uniform(batch, rows, heads),
            "saved_a": uniform(batch, rows + 1, heads), **waiting,
        }  # fmt: skip

    product = {"width": hidden, "columns": hidden, "out_features": width}
    attended = {"scale": dim**-0.5, "causal": True, "window": 0, "softcap": 0.0, "ancestors": None}
    convolution = {"width": 2, "groups": 4}
    # Of each op the sizes that only it has, and what makes the arguments that are not drawn
    table: dict[str, tuple[dict[str, int], Callable[[], Call]]] = {
        "rms_norm": ({}, lambda: {"eps": 1e-6, "counts": rows - 2 * alternating}),
        "add_rms_norm": ({}, lambda: {"eps": 1e-6}),
        "dynamic_conv": (convolution, dict),
        "conv_add_rms_norm": (convolution, lambda: {"eps": 1e-6}),
        "draft_rows": ({}, lambda: {
            "tokens": ids(capacity), "length": 3 + 4 * alternating, "drafts": ids(rows), "mask_id": 5,
            "num_drafts": rows, "rows": rows + 1, "scale": 1.5}),
        "silu_mul": ({"batch": batch * rows, "columns": 2 * hidden}, dict),
        "swiglu": (product, lambda: {"prefetch": False}),
        "sigmoid_mul": ({"width": dim}, dict),
        "delta_net_inputs": (
            {"columns": (2 * kv_heads + heads) * dim}, lambda: {"key_heads": kv_heads, "key_dim": dim}),
        "gated_rms_norm": ({"width": dim}, lambda: {"eps": 1e-6}),
        "fuse_features": ({"width": 2 * hidden}, lambda: {"eps": 1e-6, "num_context": rows - 2 * alternating}),
        "linear": (product, lambda: {"prefetch": False}),
        "linears": (product, lambda: {
            "weights": [normal(width, hidden), normal(5, hidden)], "biases": [normal(width), normal(5)],
            "prefetch": False}),
        "experts": ({"num_experts": 3}, lambda: {
            "ids": torch.arange(2 * rows).view(rows, 2) % 3, "scores": uniform(rows, 2),
            "gate_up": normal(3, 2 * width, hidden) / hidden**0.5, "down": normal(3, hidden, width) / width**0.5,
            "gate": "silu", "alpha": 1.0, "limit": 1.0, "transposed": False}),
        "block_attention": ({}, lambda: {"lengths": long - ints(*range(batch)) * (long - 1), **attended}),
        "append_kv_": ({}, lambda: {"positions": some_positions}),
        "qkv_norm_rope_append_": ({"q_rows": rows - 1}, qkv),
        "append_context_kv_": ({"num_layers": 2, "columns": 2 * kv_heads * dim}, lambda: {
            "positions": some_positions, "cos": uniform(batch, rows, dim // 2), "sin": uniform(batch, rows, dim // 2),
            "eps": 1e-6}),
        "select_tokens": ({}, lambda: dict(settings)),
        "tree_candidates": ({}, lambda: {**noise, "count": 5, "noise_weight": 0.1}),
        "top_candidates": ({}, lambda: {**noise, "sharpness": settings["sharpness"], "count": 5}),
        "walk_candidates": ({}, lambda: {"anchor": 3 + alternating, "ids": candidates, **settings, "stream": 0}),
        "link_candidates": ({}, lambda: {
            "anchor": 3 + alternating, "ids": candidates, "scores": -2 - uniform(batch, rows, 5)}),
        "build_tree": ({}, lambda: {
            "anchor": 3 + alternating, "ids": candidates, "scores": -uniform(batch, rows, 5, 5).sort().values,
            "rows": 3 * rows, "order": uniform(batch, rows, 5, 5).argsort(-1).to(torch.uint8)}),
        "accept_prefix_": ({}, lambda: {"block_ids": ids(rows, 2), "posterior": ids(rows, 2), **ends()}),
        "accept_path_": ({}, lambda: {
            "ids": ids(rows, 2), "parents": torch.stack([chain, bush])[alternating], "choices": ids(rows, 2),
            **ends(), **paths()}),
        "compact_kv_": ({}, lambda: {
            "path": torch.tensor([[0, 2, 3], [0, 1, 4]])[alternating], "counts": torch.full((batch,), 3),
            "first": lengths - 3, "k_caches": [normal(batch, kv_heads, capacity, dim) for _ in range(2)],
            "v_caches": [normal(batch, kv_heads, capacity, size) for size in (dim, 5)]}),
        "gather_rows_": ({"width": hidden, "out_rows": 2}, lambda: {
            "path": torch.tensor([[0, 2], [1, 1]])[alternating]}),
        "gated_recurrence_": ({"block": rows + 1}, recurrence),
        "causal_conv_": ({"channels": hidden, "width": 4, "slots": 3 + rows + 1}, lambda: {"silu": True, **waiting}),
    }  # fmt: skip
    return {name: lambda name=name, own=own, given=given: drawn(name, own, given())
            for name, (own, given) in table.items()}  # fmt: skip
