"""Images on their way to an engine of the kit that sees them, over all three APIs."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tandem.frontend.catalog.catalog import TokenModel
from tandem.runtime.config import RuntimeConfig
from tandem.sdk import DisaggregationMode
from tandem.sdk.engine.types import EngineConfig, GenerateRequest
from tandem.sdk.exceptions import InvalidArgument
from tandem.sdk.worker.context import Context
from tests.sdk.engine.engine_stack import PATIENCE_S, Chunks, ToyEngine, config_of, serving
from tests.sdk.worker.model_stack import ModelStack, with_engine
from tests.services import eventually

PNG = b"\x89PNG\r\n\x1a\n"
RED, BLUE = PNG + b"red", b"\xff\xd8\xffblue"
# As templates of models that see are: a mark in the place of each image.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}[answer]"
)
ONLY_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m['content'] %}{% if part['type'] == "
    "'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}[answer]"
)


def url(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def image_url(image: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(image)}}


def image_block(image: bytes) -> dict[str, Any]:
    data = base64.b64encode(image).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


class Seeing(ToyEngine):
    """Says that it sees, or not; cannot read an image of one color."""

    def __init__(self, *, sees: bool = True) -> None:
        super().__init__()
        self._sees = sees

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig("tandem-tiny", served_model_name="toy", supports_images=self._sees)

    async def generate(self, request: GenerateRequest, context: Context) -> Chunks:
        for index, image in enumerate(request.get("images", [])):
            if image.endswith(b"broken"):
                raise InvalidArgument("truncated", param=f"images[{index}]")
        async for chunk in super().generate(request, context):
            yield chunk


class Asking:
    """A frontend with one engine; each answer is that of the engine, or an error."""

    def __init__(self, stack: ModelStack, engine: ToyEngine) -> None:
        self.stack = stack
        self.engine = engine

    async def ask(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.stack.http.post(path, json={"model": "toy"} | body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def refusal(self, path: str, **body: Any) -> tuple[str, str]:
        """Return the field and the message of a 400."""
        answer = await self.stack.http.post(path, json={"model": "toy"} | body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        return error.get("param") or "", error["message"]

    def seen(self) -> tuple[str, list[bytes]]:
        """Return the prompt and the images of the last request."""
        [model] = self.stack.server.catalog.models
        assert isinstance(model, TokenModel)
        request = self.engine.requests[-1]
        return model.text.decode(request["token_ids"]), request.get("images", [])


@asynccontextmanager
async def asking(
    runtime_config: RuntimeConfig,
    folder: Path,
    engine: ToyEngine,
    template: str = TEMPLATE,
    **fields: Any,
) -> AsyncIterator[Asking]:
    path = folder / "own.jinja"
    path.write_text(template)
    config = config_of(custom_jinja_template=str(path), **fields)
    async with with_engine(engine, config, runtime_config) as stack:
        yield Asking(stack, engine)


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def input_image(image: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url(image)}


def chat_of(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def input_of(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


def messages_of(*parts: dict[str, Any]) -> dict[str, Any]:
    return chat_of(*parts) | {"max_tokens": 8}


async def test_images_of_all_apis_reach_the_engine_in_the_prompts_order(
    runtime_config: RuntimeConfig, tmp_path: Path
) -> None:
    text = {"type": "text", "text": "or"}
    async with asking(runtime_config, tmp_path, Seeing()) as asked:
        for path, body in (
            (CHAT, chat_of(image_url(RED), text, image_url(BLUE))),
            (CHAT, chat_of(image_url(RED), text, {"type": "image_url", "image_url": url(BLUE)})),
            (
                RESPONSES,
                input_of(input_image(RED), {"type": "input_text", "text": "or"}, input_image(BLUE)),
            ),
            (MESSAGES, messages_of(image_block(RED), text, image_block(BLUE))),
        ):
            await asked.ask(path, **body)
            assert asked.seen() == ("[user]<image>or<image>[answer]", [RED, BLUE]), body
        await asked.ask(CHAT, **chat_of(text))
        assert asked.seen() == ("[user]or[answer]", [])
        assert "images" not in asked.engine.requests[-1]


async def test_the_tokens_of_images_are_in_the_usage_of_every_api(
    runtime_config: RuntimeConfig, tmp_path: Path
) -> None:
    class Counting(Seeing):
        async def generate(self, request: GenerateRequest, context: Context) -> Chunks:
            num_tokens = len(request["token_ids"]) + 50 * len(request.get("images", []))
            async for chunk in super().generate(request, context):
                yield chunk | {"num_prompt_tokens": num_tokens}

    text = {"type": "text", "text": "or"}
    async with asking(runtime_config, tmp_path, Counting()) as asked:
        for path, body, key in (
            (CHAT, chat_of(image_url(RED), text, image_url(BLUE)) | {"n": 2}, "prompt_tokens"),
            (RESPONSES, input_of(input_image(RED), input_image(BLUE)), "input_tokens"),
            (MESSAGES, messages_of(image_block(RED), text, image_block(BLUE)), "input_tokens"),
            (CHAT, chat_of(text), "prompt_tokens"),
        ):
            counted = (await asked.ask(path, **body))["usage"][key]
            request = asked.engine.requests[-1]
            assert counted == len(request["token_ids"]) + 50 * len(request.get("images", [])), path
        body = messages_of(image_block(RED)) | {"model": "toy", "stream": True}
        lines = (await asked.stack.http.post(MESSAGES, json=body)).text.splitlines()
        (begin,) = (line for line in lines if '"message_start"' in line and "data:" in line)
        usage = json.loads(begin.removeprefix("data: "))["message"]["usage"]
        assert usage["input_tokens"] == len(asked.engine.requests[-1]["token_ids"]) + 50


async def test_images_stay_in_the_conversation(
    runtime_config: RuntimeConfig, tmp_path: Path
) -> None:
    async with asking(runtime_config, tmp_path, Seeing()) as asked:
        first = await asked.ask(RESPONSES, **input_of(input_image(RED)))
        question = input_of({"type": "input_text", "text": "And?"}, input_image(BLUE))
        await asked.ask(RESPONSES, previous_response_id=first["id"], **question)
        prompt, images = asked.seen()
        assert prompt.startswith("[user]<image>[assistant]")
        assert prompt.endswith("[user]And?<image>[answer]") and images == [RED, BLUE]


async def test_images_that_a_tool_shows_are_in_the_next_message(
    runtime_config: RuntimeConfig, tmp_path: Path
) -> None:
    note = "[image: in the next message of the user]"
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [image_block(RED)]}
    made = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [input_image(RED)]}
    async with asking(runtime_config, tmp_path, Seeing()) as asked:
        messages = [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        ]
        await asked.ask(MESSAGES, max_tokens=8, messages=messages)
        assert asked.seen() == (f"[user]Look[assistant][tool]{note}[user]<image>So?[answer]", [RED])
        items = [{"role": "user", "content": "Look"}, made, output]
        await asked.ask(RESPONSES, input=items)
        assert asked.seen() == (f"[user]Look[assistant][tool]{note}[user]<image>[answer]", [RED])


async def test_a_template_that_takes_parts_alone_gets_them(
    runtime_config: RuntimeConfig, tmp_path: Path
) -> None:
    async with asking(runtime_config, tmp_path, Seeing(), ONLY_PARTS) as asked:
        body = chat_of(image_url(RED))
        body["messages"].insert(0, {"role": "system", "content": "Be brief."})
        await asked.ask(CHAT, **body)
        assert asked.seen() == ("[system]Be brief.[user]<image>[answer]", [RED])
        await asked.ask(CHAT, messages=[{"role": "user", "content": "Hi"}])
        assert asked.seen() == ("[user]Hi[answer]", [])


LARGE = PNG + bytes(4 * 1024 * 1024)
PLACES = {
    CHAT: "messages[0].content[{}].image_url.url",
    RESPONSES: "input[0].content[{}].image_url",
    MESSAGES: "messages[0].content[{}].source.data",
}
BODIES: dict[str, Any] = {
    CHAT: lambda *images: chat_of(*map(image_url, images)),
    RESPONSES: lambda *images: input_of(*map(input_image, images)),
    MESSAGES: lambda *images: messages_of(*map(image_block, images)),
}


async def test_an_image_that_cannot_be_seen_is_named(
    runtime_config: RuntimeConfig, tmp_path: Path
) -> None:
    engine = Seeing()
    async with asking(runtime_config, tmp_path, engine) as asked:
        for path, body in BODIES.items():
            for images, place, reason in (
                ([RED] * 17, 16, "is over 16 images of one request"),
                ([RED, LARGE], 1, "is an image of 4194312 bytes, the most is 4194304"),
                ([RED, b"%PDF"], 1, "is no PNG, JPEG, GIF or WebP image"),
            ):
                param, message = await asked.refusal(path, **body(*images))
                field = PLACES[path].format(place)
                assert message == f"`{field}` {reason}"
                assert param in (field, "")  # errors of messages have no field of their own
        for image, reason in (
            ("data:image/png;base64,AAA", "is not base64: Incorrect padding"),
            ("data:image/png;base64,A*AA", "is not base64: Only base64 data is allowed"),
            ("data:image/png,AAAA", "must be a `data:` URL in base64"),
            ("https://example.org/a.png", "must be a `data:` URL; images of the web are not"),
            (5, "must be a `data:` URL; images of the web are not fetched"),
            (None, "is required"),
        ):
            part = {"type": "input_image", "image_url": image}
            param, message = await asked.refusal(RESPONSES, **input_of(part))
            assert param == PLACES[RESPONSES].format(0) and reason in message
        source = {"type": "file", "file_id": "f"}
        _, message = await asked.refusal(
            MESSAGES, **messages_of({"type": "image", "source": source})
        )
        assert "`messages[0].content[0].source.type` must be 'base64'" in message
        assert not engine.requests
        param, message = await asked.refusal(
            CHAT, **chat_of(image_url(RED), image_url(PNG + b"broken"))
        )
        assert (
            param == "messages[0].content[1].image_url" and "cannot be read: truncated" in message
        )
        sound = {"type": "input_audio", "input_audio": {}}
        param, message = await asked.refusal(CHAT, **chat_of(sound))
        assert param == "messages[0].content[0].type"
        assert "only text and images of the user are supported" in message


async def test_a_body_with_images_takes_its_room_up_to_the_end_of_the_answer(
    runtime_config: RuntimeConfig, tmp_path: Path
) -> None:
    engine = Seeing()
    engine.may_go_on.clear()
    async with asking(runtime_config, tmp_path, engine) as asked:
        room = asked.stack.server.handler._bodies
        for body, is_kept in (
            (chat_of(image_url(PNG + bytes(60_000))), True),
            (chat_of({"type": "text", "text": "Hi"}) | {"user": "x" * 60_000}, False),
        ):
            engine.is_waiting.clear()
            async with asyncio.TaskGroup() as group:
                answer = group.create_task(asked.ask(CHAT, **body))
                await asyncio.wait_for(engine.is_waiting.wait(), PATIENCE_S)
                assert (room.num_taken > 40_000) == is_kept
                engine.may_go_on.set()
                await answer
            engine.may_go_on.clear()
            await eventually(lambda: room.num_taken == 0)
        engine.may_go_on.set()


async def test_one_that_does_not_see_is_not_asked(
    runtime_config: RuntimeConfig, tmp_path: Path
) -> None:
    engine = Seeing(sees=False)
    async with asking(runtime_config, tmp_path, engine) as asked:
        for path, body in BODIES.items():
            _, message = await asked.refusal(path, **body(RED))
            assert "only text is supported" in message
    assert not engine.requests


async def test_a_decode_engine_computes_a_prompt_with_images_itself(
    runtime_config: RuntimeConfig, tmp_path: Path
) -> None:
    class Prefilling(ToyEngine):
        async def generate(self, request: GenerateRequest, context: Context) -> Chunks:
            self.requests.append(request)
            params = {"blocks": [1]}
            yield {
                "token_ids": [1], "index": 0, "finish_reason": "length",
                "disaggregated_params": params,
            }  # fmt: skip

    prefill, seeing = Prefilling(), Seeing()
    apart = config_of(disaggregation_mode=DisaggregationMode.PREFILL)
    decode = DisaggregationMode.DECODE
    async with (
        serving(prefill, apart, runtime_config),
        asking(runtime_config, tmp_path, seeing, disaggregation_mode=decode) as asked,
    ):
        answer = await asked.stack.http.post(CHAT, json={"model": "toy"} | chat_of(image_url(RED)))
        assert answer.headers["x-tandem-prefill"] == "local"
        assert answer.headers["x-tandem-prefill-reason"] == "the prompt has images"
        assert not prefill.requests and seeing.requests[0].get("images") == [RED]
        await asked.ask(CHAT, messages=[{"role": "user", "content": "Hi"}])
        assert len(prefill.requests) == 1 and "prefill_result" in seeing.requests[1]
