"""A frontend on a real port before fake decode workers on real sockets, in one process."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import httpx
import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.frontend.config import FrontendConfig
from tandem.frontend.serving.server import FrontendServer
from tandem.frontend.ui.pages import ParseLive
from tandem.router.config import RouterConfig
from tandem.runtime.address import EndpointAddress, new_id
from tandem.runtime.bus.events import Listener, MemoryEvents
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConnectionLostError
from tandem.runtime.membership.model_files import files_digest
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.server import RequestServer, Responder
from tandem.runtime.store.discovery import (
    MemoryDiscovery,
    MemoryStore,
    register_instance,
    register_model,
)
from tandem.runtime.wire.cluster_messages import Instance, KvEvent, ModelCard
from tandem.runtime.wire.messages import (
    GenerateRequest,
    ModelFiles,
    PrefillReport,
    TextRequest,
    TokenDelta,
    VectorRequest,
    encode,
    unpack_tokens,
)
from tests.services import eventually, free_port

MODEL = "test/model"
CONTEXT_LENGTH = 128
ANSWER = "Hello wörld 😀!"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Script = Callable[[GenerateRequest, RequestContext, Responder], Awaitable[None]]
VectorScript = Callable[[VectorRequest, RequestContext, Responder], Awaitable[None]]
TextScript = Callable[[TextRequest, RequestContext, Responder], Awaitable[None]]


@cache
def byte_level_tokenizer() -> Tokenizer:
    """A tiny byte-level BPE; most characters beyond ASCII are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["Hello world, hello there, the world"] * 4, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<added word>", normalized=False)])
    return tokenizer


def model_files(template: str = TEMPLATE) -> ModelFiles:
    """The files of the model that fake workers serve."""
    config = {"chat_template": template, "eos_token": {"content": "<|im_end|>"}}
    return ModelFiles(
        {
            "tokenizer.json": byte_level_tokenizer().to_str().encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
            "config.json": b'{"vocab_size": %d}' % byte_level_tokenizer().get_vocab_size(),
        }
    )


def token_ids(text: str) -> list[int]:
    return byte_level_tokenizer().encode(text, add_special_tokens=False).ids


