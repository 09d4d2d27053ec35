"""Runs the application with uvicorn, from a bound socket to an orderly end."""

from __future__ import annotations

import asyncio
import socket
import time

import uvicorn

from .app import build_app
from .service import Service

_AFTER_GRACE = 5.0  # seconds for streams to send their last event
_UNREAD_SECONDS = 60.0  # a client may read nothing, then its connection is closed


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet; port 0 takes a free one. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. The kernel drops one whose data is not taken, also after the application has sent all.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _UNREAD_SECONDS))
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"--host {host} --port {port}: {error.strerror}") from error
    return bound


class Server(uvicorn.Server):
    """A server whose answers may still take ``grace`` seconds at its end; then their streams end in an error."""

    def __init__(self, service: Service, *, api_key: str | None = None, grace: float = 30.0) -> None:
        app = build_app(service, api_key)
        end = int(grace + _AFTER_GRACE) + 1
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=end, server_header=False, lifespan="off"))
        self._service, self._grace = service, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, let answers finish, end the others, and stop the scheduler.

        A second signal ends them at once.
        """
        self._service.is_ending = True
        closing = asyncio.ensure_future(self._close())
        await super().shutdown(sockets)
        await closing

    async def _close(self) -> None:
        scheduler = self._service.scheduler
        finished = asyncio.ensure_future(asyncio.to_thread(scheduler.close))
        until = time.monotonic() + self._grace
        while not (finished.done() or self.force_exit or time.monotonic() > until):
            await asyncio.sleep(0.05)
        await asyncio.to_thread(scheduler.close, drain=False)
        await finished


def run_server(server: Server, bound: socket.socket) -> None:
    """Serve until a signal (SIGINT, SIGTERM) asks for the end."""
    server.run(sockets=[bound])
