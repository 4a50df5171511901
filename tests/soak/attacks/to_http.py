"""Attacks of anyone who reaches the HTTP port."""

import asyncio
from collections.abc import Awaitable
from itertools import chain

from tests.soak.attacks.target import (
    CHAT,
    COMPLETIONS,
    HOLD_S,
    Attack,
    Target,
    chat,
    completion,
    connected,
    exchange,
    post,
    request,
    send,
    with_field,
)

MIB = 2**20
NEARLY_ALL = 8 * MIB - 4096  # of the largest body
NUMBERS = (b"-1", b"0", b"1e-40", b"5e-324", b"1e308", b"2147483648", b"9223372036854775807",
           b"9223372036854775813", b"1e999999", b"NaN", b"-Infinity")  # fmt: skip
NUMBER_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_tokens", "min_tokens", "n", "seed", "logprobs",
)  # fmt: skip


async def _all(*attempts: Awaitable[list[int]]) -> list[int]:
    return list(chain.from_iterable(await asyncio.gather(*attempts)))


async def numbers_out_of_range(target: Target) -> list[int]:
    statuses = []
    for field in NUMBER_FIELDS:
        bodies = [with_field(completion(target), field, number) for number in NUMBERS]
        statuses += await _all(*(post(target, COMPLETIONS, body) for body in bodies))
    return statuses


async def numbers_of_many_digits(target: Target) -> list[int]:
    statuses = []
    for num_digits in (4200, 4301, 7 * MIB):
        body = with_field(completion(target), "seed", b"9" * num_digits)
        statuses += await post(target, COMPLETIONS, body)
    return statuses


