"""The errors that workers and engines raise and catch, under the names their authors know.

Most are the project's own errors under another name, so what a handler raises is what its caller
catches, also across the wire. The rest keep their kind on the wire and lose only the name.

DynamoException          TandemError             any of these
├── Unknown              InternalError           what has no better name; other errors become it
├── InvalidArgument      InvalidRequestError     the caller's input
├── CannotConnect        ConnectionLostError     a peer cannot be reached
├── Disconnected         ConnectionLostError     a peer was reached and then lost
├── StreamIncomplete     IncompleteError         go on elsewhere with what was said already
├── ConnectionTimeout    DeadlineError           the time is up
├── Cancelled            CancelledRequestError   the caller does not want it any more
├── WorkerUnavailable    UnavailableError        try another worker
│   ├── EngineShutdown                           the engine did not start, or is at its end
│   └── PrefillResultMissing                     a decode engine got no prefill result
└── RouterQueueLimitExceeded  OverloadedError    too much to do already
"""

from tandem.runtime.errors import (
    CancelledRequestError,
    ConnectionLostError,
    DeadlineError,
    IncompleteError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    TandemError,
    UnavailableError,
)

DynamoException = TandemError
Unknown = InternalError
InvalidArgument = InvalidRequestError
CannotConnect = ConnectionLostError
Disconnected = ConnectionLostError
StreamIncomplete = IncompleteError
ConnectionTimeout = DeadlineError
Cancelled = CancelledRequestError
WorkerUnavailable = UnavailableError
RouterQueueLimitExceeded = OverloadedError


class EngineShutdown(UnavailableError):
    """The engine did not start, crashed, or is at its end: nothing more comes of it."""


class PrefillResultMissing(UnavailableError, ValueError):
    """A decode engine that cannot do without a prefill result got none."""


__all__ = [
    "Cancelled",
    "CannotConnect",
    "ConnectionTimeout",
    "Disconnected",
    "DynamoException",
    "EngineShutdown",
    "InvalidArgument",
    "PrefillResultMissing",
    "RouterQueueLimitExceeded",
    "StreamIncomplete",
    "Unknown",
    "WorkerUnavailable",
]
