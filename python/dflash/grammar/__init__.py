"""Grammars that answers must match, around the core: a call carries them, and the engine asks for their masks."""

from .grammar import Grammar
from .masks import GrammarMasks, Matcher, first_banned
