"""The messages of Envoy's ext_proc that an endpoint picker needs, by their numbers on the wire.

    envoy/service/ext_proc/v3/external_processor.proto

A field that is not listed is ignored, as protobuf has it. The only package with all messages of
Envoy, xds-protos, overwrites files of OpenTelemetry's.
"""

from enum import IntEnum
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_PACKAGE = "tandem.epp"  # names of messages are not on the wire
_STRUCT = "google.protobuf.Struct"


class Mode(IntEnum):
    """The ways in which a Gateway sends a body."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


OVERWRITE = 2  # the append action OVERWRITE_IF_EXISTS_OR_ADD

_BODY = {"body": (1, "bytes"), "end_of_stream": (2, "bool")}
_REQUESTS = {
    "request_headers": (2, "HttpHeaders"),
    "response_headers": (3, "HttpHeaders"),
    "request_body": (4, "HttpBody"),
    "response_body": (5, "HttpBody"),
    "request_trailers": (6, "HttpTrailers"),
    "response_trailers": (7, "HttpTrailers"),
}
_RESPONSES = {
    "request_headers": (1, "HeadersResponse"),
    "response_headers": (2, "HeadersResponse"),
    "request_body": (3, "BodyResponse"),
    "response_body": (4, "BodyResponse"),
    "request_trailers": (5, "TrailersResponse"),
    "response_trailers": (6, "TrailersResponse"),
    "immediate_response": (7, "ImmediateResponse"),
}
_ONE_OF = {
    "ProcessingRequest": ("request", _REQUESTS),
    "ProcessingResponse": ("response", _RESPONSES),
}
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ProcessingRequest": _REQUESTS
    | {"metadata_context": (8, "Metadata"), "protocol_config": (11, "ProtocolConfiguration")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HeaderMap": {"headers": (1, "HeaderValue*")},
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HttpBody": _BODY,
    "HttpTrailers": {},
    "Metadata": {"filter_metadata": (1, "FilterMetadata*")},
    "FilterMetadata": {"key": (1, "string"), "value": (2, _STRUCT)},
    "ProtocolConfiguration": {
        "request_body_mode": (1, "int32"),
        "response_body_mode": (2, "int32"),
    },
    "ProcessingResponse": _RESPONSES | {"dynamic_metadata": (8, _STRUCT)},
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeaderMutation": {
        "set_headers": (1, "HeaderValueOption*"),
        "remove_headers": (2, "string*"),
    },
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
    "StreamedBodyResponse": _BODY,
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "HttpStatus": {"code": (1, "int32")},
}


def _field(name: str, number: int, kind: str) -> FieldDescriptorProto:
    """Return a field of a kind: a scalar, or a message of this file or another; with * repeated."""
    field = FieldDescriptorProto(name=name, number=number)
    plain = kind.rstrip("*")
    field.label = field.LABEL_OPTIONAL if plain == kind else field.LABEL_REPEATED
    if plain.islower() and "." not in plain:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{plain.upper()}")
    else:
        field.type = field.TYPE_MESSAGE
        field.type_name = f".{plain}" if "." in plain else f".{_PACKAGE}.{plain}"
    return field


def _classes() -> dict[str, Any]:
    """Return the classes of all messages."""
    dependency = struct_pb2.DESCRIPTOR
    file = FileDescriptorProto(name="tandem/epp.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(dependency.name)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        choice, alternatives = _ONE_OF.get(name, ("", {}))
        if choice:
            message.oneof_decl.add(name=choice)
        for field_name, (number, kind) in fields.items():
            field = _field(field_name, number, kind)
            if field_name in alternatives:
                field.oneof_index = 0
            message.field.append(field)
    pool = DescriptorPool()
    pool.AddSerializedFile(dependency.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_made = _classes()
ProcessingRequest, ProcessingResponse = _made["ProcessingRequest"], _made["ProcessingResponse"]
