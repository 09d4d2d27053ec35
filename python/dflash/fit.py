"""Whether a target and a drafter can be run together, with a generator's options. Nothing is run."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn

from . import targets
from .drafter import MAX_MTP_ROWS, MTP, DraftConfig, Drafter, MtpHead, check_draft_weights
from .options import GeneratorArguments, resolve_options
from .settings import TreeSize

_LOOKUP_ROWS = 8  # of a step that has no drafter's block size


class CheckedPair(NamedTuple):
    """A target and a drafter that can be run together.

    Attributes:
        target: the user's model, without wrappers.
        draft: the loaded drafter, or the target's own head; None if nothing drafts.
        block_size: rows of a block, the most if they are chosen as a call proceeds.
        options: every option, checked.
    """

    target: nn.Module
    draft: Drafter | MtpHead | None
    block_size: int
    options: GeneratorArguments


@torch.inference_mode(False)  # a drafter that is loaded here is also written outside of inference mode
def check_pair(target: nn.Module, draft: nn.Module | Literal["mtp"] | None, given: Mapping[str, object]) -> CheckedPair:
    """Check all that a generator needs before anything is made; ``target`` has passed `check_target`."""
    if given.get("max_length") is None:
        raise TypeError("Generator needs max_length: the most tokens of a prompt and its answer together")
    options = resolve_options(given)
    # 1. The target
    positions, count = targets.max_positions(target), targets.ranks_in(target)
    device = targets.embedding_table(target).device
    if positions is not None and options["max_length"] > positions:
        length = options["max_length"]
        raise ValueError(f"max_length {length} is past the target's max_position_embeddings, {positions}")
    for name in ("graph", "fused", "compile"):
        if options[name] is True and count > 1:
            raise ValueError(f"{name}=True needs a target in one process, this one is spread over {count}")
    if options["graph"] is True and device.type != "cuda":
        raise ValueError(f"graph=True needs a target on a GPU, this one is on {device}")
    # 2. The drafter
    from .loading import load_draft, load_mtp  # the core's one door to the readers of files; it takes modules too

    lookup, loaded = options["prompt_lookup"], load_mtp(target) if draft == MTP else draft
    if loaded is not None and not isinstance(loaded, MtpHead):
        loaded = load_draft(loaded)
    if loaded is not None:
        check_fit(target, loaded)
    block_size = _block_size_of(loaded, options)
    if lookup is not None and block_size == 1:
        raise ValueError(f"prompt_lookup={lookup} needs blocks of at least 2 rows, this drafter's have 1")
    loaded = loaded if block_size > 1 else None
    if isinstance(loaded, MtpHead):
        for lacking in ("draft_weights", "drafter_window", "on_answer"):
            check_is_unset(lacking, options[lacking], None)
        check_is_unset("denoise_steps", options["denoise_steps"], 1)
    else:
        check_draft_weights(options["draft_weights"], loaded)
    if (window := options["drafter_window"]) is not None and loaded is None:
        raise ValueError(f"drafter_window={window} needs a drafter, got draft=None or block_size=1: leave it out")
    if options["tree"] is not None:
        check_tree(target, options["tree"], loaded)
    if options["on_answer"] is not None and (loaded is None or options["tree"] is not None):
        raise ValueError("on_answer needs a drafter with blocks of at least 2 rows, and tree=None")
    if options["weights"] is not None:
        targets.check_int8(target)
    return CheckedPair(target, loaded, block_size, options)


def check_is_unset(name: str, value: object, unset: object) -> None:
    """Raise ValueError for an option or setting that a target's own head does not have, if it is set."""
    if value != unset:
        raise ValueError(f"{name}={value!r} needs a DFlash drafter, got draft={MTP!r}: leave it out")


