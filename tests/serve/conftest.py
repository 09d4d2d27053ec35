"""One service of the pair per file, in this process and on a port of this machine."""

from collections.abc import Iterator
from typing import Any

import pytest
from served import Live, live, serving

from dflash_serve.service import Service


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def server(service) -> Iterator[Live]:
    """Serve ``service`` on a port."""
    with live(service=service) as found:
        yield found


@pytest.fixture(scope="module")
def client(server) -> Iterator[Any]:
    """Return OpenAI's client for ``server``."""
    import openai  # not every environment that serves has it

    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as found:
        yield found
