"""Answer prompts and compare: the demo, the benchmark and what they share."""
