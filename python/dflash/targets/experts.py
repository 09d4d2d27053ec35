"""Mixture-of-experts modules of the copy on our op.

transformers runs the experts of every family by one contract: a decorated class (``use_experts_implementation``) says
how its weights lie, and one of two functions for all families computes the sum (``grouped_mm``, ``batched_mm``). A
module that either of them would run gets a forward that runs `dflash.ops.experts` for few rows. Routers, shared experts
and all around them stay the family's own. So do experts that a loop of the family (``eager``) or other kernels run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.integrations import moe

from .. import ops
from .weights import KERNEL_DTYPES, is_plain_module, is_plain_tensor, kernel_obstacle

__all__ = ["use_experts_op"]

_MAX_ROWS = 256  # of one pass: a block for each row of a batch, but not a chunk of a long prompt
_IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
_GPT_OSS = ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")
_ACTIVATIONS = {nn.SiLU: "silu", SiLUActivation: "silu", GELUTanh: "gelu_tanh"}


class _Form(NamedTuple):
    """The last arguments of `ops.experts` for a module."""

    gate: str
    alpha: float = 0.0
    limit: float = 0.0
    transposed: bool = False


def use_experts_op(copied: nn.Module) -> bool:
    """Give the modules of a copy whose experts our op can run a forward that does. Returns True if there are any."""
    found = False
    for module in copied.modules():
        if (form := _form(module)) is not None:
            found = True
            kind = type(module)
            # A class of the module's own, as in `recurrent.take_over`.
            space = {"forward": _forward(kind.forward, form), "__module__": kind.__module__}
            module.__class__ = type(kind.__name__, (kind,), space)
    return found


def _forward(own: Callable, form: _Form) -> Callable:
    """Return a forward that runs our op, or ``own`` where the op does not take the tensors."""

    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not _is_taken(hidden_states, top_k_index, top_k_weights, self.gate_up_proj):
            return own(self, hidden_states, top_k_index, top_k_weights)
        weights = self.gate_up_proj, self.down_proj
        biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else (None, None)
        return ops.experts(hidden_states, top_k_index, top_k_weights, *weights, *biases, *form)

    return forward


def _is_taken(x: Tensor, ids: Tensor, scores: Tensor, weight: Tensor) -> bool:
    is_few = x.dim() == 2 and x.shape[0] <= _MAX_ROWS
    is_typed = x.dtype == weight.dtype and ids.dtype == torch.int64 and scores.dtype in (x.dtype, torch.float32)
    return is_few and is_typed and x.dtype in KERNEL_DTYPES.get(x.device.type, ())


# ---------------------------------------------------------------------------------------------- recognizing modules


def _form(module: nn.Module) -> _Form | None:
    """Return how our op runs a module; None for other modules. Numbers are compared in `dflash.targets.trial`."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if not hasattr(module, "gate_up_proj") or chosen not in _IMPLEMENTATIONS or not is_plain_module(module):
        return None
    form = _gate(module, type(module))
    return form if form is not None and _has_weights(module, form) else None


def _gate(module: nn.Module, kind: type) -> _Form | None:
    names = ("has_gate", "is_concatenated", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    flags = tuple(getattr(module, name, False) for name in names)
    if (kind.__module__, kind.__name__) == _GPT_OSS:
        is_its_own = flags == (True, False, True, False, False)
        return _Form("clamped_silu", module.alpha, module.limit, True) if is_its_own else None
    if flags != (True, True, False, False, False) or kind._apply_gate is not moe._default_apply_gate:
        return None
    activation: Any = getattr(module, "act_fn", None)
    gate = "silu" if activation is nn.functional.silu else _ACTIVATIONS.get(type(activation))
    return None if gate is None else _Form(gate)


def _has_weights(module: nn.Module, form: _Form) -> bool:
    """Return True if the kernels take the weights, and the module has no others. The op's twin would copy them."""
    names = {"gate_up_proj", "down_proj"} | ({"gate_up_proj_bias", "down_proj_bias"} if module.has_bias else set())
    weights = dict(module.named_parameters())
    if weights.keys() != names or not all(is_plain_tensor(w) and w.is_contiguous() for w in weights.values()):
        return False
    first, second = module.gate_up_proj, module.down_proj
    widths = [(weight.mT if form.transposed else weight).shape[2] for weight in (first, second)]
    storage = {(weight.device, weight.dtype) for weight in weights.values()}
    return len(storage) == 1 and not kernel_obstacle(first.device, (first, second), widths)
