"""What drafts a block of tokens."""

from .sharpness import LEVELS, AutoSharpness

__all__ = ["LEVELS", "AutoSharpness"]
