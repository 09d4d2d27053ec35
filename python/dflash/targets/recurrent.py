"""Recurrent layers of the copy: convolutions and recurrences on our ops, with their states in our cache.

transformers' recurrent modules call functions of their own file (``causal_conv1d_fn``, ``mamba2_chunk_scan``, ...) and
hand a state in and out through the cache. No attribute can be exchanged. So each such module of the copy gets its
class's ``forward`` once more, bound to globals in which these functions are ours. The cache view answers "no state
yet", so that every pass takes the branch for several rows. The user's modules, classes and globals stay as they are.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .. import ops
from ..state import KVCache, RecurrentCache, RecurrentLayer
from .weights import modules_of, repeated_modules

__all__ = [
    "FUNCTIONS",
    "Pass",
    "clamps_prompts",
    "has_recurrent_layers",
    "is_stateful",
    "only_function_in",
    "refusal_of_recurrence",
    "take_over",
]

_CONVOLUTIONS = frozenset(["causal_conv1d_fn"])
_RECURRENCES = frozenset(
    [
        *("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        *("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
        "mamba2_chunk_scan",
    ]
)
_FOR_ONE_ROW = frozenset(["causal_conv1d_update", "mamba2_selective_state_update"])  # never called in the copy
FUNCTIONS = _CONVOLUTIONS | _RECURRENCES | _FOR_ONE_ROW
"""Names of transformers' functions whose work is ours in the copy."""

# Parts of names that only code with a state looks up.
_CONVOLUTION_STATES, _RECURRENT_STATES = ("conv_state",), ("recurrent_state", "ssm_state", "linear_cache")


class Pass:
    """The pass that runs, as the copy's recurrent modules find it: not every family hands keyword arguments on.

    Attributes:
        cache: where the states are.
        lengths: ``[batch]`` int64, positions before its first row.
        is_prompt: True for rows of a prompt, False for a block.
    """

    cache: KVCache | None = None
    lengths: Tensor | None = None
    is_prompt = False


# ---------------------------------------------------------------------------------------------- recognizing modules


def is_stateful(module: nn.Module) -> bool:
    """Return True if a module keeps the state of a convolution or a recurrence, ours to take over or not."""
    return _keeps(_names_in_class(type(module)), _CONVOLUTION_STATES + _RECURRENT_STATES)


def has_recurrent_layers(model: nn.Module) -> bool:
    """Return True if a module of the model is stateful."""
    one_per_class = {type(module): module for module in modules_of(model)}
    return any(map(is_stateful, one_per_class.values()))


def refusal_of_recurrence(model: nn.Module) -> str | None:
    """Return which module keeps a state that cannot be rolled back, and why; None if all can."""
    indices: set[int] = set()
    repeated = repeated_modules(model)
    for module in filter(is_stateful, model.modules()):
        kind, index = type(module), module.__dict__.get("layer_idx")
        keeps, code = _names_in_class(kind), _inner_forward(kind).__code__
        is_served = isinstance(index, int) and all(
            not _keeps(keeps, states) or _calls_each_once(code, functions)
            for states, functions in ((_CONVOLUTION_STATES, _CONVOLUTIONS), (_RECURRENT_STATES, _RECURRENCES))
        )
        if not is_served:
            return f"{kind.__name__} keeps a state by functions that dflash does not know, and cannot roll back"
        if id(module) in repeated:
            return f"one {kind.__name__} is in several layers, which would share its state"
        if index in indices:
            return (
                f"{kind.__name__} has the layer_idx of another recurrent layer, {index}: they would share their states"
            )
        indices.add(index)
    return None


def clamps_prompts(model: nn.Module) -> bool:
    """Return True if prompts move the states otherwise than decoded tokens: transformers clamps dt in prompts only."""
    limits = [module.__dict__.get("time_step_limit") for module in filter(is_stateful, model.modules())]
    return any(limit is not None and (limit[0] > 0 or limit[1] < float("inf")) for limit in limits)


def _keeps(names: frozenset[str], states: tuple[str, ...]) -> bool:
    return any(state in name for name in names for state in states)


_names_of_classes: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def _names_in_class(kind: type) -> frozenset[str]:
    """Return the names that the methods of a class of modules look up."""
    if kind not in _names_of_classes:
        bases = [base for base in kind.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
        methods = [value for base in bases for value in vars(base).values() if isinstance(value, types.FunctionType)]
        is_part = not any(hasattr(base, "get_input_embeddings") for base in bases)  # no whole model
        found = [name for method in methods for name in _names(_inner(method))] if is_part else []
        _names_of_classes[kind] = frozenset(found)
    return _names_of_classes[kind]


@functools.lru_cache(64)
def _calls_each_once(code: types.CodeType, functions: frozenset[str]) -> bool:
    """Return True if code calls one or more of these functions, none of them twice: a layer has one state."""
    called = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    return max(map(called.count, functions)) == 1


def _names(function: Callable | None) -> frozenset[str]:
    code = getattr(function, "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def _inner_forward(kind: type) -> types.FunctionType:
    return _inner(kind.forward)


def _inner(function: Any) -> Any:
    """Return the method below transformers' decorators. Some of 5.15 do not say what they wrap."""
    while True:
        function = inspect.unwrap(function)
        inside = only_function_in(function)
        if inside is None or _names(function) & FUNCTIONS:
            return function
        function = inside


def only_function_in(wrapper: Any) -> types.FunctionType | None:
    """Return the one function that another closes over; None if there is none, or more than one."""
    cells = [cell.cell_contents for cell in getattr(wrapper, "__closure__", None) or ()]
    inside = [value for value in cells if isinstance(value, types.FunctionType)]
    return inside[0] if len(inside) == 1 else None


# ---------------------------------------------------------------------------------------------- taking over


def take_over(copied: nn.Module) -> Pass:
    """Give every stateful module of a copy a forward that keeps its states in the cache of the pass.

    Args:
        copied: a structural copy; `refusal_of_recurrence` has found nothing.

    Returns:
        What says which pass runs; to be set before each.
    """
    running = Pass()
    if has_recurrent_layers(copied):
        for module in copied.modules():
            if "is_causal" in module.__dict__:  # attention, to which falcon_h1 of 5.15 hands no lengths
                module.running_pass = running
    for module in filter(is_stateful, copied.modules()):
        forward = _inner_forward(type(module))
        functions = _LayerFunctions(running, module.layer_idx, getattr(module, "num_k_heads", None))
        space = {**forward.__globals__, **functions.by_name()}
        space.pop("__name__", None)  # torch.compile would look the names up in the real module
        own = types.FunctionType(forward.__code__, space, forward.__name__, forward.__defaults__, forward.__closure__)
        own.__kwdefaults__ = forward.__kwdefaults__
        # A class of the module's own: a bound method in its attributes would be a reference cycle through the weights.
        kind = type(module)
        module.__class__ = type(kind.__name__, (kind,), {"forward": own, "__module__": kind.__module__})
    return running


class _LayerFunctions:
    """What takes the place of transformers' functions in one layer. Signatures are theirs."""

    def __init__(self, running: Pass, index: int, key_heads: int | None) -> None:
        self.running, self.index, self.key_heads = running, index, key_heads

    def by_name(self) -> dict[str, Callable]:
        """Return the functions under the names that modules look up."""
        delta = dict.fromkeys(_RECURRENCES - {"mamba2_chunk_scan"}, self.delta_rule)
        return {**dict.fromkeys(_CONVOLUTIONS, self.convolution), **delta, "mamba2_chunk_scan": self.state_space}

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
