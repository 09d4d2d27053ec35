"""Measuring a pair: answers compared with one-token decoding, datasets, reports."""

from ..config import Decoding
from .compare import GeneratorRunner, add_up
from .demo import ARROW, demo_prompts, encode
