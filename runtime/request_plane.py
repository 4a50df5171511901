"""The request plane's public names: direct TCP between processes, many streams per connection."""

from tandem.runtime.plane.client import RequestClient, ResponseStream
from tandem.runtime.plane.server import Handler, RequestServer, Responder

__all__ = ["Handler", "RequestClient", "RequestServer", "Responder", "ResponseStream"]
