"""Serving many requests with one generator."""

from .scheduler import QueueFullError, Scheduler, Ticket
