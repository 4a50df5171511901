"""The errors that only engines have; `tandem.sdk.exceptions` has all of them."""

from tandem.runtime.errors import UnavailableError


class EngineShutdown(UnavailableError):
    """The engine did not start, has crashed, or ends."""


class PrefillResultMissing(UnavailableError, ValueError):
    """A request without a prefill result, at a decode engine that needs one."""
