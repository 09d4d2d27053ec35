"""Recurrent layers of the copy: convolutions and recurrences on our ops, with their states in our cache.

transformers' recurrent modules call functions of their own file (``causal_conv1d_fn``, ``mamba2_chunk_scan``, ...) and
hand a state in and out through the cache. No attribute can be exchanged. So each such module of the copy gets its
class's ``forward`` once more, bound to globals in which these functions are ours. The cache view answers "no state
yet", so that every pass takes the branch for several rows. The user's modules, classes and globals stay as they are.
"""

from __future__ import annotations

import dis
import inspect
import types
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .. import ops
from ..cache import KVCache, RecurrentCache, RecurrentLayer
from .model import modules_of

_OURS = {  # functions of transformers, and the method of `_LayerFunctions` in place of each
    "causal_conv1d_fn": "convolution",
    "mamba2_chunk_scan": "state_space",
    **dict.fromkeys(("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"), "delta_rule"),
    **dict.fromkeys(("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"), "delta_rule"),
}
_FUNCTIONS = {*_OURS, "causal_conv1d_update", "mamba2_selective_state_update"}  # the last two, for one row, never run


class Pass:
    """The pass that runs, as the copy's recurrent modules find it: not every family hands keyword arguments on.

    Attributes:
        cache: where the states are.
        lengths: ``[batch]`` int64, positions before its first row.
        is_prompt: True for rows of a prompt, False for a block.
        ends: ``[batch]`` int64, the positions of each whole prompt; None for a block.
    """

    cache: KVCache | None = None
    lengths: Tensor | None = None
    is_prompt = False
    ends: Tensor | None = None


# ---------------------------------------------------------------------------------------------- recognizing modules


def is_stateful(module: nn.Module) -> bool:
    """Return True if a module keeps the state of a convolution or a recurrence by transformers' functions."""
    return bool(_calls_of(type(module)))


def has_recurrent_layers(model: nn.Module) -> bool:
    """Return True if a module of the model is stateful."""
    return any(map(_calls_of, set(map(type, modules_of(model)))))


def refusal_of_recurrence(model: nn.Module) -> str | None:
    """Return which stateful module's state cannot be rolled back, and why; None if all can.

    A state that is kept by other functions is seen by the trial run, after a part of a block was rejected.
    """
    indices: set[int] = set()
    places = Counter(id(child) for module in modules_of(model) for child in module._modules.values())
    for module in filter(is_stateful, model.modules()):
        name, index, calls = type(module).__name__, module.__dict__.get("layer_idx"), _calls_of(type(module))
        if not isinstance(index, int) or max(map(calls.count, _OURS)) != 1:
            return f"{name} keeps a state by functions that dflash does not know, and cannot roll back"
        if places[id(module)] > 1:
            return f"one {name} is in several layers, which would share its state"
        if index in indices:
            return f"{name} has the layer_idx of another recurrent layer, {index}: they would share their states"
        indices.add(index)
    return None


def clamps_prompts(model: nn.Module) -> bool:
    """Return True if prompts move the states otherwise than decoded tokens: transformers clamps dt in prompts only."""
    limits = [module.__dict__.get("time_step_limit") for module in filter(is_stateful, model.modules())]
    return any(limit is not None and (limit[0] > 0 or limit[1] < float("inf")) for limit in limits)


_calls: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()


def _calls_of(kind: type) -> list[str]:
    """Return the names of transformers' functions that the forward of a class calls, once per call."""
    if kind not in _calls:
        code = getattr(inner_function(kind.forward), "__code__", None)
        steps = dis.get_instructions(code) if code is not None and _FUNCTIONS & set(code.co_names) else ()
        _calls[kind] = [step.argval for step in steps if step.opname == "LOAD_GLOBAL" and step.argval in _FUNCTIONS]
    return _calls[kind]


def inner_function(function: Any) -> Any:
    """Return the method below transformers' decorators. Some of 5.15 do not say what they wrap."""
    while True:
        function = inspect.unwrap(function)
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        inside = [value for value in cells if isinstance(value, types.FunctionType)]
        if len(inside) != 1 or _FUNCTIONS & set(function.__code__.co_names):
            return function
        function = inside[0]


