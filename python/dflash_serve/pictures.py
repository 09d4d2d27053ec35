"""Pictures in requests: read from URLs within bounds, and made into the target's inputs by its processor."""

from __future__ import annotations

import base64
import contextlib
import io
import threading
import time
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import URLError

from torch import Tensor

from dflash.light import terminal

from .requests import ImagePart, Message, bad_request, refusing, refusing_all

# Of one request; bytes are those of a picture's file, pixels those of all together.
MAX_PICTURES, MAX_BYTES, MAX_PIXELS = 16, 16 * 2**20, 2**25
# Other decoders of Pillow start programs, or decode before a picture's size is known.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_SECONDS = 10.0  # to fetch the pictures of a request
_FETCHING = ThreadPoolExecutor(8, "pictures")  # hosts that never answer hold up these threads only
_TURNS = threading.BoundedSemaphore(2)  # pictures that are decoded or prepared at once
_PNG = b"\x89PNG\r\n\x1a\n"
_PIECE = 2**16  # bytes that are read at once
_FIELD = "messages"


class PictureReader:
    """Reads the pictures of conversations.

    Args:
        processor: the target's, of transformers: text and pictures to tensors.
        allows_urls: fetch ``http`` and ``https`` URLs, from where this machine may. Off, only ``data:`` URLs are read.
    """

    def __init__(self, processor: Any, *, allows_urls: bool = False) -> None:
        self._processor, self._opener = processor, _http_opener() if allows_urls else None

    def read(self, messages: Sequence[Message]) -> list[Any]:
        """Return a conversation's pictures in RGB and upright, in order.

        Raises:
            ApiError: there are too many, or one is too large or no picture.
        """
        parts = [part for message in messages for part in message.content or () if isinstance(part, ImagePart)]
        if len(parts) > MAX_PICTURES:
            raise bad_request(f"a request may have {MAX_PICTURES} pictures, this one has {len(parts)}", _FIELD)
        end, left, pictures = time.monotonic() + _SECONDS, MAX_PIXELS, []
        for number, part in enumerate(parts, 1):
            name = f"picture {number}"
            pictures.append(_decoded(self._bytes(part.image_url.url, name, end), name, left))
            left -= pictures[-1].width * pictures[-1].height
        return pictures

    def _bytes(self, url: str, name: str, end: float) -> bytes:
        """Return a picture's file; what is fetched must have arrived when ``time.monotonic`` is ``end``."""
        scheme, _, rest = url.partition(":")
        if scheme.lower() == "data":
            head, _, encoded = rest.partition(",")
            if not head.endswith(";base64"):
                raise bad_request(f"{name} must be a data: URL in base64, data:image/png;base64,...", _FIELD)
            with refusing(_FIELD, f"{name} is not in base64: "):
                data = base64.b64decode(encoded, validate=True)
        elif self._opener is not None and scheme.lower() in ("http", "https"):
            try:
                data = _FETCHING.submit(_fetched, self._opener, url, end).result(max(0.1, end - time.monotonic()))
            except TimeoutError as error:
                raise bad_request(f"{name} cannot be fetched: it took more than {_SECONDS:g} s", _FIELD) from error
            except Exception as error:  # of any of the libraries below
                raise bad_request(f"{name} cannot be fetched: {terminal.first_line(error)}", _FIELD) from error
        else:
            advice = "" if self._opener is not None else "; the server fetches none without --allow-image-urls"
            raise bad_request(f"{name} must be a data: URL, got {scheme[:20]!r}{advice}", _FIELD)
        if len(data) > MAX_BYTES:
            raise bad_request(f"{name} may have {MAX_BYTES} bytes, it has more", _FIELD)
        return data

    def encode(self, text: str, pictures: Sequence[Any]) -> tuple[list[int], Mapping[str, Tensor]]:
        """Return the ids of a prompt, and what the model takes of its pictures.

        Raises:
            ApiError: the processor refuses them.
        """
        given: Any = {"text": [text], "images": [list(pictures)], "return_tensors": "pt", "add_special_tokens": False}
        with refusing_all(_FIELD, "the processor refuses the pictures"), _TURNS:
            made = dict(self._processor(**given))
        if odd := [name for name, value in made.items() if not isinstance(value, Tensor)]:
            raise bad_request(f"this model cannot take these pictures together: {', '.join(odd)} differ", _FIELD)
        made.pop("attention_mask", None)
        return made.pop("input_ids")[0].tolist(), made


def _decoded(data: bytes, name: str, pixels: int) -> Any:
    """Return a picture of at most so many pixels."""
    from PIL import Image, ImageOps

    with refusing_all(_FIELD, f"{name} cannot be read as {', '.join(FORMATS)}"):
        picture = Image.open(io.BytesIO(_without_damage(data)), formats=FORMATS)
        width, height = picture.size
        if width * height <= pixels:
            with _TURNS:
                with contextlib.suppress(Exception):  # broken EXIF: browsers show the picture as it lies
                    picture = ImageOps.exif_transpose(picture)
                return picture.convert("RGB")
    most = f"the pictures of a request may have {MAX_PIXELS} pixels together"
    raise bad_request(f"{most}: {name} has {width} x {height}, and {pixels} are left", _FIELD)


def _without_damage(data: bytes) -> bytes:
    """Return a PNG without optional chunks whose checksum is wrong: libpng and so browsers skip these, Pillow stops."""
    if not data.startswith(_PNG):
        return data
    kept, at = [_PNG], len(_PNG)
    while at < len(data):  # length, name, content, checksum of name and content
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        is_optional = data[at + 4 : at + 5].islower()
        if not is_optional or zlib.crc32(data[at + 4 : end - 4]) == int.from_bytes(data[end - 4 : end], "big"):
            kept.append(data[at:end])
        at = end
    return b"".join(kept)


def _http_opener() -> urllib.request.OpenerDirector:
    """Return what opens HTTP and HTTPS only, behind redirects too."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor, urllib.request.HTTPDefaultErrorHandler, urllib.request.UnknownHandler,
    ):  # fmt: skip
        opener.add_handler(handler())
    return opener


def _fetched(opener: urllib.request.OpenerDirector, url: str, end: float) -> bytes:
    data = bytearray()
    with opener.open(url, timeout=max(0.1, end - time.monotonic())) as response:
        while len(data) <= MAX_BYTES and (piece := response.read1(_PIECE)):
            data += piece
            if time.monotonic() > end:
                raise URLError(f"it took more than {_SECONDS:g} s")
    return bytes(data)
