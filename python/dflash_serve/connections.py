"""Connections of clients: how long and how many may wait for the rest of a request, and those that are half closed."""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_REQUEST_SECONDS = 30.0  # for the head of a request; the body has as long
FILLER = "filler"  # key of the state of a request: bytes that say nothing between two parts of its stream
_ASK_SECONDS = 1.0  # between two questions whether a client is still there
_DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MOST_WAITING = max(8, min(256, _DESCRIPTORS // 4))  # connections without a whole request
BACKLOG = max(4, min(128, _DESCRIPTORS // 8))  # those that are accepted at once


class Connection(H11Protocol):
    """A connection that is closed unless a request arrives, and that a client may close for writing after its request.

    uvicorn waits forever for the rest of a request, and takes the end of what is written for the client's end.
    """

    waiting: dict[Connection, asyncio.TimerHandle]  # of one server, the oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._wait()
        else:
            self._end_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_waiting()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if its request is whole and the answer can still ask whether the client is there."""
        if self.conn.their_state is not h11.DONE or (self.cycle.response_started and not self._filler):
            return False
        self.cycle.keep_alive = False
        self._ask()
        return True

    def _wait(self) -> None:
        if self not in self.waiting and not self.transport.is_closing():
            self.waiting[self] = self.loop.call_later(_REQUEST_SECONDS, self._give_up)
            if len(self.waiting) > MOST_WAITING:
                oldest = next(iter(self.waiting))
                oldest._end_waiting()
                oldest.transport.abort()

    def _end_waiting(self) -> None:
        if (timer := self.waiting.pop(self, None)) is not None:
            timer.cancel()

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # else the body has its own limit
            self.transport.abort()

    @property
    def _filler(self) -> bytes:
        return self.cycle.scope["state"].get(FILLER, b"")

    def _ask(self) -> None:
        """Abort if the client has left: then it resets the connection when something is sent."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        question: h11.Event | None = None
        if self.cycle.response_started and self._filler:
            question = h11.Data(data=self._filler)
        elif not self.cycle.response_started and self.conn.their_http_version == b"1.1":
            # Clients skip any number of these before an answer.
            question = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        if question is not None:
            self.transport.write(self.conn.send(question) or b"")
        self.loop.call_later(_ASK_SECONDS, self._ask)


def connections_of_server() -> type[Any]:
    """Return the class of one server's connections."""
    return type("Connection", (Connection,), {"waiting": {}})
