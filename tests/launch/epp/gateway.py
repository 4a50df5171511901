"""An endpoint picker over real gRPC, beside frontends and workers, and a Gateway that asks it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from tandem.config.epp import EppConfig
from tandem.frontend.config import FrontendConfig
from tandem.launch.epp.messages import DESTINATION
from tandem.launch.epp.process import EppServer
from tandem.launch.epp.protos import SERVICE, Mode, ProcessingRequest, ProcessingResponse
from tandem.router.config import RouterConfig
from tandem.runtime.address import EndpointAddress
from tandem.runtime.membership.node import Node
from tandem.runtime.store.discovery import register_instance
from tests.frontend.frontend_stack import MODEL, Stack
from tests.services import eventually

Message = Any
PROMPT = '{"model": "%s", "prompt": "%s"}'


@asynccontextmanager
async def picker_of(stack: Stack, **fields: Any) -> AsyncIterator[EppServer]:
    """A picker that knows the frontend and the workers of a stack; `fields` are of its config."""
    node = stack.node()
    server = EppServer(EppConfig(port=0, **fields), stack.config, RouterConfig(), node)
    async with AsyncExitStack() as exits:
        exits.push_async_callback(node.client.close)
        await node.discovery.start()
        await node.events.start()
        exits.push_async_callback(server.stop)
        await server.start()
        picker = server.picker
        await eventually(lambda: len(picker.catalog.instances) == len(stack.workers))
        await eventually(lambda: stack.num_known == sum(
            len(model.instances) for model in picker.catalog.models
        ))  # fmt: skip
        yield server


async def add_frontend(stack: Stack, address: str) -> Node:
    """Registers a frontend at an address; the caller closes its discovery, and it has left."""
    node = stack.node()
    await node.discovery.start()
    await register_instance(
        node.discovery, node.instance(EndpointAddress("tandem", "frontend", "http"), address)
    )
    return node


@asynccontextmanager
async def channel_to(server: EppServer) -> AsyncIterator[Any]:
    """A connection of a Gateway."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


class Gateway:
    """One HTTP request as a Gateway tells of it; `mode` is that of both bodies, None: unnamed."""

    def __init__(self, channel: Any, mode: int | None = Mode.FULL_DUPLEX_STREAMED) -> None:
        self.call = channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()
        self._mode = mode

    async def send(self, **fields: Any) -> None:
        await self.call.write(ProcessingRequest(**fields))

    async def head(
        self,
        path: str = "/v1/completions",
        subset: list[str] | str | None = None,
        is_end: bool = False,
        **headers: str,
    ) -> None:
        all_headers = {
            ":method": "GET" if is_end else "POST",
            ":path": path,
            ":authority": "gateway.example",
            "content-type": "application/json",
        } | {name.replace("_", "-"): value for name, value in headers.items()}
        message = ProcessingRequest()
        for key, value in all_headers.items():
            message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
        message.request_headers.end_of_stream = is_end
        if subset is not None:
            hint = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
            hint.value["x-gateway-destination-endpoint-subset"] = subset
        if self._mode is not None:
            message.protocol_config.request_body_mode = self._mode
            message.protocol_config.response_body_mode = self._mode
        await self.call.write(message)

    async def body(self, *parts: bytes, is_end: bool = True) -> None:
        for number, part in enumerate(parts, 1):
            is_last = is_end and number == len(parts)
            await self.send(request_body={"body": part, "end_of_stream": is_last})

    async def read(self) -> Message:
        message = await self.call.read()
        assert message is not grpc.aio.EOF, await self.call.details()
        return message

    async def streamed(self, kind: str = "request_body") -> bytes:
        """The body that the picker sends back, up to its end."""
        parts, is_end = [], False
        while not is_end:
            message = await self.read()
            assert message.WhichOneof("response") == kind
            chunk = getattr(message, kind).response.body_mutation.streamed_response
            assert len(chunk.body) <= 62_000
            parts.append(chunk.body)
            is_end = chunk.end_of_stream
        return b"".join(parts)

    async def ask(self, prompt: str = "Hi", **head: Any) -> Message:
        """The answer to the headers of a completion, whose body has come back unchanged."""
        sent = (PROMPT % (MODEL, prompt)).encode()
        await self.head(**head)
        await self.body(sent)
        answer = await self.read()
        if answer.WhichOneof("response") == "request_headers":
            assert await self.streamed() == sent
        return answer

    async def end(self) -> None:
        """The Gateway's end of the stream, and the picker's."""
        await self.call.done_writing()
        while await self.call.read() is not grpc.aio.EOF:
            pass


def mutations_of(answer: Message) -> dict[str, str]:
    """The headers that an answer sets, those that it removes as empty ones."""
    kind = answer.WhichOneof("response")
    mutation = getattr(answer, kind).response.header_mutation
    headers = {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}
    return headers | dict.fromkeys(mutation.remove_headers, "")


def endpoint_of(answer: Message) -> str:
    """The endpoint in the header, which is that in the metadata."""
    endpoint = mutations_of(answer)[DESTINATION]
    assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == endpoint
    return endpoint


def status_of(answer: Message) -> int:
    """The status of a response that the picker has the Gateway send."""
    assert answer.WhichOneof("response") == "immediate_response"
    return int(answer.immediate_response.status.code)


def frontend_config(**fields: Any) -> FrontendConfig:
    return FrontendConfig(port=0, **fields)
