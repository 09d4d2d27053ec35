"""Responses written by the target itself, which its drafter learns from."""

from .jobs import Answer, Job, Settings, Summary, Writer, jobs
from .local_writer import LocalWriter
from .run import regenerate
from .server_writer import ServerWriter

__all__ = ["Answer", "Job", "LocalWriter", "ServerWriter", "Settings", "Summary", "Writer", "jobs", "regenerate"]
