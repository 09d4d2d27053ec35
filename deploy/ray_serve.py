"""Replicas of ``dflash serve`` under Ray Serve: each starts a server of its own and passes requests on to it.

pip install 'ray[serve]' httpx
DFLASH_MODEL=Qwen/Qwen3-8B serve run deploy.ray_serve:replicas
"""

import socket
import subprocess
import time
from collections.abc import AsyncIterator

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve

app = FastAPI()  # what its routes use must stand before the class: Ray keeps a copy of what there is then
_OF_CONNECTION = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}  # headers


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


# As many requests as --rows and --queue together
@serve.deployment(num_replicas=2, max_ongoing_requests=68, ray_actor_options={"num_cpus": 1})
@serve.ingress(app)
class Replica:
    """One server. Its options are variables (``DFLASH_ROWS``), so that all replicas have the same."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(["dflash", "serve", "--host", "127.0.0.1", "--port", str(port)])
        self._client = httpx.AsyncClient(base_url=url, timeout=None)
        while not self._is_loaded(url):  # until then, Ray asks the others
            self.check_health()
            time.sleep(0.5)

    @staticmethod
    def _is_loaded(url: str) -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def check_health(self) -> None:
        """Ray calls it: a replica whose server has ended is replaced."""
        if self._process.poll() is not None:
            raise RuntimeError(f"dflash serve has ended with code {self._process.returncode}: see its log")

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def forward(self, path: str, request: Request) -> StreamingResponse:
        """Pass a request on, and its answer back as it comes."""
        headers = {name: value for name, value in request.headers.items() if name not in _OF_CONNECTION}
        body = await request.body()
        asked = self._client.build_request(request.method, f"/{path}", headers=headers, content=body)
        answer = await self._client.send(asked, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name not in _OF_CONNECTION}
        return StreamingResponse(_pieces(answer), answer.status_code, kept)

    def __del__(self) -> None:
        self._process.terminate()


replicas = Replica.bind()
