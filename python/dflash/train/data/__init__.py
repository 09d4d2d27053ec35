"""Training data: prompts, rows, batches and blocks."""

from .sources import load_prompts, load_rows, prompt_ids

__all__ = ["load_prompts", "load_rows", "prompt_ids"]
