"""Images in bodies, as base64 within bounds. Nothing is fetched: a URL of the web is refused."""

import binascii

import msgspec
from msgspec import Raw

from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.bodies.outline import begins, is_null
from tandem.frontend.bodies.typed import read
from tandem.frontend.config import FrontendConfig

_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")


class _ImageUrl(msgspec.Struct, frozen=True):
    """The object around a URL."""

    url: Raw


class Images:
    """The images of one request, for a model that sees them. Counts them.

    Both methods raise InvalidRequestError naming the field.
    """

    def __init__(self, config: FrontendConfig) -> None:
        self._max_images = config.max_images
        self._max_bytes = config.max_image_bytes
        self._num_images = 0

    def of_url(self, raw: Raw, field: str) -> bytes:
        """Return the image of a `data:` URL: text, or an object with a `url`."""
        if is_null(raw):
            raise invalid_field(field, "is required")
        url = raw
        if begins(raw, b"{"):
            url, field = read(_ImageUrl, raw, field).url, f"{field}.url"
        try:
            text = msgspec.json.decode(url, type=str) if begins(url, b'"') else ""
        except UnicodeDecodeError as error:
            raise invalid_field(field, f"is not UTF-8: {error}") from error
        if not text.startswith("data:"):
            raise invalid_field(field, "must be a `data:` URL; images of the web are not fetched")
        head, _, data = text.partition(",")
        if not head.endswith(";base64"):
            raise invalid_field(field, "must be a `data:` URL in base64")
        return self.of_base64(data, field)

    def of_base64(self, data: str, field: str) -> bytes:
        """Return the image of a text in base64."""
        self._num_images += 1
        if self._num_images > self._max_images:
            raise invalid_field(field, f"is over {self._max_images} images of one request")
        try:
            image = binascii.a2b_base64(data, strict_mode=True)
        except ValueError as error:
            raise invalid_field(field, f"is not base64: {error}") from error
        if len(image) > self._max_bytes:
            raise invalid_field(
                field, f"is an image of {len(image)} bytes, the most is {self._max_bytes}"
            )
        is_webp = image[:4] == b"RIFF" and image[8:12] == b"WEBP"
        if not is_webp and not image.startswith(_SIGNATURES):
            raise invalid_field(field, "is no PNG, JPEG, GIF or WebP image")
        return image
