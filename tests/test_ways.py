"""The ways of one chat and of one ticket, traced: the page of the architecture has their files."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tandem.runtime.config import RuntimeConfig
from tests.decode.prefill_peer import PROMPT
from tests.decode.prefill_peer import Stage as DecodeStage
from tests.frontend.frontend_stack import Stack
from tests.handoff_peer import fresh_prompt
from tests.handoff_peer import tiny_model as tiny_model
from tests.prefill.decode_peer import Stage as PrefillStage
from tests.services import eventually

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()
# from time to time, and not for the request
BESIDE = {
    "decode/kv_events.py", "frontend/catalog/worker_events.py", "worker/load_reports.py",
    "worker/metrics.py",
}  # fmt: skip
# by the prefill worker that the test plays, in the same process
PLAYED = {"queue/limits.py", "queue/pull.py", "transfer/agents/link.py", "transfer/layout.py"}


@contextmanager
def entered(*rooms: str) -> Iterator[set[str]]:
    """The files of rooms that the event loop's thread enters, complete at the end."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
    own = {str(Path(file).relative_to(ROOT)) for file in files if file.startswith(str(ROOT))}
    files.clear()
    files |= {file for file in own if file.partition("/")[0] in rooms} - BESIDE


def way(start: str, end: str) -> str:
    """The part of the page between the lines that begin so."""
    return PAGE.partition(f"\n{start}")[2].partition(f"\n{end}")[0]


def named(part: str, *rooms: str) -> set[str]:
    """The files of rooms that a part of the page names."""
    return {file for file in re.findall(r"`([\w/]+\.py)`", part) if file.partition("/")[0] in rooms}


async def test_a_chat_enters_as_many_files_as_the_page_says() -> None:
    async with Stack() as stack:
        await stack.chat(stream=True)  # the first one loads more
        with entered("frontend", "router") as files:
            await stack.chat(stream=True)
    page = way("## A chat request's way", "## A remote prefill's way")
    folders = tuple(re.findall(r"`(frontend/[\w/]+/)`", page))
    unnamed = files - named(page, "frontend", "router")
    assert not {file for file in unnamed if not file.startswith(folders)}
    found = re.search(r"enters (\d+) files", page)
    assert found is not None and len(files) == int(found[1]), sorted(files)


async def test_a_ticket_enters_the_files_of_the_page_at_its_decode_worker(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    rooms = ("decode", "transfer", "queue")
    async with DecodeStage(runtime_config, tiny_model) as stage:
        with entered(*rooms) as files:
            answer, work = await stage.handoff(PROMPT)
            await stage.deliver(work)
            await stage.settle(work)
            await answer.whole()
    assert files - PLAYED == named(way("At the decode worker:", "At the prefill worker:"), *rooms)


async def test_a_ticket_enters_the_files_of_the_page_at_its_prefill_worker(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    rooms = ("prefill", "transfer", "queue")
    async with PrefillStage(runtime_config, tiny_model) as stage:
        with entered(*rooms) as files:
            offer = await stage.offer(fresh_prompt(40))
            await stage.settled(offer)
            await eventually(lambda: not len(stage.worker._jobs))
    assert files == named(way("At the prefill worker:", "An agent"), *rooms)
