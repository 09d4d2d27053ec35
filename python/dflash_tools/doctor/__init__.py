"""Diagnosis of a pair: faults of its wiring, found by what other wirings accept."""

from .diagnosis import Diagnosis, Finding, Pair, Prompts, diagnose, find_prompts
from .wiring import FAMILIES, Wiring