@dataclass
class FakeWorker:
    """A worker without an engine; `script` answers, by default with ANSWER.

    With `model_input="text"` it is a text model, and `text_script` answers.
    """

    store: MemoryStore
    listeners: list[tuple[str, Listener]]
    config: RuntimeConfig = field(default_factory=RuntimeConfig)
    model: str = MODEL
    instance_id: str = field(default_factory=new_id)
    requests: list[GenerateRequest] = field(default_factory=list)
    contexts: list[RequestContext] = field(default_factory=list)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    script: Script | None = None
    text_script: TextScript | None = None
    vector_script: VectorScript | None = None
    vector_requests: list[VectorRequest] = field(default_factory=list)
    text_requests: list[TextRequest] = field(default_factory=list)
    endpoint: str = "tandem.decode.generate"
    model_input: Literal["tokens", "text"] = "tokens"
    model_types: list[str] = field(default_factory=lambda: ["chat", "completions"])
    held: list[bytes] = field(default_factory=list)  # block hashes of the snapshot
    last_event_id: int = 0
    migration_limit: int | None = None
    weights_digest: str = ""
    sends_kv_events: bool = True  # so its snapshot is fetched at once
    files: ModelFiles = field(default_factory=model_files)
    metrics: str = ""

    async def start(self) -> None:
        at_a_port = self.config.model_copy(
            update={"port": free_port()}
        )  # at which it may come back
        self.server = RequestServer(at_a_port, self.instance_id)
        self.server.register(self.endpoint, self._generate)
        self.server.register("model_files", self._model_files)
        self.server.register("kv_snapshot", self._kv_snapshot)
        await self.server.start()
        self.events = MemoryEvents(self.listeners)
        await self.events.start()
        self.discovery = MemoryDiscovery(self.store)
        await self.discovery.start()
        await register_instance(self.discovery, self.instance())
        await register_model(self.discovery, "tandem", self.card())

    def card(self) -> ModelCard:
        return ModelCard(
            name=self.model,
            context_length=CONTEXT_LENGTH,
            block_size=4,
            vocab_size=byte_level_tokenizer().get_vocab_size(),
            files_digest=files_digest(self.files),
            instance_id=self.instance_id,
            created_s=1_700_000_000,
            endpoint=self.endpoint,
            model_input=self.model_input,
            model_types=self.model_types,
            migration_limit=self.migration_limit,
            sends_kv_events=self.sends_kv_events,
            weights_digest=self.weights_digest,
        )

    def instance(self) -> Instance:
        address = EndpointAddress.parse(self.endpoint)
        return Instance(
            namespace=address.namespace,
            component=address.component,
            endpoint=address.endpoint,
            instance_id=self.instance_id,
            address=self.server.address,
            epoch="epoch",
            model=self.model,
            metrics=self.metrics,
        )

    async def leave(self) -> None:
        await self.discovery.close()
        await self.server.stop()

    def vanish(self) -> None:
        """As a killed process: nobody listens any more; the records stay, as until a lease ends."""
        assert self.server._server is not None
        self.server._server.close()
        self.cut()

    def cut(self) -> None:
        """Lose all connections, as when a process is killed."""
        for connection in list(self.server.connections):
            connection.abort(ConnectionLostError("as if killed"))

    async def come_back(self) -> None:
        """As after a pause: at its address again, under its old records."""
        await self.server.start()

    async def _generate(
        self, payload: bytes, context: RequestContext, responder: Responder
    ) -> None:
        request = msgspec.msgpack.decode(
            payload, type=GenerateRequest | TextRequest | VectorRequest
        )
        self.contexts.append(context)
        self.called.set()
        if isinstance(request, TextRequest):
            self.text_requests.append(request)
            assert self.text_script is not None
            await self.text_script(request, context, responder)
            return
        if isinstance(request, VectorRequest):
            self.vector_requests.append(request)
            assert self.vector_script is not None
            await self.vector_script(request, context, responder)
            return
        self.requests.append(request)
        await (self.script or answer_with(ANSWER))(request, context, responder)

    async def _model_files(
        self, _payload: bytes, _context: RequestContext, responder: Responder
    ) -> None:
        responder.send(encode(self.files))

    async def _kv_snapshot(
        self, _payload: bytes, _context: RequestContext, responder: Responder
    ) -> None:
        snapshot = KvEvent(self.instance_id, "epoch", self.last_event_id, stored=self.held)
        responder.send(encode(snapshot))


REPORT = PrefillReport("local", "uncached 3 <= max_local_prefill_length 1000", num_cached_tokens=2)


def answer_with(text: str, tokens_per_delta: int = 1) -> Script:
    """Answers with the tokens of `text`, ended by a stop token or by max_tokens.

    A request that was begun elsewhere gets the rest of them.
    """

    async def script(
        request: GenerateRequest, _context: RequestContext, responder: Responder
    ) -> None:
        ids = token_ids(text)
        is_cut = request.stop.max_tokens < len(ids)
        ids = ids[request.num_generated : request.stop.max_tokens]
        report: PrefillReport | None = REPORT
        for start in range(0, len(ids), tokens_per_delta):
            some = ids[start : start + tokens_per_delta]
            responder.send(encode(TokenDelta(some, prefill=report)))
            report = None
            await asyncio.sleep(0)
        responder.send(
            encode(
                TokenDelta(
                    [],
                    finish_reason="length" if is_cut else "stop",
                    prefill=report,
                    stop_token_id=None if is_cut else 0,
                )
            )
        )

    return script


async def one_token_then_wait(
    _request: GenerateRequest, context: RequestContext, responder: Responder
) -> None:
    responder.send(encode(TokenDelta(token_ids("H"), prefill=REPORT)))
    await context.cancelled()
    context.raise_if_done()


