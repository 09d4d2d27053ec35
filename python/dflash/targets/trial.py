"""A trial run of targets that no test covers: a few tokens, compared with the model's own logits."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..cache import KVCache
from ..state import Tree
from .functions import Functions, functions_of, global_hooks, shadowed_method
from .quantized import rounds_activations
from .support import TESTED_FAMILIES, UnsupportedTargetError
from .weights import is_plain_tensor, modules_of, tensors_of

if TYPE_CHECKING:
    from .target import Target

__all__ = ["needs_probe", "probe", "replaced_function", "tree_obstacle"]


class _Passed(NamedTuple):
    """What is remembered of a model that has passed.

    Attributes:
        basis: what its passing depended on.
        tree_obstacle: what went wrong with a tree; empty if nothing did.
    """

    basis: tuple
    tree_obstacle: str


_PASSED: weakref.WeakKeyDictionary[nn.Module, _Passed] = weakref.WeakKeyDictionary()
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
    is_tested = model.config.model_type in TESTED_FAMILIES and _differences(model, replaced) == _UNCHANGED
    return not is_tested and _passed(model, replaced) is None


def tree_obstacle(model: PreTrainedModel, replaced: str) -> str:
    """Return what went wrong in the trial run of a tree; empty if it went well, or if a model needs no trial.

    Args:
        model: the user's, of which a `Target` was made.
        replaced: what `replaced_function` has found.
    """
    passed = _passed(model, replaced)
    return "" if passed is None else passed.tree_obstacle


def _passed(model: PreTrainedModel, replaced: str) -> _Passed | None:
    """Return what is remembered of a model's trial if it still holds."""
    passed = _PASSED.get(model)
    return passed if passed is not None and passed.basis == _basis(model, replaced) else None


def _basis(model: PreTrainedModel, replaced: str) -> tuple:
    """Return what the result of a trial depends on."""
    return functions_of(model).token, *_differences(model, replaced)


_UNCHANGED: tuple[str, tuple[int, ...], tuple[int, ...]] = ("", (), ())


def _differences(model: PreTrainedModel, replaced: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
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
    cache = target.new_cache(1, 2 * _PROBE_TOKENS, _PROBE_TOKENS)
    try:
        got = _chain_logits(target, ids, cache)
    except UnsupportedTargetError:
        raise
    except Exception as error:
        raise UnsupportedTargetError(
            f"this target is not supported: {family} failed in a trial run with dflash's cache "
            f"and attention: {type(error).__name__}: {error}"
        ) from error
    difference, allowed = _difference(got, expected), _allowed(target, model)
    if not difference < allowed:
        raise UnsupportedTargetError(
            f"this target is not supported: {family} gives other logits with dflash's cache and "
            f"attention (relative difference {difference:.1e} in a trial run)"
        )
    # Targets with recurrent layers take no tree at all.
    closer = allowed if rounds_activations(model) else allowed / 5
    obstacle = "" if target.is_recurrent else _try_tree(target, ids, cache, closer)
    _PASSED[model] = _Passed(_basis(model, replaced), obstacle)


def _allowed(target: Target, model: PreTrainedModel) -> float:
    """Return the relative difference that rounding may make.

    8-bit activations move by a whole step where a last bit differs: 7e-2 was seen. In 16 bits a recurrence carries
    roundings from row to row: 0.18 was seen in random models. Wrong wiring gives 0.7 and more.
    """
    is_float32 = target.dtype == torch.float32
    is_rough = rounds_activations(model) or (target.is_recurrent and not is_float32)
    return 0.25 if is_rough else 1e-3 if is_float32 else 5e-2


def _difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def _chain_logits(target: Target, ids: Tensor, cache: KVCache) -> Tensor:
    """Run ``ids`` as a prompt, a block of which only the first rows are right, and a block of which every other row
    is asked for."""
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


def _try_tree(target: Target, ids: Tensor, cache: KVCache, allowed: float) -> str:
    """Run the last ids as a chain, and again among other rows of a tree; return what is wrong with the latter.

    Both blocks have one shape. What depends on rounding has been seen to be equal then, but for a last bit of fp32.
    """
    path, last = ids[:, _PROBE_ACCEPTED:], ids.shape[1] - _PROBE_ACCEPTED
    others = (path[:, 1:] + 1) % target.embedding_weight.shape[0]
    between = torch.stack([others, path[:, 1:]], -1).flatten(1)
    lengths = torch.full((1,), _PROBE_ACCEPTED, dtype=torch.int64, device=ids.device)
    block = torch.cat([path[:, :1], between], 1)
    try:
        chain, _ = target.forward(torch.cat([path, others], 1), lengths, cache)
        tree, _ = target.forward(block, lengths, cache, tree=_ladder(last - 1, ids.device))
    except (MemoryError, torch.OutOfMemoryError):
        raise  # says nothing about trees
    except Exception as error:  # whatever it is: chains have run
        return f"failed in a trial run of a tree: {type(error).__name__}: {error}"
    difference = _difference(tree[:, ::2].float(), chain[:, :last].float())
    if difference < allowed:
        return ""
    return f"gave other logits in a trial run of a tree (relative difference {difference:.1e})"


def _ladder(depth: int, device: torch.device) -> Tree:
    """Return a tree of two rows at each depth: the even rows are one path, the odd ones branch off in paths of two."""
    parents = [-1, *(row - 1 if row % 4 == 1 else row - 2 for row in range(1, 2 * depth + 1))]
    ancestors: list[int] = []
    for row, parent in enumerate(parents):
        ancestors.append(1 << row | (ancestors[parent] if row else 0))
    rows = torch.arange(len(parents), device=device)
    ids: dict[str, Any] = {"dtype": torch.int64, "device": device}
    return Tree(torch.tensor([parents], **ids), (rows + 1)[None] // 2, torch.tensor([ancestors], **ids)[..., None])
