"""What is wrong with a pair: faults of its wiring, found by what other wirings accept."""

from .checks import Finding
from .diagnosis import Diagnosis, Effort, Patient, diagnose
from .faults import FAMILIES
from .prompts import find_prompts
from .wiring import Wiring

__all__ = ["FAMILIES", "Diagnosis", "Effort", "Finding", "Patient", "Wiring", "diagnose", "find_prompts"]
