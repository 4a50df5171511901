"""Whose turn it is to serve, by a file and by what a frontend answers."""

import asyncio
from pathlib import Path

import pytest

from tandem.launch.slurm import turn
from tandem.launch.slurm.turn import Turn
from tandem.runtime.local.ports import free_port
from tests.services import PATIENCE_S


async def test_a_job_serves_at_once_unless_another_does(tmp_path: Path) -> None:
    path = tmp_path / "services.json"
    one, other = Turn(path, "1"), Turn(path, "2")
    async with asyncio.timeout(turn.SILENCE_S / 2):
        await one.until_mine()  # nothing was written yet
        one.take("nats://a", "http://a", "http://a:1")
        assert path.stat().st_mode & 0o077 == 0
        await one.until_mine()  # its own process came back
        assert not other.hand_over()  # it does not have it
        assert (now := one.now()) is not None and now.job_id == "1"
        assert one.hand_over()
        await other.until_mine()
        assert await other.left_url() is None  # nothing answers there
    other.take("nats://b", "http://b", "http://b:1")
    async with asyncio.timeout(PATIENCE_S):
        assert await one.until_lost() == other.now()


async def test_clients_keep_the_address_of_a_job_that_leaves_until_the_next_one_gives_its_own(
    tmp_path: Path,
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    one, other = Turn(tmp_path / "services.json", "1"), Turn(tmp_path / "services.json", "2")
    async with await asyncio.start_server(answer, "127.0.0.1", port), asyncio.timeout(PATIENCE_S):
        one.take("nats://a", "http://a", url)
        assert await other.left_url() is None  # it has not left
        moved = asyncio.create_task(one.until_answered_elsewhere(url))
        assert one.hand_over() and await other.left_url() == url
        other.take("nats://b", "http://b", url)
        assert (await one.until_lost()).nats_url == "nats://b"
        assert not moved.done()
        other.take("nats://b", "http://b", "http://b:1")
        await moved


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_job_stands_by_while_another_answers_and_takes_over_when_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    short_s, never_s = 0.6, 1e6
    monkeypatch.setattr(turn, "SILENCE_S", never_s if is_refused else short_s)
    monkeypatch.setattr(turn, "RESTART_S", short_s if is_refused else never_s)
    is_silent = False

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if is_silent:
            await reader.read()  # until the other end gives up
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    port = free_port()
    one, other = Turn(tmp_path / "services.json", "1"), Turn(tmp_path / "services.json", "2")
    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        one.take("nats://a", "http://a", f"http://127.0.0.1:{port}")
        waiting = asyncio.create_task(other.until_mine())
        await asyncio.wait([waiting], timeout=short_s * 1.5)
        assert not waiting.done()
        is_silent = True
        if is_refused:
            server.close()
        async with asyncio.timeout(PATIENCE_S):
            await waiting
