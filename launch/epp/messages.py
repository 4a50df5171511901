"""The messages between a Gateway and its endpoint picker, protocol 1.0 over Envoy's ext_proc. Pure.

kubernetes-sigs/gateway-api-inference-extension, docs/proposals/004-endpoint-picker-protocol.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem.frontend.access.named_worker import HEADER
from tandem.launch.epp.protos import OVERWRITE, ProcessingResponse

DESTINATION = "x-gateway-destination-endpoint"
_DESTINATION_METADATA = "envoy.lb"
_SUBSET_METADATA = "envoy.lb.subset_hint"
_SUBSET = "x-gateway-destination-endpoint-subset"
_MAX_CHUNK_BYTES = 62_000  # of a streamed body; some Gateways take up to 64 KiB

Message = Any  # of protobuf, whose classes are made at run time


@dataclass(slots=True, frozen=True)
class Pick:
    """The frontend for a request, and the header that names a worker to it, or nothing."""

    endpoint: str  # ip:port
    named_worker: str

    def answer(self, kind: str) -> Message:
        """Return the answer to a message: the endpoint, as a header and as metadata."""
        response = ProcessingResponse()
        common = getattr(response, kind).response
        common.clear_route_cache = True
        _set(common.header_mutation, DESTINATION, self.endpoint)
        if self.named_worker:
            _set(common.header_mutation, HEADER, self.named_worker)
        else:
            common.header_mutation.remove_headers.append(HEADER)
        metadata = response.dynamic_metadata.get_or_create_struct(_DESTINATION_METADATA)
        metadata[DESTINATION] = self.endpoint
        return response


def _set(mutation: Message, key: str, value: str) -> None:
    option = mutation.set_headers.add(append_action=OVERWRITE)
    option.header.key, option.header.raw_value = key, value.encode()


def head_of(message: Message) -> dict[bytes, bytes]:
    """Return the headers of a request as a frontend has them, with `host`."""
    head = {
        header.key.lower().encode(): header.raw_value or header.value.encode()
        for header in message.headers.headers
    }
    if (authority := head.get(b":authority")) is not None:
        head.setdefault(b"host", authority)
    return head


def subset_of(message: Message) -> frozenset[str] | None:
    """Return the endpoints to choose from, each `ip:port` or `ip`; None: all."""
    for metadata in message.metadata_context.filter_metadata:
        if metadata.key == _SUBSET_METADATA and _SUBSET in metadata.value.fields:
            value = metadata.value.fields[_SUBSET]
            texts = [each.string_value for each in value.list_value.values] or [value.string_value]
            every = (each.strip() for text in texts for each in text.split(","))
            return frozenset(filter(None, every))
    return None


def passed_on(kind: str) -> Message:
    """Return the answer to a message of this kind that changes nothing."""
    response = ProcessingResponse()
    getattr(response, kind).SetInParent()
    return response


def chunks(kind: str, body: bytes, *, is_end: bool) -> Iterator[Message]:
    """Return a body of full duplex streaming, which the Gateway gets back from its picker."""
    for start in range(0, len(body) or 1, _MAX_CHUNK_BYTES):
        chunk = body[start : start + _MAX_CHUNK_BYTES]
        is_last = start + _MAX_CHUNK_BYTES >= len(body)
        response = ProcessingResponse()
        streamed = getattr(response, kind).response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = chunk, is_end and is_last
        streamed.SetInParent()  # also where both are their defaults
        yield response


def refused(status: int, body: bytes, retry_after_s: int) -> Message:
    """Return the response that the Gateway sends in place of a frontend."""
    response = ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code, immediate.body = status, body
    immediate.details = "tandem_endpoint_picker"
    _set(immediate.headers, "content-type", "application/json")
    _set(immediate.headers, "retry-after", str(retry_after_s))
    return response