async def long_texts(target: Target) -> list[int]:
    statuses = []
    for text in (b"a", b" ", b"\\n", "😀".encode(), b"the world, "):
        prompt = b'"%b"' % (text * (NEARLY_ALL // len(text)))
        statuses += await post(
            target, COMPLETIONS, with_field(completion(target), "prompt", prompt)
        )
    return statuses


async def a_long_text_in_a_chat(target: Target) -> list[int]:
    messages = [{"role": "user", "content": "word " * (MIB // 5)}]
    return await post(target, CHAT, chat(target, messages=messages))


async def many_long_prompts(target: Target) -> list[int]:
    return await post(target, COMPLETIONS, completion(target, prompt=["hello " * 4000] * 256))


def _repeated(unit: bytes, count: int) -> bytes:
    return b"[" + b",".join([unit] * count) + b"]"


async def empty_messages(target: Target) -> list[int]:
    messages = _repeated(b'{"role":"user","content":""}', 215_000)
    return await post(target, CHAT, with_field(chat(target), "messages", messages))


async def content_parts(target: Target) -> list[int]:
    parts = _repeated(b'{"type":"text","text":""}', 230_000)
    messages = b'[{"role":"user","content":%b}]' % parts
    return await post(target, CHAT, with_field(chat(target), "messages", messages))


async def logit_biases(target: Target) -> list[int]:
    biases = b"{" + b",".join(b'"%d":1' % token for token in range(400_000)) + b"}"
    return await post(target, COMPLETIONS, with_field(completion(target), "logit_bias", biases))


async def token_ids(target: Target) -> list[int]:
    statuses = []
    for field, count in (("prompt", 2**20), ("prompt", 2_000_000), ("stop_token_ids", 2_000_000)):
        body = with_field(completion(target), field, _repeated(b"1", count))
        statuses += await post(target, COMPLETIONS, body)
    return statuses


async def long_stop_strings(target: Target) -> list[int]:
    return await post(target, COMPLETIONS, completion(target, stop=["x" * 480_000] * 16))


async def large_template_arguments(target: Target) -> list[int]:
    large = post(target, CHAT, chat(target, chat_template_kwargs={"a": "x" * 7 * MIB}))
    odd = [
        post(target, CHAT, chat(target, chat_template_kwargs={name: {"__class__": "x"}}))
        for name in ("self", "range", "loop", "messages", "raise_exception")
    ]
    return await _all(large, *odd)


async def templates_in_contents(target: Target) -> list[int]:
    text = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": text}]
    return await _all(
        post(target, CHAT, chat(target, messages=messages)),
        post(target, CHAT, chat(target, chat_template=text)),
    )


async def deep_nesting(target: Target) -> list[int]:
    statuses = []
    for unit in (b"[", b'{"a":', b'{"messages":['):
        body = unit * (NEARLY_ALL // len(unit))
        statuses += await post(target, CHAT, body)
        statuses += await post(target, CHAT, with_field(chat(target), "metadata", body[:-1024]))
    return statuses


async def bodies_that_are_no_json(target: Target) -> list[int]:
    good = completion(target)
    bodies = (b"", b"\xef\xbb\xbf" + good, good.decode().encode("utf-16"), b"\xff" * 64, b"null",
              b"\0" * MIB, good + good, b'{"model":"\\ud800"}')  # fmt: skip
    headers = ("content-type: text/plain", "content-encoding: gzip", "transfer-encoding: gzip")
    return await _all(
        *(post(target, COMPLETIONS, body) for body in bodies),
        *(post(target, COMPLETIONS, good, header) for header in headers),
    )


async def names_without_end(target: Target) -> list[int]:
    long, lines = "x" * 7 * MIB, "x\r\nERROR forged line\x1b[31m\n" * 100
    statuses = []
    for name in (long, lines):
        statuses += await post(target, COMPLETIONS, completion(target, model=name))
        statuses += await post(target, COMPLETIONS, completion(target, **{name: 1}))
    return statuses


async def huge_headers(target: Target) -> list[int]:
    start = f"GET /live HTTP/1.1\r\nhost: {target.http}\r\n".encode()
    one = exchange(target, start + b"x-large: ", *[b"x" * MIB] * 30, b"\r\n\r\n")
    many = exchange(target, start, *[b"x-a: b\r\n" * 100_000] * 5, b"\r\n")
    return await _all(one, many, exchange(target, b"GET /" + b"x" * MIB, b" HTTP/1.1\r\n\r\n"))


def _head(target: Target, length: int) -> bytes:
    return request(target, COMPLETIONS, b"x" * length)[:-length]


async def half_sent_bodies(target: Target) -> list[int]:
    part = b" " * MIB
    data = (_head(target, NEARLY_ALL + MIB), *[part] * 7)
    await asyncio.gather(*(send(target.http, *data, hold_s=HOLD_S) for _ in range(60)))
    return []


async def bodies_byte_by_byte(target: Target) -> list[int]:
    start = (_head(target, NEARLY_ALL), b" " * (NEARLY_ALL - 2000))
    await asyncio.gather(*(send(target.http, *start, *[b" "] * 1000) for _ in range(4)))
    return []


async def half_request_lines(target: Target) -> list[int]:
    starts = (
        b"",
        b"P",
        b"POST /v1/comp",
        b"GET /live HTTP/1.1\r\nhost: localhost\r\nx-a: ",
        b"\r\n",
    )
    await asyncio.gather(*(send(target.http, start, hold_s=HOLD_S) for start in starts * 60))
    return []


async def unread_answers(target: Target) -> list[int]:
    body = completion(target, max_tokens=300, ignore_eos=True, stream=True, logprobs=5)
    data = request(target, COMPLETIONS, body)
    await asyncio.gather(*(send(target.http, data, hold_s=2 * HOLD_S) for _ in range(10)))
    return []


async def clients_that_leave(target: Target) -> list[int]:
    body = completion(target, prompt=list(range(3, 203)), max_tokens=500, ignore_eos=True)
    data = request(target, COMPLETIONS, body)
    for _ in range(4):
        await asyncio.gather(*(send(target.http, data, hold_s=0.02) for _ in range(20)))
    return []


async def many_choices_with_logprobs(target: Target) -> list[int]:
    body = chat(target, n=16, logprobs=True, top_logprobs=20, max_tokens=50, ignore_eos=True)
    return await post(target, CHAT, body)


async def old_protocols(target: Target) -> list[int]:
    """HTTP/1.0 must not get chunks, HTTP/1.1 must name its host, and 0.9 and 2 are not served."""
    body = completion(target, stream=True)
    old = request(target, COMPLETIONS, body, version="1.0")
    async with connected(target.http) as (reader, writer):
        writer.write(old)
        answer = await reader.read()
    assert b"chunked" not in answer.lower() and b"data: [DONE]" in answer, answer
    assert (await exchange(target, b"GET /live\r\n\r\n")) == [400]
    nameless = b"GET /live HTTP/1.1\r\nconnection: close\r\n\r\n"
    others = (
        nameless,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\0",
    )
    return [200, *await _all(*(_sent_whole(target, data) for data in others))]


async def _sent_whole(target: Target, data: bytes) -> list[int]:
    """Return the statuses of what may be half a request: at most until the hold is over."""
    try:
        async with asyncio.timeout(HOLD_S):
            return await exchange(target, data)
    except TimeoutError:
        return []


async def smuggled_requests(target: Target) -> list[int]:
    start = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    headers = (
        "content-length: 5\r\ntransfer-encoding: chunked", "content-length: 5\r\ncontent-length: 6",
        "content-length: -1", "content-length: 99999999999999999999", "transfer-encoding: xchunked",
        "transfer-encoding: chunked\r\n folded: x", "content-length: 5\nx: bare",
    )  # fmt: skip
    tails = (
        b"0\r\n\r\nGET /live HTTP/1.1\r\n\r\n",
        b"ffffffffffffffffff\r\n",
        b"-5\r\n",
        b"zz\r\n",
    )
    attempts = [f"{start}{each}\r\n\r\n".encode() + tail for each in headers for tail in tails]
    return await _all(*(_sent_whole(target, data) for data in attempts))


async def odd_paths(target: Target) -> list[int]:
    paths = (
        "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/%00", "/v1/models/%ff/ready", "//", "*",
        "/v1/models/" + "x" * 30_000, "/metrics?x=" + "x" * 30_000, "http://x/",
    )  # fmt: skip
    methods = ("GET", "POST", "DELETE", "OPTIONS", "CONNECT", "BREW")
    requests = [request(target, path, b"", method=name) for path in paths for name in methods]
    return await _all(*(exchange(target, data) for data in requests))


async def idle_connections(target: Target) -> list[int]:
    await asyncio.gather(*(send(target.http, hold_s=HOLD_S) for _ in range(400)))
    return []


async def pipelined_requests(target: Target) -> list[int]:
    one = f"GET /v1/models HTTP/1.1\r\nhost: {target.http}\r\n\r\n".encode()
    return await exchange(target, one * 1000 + request(target, "/live", b"", method="GET"))


async def many_requests_at_once(target: Target) -> list[int]:
    return await _all(*(post(target, COMPLETIONS, completion(target)) for _ in range(100)))


HTTP_ATTACKS: tuple[Attack, ...] = (
    numbers_out_of_range, numbers_of_many_digits, long_texts, a_long_text_in_a_chat,
    many_long_prompts, empty_messages, content_parts, logit_biases, token_ids, long_stop_strings,
    large_template_arguments, templates_in_contents, deep_nesting, bodies_that_are_no_json,
    names_without_end, huge_headers, half_sent_bodies, bodies_byte_by_byte, half_request_lines,
    unread_answers, clients_that_leave, many_choices_with_logprobs, old_protocols,
    smuggled_requests, odd_paths, idle_connections, pipelined_requests, many_requests_at_once,
)  # fmt: skip
