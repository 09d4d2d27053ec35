"""Pictures in requests: read from URLs within bounds, and made into the target's inputs by its processor."""

from __future__ import annotations

import base64
import binascii
import io
import urllib.request
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .protocol import ImagePart, Message, bad_request, refusing

MAX_PICTURES, MAX_BYTES, MAX_PIXELS = 16, 16 * 2**20, 2**25
"""Of one request; bytes are those of a picture's file, pixels those of a picture."""

_SECONDS = 10.0  # to fetch one
_FIELD = "messages"


class PictureReader:
    """Reads the pictures of conversations.

    Args:
        processor: the target's, of transformers: text and pictures to tensors.
        allows_urls: fetch ``http`` and ``https`` URLs, from where this machine may. Off, only ``data:`` URLs are read.
    """

    def __init__(self, processor: Any, *, allows_urls: bool = False) -> None:
        self._processor, self._allows_urls = processor, allows_urls

    def read(self, messages: Sequence[Message]) -> list[Any]:
        """Return a conversation's pictures in RGB, in order.

        Raises:
            ApiError: there are too many, or one is too large or no picture.
        """
        parts = [part for message in messages for part in message.content or () if isinstance(part, ImagePart)]
        if len(parts) > MAX_PICTURES:
            raise bad_request(f"a request may have {MAX_PICTURES} pictures, this one has {len(parts)}", _FIELD)
        return [self._open(part.image_url.url, f"picture {number}") for number, part in enumerate(parts, 1)]

    def _open(self, url: str, name: str) -> Any:
        from PIL import Image

        data = self._bytes(url, name)
        try:
            with warnings.catch_warnings(action="ignore"):  # its own bound on pixels
                picture = Image.open(io.BytesIO(data))
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise bad_request(f"{name} may have {MAX_PIXELS} pixels, it has {width} x {height}", _FIELD)
            return picture.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise bad_request(f"{name} cannot be read: {error}", _FIELD) from error

    def _bytes(self, url: str, name: str) -> bytes:
        scheme, _, rest = url.partition(":")
        if scheme.lower() == "data":
            head, _, encoded = rest.partition(",")
            if not head.endswith(";base64"):
                raise bad_request(f"{name} must be a data: URL in base64, data:image/png;base64,...", _FIELD)
            try:
                data = base64.b64decode(encoded, validate=True)
            except (binascii.Error, ValueError) as error:
                raise bad_request(f"{name} is not in base64: {error}", _FIELD) from error
        elif scheme.lower() in ("http", "https") and self._allows_urls:
            try:
                with urllib.request.urlopen(url, timeout=_SECONDS) as response:
                    data = response.read(MAX_BYTES + 1)
            except (OSError, ValueError) as error:
                raise bad_request(f"{name} cannot be fetched: {error}", _FIELD) from error
        else:
            advice = "" if self._allows_urls else "; the server fetches none without --allow-image-urls"
            raise bad_request(f"{name} must be a data: URL, got {scheme[:20]!r}{advice}", _FIELD)
        if len(data) > MAX_BYTES:
            raise bad_request(f"{name} may have {MAX_BYTES} bytes, it has more", _FIELD)
        return data

    def encode(self, text: str, pictures: Sequence[Any]) -> tuple[list[int], Mapping[str, Tensor]]:
        """Return the ids of a prompt, and what the model takes of its pictures.

        Raises:
            ApiError: the processor refuses them.
        """
        with refusing(_FIELD):
            made = self._processor(text=[text], images=[list(pictures)], return_tensors="pt", add_special_tokens=False)
        inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        inputs.pop("attention_mask", None)
        return inputs.pop("input_ids")[0].tolist(), inputs
