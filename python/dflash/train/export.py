"""Write a drafter in another checkpoint layout: `export`."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..drafter import MASK_EMBEDDING_FILE, draft_folder, from_speculators, is_speculators, load_draft, to_speculators
from ..files import atomic_folder, check_writable, read_architectures, read_json, save_tensors, write_json
from ..limits import MAX_JSON_BYTES, MAX_TARGET_CONFIG_BYTES

__all__ = ["FORMATS", "export"]

FORMATS = ("published", "speculators")


def export(
    draft: str | os.PathLike,
    out: str | os.PathLike,
    layout: str,
    *,
    target: str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> Path:
    """Write a drafter in the published or the speculators layout.

    Args:
        draft: a folder or a hub repository, in either layout.
        out: a folder that does not exist or is empty. It is written atomically.
        layout: ``"published"`` (the reference package, SGLang, vLLM) or ``"speculators"`` (vLLM, speculators).
        target: folder or hub repository of the target, which the speculators layout stores.
        dtype: dtype of the written weights; None keeps them bit for bit.
        revision: revision of the hub repository.

    Returns:
        ``out``.

    Raises:
        FileNotFoundError: the drafter does not exist.
        ValueError: the drafter cannot be read, ``out`` is not empty, or the layout cannot describe the drafter. Nothing
            is written.
        OSError: the disk is full or cannot be written.
    """
    if layout not in FORMATS:
        raise ValueError(f"the format must be {' or '.join(FORMATS)}, got {layout!r}")
    if layout == "speculators" and not target:
        raise ValueError("the speculators layout stores the target's name: give it (--target)")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder: choose another")
    check_writable(out.parent)
    folder = draft_folder(draft, revision)
    drafter = load_draft(folder, dtype=dtype)
    config = read_json(folder / "config.json", MAX_JSON_BYTES)
    if drafter.config.scales_like_target:
        raise ValueError(
            "a Muse Glimmer assistant cannot be exported: the multiplier and the softcap of its logits are the "
            "target's, which no other layout can say"
        )
    if is_speculators(config):
        config = from_speculators(config)
    if layout == "published" and drafter.config.predicts_from_anchor and drafter.config.dflash2 is not None:
        raise ValueError(
            "the published layout cannot say that the anchor's row of a DFlash 2 drafter predicts too, as this one's "
            "does: keep the speculators layout"
        )
    # State what the checkpoint may have left to defaults.
    taps, mask = list(drafter.config.target_layer_ids), drafter.config.mask_token_id
    config["dflash_config"] = (config.get("dflash_config") or {}) | {"target_layer_ids": taps, "mask_token_id": mask}
    config["block_size"] = drafter.config.rows_per_pass
    if layout == "speculators":
        config = to_speculators(config, drafter.config, target, _architectures(target))
    config["dtype"] = str(drafter.dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in drafter.state_dict().items()}
    mask_embedding = tensors.pop("mask_embedding", None)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_folder(out) as unfinished:
            save_tensors(tensors, unfinished / "model.safetensors", {"format": "pt"})
            if mask_embedding is not None:  # engines read it from a file of its own
                content = {"embedding": mask_embedding, "mask_token_id": mask}
                torch.save(content, unfinished / MASK_EMBEDDING_FILE)
            write_json(config, unfinished / "config.json")
    except Exception as error:
        raise OSError(f"{out} could not be written: {' '.join(str(error).split())}") from error
    return out


def _architectures(target: str) -> list[str]:
    """Return the class names in a target's config; empty for a repository that is not a local folder."""
    path = Path(target).expanduser() / "config.json"
    if not path.is_file():
        return []
    return read_architectures(read_json(path, MAX_TARGET_CONFIG_BYTES), path)
