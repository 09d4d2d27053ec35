"""Write a drafter in another checkpoint layout: `export`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..drafter import (
    MASK_EMBEDDING_FILE,
    DraftConfig,
    Drafter,
    draft_folder,
    from_speculators,
    is_speculators,
    load_draft,
    to_speculators,
)
from ..files import atomic_folder, check_writable, read_architectures, read_json, save_tensors, write_json
from .checkpoint import dflash_section, section_values
from .engines import engine_warnings, speculators_warnings, vllm_command
from .transformers_layout import TENSOR_NAMES, to_transformers

__all__ = ["FORMATS", "export"]

FORMATS = ("published", "speculators", "transformers")


def export(
    draft: str | os.PathLike,
    out: str | os.PathLike,
    layout: str,
    *,
    target: str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> Path:
    """Write a drafter in the published, the speculators or transformers' layout.

    Warns of what vLLM reads differently, and of targets that it does not find by itself.

    Args:
        draft: a folder or a hub repository, in the published or the speculators layout.
        out: a folder that does not exist or is empty. It is written atomically.
        layout: ``"published"`` (the reference package, SGLang, vLLM), ``"speculators"`` (vLLM, speculators) or
            ``"transformers"`` (``generate(speculation_type="dflash")``).
        target: folder or hub repository of the target, which the speculators layout stores. A folder is stored with
            its absolute path.
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
    # 1. Check the arguments
    if layout not in FORMATS:
        raise ValueError(f"the format must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got {layout!r}")
    if layout == "speculators" and not target:
        raise ValueError("the speculators layout stores the target's name: give it (--target)")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder: choose another")
    check_writable(out.parent)
    # 2. Read the drafter, and describe it in the layout
    folder = draft_folder(draft, revision)
    drafter = load_draft(folder, dtype=dtype)
    raw = read_json(folder / "config.json")
    verifier, architectures = _verifier(target) if layout == "speculators" else ("", [])
    config = _config(raw, drafter, layout, verifier, architectures)
    # 3. Write it
    try:
        _write(out, config, drafter, TENSOR_NAMES if layout == "transformers" else {})
    except Exception as error:
        raise OSError(f"{out} could not be written: {' '.join(str(error).split())}") from error
    # 4. Say what engines read differently
    differences = speculators_warnings(raw, drafter.config)
    if layout != "transformers":
        differences += engine_warnings(drafter.config)
    if Path(verifier).is_absolute():
        differences.append(
            "vLLM looks for the target of a speculators checkpoint on the hub only, and this target is a folder: start "
            "it with " + vllm_command(verifier, out.absolute(), drafter.config)
        )
    for difference in differences:
        warnings.warn(difference, UserWarning, stacklevel=2)
    return out


def _write(out: Path, config: dict[str, Any], drafter: Drafter, names: Mapping[str, str]) -> None:
    """Write a checkpoint's folder. ``names`` has the tensors that the layout calls differently."""
    tensors = {names.get(name, name): part.detach().contiguous().clone() for name, part in drafter.state_dict().items()}
    mask_embedding = tensors.pop("mask_embedding", None)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(out) as unfinished:
        save_tensors(tensors, unfinished / "model.safetensors", {"format": "pt"})
        if mask_embedding is not None:  # engines read it from a file of its own
            content = {"embedding": mask_embedding, "mask_token_id": drafter.config.mask_token_id}
            torch.save(content, unfinished / MASK_EMBEDDING_FILE)
        write_json(config, unfinished / "config.json")


def _config(
    raw: Mapping[str, Any], drafter: Drafter, layout: str, verifier: str, architectures: list[str]
) -> dict[str, Any]:
    """Return the ``config.json`` to write for a drafter that was read from ``raw``."""
    dtype = str(drafter.dtype).removeprefix("torch.")
    if layout == "transformers":
        return to_transformers(drafter.config) | {"dtype": dtype}
    if drafter.config.scales_like_target:
        raise ValueError(
            "a Muse Glimmer assistant cannot be exported: the multiplier and the softcap of its logits are the "
            "target's, which no other layout can say"
        )
    if layout == "published" and drafter.config.predicts_from_anchor and drafter.config.dflash2 is not None:
        raise ValueError(
            "the published layout cannot say that the anchor's row of a DFlash 2 drafter predicts too, as this one's "
            "does: keep the speculators layout"
        )
    config = from_speculators(raw) if is_speculators(raw) else dict(raw)
    _state_what_was_read(config, drafter.config)
    if layout == "speculators":
        config = to_speculators(config, drafter.config, verifier, architectures)
    config.pop("torch_dtype", None)
    return config | {"dtype": dtype}


def _state_what_was_read(config: dict[str, Any], read: DraftConfig) -> None:
    """Write what was read from a published ``config`` to where engines look, and into every copy of a key."""
    # 1. What may have been left to defaults, or stood at the top level only, where vLLM does not look
    inner = dict(config.get("dflash_config") or {})
    values = section_values(read)
    for level in (config, inner):
        level.update({key: value for key, value in values.items() if key in level})
    config["dflash_config"] = inner | dflash_section(read)
    config["block_size"] = read.rows_per_pass
    if config.get("rope_theta") is not None:
        config["rope_theta"] = read.rope.theta  # the one in rope_parameters counts, where there are two
    # 2. The one of two keys that SGLang reads
    if config.get("is_causal") is None and inner.get("causal") is not None:
        config["is_causal"] = inner["causal"]
    # 3. The taps as older engines count them: vLLM would take these instead
    config.pop("eagle_aux_hidden_state_layer_ids", None)


def _verifier(target: str) -> tuple[str, list[str]]:
    """Return a target's name as an engine finds it from any folder, and the class names in its config.

    There are no class names for a repository that is not a local folder.
    """
    folder = Path(target).expanduser()
    path = folder / "config.json"
    if not path.is_file():
        return target, []
    return str(folder.resolve()), read_architectures(read_json(path), path)
