"""A trial run of targets that no test covers: a few tokens, compared with the model's own logits."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .functions import Functions, functions_of, global_hooks, shadowed_method
from .quantized import rounds_activations
from .support import TESTED_FAMILIES, UnsupportedTargetError
from .weights import is_plain_tensor, modules_of, tensors_of

if TYPE_CHECKING:
    from .target import Target

__all__ = ["needs_probe", "probe", "replaced_function"]

# Models that have passed, and what their passing depended on.
_PROBED: weakref.WeakKeyDictionary[nn.Module, tuple] = weakref.WeakKeyDictionary()
_PROBE_TOKENS, _PROBE_PROMPT, _PROBE_ACCEPTED = 24, 8, 11  # the prompt, and where the first block is cut


def replaced_function(twin: nn.Module, functions: Functions) -> str:
    """Return the name of a function of the forward pass that is not transformers' or torch's, or an empty string."""
    return functions.replaced or shadowed_method(twin, functions.names)


def _hooks(model: nn.Module) -> list[Any]:
    """Return the user's hooks on the forward pass; transformers' own only collect outputs."""
    found = [hook for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)
             for hook in hooks.values()]  # fmt: skip
    return [hook for hook in (*global_hooks(), *found) if not _is_of_transformers(hook)]


def _is_of_transformers(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("transformers.")


def needs_probe(model: PreTrainedModel, replaced: str) -> bool:
    """Return True unless the model is of a tested family and transformers' own throughout, or has passed `probe`.

    Args:
        model: the user's.
        replaced: what `replaced_function` has found.
    """
    basis = _basis(model, replaced)
    is_tested = model.config.model_type in TESTED_FAMILIES and basis == _UNCHANGED
    return not is_tested and _PROBED.get(model) != (functions_of(model).token, *basis)


_UNCHANGED: tuple[str, tuple[int, ...], tuple[int, ...]] = ("", (), ())


def _basis(model: PreTrainedModel, replaced: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return what about a model differs from transformers': its functions, its hooks, its kinds of tensors."""
    hooks = tuple(map(id, _hooks(model)))
    return replaced, hooks, tuple(id(tensor) for tensor in tensors_of(modules_of(model)) if not is_plain_tensor(tensor))


@torch.no_grad()
def probe(target: Target, model: PreTrainedModel, replaced: str, twin: nn.Module) -> None:
    """Compare the logits of a few tokens with the model's own, and remember a model that passes.

    Args:
        target: runs on our attention and cache.
        model: the user's.
        replaced: what `replaced_function` has found.
        twin: a twin of it that keeps the model's own attention. A model with hooks is asked itself: hooks may look for
            its own modules.

    Raises:
        UnsupportedTargetError: the target fails, or its logits differ.
    """
    family = target.config.model_type
    ids = torch.arange(_PROBE_TOKENS, device=target.device)[None] * 7919 % target.embedding_weight.shape[0]
    reference = model if _hooks(model) and not model.training else twin
    logits = reference(input_ids=ids, use_cache=False).logits.float()
    expected = torch.cat([logits[:, :_PROBE_ACCEPTED], logits[:, _PROBE_ACCEPTED + 1 :: 2]], 1)
    try:
        got = _probe_logits(target, ids)
    except UnsupportedTargetError:
        raise
    except Exception as error:
        raise UnsupportedTargetError(
            f"this target is not supported: {family} failed in a trial run with dflash's cache "
            f"and attention: {type(error).__name__}: {error}"
        ) from error
    difference = float((got - expected).norm() / expected.norm())
    # 8-bit activations move by a whole step where a last bit differs: 7e-2 was seen. In 16 bits a recurrence carries
    # roundings from row to row: 0.18 was seen in random models. Wrong wiring gives 0.7 and more.
    is_float32 = target.dtype == torch.float32
    is_rough = rounds_activations(model) or (target.is_recurrent and not is_float32)
    allowed = 0.25 if is_rough else 1e-3 if is_float32 else 5e-2
    if not difference < allowed:
        raise UnsupportedTargetError(
            f"this target is not supported: {family} gives other logits with dflash's cache and "
            f"attention (relative difference {difference:.1e} in a trial run)"
        )
    _PROBED[model] = functions_of(model).token, *_basis(model, replaced)


def _probe_logits(target: Target, ids: Tensor) -> Tensor:
    """Run ``ids`` as a prompt, a block of which only the first rows are right, and a block of which every other row
    is asked for."""
    cache = target.new_cache(1, 2 * _PROBE_TOKENS, _PROBE_TOKENS)
    lengths = torch.full((1,), _PROBE_PROMPT, dtype=torch.int64, device=ids.device)
    first, _ = target.forward(ids[:, :_PROBE_PROMPT], torch.zeros_like(lengths), cache, keep=lengths)
    block = ids[:, _PROBE_PROMPT : 2 * _PROBE_PROMPT].clone()
    accepted = _PROBE_ACCEPTED - _PROBE_PROMPT
    block[:, accepted:] = (block[:, accepted:] + 1) % target.embedding_weight.shape[0]
    none = torch.zeros_like(lengths)  # of a block's rows are kept; the arithmetic is a prompt's, as in the model's pass
    second, _ = target.forward(block, lengths, cache, keep=none)
    rest = ids[:, _PROBE_ACCEPTED:]
    asked = torch.arange(1, rest.shape[1], 2, dtype=torch.int64, device=ids.device)
    third, _ = target.forward(rest, lengths + accepted, cache, asked, keep=none)
    return torch.cat([first, second[:, :accepted], third], 1).float()
