"""Measuring a pair: answers compared with one-token decoding, datasets, reports."""

from .compare import Decoding, GeneratorRunner, add_up
from .demo import ARROW, demo_prompts, encode
