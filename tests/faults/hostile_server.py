"""A server on this machine that answers with whatever bytes a test asks for, as slowly as it asks for."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator

Reply = bytes | Callable[[socket.socket], None]


def completion(text: object = "w9", finish_reason: object = "stop", **fields: object) -> dict:
    """Return a whole and correct answer to a raw prompt, with some fields replaced."""
    choice = {"text": text, "finish_reason": finish_reason, "token_ids": [9, 1]}
    return {"choices": [choice], "prompt_token_ids": [7], "usage": {"completion_tokens": 2}} | fields


def http(body: object, status: str = "200 OK", *headers: str) -> bytes:
    """Return the bytes of an HTTP answer. A body that is not bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + content


class HostileServer:
    """Answers every request with ``reply``: bytes, or a function that writes to the connection, which then ends.

    Attributes:
        url: root of the API.
        requests: bytes of every request.
        sent: bytes that `send` has written.
    """

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"
        self.requests: list[bytes] = []
        self.reply: Reply = http(completion())
        self.sent = 0
        self.closing = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=self._serve, args=(self.listener.accept()[0],), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while request := _read_request(connection):
                self.requests.append(request)
                if callable(self.reply):
                    self.reply(connection)
                    return
                connection.sendall(self.reply)

    def send(self, connection: socket.socket, data: bytes) -> None:
        """Write ``data``; raises once the client or the test is done."""
        if self.closing.is_set():
            raise ConnectionAbortedError
        connection.sendall(data)
        self.sent += len(data)

    def close(self) -> None:
        """End every connection."""
        self.closing.set()
        self.listener.close()


def _read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (part := connection.recv(65536)):
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextlib.contextmanager
def hostile_server() -> Iterator[HostileServer]:
    """Run a server until the block ends."""
    server = HostileServer()
    try:
        yield server
    finally:
        server.close()
