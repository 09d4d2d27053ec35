"""The doors from transformers: its ``generate`` running our loop, and our drafter in its assisted generation."""

from .assistant import as_assistant
from .generation import custom_generate

__all__ = ["as_assistant", "custom_generate"]
