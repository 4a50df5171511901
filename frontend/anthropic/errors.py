"""Errors in Anthropic's shape."""

import msgspec

from tandem.runtime.errors import OverloadedError, TandemError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
_encode = msgspec.json.Encoder().encode


class ErrorDetail(msgspec.Struct, frozen=True):
    """An error; the message names the field at fault."""

    type: str
    message: str


class ErrorObject(msgspec.Struct, frozen=True):
    """The body of an error response, and of the event that ends a stream."""

    error: ErrorDetail
    type: str = "error"


class AnthropicErrors:
    """An `ErrorShape`."""

    def body(self, error: TandemError) -> bytes:
        return _encode(ErrorObject(ErrorDetail(_kind(error), error.message)))

    def event(self, error: TandemError) -> bytes:
        return b"event: error\ndata: %b\n\n" % self.body(error)


def _kind(error: TandemError) -> str:
    known = _KINDS.get(error.status)
    if known is not None:
        return known
    if isinstance(error, OverloadedError):
        return "overloaded_error"
    return "invalid_request_error" if error.status < 500 else "api_error"
