"""What training reads: prompts, rows, batches, blocks."""

from .sources import load_prompts, load_rows, prompt_ids

__all__ = ["load_prompts", "load_rows", "prompt_ids"]
