"""Try a target on a few tokens: what its passes compute is compared with the user's own model, once per model."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from ..cache import KVCache
from ..state import Tree
from .copies import structural_copy, use_attention, window_of
from .fingerprint import Fingerprint
from .model import UnsupportedTargetError, cache_argument, config_values, first_hook, max_positions, text_config
from .support import rounds_activations

if TYPE_CHECKING:
    from .target import Target

_TOKENS, _PROMPT, _ACCEPTED = 24, 8, 11  # tokens in all, those of the prompt, and where the first block is cut
_MASKED_ROWS = 4  # rows of a prompt whose masks are compared
_LONGEST = 2**20  # positions; longer windows are taken to be of this length


class Verdict(NamedTuple):
    """Result of a trial.

    Attributes:
        fault: what went wrong; empty if the target writes what the user's model writes.
        tree_fault: what went wrong with a tree; empty if nothing did.
    """

    fault: str = ""
    tree_fault: str = ""


class _Remembered(NamedTuple):
    """Verdicts on a model, by whether it ran on the package's ops. They hold while the first two fields do."""

    fingerprint: Fingerprint
    replaced: str
    verdicts: dict[bool, Verdict]


_remembered: weakref.WeakKeyDictionary[nn.Module, _Remembered] = weakref.WeakKeyDictionary()


def forget_trials() -> None:
    """Try every target again, even one that has been tried."""
    _remembered.clear()


def run_trial(target: Target, model: PreTrainedModel, replaced: str) -> Verdict:
    """Return what is wrong with a target that is not stored as int8 yet.

    Takes about seven passes, and none if such a target of the model has been tried.

    Args:
        target: made of ``model``.
        model: the user's.
        replaced: a replaced function that the model runs, or empty.

    Raises:
        UnsupportedTargetError: the model fails without dflash.
    """
    known = _remembered.get(model)
    if known is None or known.replaced != replaced or not known.fingerprint.has_same_values(model):
        known = _remembered[model] = _Remembered(Fingerprint(model), replaced, {})
    if target.runs_ops not in known.verdicts:
        # Without the caller's inference mode and autocast
        with torch.inference_mode(False), torch.autocast(target.device.type, enabled=False), torch.no_grad():
            known.verdicts[target.runs_ops] = _try(target, model)
    return known.verdicts[target.runs_ops]


def _try(target: Target, model: PreTrainedModel) -> Verdict:
    # 1. The model's own forward, on a copy, since the model may be in training mode
    copied, where = structural_copy(model), "on its own"
    ids = torch.arange(_TOKENS, device=target.device)[None] * 7919 % target.embedding_weight.shape[0]
    try:
        # Hooks may look for the model's own modules.
        reference = model if first_hook(model) and not model.training else copied
        logits = reference(input_ids=ids, use_cache=False).logits.float()
        where = "on its own past its window"
        masks = [] if target.makes_masks else _masks_of(copied, ids.device)
    except Exception as error:  # of a stranger's modules
        raise UnsupportedTargetError(
            f"this target is not supported: {text_config(model).model_type} fails {where} in a trial run, without "
            f"dflash: {type(error).__name__}: {error}"
        ) from error
    # 2. Masks at positions past every window, where logits would take long
    for mask in masks:
        if fault := _mask_fault(*mask, target.fused_windows):
            return Verdict(fault)
    if not logits.isfinite().all():
        return Verdict()  # says nothing; calls refuse logits that are not finite
    # 3. A chain, with a part that is rejected
    cache = target.new_cache(1, 2 * _TOKENS, _TOKENS)
    expected = torch.cat([logits[:, :_ACCEPTED], logits[:, _ACCEPTED + 1 :: 2]], 1)
    try:
        difference = _difference(_chain_logits(target, ids, cache), expected)
    except (UnsupportedTargetError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of a stranger's modules
        return Verdict(f"failed in a trial run with dflash's cache and attention: {type(error).__name__}: {error}")
    allowed = _allowed(target, model)
    if not target.ranks.all(difference < allowed):
        return Verdict(
            "gives other logits with dflash's cache and attention (relative difference "
            f"{difference:.1e} in a trial run)"
        )
    # 4. A tree; recurrent layers take none
    closer = allowed if rounds_activations(model) else allowed / 5
    return Verdict(tree_fault="" if target.is_recurrent else _tree_fault(target, ids, cache, closer))


def _allowed(target: Target, model: PreTrainedModel) -> float:
    """Return the relative difference that rounding may make.

    8-bit activations move by a whole step where a last bit differs: 7e-2 was seen. In 16 bits a recurrence carries
    roundings from row to row, and a near-tie may choose another expert: 0.18 was seen in random models. Roundings of
    layers add up like random numbers: 5.5e-2 was seen in a random model of Qwen3-8B's size, on an H100 in bfloat16.
    Wrong wiring gives 0.7 and more.
    """
    num_layers = target.config.num_hidden_layers
    is_float32 = target.dtype == torch.float32
    has_experts = any(key.endswith("experts") and value for key, value in target.config.to_dict().items())
    is_rough = rounds_activations(model) or (not is_float32 and (target.is_recurrent or has_experts))
    return 0.25 if is_rough else 1e-3 if is_float32 else min(0.25, 5e-2 * max(1.0, num_layers / 8) ** 0.5)


def _difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp(min=1e-20))


