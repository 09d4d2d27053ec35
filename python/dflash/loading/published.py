"""What a command finds by itself to draft: in the target's files, next to them, or published for its model."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from ..drafter import MTP
from ..files import read_json
from ..terminal import printable
from .gguf import find_gguf, read_gguf
from .mtp import has_mtp

_QWEN = ("3.5-4B", "3.5-9B", "3.5-27B", "3.5-35B-A3B", "3.5-397B-A17B", "3.6-27B", "3.6-35B-A3B")
# By the model's name in lower case; docs/drafters.md says which of their targets run.
PUBLISHED = {
    "qwen3-4b": "z-lab/Qwen3-4B-DFlash-b16",
    "qwen3-8b": "z-lab/Qwen3-8B-DFlash-b16",
    "qwen3-14b": "deepseek-ai/dspark_qwen3_14b_block7",
    "qwen3-coder-30b-a3b-instruct": "z-lab/Qwen3-Coder-30B-A3B-DFlash",
    "qwen3-coder-next": "z-lab/Qwen3-Coder-Next-DFlash",
    **{f"qwen{size}".lower(): f"z-lab/Qwen{size}-DFlash" for size in _QWEN},
    "gpt-oss-20b": "z-lab/gpt-oss-20b-DFlash",
    "gpt-oss-120b": "z-lab/gpt-oss-120b-DFlash",
    "llama-3.1-8b-instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    "muse-glimmer-30b": "z-lab/Muse-Glimmer-30B-DFlash2",
    "glm-5.2": "RedHatAI/GLM-5.2-speculator.dspark",
}
_SUFFIX = re.compile(r"(-gguf|[-.](ud-)?i?q\d\w*|[-.]mxfp4\w*|[-.]b?f(16|32)|-fp8|-awq|-gptq\w*)$")


class FoundDraft(NamedTuple):
    """A drafter: a path, or a hub id; ``is_local`` if nothing must be downloaded for it."""

    name: str
    is_local: bool


def find_known_draft(target: str | os.PathLike) -> FoundDraft | None:
    """Return the drafter of a target: the head in its files, one next to them, else the published one.

    Downloads nothing.

    Args:
        target: a folder, a GGUF file or a hub id, as `dflash.load_target` takes it.
    """
    path = Path(target).expanduser()
    # 1. In the files of the target, in its folder, or next to it.
    if has_mtp(target):
        return FoundDraft(MTP, True)
    if path.exists():
        folder = path if path.is_dir() else path.parent
        files = [file for file in sorted(folder.glob("*.gguf")) if file != path and "mmproj" not in file.name]
        near = [file for file in files if _is_draft(file)]
        near += [found for found in (folder / "draft", folder.parent / "draft") if (found / "config.json").is_file()]
        if near:
            return FoundDraft(str(near[0]), True)
    # 2. Published for a model of that name.
    repository = next((PUBLISHED[name] for name in _names(target) if name in PUBLISHED), None)
    if repository is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    return FoundDraft(repository, isinstance(try_to_load_from_cache(repository, "config.json"), str))


def require_known_draft(target: str | os.PathLike) -> str:
    """Return the drafter of `find_known_draft`, which must be on this machine; else raise ValueError."""
    found = find_known_draft(target)
    if found is None:
        where = "none lies next to its files, and none is known to be published for a model of that name"
        raise ValueError(f"--draft auto finds no drafter for {printable(target)}: {where}; name one with --draft")
    if not found.is_local:
        what = f"{found.name} drafts for {printable(target)}, and it is not on this machine"
        raise ValueError(f"--draft auto: {what}: --draft {found.name} downloads it")
    return found.name


def _is_draft(file: Path) -> bool:
    with contextlib.suppress(ValueError):  # a neighbor that cannot be read
        return read_gguf(file).is_draft
    return False


def _names(target: str | os.PathLike) -> list[str]:
    """Return what a target may be called: by its name, by the keys of its file, by its config."""
    path, names = Path(target).expanduser(), [os.fspath(target).rpartition(":")[0] or os.fspath(target)]
    if path.exists():
        names = [path.resolve().name.removesuffix(".gguf")]
        if (file := find_gguf(path)) is not None:
            keys = ("general.base_model.0.repo_url", "general.base_model.0.name", "general.name", "general.basename")
            found = read_gguf(file).metadata
            names += [str(found[key]) for key in keys if key in found]
        elif (path / "config.json").is_file():
            names.append(str(read_json(path / "config.json").get("_name_or_path")))
    short = [name.rstrip("/").rpartition("/")[2].lower().replace(" ", "-").removeprefix("meta-") for name in names]
    return [*short, *(_SUFFIX.sub("", _SUFFIX.sub("", name)) for name in short)]
