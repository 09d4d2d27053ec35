"""One server for all clients."""

from collections.abc import Iterator

import pytest
import scripted
from served import Live, live

from dflash.sampling import LogitRules


@pytest.fixture(scope="session")
def server() -> Iterator[Live]:
    """Serve the model on a port of this machine."""
    service = scripted.service()
    script = scripted.Script(service)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogitRules, "apply", lambda *arguments: script.apply(*arguments))
        with live(service=service) as found:
            yield found
