"""A vLLM of a model that sees: an Idefics3 of two layers with random weights, made here."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem.models.folder import byte_level_tokenizer, write_generation_config, write_tokenizer
from tests.services import EtcdServer, NatsServer
from tests.vllm.vllm_cluster import NEEDS_VLLM, VllmCluster

pytestmark = NEEDS_VLLM
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
WORDS = ("<image>", "<fake_token_around_image>", "<global-img>")
LANGUAGE = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 8192, "initializer_range": 0.15, "eos_token_id": 258,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
VISION = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "image_size": 32,
    "num_attention_heads": 2, "patch_size": 8, "initializer_range": 0.15,
}  # fmt: skip


def write_seeing_model(folder: Path) -> Path:
    """Write an Idefics3, whose module of vLLM's needs no torchvision."""
    import torch
    import transformers

    folder.mkdir()
    tokenizer = byte_level_tokenizer(LANGUAGE["vocab_size"] - len(WORDS))
    tokenizer.add_special_tokens(list(WORDS))
    write_tokenizer(folder, tokenizer, max_length_tokens=8192, chat_template=TEMPLATE)
    write_generation_config(folder, tokenizer)
    config = transformers.Idefics3Config(
        text_config=LANGUAGE | {"model_type": "llama"},
        vision_config=VISION,
        image_token_id=tokenizer.token_to_id(WORDS[0]),
        pad_token_id=0,
        scale_factor=2,
    )
    torch.manual_seed(0)
    transformers.Idefics3ForConditionalGeneration(config).float().save_pretrained(folder)
    edge = {"longest_edge": VISION["image_size"]}
    transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessorPil(
            size=edge, max_image_size=edge, do_image_splitting=False
        ),
        transformers.AutoTokenizer.from_pretrained(folder),
        image_seq_len=4,  # (32 / 8 / 2) ** 2
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cluster(
    nats: NatsServer, etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmCluster]:
    folder = tmp_path_factory.mktemp("seeing")
    cluster = VllmCluster(nats, etcd, write_seeing_model(folder / "model"), folder)
    cluster.start_frontend()
    cluster.start_pair()
    yield cluster
    cluster.end()


def png(color: tuple[int, int, int]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (48, 40), color).save(file, "png")
    return file.getvalue()


def message(*images: bytes) -> dict[str, Any]:
    urls = ["data:image/png;base64," + base64.b64encode(each).decode() for each in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "Which color?"}]}


async def test_what_a_model_sees_changes_its_answer(
    cluster: VllmCluster, http: aiohttp.ClientSession
) -> None:
    await cluster.ready(http)
    await cluster.prefill_ready()
    red, blue = png((255, 0, 0)), png((0, 0, 255))
    answers, num_prompt = {}, {}
    for name, images in (("red", [red]), ("blue", [blue]), ("both", [red, blue]), ("none", [])):
        body = {"messages": [message(*images)], "max_tokens": 8, "temperature": 0, "logprobs": True}
        async with http.post(
            f"{cluster.address}/v1/chat/completions",
            json={"model": "random"} | body,
            headers={"x-tandem-prefill": "remote"},
        ) as answer:
            found = await answer.json()
            assert answer.status == 200, found
            reason = answer.headers["x-tandem-prefill-reason"]
            place = answer.headers["x-tandem-prefill"]
            assert (reason == "the prompt has images") == bool(images), reason
            assert place == ("local" if images else "remote"), reason
            num_prompt[name] = found["usage"]["prompt_tokens"]
            tokens = found["choices"][0]["logprobs"]["content"]
            answers[name] = [each["logprob"] for each in tokens]
        again = await cluster.chat(http, **body)
        tokens = again["choices"][0]["logprobs"]["content"]
        assert [each["logprob"] for each in tokens] == pytest.approx(answers[name], abs=1e-3)
    kinds = [tuple(round(each, 2) for each in found) for found in answers.values()]
    assert len(set(kinds)) == 4, "the model sees no difference"
    assert num_prompt["red"] == num_prompt["blue"]
    of_image = num_prompt["red"] - num_prompt["none"]
    assert of_image >= 4 and num_prompt["both"] - num_prompt["red"] == of_image


async def test_an_image_that_vllm_cannot_read_is_named(
    cluster: VllmCluster, http: aiohttp.ClientSession
) -> None:
    await cluster.ready(http)
    broken = png((0, 255, 0))[:60]
    found = await cluster.chat(http, 400, messages=[message(png((0, 0, 0)), broken)])
    assert found["error"]["param"] == "messages[0].content[1].image_url"
