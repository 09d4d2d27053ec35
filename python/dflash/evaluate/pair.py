"""The pair that comes inside the package.

The pair is a folder with ``target/``, ``draft/`` and ``prompts.jsonl``, one object a line: ``prompt``, ``answer`` (null
where many are right) and ``kind``. No step of either model's training saw these prompts.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..drafter import Drafter, load_draft
from ..files import read_jsonl
from .prompts import text_ids

__all__ = ["ARROW", "PAIR", "Prompt", "demo_pair", "demo_prompts", "encode"]

PAIR = Path(__file__).parents[1] / "pair"
ARROW = "\n=>\n"  # how the package's prompts end


class Prompt(NamedTuple):
    """A held-out prompt, its one right answer if it has one, and what kind of task it is."""

    text: str
    answer: str | None = None
    kind: str = ""


def demo_pair(folder: str | Path = PAIR, *, dtype: torch.dtype = torch.float32) -> tuple[Any, Drafter, Any]:
    """The target, its drafter and its tokenizer, as they come with the package; on the CPU.

    >>> target, draft, tokenizer = dflash.demo_pair()
    >>> ids = dflash.demo.encode(tokenizer, dflash.demo.demo_prompts()[0].text)
    >>> dflash.generate(target, draft, ids, max_new_tokens=200)

    Raises:
        FileNotFoundError: there is no pair in ``folder``.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    folder = _existing(folder)
    draft = load_draft(folder / "draft", dtype=dtype)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=dtype, local_files_only=True).eval()
    finally:
        if shown:
            logging.enable_progress_bar()
    return target, draft, AutoTokenizer.from_pretrained(folder / "target", local_files_only=True)


def demo_prompts(folder: str | Path = PAIR) -> list[Prompt]:
    """The pair's held-out prompts, one of each kind, then the second of each kind, and so on.

    Raises:
        FileNotFoundError: there is no pair in ``folder``.
    """
    kinds: dict[str, list[Prompt]] = {}
    for _, _, record in read_jsonl(_existing(folder) / "prompts.jsonl"):
        prompt = Prompt(record["prompt"], record.get("answer"), record.get("kind") or "")
        kinds.setdefault(prompt.kind, []).append(prompt)
    return [prompt for row in itertools.zip_longest(*kinds.values()) for prompt in row if prompt is not None]


def _existing(folder: str | Path) -> Path:
    folder = Path(folder)
    for name in ("target", "draft", "prompts.jsonl"):
        if not (folder / name).exists():
            raise FileNotFoundError(
                f"no pair in {folder}: there is no {name}; python -m dflash.train.demo_pair makes one"
            )
    return folder


def encode(tokenizer: Any, text: str) -> Tensor:
    """``text`` as the pair was trained to read it: ``[1, length]`` ids behind the BOS token."""
    return torch.tensor([text_ids(tokenizer, text, bos=True)])
