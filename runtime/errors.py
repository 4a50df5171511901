"""Every error that leaves a room, as one tree.

TandemError                     code              http
├── InvalidRequestError         invalid_request   400   the caller's input; names the field
│   └── ContextLengthError      context_length    400   prompt and answer do not fit the model
├── NotFoundError               not_found         404   no such model, endpoint or request
├── OverloadedError             overloaded        503   retry after `retry_after_s`
│   └── UnavailableError        unavailable       503   no instance can take the request
├── CancelledRequestError       cancelled         499   the caller went away
├── DeadlineError               deadline          504   the request's time is up
├── ConnectionLostError         connection_lost   502   the peer died, stopped, or closed mid-stream
│   └── IncompleteError         incomplete        502   the peer gave up: resume elsewhere
├── ProtocolError               protocol          502   a peer violated the protocol
├── TransferError               transfer          500   KV was not moved, or arrived corrupt
├── ServiceError                service           500   etcd or NATS failed; names the address
├── ConfigError                 config            500   a config value; names the key
├── ModelError                  model             500   a model folder; names the file or key
├── CapacityError               capacity          500   not enough memory or blocks, in numbers
└── InternalError               internal          500   a bug in Tandem; the log has the details
"""

from typing import ClassVar


class TandemError(Exception):
    """Base of all errors of this project.

    `code` names the kind on the wire, `status` the HTTP status, `param` the input field at fault.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(TandemError):
    code = "invalid_request"
    status = 400


class ContextLengthError(InvalidRequestError):
    code = "context_length"


class NotFoundError(TandemError):
    code = "not_found"
    status = 404


class OverloadedError(TandemError):
    """`retry_after_s` is the value of the Retry-After header, in seconds."""

    code = "overloaded"
    status = 503

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class UnavailableError(OverloadedError):
    code = "unavailable"


class CancelledRequestError(TandemError):
    code = "cancelled"
    status = 499


class DeadlineError(TandemError):
    code = "deadline"
    status = 504


class ConnectionLostError(TandemError):
    code = "connection_lost"
    status = 502


class IncompleteError(ConnectionLostError):
    code = "incomplete"


class ProtocolError(TandemError):
    code = "protocol"
    status = 502


class TransferError(TandemError):
    code = "transfer"


class ServiceError(TandemError):
    code = "service"


class ConfigError(TandemError):
    code = "config"


class ModelError(TandemError):
    code = "model"


class CapacityError(TandemError):
    code = "capacity"


class InternalError(TandemError):
    code = "internal"


def _tree(root: type[TandemError]) -> dict[str, type[TandemError]]:
    """Return code |-> class of a part of the tree."""
    kinds = {root.code: root}
    for child in root.__subclasses__():
        kinds |= _tree(child)
    return kinds


def from_code(code: str, message: str, param: str | None = None) -> TandemError:
    """Return the error of a peer's `code`; an unknown code becomes InternalError."""
    kind = KINDS.get(code, InternalError)
    return kind(message, param=param)


KINDS = _tree(TandemError) | {"internal": InternalError}
