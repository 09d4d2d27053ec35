"""Train a drafter for SmolLM2-135M-Instruct: ``python recipes/smollm2 FOLDER``."""
