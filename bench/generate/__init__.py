"""Whole generations: the runners, the table of their results, and its plot."""
