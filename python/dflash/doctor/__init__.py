"""What is wrong with a pair: faults of its wiring, found by what other wirings accept."""

from .diagnosis import Diagnosis, Effort, Finding, diagnose
from .faults import FAMILIES
from .prompts import Pair, Prompts, find_prompts
from .wiring import Wiring

__all__ = ["FAMILIES", "Diagnosis", "Effort", "Finding", "Pair", "Prompts", "Wiring", "diagnose", "find_prompts"]
