"""The parts that a drafter may bring itself instead of sharing the target's: embedding, head and mask embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .. import ops
from ..limits import MAX_MASK_EMBEDDING_BYTES
from ..terminal import listed, printable, shortened
from ..weight_files import read_torch_file

if TYPE_CHECKING:
    from .config import DraftConfig

__all__ = [
    "MASK_EMBEDDING_FILE",
    "add_own_parts",
    "check_token_map",
    "config_of_stored_parts",
    "own_embeddings",
    "own_head",
    "read_mask_embedding",
    "scatter_to_vocabulary",
    "share_equal_parts",
    "target_ids",
]

MASK_EMBEDDING_FILE = "mask_embedding.pt"
_TENSORS = {"embed_tokens": "embed_tokens.weight", "lm_head": "lm_head.weight", "mask_embedding": "mask_embedding"}


def config_of_stored_parts(config: DraftConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> DraftConfig:
    """Return ``config`` with the parts that a checkpoint stores. ``shapes`` are by the drafter's names.

    Raises:
        ValueError: the config does not say what size a part has, or a part without which it cannot be used is missing.
    """
    parts = tuple(part for part, name in _TENSORS.items() if part in config.own_parts or name in shapes)
    if config.draft_vocab_size is None and "d2t" in shapes:
        raise ValueError(
            f"{source}: tensor d2t maps a reduced vocabulary to the target's, and the config states none: "
            "draft_vocab_size must be below vocab_size"
        )
    if config.draft_vocab_size is not None and "lm_head" not in parts:
        raise ValueError(
            f"{source}: a drafter with a reduced vocabulary (draft_vocab_size {config.draft_vocab_size}) must have its "
            "own head, and tensor lm_head.weight is missing"
        )
    if config.vocab_size is None and {"embed_tokens", "lm_head"} & set(parts):
        own = listed([_TENSORS[part] for part in parts if part != "mask_embedding"])
        raise ValueError(f"{source}: the config must state vocab_size, since the drafter has its own {own}")
    return dataclasses.replace(config, own_parts=parts)


def add_own_parts(drafter: nn.Module, config: DraftConfig, like: Tensor) -> None:
    """Give a drafter the tensors of its own parts, uninitialized, under the names that checkpoints use."""
    for part, rows in (("embed_tokens", config.vocab_size), ("lm_head", config.draft_vocab_size or config.vocab_size)):
        if part in config.own_parts:
            module = nn.Module()
            module.weight = nn.Parameter(like.new_empty(rows, config.hidden_size), requires_grad=False)
            drafter.add_module(part, module)
    if "mask_embedding" in config.own_parts:
        drafter.mask_embedding = nn.Parameter(like.new_empty(config.hidden_size), requires_grad=False)
    if config.draft_vocab_size is not None:
        drafter.register_buffer("d2t", like.new_empty(config.draft_vocab_size, dtype=torch.int64))


# ---------------------------------------------------------------------------------------------- files


def read_mask_embedding(path: Path, config: DraftConfig) -> Tensor:
    """Read ``mask_embedding.pt``: a tensor, or a dict with ``embedding`` and perhaps ``mask_token_id``.

    Raises:
        ValueError: the file holds something else, or a mask embedding of another drafter.
    """
    where = printable(path)
    if (size := path.stat().st_size) > MAX_MASK_EMBEDDING_BYTES:
        raise ValueError(f"{where}: must have at most {MAX_MASK_EMBEDDING_BYTES} bytes, got {size}")
    try:
        content = read_torch_file(path)
    except Exception as error:  # torch raises many types for empty, truncated or foreign files
        raise ValueError(f"{where}: cannot be read: {printable(shortened(str(error)))}") from error
    mask, tensor = None, content
    if isinstance(content, dict):
        mask, tensor = content.get("mask_token_id"), content.get("embedding")
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise ValueError(f"{where}: must hold a floating tensor, or a dict with one under 'embedding'")
    if mask is not None and mask != config.mask_token_id:
        raise ValueError(f"{where}: its mask_token_id is {shortened(mask)}, and the config's is {config.mask_token_id}")
    if tensor.numel() != config.hidden_size:
        raise ValueError(
            f"{where}: the mask embedding must have hidden_size = {config.hidden_size} values, got "
            f"{shortened(list(tensor.shape))}"
        )
    return tensor.flatten()


def check_token_map(config: DraftConfig, d2t: Tensor, source: str) -> None:
    """Raise ValueError unless each draft token has a token of the target's, and no two have the same.

    Args:
        config: the drafter's.
        d2t: ``[draft_vocab]`` int64, what to add to each draft token.
        source: what error messages call the checkpoint.
    """
    ids = target_ids(d2t)
    outside = (ids < 0) | (ids >= config.vocab_size)
    if outside.any():
        index = int(outside.nonzero()[0])
        raise ValueError(
            f"{source}: d2t must map each of the {config.draft_vocab_size} draft tokens to a token below vocab_size "
            f"{config.vocab_size}, and it maps {index} to {int(ids[index])}"
        )
    if len(ids.unique()) < len(ids):
        raise ValueError(f"{source}: d2t must map each draft token to another token, and it maps some to the same")


# ---------------------------------------------------------------------------------------------- what a step uses


def own_embeddings(drafter: nn.Module, table: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the drafter's own embeddings, or else ``table``, and its own embedding of the mask or None."""
    own = drafter.config.own_parts
    table = drafter.embed_tokens.weight if "embed_tokens" in own else table
    return table, drafter.mask_embedding if "mask_embedding" in own else None


def own_head(drafter: nn.Module, hidden: Tensor) -> Tensor:
    """Return the logits of the drafter's own head, ``[..., draft_vocab]``."""
    return ops.linear(hidden, drafter.lm_head.weight)


def scatter_to_vocabulary(drafter: nn.Module, logits: Tensor) -> Tensor:
    """Return logits over the target's vocabulary, -inf for tokens that the drafter does not know."""
    full = logits.new_full((*logits.shape[:-1], drafter.config.vocab_size), -torch.inf)
    return full.index_copy_(-1, target_ids(drafter.d2t), logits)


def target_ids(d2t: Tensor) -> Tensor:
    """Return the target's id of each token of a reduced vocabulary: ``d2t`` stores the difference."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


@torch.no_grad()
def share_equal_parts(drafter: nn.Module, embedding: Tensor, head: nn.Module) -> None:
    """Let own parts that equal the target's be the target's tensors, so that they are in memory once.

    Args:
        drafter: its parameters keep their names and values.
        embedding: ``[vocab, hidden]``, the target's raw input embeddings.
        head: the target's.
    """
    for part, theirs in (("embed_tokens", embedding), ("lm_head", getattr(head, "weight", None))):
        if part in drafter.config.own_parts:
            ours = getattr(drafter, part).weight
            if _is_plain(theirs) and ours.data_ptr() != theirs.data_ptr() and _equal(ours, theirs):
                ours.data = theirs.data
                drafter.shared_parts.add(part)


@torch.no_grad()
def keep_own_parts(drafter: nn.Module) -> None:
    """Give parts that are the target's tensors memory of their own again, before something is written to them."""
    for part in drafter.shared_parts:
        weight = getattr(drafter, part).weight
        weight.data = weight.data.clone()
    drafter.shared_parts.clear()


def _is_plain(tensor: Tensor | None) -> bool:
    """Return False for tensors that are spread, quantized, without values, or made in inference mode."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and not tensor.is_inference()


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    alike = (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    return alike and torch.equal(ours, theirs)
