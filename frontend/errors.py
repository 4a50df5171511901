"""Errors in OpenAI's shape, and the public part of an error."""

import logging

import msgspec

from tandem.runtime.address import new_id
from tandem.runtime.errors import (
    CapacityError,
    ConnectionLostError,
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    TandemError,
)

logger = logging.getLogger(__name__)

_HTTP_CODES = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "head_timeout",
    431: "head_too_large",
}
_encode = msgspec.json.Encoder().encode


class BodyError(TandemError):
    """A request that is refused before its body is read to the end."""


class BodyTooLargeError(BodyError):
    """The request's body is over the limit."""

    code = "body_too_large"
    status = 413


class BodyTimeoutError(BodyError):
    """The request's body did not arrive in time."""

    code = "body_timeout"
    status = 408


class UnsupportedMediaError(BodyError):
    """The request's body is not JSON by its headers."""

    code = "unsupported_media_type"
    status = 415


class MethodError(BodyError):
    """The path does not take this method."""

    code = "method_not_allowed"
    status = 405


class UnauthorizedError(BodyError):
    """The request has no valid API key."""

    code = "invalid_api_key"
    status = 401


class ForbiddenError(BodyError):
    """The request may not have this path."""

    code = "forbidden"
    status = 403


class RateLimitError(OverloadedError):
    """The API key has used up its requests or its tokens of the minute."""

    code = "rate_limit_exceeded"
    status = 429


class TooManyRequestsError(OverloadedError):
    """The frontend has as many requests, or as much of their bodies, as it takes at one time."""

    code = "too_many_requests"
    status = 429


class ErrorDetail(msgspec.Struct, frozen=True):
    """An error, for programs (`code`, `param`) and for people (`message`)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of an error response."""

    error: ErrorDetail


def error_body(error: TandemError) -> bytes:
    """Return the JSON of an error with its full message; see `public_error`."""
    return _encode(ErrorBody(_detail(error)))


class OpenAIErrors:
    """Errors of chat and completions: an `ErrorShape`."""

    def body(self, error: TandemError) -> bytes:
        return error_body(error)

    def event(self, error: TandemError) -> bytes:
        return b"data: %b\n\n" % error_body(error)


def _detail(error: TandemError) -> ErrorDetail:
    if isinstance(error, ContextLengthError):
        return ErrorDetail(
            error.message, "invalid_request_error", error.param, "context_length_exceeded"
        )
    if isinstance(error, InvalidRequestError | NotFoundError | BodyError):
        is_model = isinstance(error, NotFoundError) and error.param == "model"
        code = "model_not_found" if is_model else error.code
        return ErrorDetail(error.message, "invalid_request_error", error.param, code)
    kind = "overloaded_error" if isinstance(error, OverloadedError) else "server_error"
    if isinstance(error, RateLimitError):
        kind = "rate_limit_error"
    return ErrorDetail(error.message, kind, error.param, error.code)


def http_error_body(status: int, message: str) -> bytes:
    """Return the JSON of an error about the head of a request."""
    code = _HTTP_CODES.get(status)
    return _encode(ErrorBody(ErrorDetail(message, "invalid_request_error", None, code)))


def public_error(error: Exception, request_id: str) -> TandemError:
    """Return the error for the caller. Details of inner errors go to the log under an error id."""
    if isinstance(error, NotFoundError) and error.param is None:
        return _opaque(InternalError, "internal error", error, request_id)
    if isinstance(error, _SHOWN):
        return error
    if isinstance(error, DeadlineError):
        return DeadlineError("the request's time is up")
    if isinstance(error, ConnectionLostError | ProtocolError):
        return _opaque(type(error), "the decode worker of this request was lost", error, request_id)
    return _opaque(InternalError, "internal error", error, request_id)


def _opaque(
    kind: type[TandemError], message: str, error: Exception, request_id: str
) -> TandemError:
    error_id = new_id()
    trace = None if isinstance(error, TandemError) else error
    logger.error("request %s, error id %s: %s", request_id, error_id, error, exc_info=trace)
    return kind(f"{message} (error id {error_id})")


# Errors about the caller's own request; a CapacityError names the capacity that is missing.
_SHOWN = (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    BodyError,
    CapacityError,
)
