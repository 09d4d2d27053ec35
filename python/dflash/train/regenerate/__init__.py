"""Responses written by the target itself, which its drafter learns from: `regenerate`.

They come from the package's own generator (`LocalWriter`) or from a server (`ServerWriter`) and are
appended to a JSONL file as they come, so a run that was stopped continues where it was.
"""

from .jobs import Answer, Job, Settings, Summary, Writer, jobs
from .local_writer import LocalWriter
from .run import regenerate
from .server_writer import ServerWriter

__all__ = ["Answer", "Job", "LocalWriter", "ServerWriter", "Settings", "Summary", "Writer", "jobs", "regenerate"]