def sending(*deltas: TokenDelta, error: Exception | None = None) -> Script:
    """Sends these deltas, the first with its report, and raises the error if there is one."""

    async def script(
        _request: GenerateRequest, _context: RequestContext, responder: Responder
    ) -> None:
        for number, delta in enumerate(deltas):
            report = None if number else REPORT
            responder.send(encode(msgspec.structs.replace(delta, prefill=report)))
        if error is not None:
            raise error

    return script


one_token_then_fail = sending(TokenDelta(token_ids("H")), error=RuntimeError("a bug"))


@dataclass
class Stack:
    """The frontend, its workers, and a client that talks to it."""

    config: FrontendConfig = field(default_factory=lambda: FrontendConfig(port=0))
    router: RouterConfig = field(default_factory=RouterConfig)
    num_workers: int = 1
    store: MemoryStore = field(default_factory=MemoryStore)
    listeners: list[tuple[str, Listener]] = field(default_factory=list)
    workers: list[FakeWorker] = field(default_factory=list)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    parse_live: ParseLive | None = None

    async def __aenter__(self) -> "Stack":
        self._exits = AsyncExitStack()
        for _ in range(self.num_workers):
            await self.add_worker()
        node = self.node()
        self._exits.push_async_callback(node.client.close)
        await node.discovery.start()
        await node.events.start()
        self.server = FrontendServer(self.config, self.router, node, self.parse_live)
        self._exits.push_async_callback(self.server.stop)
        await self.server.start()
        self.url = f"http://{self.server.address}"
        is_json = {"content-type": "application/json"}
        # verify=False: httpx would read the machine's certificates for each client.
        self.http = httpx.AsyncClient(base_url=self.url, timeout=60, headers=is_json, verify=False)
        await self._exits.enter_async_context(self.http)
        await eventually(lambda: self.num_known >= self.num_workers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    def node(self) -> Node:
        """A frontend's node over the stack's store and events."""
        node = Node(self.runtime, component="frontend", serves=False)
        node.discovery, node.events = MemoryDiscovery(self.store), MemoryEvents(self.listeners)
        return node

    async def add_worker(self, kind: type[Any] = FakeWorker, **fields: Any) -> Any:
        """Starts a worker of this kind, with these fields, which leaves with the stack."""
        worker = kind(self.store, self.listeners, **fields)
        await worker.start()
        self._exits.push_async_callback(worker.leave)
        self.workers.append(worker)
        return worker

    @property
    def num_known(self) -> int:
        """The workers that requests may go to, of all models."""
        return sum(len(model.instances) for model in self.server.catalog.models)

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]

    async def chat(
        self, *, headers: dict[str, str] | None = None, **fields: object
    ) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]} | fields
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def complete(
        self, *, headers: dict[str, str] | None = None, **fields: object
    ) -> httpx.Response:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 64} | fields
        return await self.http.post("/v1/completions", json=body, headers=headers)

    def metrics(self) -> str:
        return self.server.metrics.render().decode()


def events_of(response: httpx.Response) -> list[dict[str, object]]:
    """The events of a stream, [DONE] checked and dropped."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_event(text: str) -> dict[str, object]:
    """The last event of a stream, which is an error."""
    last = text.rstrip().rpartition("\n\n")[2]
    error: dict[str, object] = json.loads(last.removeprefix("data: "))["error"]
    return error


def text_of(response: httpx.Response) -> str:
    """The text of all choices, one after another, of a whole answer or of a stream."""
    parts = [each.get("message") or each.get("delta") or each for each in choices_of(response)]
    return "".join(part.get("content") or part.get("text") or "" for part in parts)


def choices_of(response: httpx.Response) -> list[Any]:
    """The choices of a whole answer, or those of all events of a stream."""
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    bodies: list[Any] = events_of(response) if is_stream else [response.json()]
    return [choice for body in bodies for choice in body["choices"]]


def prompt_tokens(request: GenerateRequest) -> list[int]:
    return unpack_tokens(request.token_ids)


def prompt_of(request: GenerateRequest) -> str:
    """The text of a prompt, with its special tokens."""
    tokenizer = byte_level_tokenizer()
    return str(tokenizer.decode(prompt_tokens(request), skip_special_tokens=False))
