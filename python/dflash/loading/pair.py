"""The trained pair inside the package: where it is, how it is loaded, and how it reads a prompt.

A pair is a folder with ``target/``, ``draft/`` and held-out prompts in ``prompts.jsonl``. The package's has a drafter
of DFlash 2 in ``draft/``, and one of the first generation in ``draft-dflash/``, for what takes no other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from ..drafter import Drafter
from .drafters import load_draft
from .pretrained import Pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAIR = Path(__file__).parents[1] / "pair"
FIRST_GENERATION = "draft-dflash"


def demo_pair(
    folder: str | Path = PAIR, *, dtype: torch.dtype = torch.float32, generation: Literal[1] | None = None
) -> tuple[PreTrainedModel, Drafter, PreTrainedTokenizerBase]:
    """Load the target, the drafter and the tokenizer that come with the package, on the CPU.

    >>> target, draft, tokenizer = dflash.demo_pair()
    >>> question = [{"role": "user", "content": "add 48213 and 90377"}]
    >>> ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt").input_ids
    >>> dflash.generate(target, draft, ids, max_new_tokens=200)

    Args:
        folder: another pair in the same layout.
        dtype: of both models.
        generation: 1 for a drafter of the first generation, which `dflash.as_assistant` needs; None for the better
            one, of DFlash 2.

    Raises:
        FileNotFoundError: ``folder`` holds no pair.
        ValueError: a file in it is broken, or it needs Python code of its own.
    """
    draft = load_draft(draft_folder(check_folder(folder), generation), dtype=dtype)
    target, tokenizer = load_target_of(folder, dtype=dtype)
    return target, draft, tokenizer


def draft_folder(folder: str | Path = PAIR, generation: Literal[1] | None = None) -> Path:
    """Return the folder of a pair's drafter; ``generation`` is that of `demo_pair`."""
    first = Path(folder) / FIRST_GENERATION
    return first if generation == 1 and first.exists() else Path(folder) / "draft"


def load_target_of(
    folder: str | Path, *, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a pair's target and tokenizer: from the folder only, and without running any code in it."""
    files = Pretrained(Path(folder) / "target", advice="a pair has none", local_files_only=True)
    return files.load_target(dtype), files.load_tokenizer()


def check_folder(folder: str | Path) -> Path:
    folder = Path(folder)
    for name in ("target", "draft", "prompts.jsonl"):
        if not (folder / name).exists():
            raise FileNotFoundError(f"no pair in {folder}: there is no {name}; recipes/demo_pair makes one")
    return folder
