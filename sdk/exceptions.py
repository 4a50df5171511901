"""The errors that workers and engines raise and catch, under Dynamo's names.

Most are Tandem's own errors under another name: a caller catches the class that the handler raised,
also in another process. The rest arrive at the caller as their Tandem class.

DynamoException          TandemError             the base of all
├── Unknown              InternalError           any other error becomes this
├── InvalidArgument      InvalidRequestError     the caller's input
├── CannotConnect        ConnectionLostError     a peer cannot be reached
├── Disconnected         ConnectionLostError     a peer was reached and then lost
├── StreamIncomplete     IncompleteError         another worker resumes the answer
├── ConnectionTimeout    DeadlineError           the deadline has passed
├── Cancelled            CancelledRequestError   the caller has cancelled
├── WorkerUnavailable    UnavailableError        try another worker
│   ├── EngineShutdown                           the engine did not start, or ends
│   └── PrefillResultMissing                     a decode engine got no prefill result
└── RouterQueueLimitExceeded  OverloadedError    too many requests
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
from tandem.sdk.engine.errors import EngineShutdown, PrefillResultMissing

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
