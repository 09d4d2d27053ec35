"""The server's address: taken before anything slow is imported, and answered with 503 while models are loaded."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_UNREAD_SECONDS = 60.0  # a client may read nothing, then its connection is closed
_MAX_BODY = 4 * 2**20  # bytes that are read before the answer: a client that still writes would not see it
_LOADING = (
    b'{"status": "loading", "error": {"message": "the model is being loaded: try again later", '
    b'"type": "server_error", "param": null, "code": "loading"}}'
)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet; port 0 takes a free one. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. The kernel drops one whose data is not taken, also after the application has sent all.
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # not on macOS
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _UNREAD_SECONDS))
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"--host {host} --port {port}: {error.strerror}") from error
    return bound


class _Refusal(BaseHTTPRequestHandler):
    server: Port
    timeout = 5  # seconds for a client to send its request

    def _refuse(self) -> None:
        length = self.headers.get("Content-Length", "")
        self.rfile.read(min(int(length) if length.isdigit() else 0, _MAX_BODY))
        origin = next((each for each in ("*", self.headers.get("Origin")) if each in self.server.origins), None)
        self.send_response(200 if origin and self.command == "OPTIONS" else 503)
        if origin:
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Vary", "Origin")
            self.send_header("Access-Control-Allow-Methods", "*")
            self.send_header("Access-Control-Allow-Headers", "*, authorization")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(_LOADING)))
        self.send_header("Retry-After", "1")
        self.send_header("Refresh", "1")  # of a browser that asks for the page
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else _LOADING)

    do_GET = do_HEAD = do_POST = do_OPTIONS = do_PUT = do_PATCH = do_DELETE = _refuse

    def log_message(self, *_: object) -> None:
        pass


class Port(ThreadingHTTPServer):
    """A port of this machine that answers every request with 503 until it is handed over.

    Pages of ``origins`` can read that; ``"*"`` is any. As a context manager, it closes the socket at the end.

    Raises:
        OSError: it cannot be bound.
    """

    request_queue_size = 128

    def __init__(self, host: str, port: int, origins: Sequence[str] = ()) -> None:
        super().__init__((host, port), _Refusal, bind_and_activate=False)
        self.origins = origins
        self.socket.close()
        self.socket = bind(host, port)
        self.server_activate()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def hand_over(self) -> socket.socket:
        """Return the socket, which goes on listening."""
        self.shutdown()
        self._thread.join()
        return self.socket

    def server_close(self) -> None:
        """Close the socket, whether it was handed over or not."""
        self.hand_over().close()

    def handle_error(self, *_: object) -> None:
        """Say nothing: the client has gone, or has sent no request."""