def _chain_logits(target: Target, ids: Tensor, cache: KVCache) -> Tensor:
    """Run a prompt, a block of which only the first rows are right, and a block whose every other row is asked for."""
    lengths = torch.full((1,), _PROMPT, dtype=torch.int64, device=ids.device)
    first, _ = target.forward(ids[:, :_PROMPT], torch.zeros_like(lengths), cache, keep=lengths)
    block = ids[:, _PROMPT : 2 * _PROMPT].clone()
    accepted = _ACCEPTED - _PROMPT
    block[:, accepted:] = (block[:, accepted:] + 1) % target.embedding_weight.shape[0]
    none = torch.zeros_like(lengths)  # of a block's rows are kept; the arithmetic is a prompt's, as in the model's pass
    second, _ = target.forward(block, lengths, cache, keep=none)
    rest = ids[:, _ACCEPTED:]
    asked = torch.arange(1, rest.shape[1], 2, dtype=torch.int64, device=ids.device)
    third, _ = target.forward(rest, lengths + accepted, cache, asked, keep=none)
    return torch.cat([first, second[:, :accepted], third], 1).float()


# ---------------------------------------------------------------------------------------------- masks


_NOTHING = torch.zeros(1, 1, 1, 1, dtype=torch.float32, device="cpu")  # keys and values that nothing reads


class _LongCache(DynamicCache):
    """The cache that ``generate`` makes of a config, past every window and chunk, for passes in which nothing attends.

    Args:
        config: of the language model.
        rows: of the pass: 1 for a token after a prompt, when layers drop keys; more for the end of a prompt.

    Attributes:
        is_plain: True if neither a key of the config nor a layer of the cache limits what is seen.
        masks: see `_note_mask`.
    """

    is_compileable = False

    def __init__(self, config: Any, rows: int) -> None:
        with torch.device("cpu"):  # its layers make tensors on the default device
            DynamicCache.__init__(self, config=config)
        limits = [value for key in ("sliding_window", "attention_chunk_size") for value in config_values(config, key)]
        self.is_plain = not any([*limits, *self.is_sliding, *getattr(self, "is_dummy", ())])
        self.rows, self.length = rows, min(max(limits, default=0), _LONGEST) + _MASKED_ROWS
        self.masks: list[_Mask] = []
        self.num_keys: dict[int, int] = {}  # by layer
        for layer in self.layers:
            if rows == 1 and hasattr(layer, "get_mask_sizes"):
                layer.update(*[_NOTHING.expand(1, 1, self.length, 1)] * 2)

    def get_seq_length(self, *_: Any) -> int:
        return self.length

    get_query_offset = get_seq_length

    def get_mask_sizes(self, *arguments: Any) -> tuple[int, int]:
        return super().get_mask_sizes(*arguments) if self.rows == 1 else (self.length + self.rows, 0)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **_options: Any) -> tuple[Tensor, Tensor]:
        if self.rows == 1:
            kept, _values = self.layers[layer_idx].update(*[_NOTHING] * 2)
            self.num_keys[layer_idx] = kept.shape[2]
        return key, value


