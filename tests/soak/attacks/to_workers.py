"""Attacks of anyone who reaches the request ports of workers, without the cluster token."""

import asyncio
import secrets

import msgspec

from tandem.runtime.plane.framing import HEADER, PREAMBLE_BYTES, Hello, Open, encode_frame
from tandem.runtime.wire.messages import GenerateRequest, SamplingParams, StopConditions, encode
from tests.soak.attacks.target import ANSWER_S, HOLD_S, Attack, Target, connected, send
from tests.soak.attacks.to_etcd import planted_instances_at
from tests.soak.attacks.traps import PREAMBLE, trap

MIB = 2**20


async def _send_to_all(target: Target, *parts: bytes, times: int = 1, hold_s: float = 0.0) -> None:
    addresses = target.workers * times
    await asyncio.gather(*(send(address, *parts, hold_s=hold_s) for address in addresses))


def _calls(endpoint: str, payload: bytes, count: int, greeting: bytes = PREAMBLE) -> bytes:
    """Return a greeting, by default without the token, and calls right behind it."""
    opens = [
        Open(number, endpoint, payload, 10**6, secrets.token_hex(8), 10**12, {})
        for number in range(1, count + 1)
    ]
    frames = [Hello("stranger"), *opens]
    return greeting + b"".join(encode_frame(n, frame) for n, frame in enumerate(frames))


async def garbage_bytes(target: Target) -> list[int]:
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * MIB, b"\xff" * MIB, secrets.token_bytes(MIB)):
        await _send_to_all(target, data, times=5)
    for version in (0, 2**16 - 1):
        other = PREAMBLE[:8] + version.to_bytes(2, "little") + PREAMBLE[10:]
        await _send_to_all(target, other, times=5)
    return []


async def silent_connections(target: Target) -> list[int]:
    await _send_to_all(target, times=100, hold_s=HOLD_S)
    await _send_to_all(target, PREAMBLE[:9], times=50, hold_s=HOLD_S)
    return []


async def unfinished_frames(target: Target) -> list[int]:
    frame = HEADER.pack(60 * MIB, 0)
    await _send_to_all(target, PREAMBLE, frame, *[bytes(MIB)] * 59, times=5, hold_s=HOLD_S)
    return []


async def unread_calls(target: Target) -> list[int]:
    for endpoint in ("model_files", "status", "kv_snapshot"):
        await _send_to_all(target, _calls(endpoint, b"", 4000), hold_s=HOLD_S)
    return []


def _generate(target: Target) -> tuple[str, bytes]:
    """Return the endpoint and the payload of a request."""
    sampling, stop = SamplingParams(), StopConditions(max_tokens=99)
    request = GenerateRequest("stranger", target.model, bytes(4), sampling, stop, 9999)
    return f"{target.namespace}.decode.generate", encode(request)


async def _must_be_refused(address: str, data: bytes) -> None:
    async with connected(address) as (reader, writer):
        writer.write(data)
        answer = await asyncio.wait_for(_read_all(reader), ANSWER_S)
    assert len(answer) <= 2 * PREAMBLE_BYTES, "a stranger's call was answered"


async def calls_without_the_token(target: Target) -> list[int]:
    """Requests, claims and first tokens, none of which may be acted on."""
    handoff_id = secrets.token_bytes(16)
    calls = {
        "claim": {"type": "Claim", "prefill_instance": "stranger", "prefill_epoch": "epoch"},
        "first_token": {"type": "FirstToken", "token_id": 2**31 - 1, "run": b"", "secret": b""},
        "settled": {"type": "Settled", "num_completed": 10**6, "num_failed": 0},
    }
    payloads = {
        endpoint: msgspec.msgpack.encode({**fields, "handoff_id": handoff_id, "attempt": 1})
        for endpoint, fields in calls.items()
    }
    for endpoint, payload in (_generate(target), ("model_files", b""), *payloads.items()):
        for address in target.workers:
            await _must_be_refused(address, _calls(endpoint, payload, 20))
    return []


async def replayed_greetings(target: Target) -> list[int]:
    """Processes of the cluster are led to a stranger, who shows workers what they showed."""
    caught: list[bytes] = []
    async with trap("zeros", caught) as address, planted_instances_at(target, address):
        await asyncio.sleep(HOLD_S)
    for greeting in caught[:5]:
        await _must_be_refused(target.decode, _calls(*_generate(target), 5, greeting))
    return []


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def deep_frames(target: Target) -> list[int]:
    for unit in (b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff"):
        body = unit * (MIB // len(unit))
        await _send_to_all(target, PREAMBLE, HEADER.pack(len(body), 0), body, times=3)
    return []


WORKER_ATTACKS: tuple[Attack, ...] = (
    garbage_bytes, silent_connections, unfinished_frames, unread_calls, calls_without_the_token,
    replayed_greetings, deep_frames,
)  # fmt: skip
