"""Let the target write the responses that its drafter learns from: `regenerate`.

The package's own generator (`LocalWriter`) or a server (`ServerWriter`) writes them. They are appended to a JSONL file
as they arrive, so an interrupted run can continue.
"""

from .jobs import Answer, Job, Settings, Summary, Writer, jobs
from .local_writer import LocalWriter
from .run import regenerate
from .server_writer import ServerWriter

__all__ = ["Answer", "Job", "LocalWriter", "ServerWriter", "Settings", "Summary", "Writer", "jobs", "regenerate"]