def check_fit(target: nn.Module, draft: Drafter | MtpHead) -> None:
    """Raise ValueError unless ``draft`` was made for a target like ``target``; the message names both sides."""
    check_config(target, draft.config)
    embedding = targets.embedding_table(target)
    _check_equal("device", draft.device, embedding.device)
    _expect(
        draft.dtype == embedding.dtype,
        f"its dtype is {draft.dtype}, the target's is {embedding.dtype}: load it with dtype={embedding.dtype} "
        "(dflash.load_draft), which never changes the text",
    )
    if reason := targets.refusal_of_weights(draft):
        raise ValueError(f"the drafter cannot be run: {reason}")


def check_config(target: nn.Module, config: DraftConfig) -> None:
    """Do what `check_fit` does with a drafter's config; ``target`` may be on the meta device."""
    theirs, embedding = targets.text_config(target), targets.embedding_table(target)
    for value in targets.config_values(theirs, "hidden_size"):
        _check_equal("hidden_size", config.hidden_size, value)
    if config.num_target_layers is not None:
        _check_equal("num_target_layers", config.num_target_layers, theirs.num_hidden_layers)
    if config.vocab_size is not None:
        _check_vocabulary(config, [*targets.config_values(theirs, "vocab_size"), embedding.shape[0]])
    taps, last = config.target_layer_ids, theirs.num_hidden_layers - 1
    mask, most = config.mask_token_id, embedding.shape[0] - 1
    _expect(max(taps) <= last, f"it taps layers {list(taps)}, the target has layers 0 .. {last}")
    _expect(0 <= mask <= most, f"its mask_token_id is {mask}, the target embeds ids 0 .. {most}")


def _check_vocabulary(config: DraftConfig, rows: Sequence[int]) -> None:
    """Refuse a drafter with rows for tokens unless the target has as many. Others read none but the target's."""
    if config.has_token_rows:
        for count in rows:
            _check_equal("vocab_size", config.vocab_size, count)
    elif config.vocab_size not in rows:
        warnings.warn(
            f"the drafter's vocab_size is {config.vocab_size}, the target's is {rows[0]}: it has no rows for tokens, "
            "so it runs. Drafts are good if the same tokenizer is behind both, and rows were only added or padded",
            stacklevel=2,
        )


def _check_equal(what: str, drafters: object, needed: object) -> None:
    _expect(drafters == needed, f"its {what} is {drafters}, the target's is {needed}")


def _expect(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"the drafter does not fit the target: {what}")


def _block_size_of(draft: Drafter | MtpHead | None, options: GeneratorArguments) -> int:
    """Return the block size of a generator with this drafter, the largest if it is chosen."""
    trained, size = None if draft is None else draft.config.block_size, options["block_size"]
    own = trained or (1 if options["prompt_lookup"] is None else _LOOKUP_ROWS)
    if size == "auto" and own < 2:
        raise ValueError(
            f"block_size={size!r} needs a drafter of blocks of at least 2 tokens, or prompt_lookup, got "
            f"{'draft=None' if trained is None else f'one of {trained}'}: pass a number, or leave it out"
        )
    if size is None or size == "auto":
        return own
    most = MAX_MTP_ROWS if isinstance(draft, MtpHead) else trained
    if most is not None and size > most:
        raise ValueError(f"block_size must be at most the drafter's own, {most}, got {size}")
    return size


def check_tree(target: nn.Module, tree: TreeSize, draft: object) -> None:
    """Raise ValueError if trees cannot be drafted, or not be verified.

    ``draft`` is the drafter, or what it will be loaded from; None for none.
    """
    if draft is None:
        raise ValueError(f"tree={tree!r} needs a drafter to grow from, got draft=None or block_size=1: pass tree=None")
    if draft == MTP or isinstance(draft, MtpHead):
        check_is_unset("tree", tree, None)
    if targets.has_recurrent_layers(target):
        raise ValueError(
            f"tree={tree!r} needs a target whose layers are all attention, {type(target).__name__} has recurrent "
            "layers: these take chains only, pass tree=None"
        )