# ------------------------------------------------------------------------------------ binding modules to the cache


def bind_to_cache(copied: nn.Module) -> Pass:
    """Give every stateful module of a copy a forward that keeps its states in the cache of the pass.

    Returns what says which pass runs; to be set before each.
    """
    running = Pass()
    if has_recurrent_layers(copied):
        for module in copied.modules():
            if "is_causal" in module.__dict__:  # attention, to which falcon_h1 of 5.15 hands no lengths
                module.running_pass = running
    for module in filter(is_stateful, copied.modules()):
        forward = inner_function(type(module).forward)
        functions = _LayerFunctions(running, module.layer_idx, getattr(module, "num_k_heads", None))
        space = {**forward.__globals__, **{name: getattr(functions, method) for name, method in _OURS.items()}}
        space.pop("__name__", None)  # torch.compile would look the names up in the real module
        own = types.FunctionType(forward.__code__, space, forward.__name__, forward.__defaults__, forward.__closure__)
        own.__kwdefaults__ = forward.__kwdefaults__
        give_forward(module, own)
    return running


def give_forward(module: nn.Module, forward: types.FunctionType) -> None:
    """Let a module of a copy run ``forward``.

    It gets a class of its own: a bound method in its attributes would be a reference cycle through the weights.
    """
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def forward_names(kind: type) -> set[str]:
    """Return the names that the forward of a class uses: attributes, globals and texts."""
    code = getattr(inner_function(kind.forward), "__code__", None)
    return set() if code is None else {*code.co_names, *(value for value in code.co_consts if isinstance(value, str))}


class _LayerFunctions:
    """Replacements of transformers' functions in one layer. Signatures are theirs."""

    def __init__(self, running: Pass, index: int, key_heads: int | None) -> None:
        self.running, self.index, self.key_heads = running, index, key_heads

    def _layer(self) -> tuple[RecurrentCache, RecurrentLayer]:
        cache = self.running.cache
        return cache, cache.recurrent_layer(self.index)

    def convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        """Convolve ``x [batch, channels, rows]``."""
        cache, layer = self._layer()
        rows = x.transpose(1, 2).to(weight.dtype)
        is_silu = activation in ("silu", "swish")
        window = layer.convolution(rows, weight.shape[-1])
        out = ops.causal_conv_(rows, weight, bias, is_silu, window, cache.pending, cache.keep)
        if activation is not None and not is_silu:
            out = ACT2FN[activation](out)
        return out.to(x.dtype).transpose(1, 2)

    def delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False, **_: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run the gated delta rule; ``query`` and ``key [batch, rows, key_heads, key_dim]``."""
        if self.key_heads is not None:  # before 5.18 the module repeats them for the heads that share them
            repeats = query.shape[2] // self.key_heads
            query, key = query[:, :, ::repeats], key[:, :, ::repeats]
        q, k, v, decay, beta = (x.float() for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + ops.L2_EPS) for x in (q, k))
        out, state = self._recurrence(q / q.shape[-1] ** 0.5, k, v, decay, beta)
        return out.to(query.dtype), state

    def state_space(  # noqa: PLR0913 - transformers' signature
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
        dt_bias: Tensor | None = None, dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run Mamba-2: ``hidden_states [batch, rows, heads, value_dim]``, B, C ``[batch, rows, groups, key_dim]``."""
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = nn.functional.softplus(dt)
        if self.running.is_prompt:  # transformers clamps in the prompt, not after it
            dt = dt.clamp(*dt_limit)
        x, dt = hidden_states.float(), dt.float()
        out, state = self._recurrence(C.float(), B.float(), x * dt[..., None], A.float() * dt, None)
        if D is not None:
            out = out + x * D.float()[:, None]
        return out.to(hidden_states.dtype), state

    def _recurrence(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        cache, layer = self._layer()
        buffers = layer.recurrence(k, v, log_decay)
        out = ops.gated_recurrence_(q, k, v, log_decay, beta, *buffers, cache.pending, cache.keep)
        return out, buffers[0]
