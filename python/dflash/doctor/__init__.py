"""What is wrong with a pair: faults of its wiring, found by what other wirings accept."""

from .answers import Pair, Prompts, find_prompts
from .diagnosis import Diagnosis, Effort, Finding, diagnose
from .wiring import FAMILIES, Wiring
