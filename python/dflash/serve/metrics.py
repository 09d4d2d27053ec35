"""What the server measures, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .run import Run
from .scheduler import Scheduler

__all__ = ["Metrics"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """Counters of one server, in a registry of their own.

    Args:
        scheduler: tells how many requests wait and run, and the time of each step.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._registry = CollectorRegistry()
        own, block_size = {"registry": self._registry}, scheduler.generator.block_size
        # 1. Requests.
        self.requests = Counter("dflash_requests", "Requests by how they ended.", ["outcome"], **own)
        waiting = Gauge("dflash_answers_waiting", "Answers that wait for a row.", **own)
        waiting.set_function(lambda: scheduler.waiting)
        running = Gauge("dflash_answers_running", "Answers that have a row.", **own)
        running.set_function(lambda: scheduler.running)
        # 2. Tokens.
        self._prompt = Counter("dflash_prompt_tokens", "Prompt tokens of answers that began.", **own)
        self._cached = Counter("dflash_cached_prompt_tokens", "Those that a row's caches already held.", **own)
        self._new = Counter("dflash_new_tokens", "Tokens of answers.", **own)
        self._step_tokens = Histogram(
            "dflash_step_tokens", "Tokens that a step added to an answer: accepted drafts and the bonus token.",
            buckets=range(1, block_size + 1), **own,
        )  # fmt: skip
        # 3. Times.
        self._first = Histogram(
            "dflash_first_token_seconds", "From a request to its first token.", buckets=_SECONDS, **own
        )
        self._request = Histogram("dflash_request_seconds", "From a request to its end.", buckets=_SECONDS, **own)
        step = Histogram("dflash_step_seconds", "Time of a step of all rows.", buckets=_STEP_SECONDS, **own)
        scheduler.on_step = step.observe

    def ended(self, run: Run, outcome: str) -> None:
        """Take note that a request has ended: ``completed``, ``failed`` or ``cancelled``."""
        self.requests.labels(outcome).inc()
        self._request.observe(run.seconds())
        if run.first_token_seconds is not None:
            self._first.observe(run.first_token_seconds)
        for answer in run.answers:
            if (found := answer.statistics) is None:
                continue  # it never began
            self._prompt.inc(answer.prompt_tokens)
            self._cached.inc(answer.cached_tokens)
            self._new.inc(answer.new_tokens)
            for tokens in found.acceptance_lengths[0]:
                self._step_tokens.observe(tokens)

    def page(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)