_Mask = tuple[int | None, int, Tensor]  # a layer, the window that its module applies, and [rows, positions] bool


def _mask_fault(layer: int | None, window: int, seen: Tensor, fused_windows: dict[int, int]) -> str:
    """Return how a layer that sees ``seen`` masks otherwise than our attention, or an empty string."""
    rows, positions = seen.shape
    window, slots = fused_windows.get(layer, window), torch.arange(positions, device="cpu")
    distance = slots[-rows:, None] - slots
    if torch.equal(seen, (distance >= 0) & (distance < (window or positions))):
        return ""
    return (
        f"attends over a window of {window or None} in layer {layer} by its modules, and by its config to "
        f"{int(seen[-1].sum())} of {positions} positions {'after' if rows == 1 else 'in'} a prompt: take windows, "
        "chunks and layer types that its modules do not apply out of the config, and make a new model from it"
    )


def _masks_of(copied: nn.Module, device: torch.device) -> list[_Mask]:
    """Read masks off two passes in which nothing attends, at positions past all windows and chunks of the config.

    The first is the end of a prompt, the second a token after it: caches drop keys by the config, whatever modules do.
    """
    masks: list[_Mask] = []
    use_attention(copied, _NOTE_MASK)
    for rows in (_MASKED_ROWS, 1):
        cache = _LongCache(text_config(copied), rows)
        if cache.is_plain:
            break
        for module in copied.modules():
            module.long_cache = cache
        slots = torch.arange(cache.length, cache.length + rows, device=device)[None]
        positions = slots.clamp(max=(max_positions(copied) or _LONGEST) - 1)
        copied(input_ids=slots * 0, position_ids=positions, use_cache=True, **{cache_argument(copied): cache})
        masks += cache.masks
    return masks


def _note_mask(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,  # noqa: ARG001
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Note which of the last positions a layer sees, behind the signature that transformers calls. Returns zeros."""
    cache, layer, mask = module.long_cache, getattr(module, "layer_idx", None), attention_mask
    rows, total = cache.rows, cache.length + cache.rows
    num_keys = cache.num_keys.get(layer, total if mask is None else mask.shape[-1])
    seen = torch.ones(rows, num_keys, dtype=torch.bool, device="cpu").tril(num_keys - rows)
    if mask is not None:
        seen = (mask[0, 0] >= 0).cpu()
    if seen.shape[1] != num_keys:
        raise ValueError(f"layer {layer} has a mask of {seen.shape[1]} positions for {num_keys} keys")
    seen = nn.functional.pad(seen, (total - num_keys, 0))
    cache.masks.append((layer, window_of(module, options) or 0, seen))
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


_NOTE_MASK = "note_mask"
AttentionInterface.register(_NOTE_MASK, _note_mask)
AttentionMaskInterface.register(_NOTE_MASK, eager_mask)


# ---------------------------------------------------------------------------------------------- trees


def _tree_fault(target: Target, ids: Tensor, cache: KVCache, allowed: float) -> str:
    """Run the last ids as a chain, and again among other rows of a tree; return what is wrong with the latter.

    Both blocks have one shape. What depends on rounding has been seen to be equal then, but for a last bit of fp32.
    """
    path, last = ids[:, _ACCEPTED:], ids.shape[1] - _ACCEPTED
    others = (path[:, 1:] + 1) % target.embedding_weight.shape[0]
    between = torch.stack([others, path[:, 1:]], -1).flatten(1)
    lengths = torch.full((1,), _ACCEPTED, dtype=torch.int64, device=ids.device)
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
