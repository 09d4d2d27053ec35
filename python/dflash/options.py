"""The options of a generator, checked once, and whether drafter and target fit each other. Nothing is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from .call import check_combination, check_tree
from .drafter import DraftConfig, Drafter, check_draft_weights, load_draft
from .ops import WeightStorage
from .settings import BlockSize, TreeSize, checked, integer_from
from .targets import config_values, embedding_table, max_positions, ranks_in, refusal_of_weights, text_config

_LOOKUP_ROWS = 8  # of a step that has no drafter's block size


@dataclass(frozen=True)
class GeneratorOptions:
    """The options of `Generator`, which documents them."""

    max_length: int
    batch_size: int = 1
    block_size: BlockSize = None
    denoise_steps: int = 1
    compile: bool = False
    graph: bool | Literal["auto"] = "auto"
    fused: bool | Literal["auto"] = "auto"
    prefill_chunk: int = 512
    reuse_prefix: bool = True
    tree: TreeSize = None
    weights: WeightStorage = None
    draft_weights: WeightStorage = None
    prompt_lookup: int | None = None

    def check(self, target: nn.Module) -> None:
        """Raise ValueError or TypeError for a value that is wrong, or that does not suit the target."""
        lowest = {"max_length": 2, "batch_size": 1, "denoise_steps": 1, "prefill_chunk": 1}
        for name, low in lowest.items():
            integer_from(low, name, getattr(self, name))
        tree = checked("tree", self.tree)
        check_combination(tree, checked_block_size(self.block_size), self.denoise_steps)
        check_lookup(self.prompt_lookup, self.block_size, tree)
        positions = max_positions(target)
        if positions is not None and self.max_length > positions:
            raise ValueError(f"max_length {self.max_length} is past the target's max_position_embeddings, {positions}")
        for name, value in (("graph", self.graph), ("fused", self.fused)):
            if value not in (True, False, "auto"):
                raise ValueError(f'{name} must be True, False or "auto", got {value!r}')
        check_weights("weights", self.weights)
        check_weights("draft_weights", self.draft_weights)
        for name in ("graph", "fused", "compile"):
            if getattr(self, name) is True and (count := ranks_in(target)) > 1:
                raise ValueError(f"{name}=True needs a target in one process, this one is spread over {count}")
        device = embedding_table(target).device
        if self.graph is True and device.type != "cuda":
            raise ValueError(f"graph=True needs a target on a GPU, this one is on {device}")

    def check_pair(self, target: nn.Module, draft: nn.Module | None) -> tuple[Drafter | None, int]:
        """Return the loaded drafter, None if nothing drafts, and the block size; raise unless the pair can run so."""
        self.check(target)
        loaded = None if draft is None else load_draft(draft)
        block_size = check_block_size(target, loaded, self.block_size, looks_up=self.prompt_lookup is not None)
        if self.prompt_lookup is not None and block_size == 1:
            raise ValueError(
                f"prompt_lookup={self.prompt_lookup} needs blocks of at least 2 rows, this drafter's have 1"
            )
        loaded = loaded if block_size > 1 else None
        check_draft_weights(self.draft_weights, loaded)
        if self.tree is not None:
            check_tree(target, checked("tree", self.tree), loaded)
        return loaded, block_size


def check_weights(name: str, weights: object) -> None:
    """Raise ValueError unless weights can be stored so."""
    if weights not in ("int8", None):
        raise ValueError(f'{name} must be "int8" or None, got {weights!r}')


def checked_block_size(block_size: object) -> BlockSize:
    """Return the argument ``block_size``; raise ValueError or TypeError if it is wrong for every drafter."""
    if block_size is None:
        return None
    if isinstance(block_size, str):
        if block_size != "auto":
            raise ValueError(f'block_size must be an integer of at least 1, "auto" or None, got {block_size!r}')
        return "auto"
    return integer_from(1, "block_size", block_size)


def check_lookup(prompt_lookup: object, block_size: object, tree: TreeSize) -> None:
    """Raise ValueError or TypeError unless n-grams of this size can be looked up for blocks like these."""
    if prompt_lookup is None:
        return
    integer_from(1, "prompt_lookup", prompt_lookup)
    if tree is not None:
        raise ValueError(f"prompt_lookup={prompt_lookup} drafts chains, got tree={tree!r}: leave one of them out")
    if block_size == 1:
        raise ValueError(f"prompt_lookup={prompt_lookup} needs blocks of at least 2 rows, got block_size=1")


# ----------------------------------------------------------------------------------------------------------------- fit


def check_fit(target: nn.Module, draft: Drafter) -> None:
    """Raise ValueError unless ``draft`` was made for a target like ``target``; the message names both sides."""
    check_config(target, draft.config)
    embedding = embedding_table(target)
    _check_equal("device", draft.device, embedding.device)
    _check_equal("dtype", draft.dtype, embedding.dtype)
    if reason := refusal_of_weights(draft):
        raise ValueError(f"the drafter cannot be run: {reason}")


def check_config(target: nn.Module, config: DraftConfig) -> None:
    """Do what `check_fit` does with a drafter's config; ``target`` may be on the meta device."""
    theirs, embedding = text_config(target), embedding_table(target)
    for key in ("hidden_size", "vocab_size"):
        for value in config_values(theirs, key) if getattr(config, key) is not None else ():
            _check_equal(key, getattr(config, key), value)
    if config.num_target_layers is not None:
        _check_equal("num_target_layers", config.num_target_layers, theirs.num_hidden_layers)
    if config.own_parts and config.vocab_size is not None:
        _check_equal("vocab_size", config.vocab_size, embedding.shape[0])
    taps, last = config.target_layer_ids, theirs.num_hidden_layers - 1
    mask, most = config.mask_token_id, embedding.shape[0] - 1
    _expect(max(taps) <= last, f"it taps layers {list(taps)}, the target has layers 0 .. {last}")
    _expect(0 <= mask <= most, f"its mask_token_id is {mask}, the target embeds ids 0 .. {most}")


def _check_equal(what: str, drafters: object, targets: object) -> None:
    _expect(drafters == targets, f"its {what} is {drafters}, the target's is {targets}")


def _expect(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"the drafter does not fit the target: {what}")


def check_block_size(target: nn.Module, draft: Drafter | None, block_size: BlockSize, *, looks_up: bool = False) -> int:
    """Return the block size of a generator for the two, the largest if it is chosen; raise unless they can run."""
    if draft is not None:
        check_fit(target, draft)
    trained, size = None if draft is None else draft.config.block_size, checked_block_size(block_size)
    own = trained or (_LOOKUP_ROWS if looks_up else 1)
    if size == "auto" and own < 2:
        raise ValueError(
            f"block_size={size!r} needs a drafter of blocks of at least 2 tokens, or prompt_lookup, got "
            f"{'draft=None' if trained is None else f'one of {trained}'}: pass a number, or leave it out"
        )
    if size is None or size == "auto":
        return own
    if trained is not None and size > trained:
        raise ValueError(f"block_size must be at most the drafter's own, {trained}, got {size}")
    return size
