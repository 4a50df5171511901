"""`tandem explain`: every place that was considered for a request's prompt, and what came."""

import asyncio
import json
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.config.live import connected
from tandem.config.model import EffectiveConfig
from tandem.runtime.address import new_id
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConfigError, NotFoundError, TandemError
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.printable import one_line
from tandem.runtime.process.reporter import wide_console
from tandem.runtime.store.discovery import read_instances
from tandem.runtime.wire.cluster_messages import Instance
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.explain_messages import (
    EXPLAIN_ENDPOINT,
    MAX_REMEMBERED,
    MAX_REQUEST_ID_CHARS,
    ExplainRequest,
    PromptExplanation,
    PromptExplanations,
)
from tandem.runtime.wire.messages import encode

CALL_TIMEOUT_S = 2.0  # a stopped worker does not answer, and a person is waiting
MAX_TEXT_BYTES = 1024
_decode_answer = decoder(PromptExplanations)


def run_explain(effective: EffectiveConfig, request_id: str, *, as_json: bool) -> None:
    """Print the explanations of a request.

    Raise NotFoundError for a request that no worker remembers, and ServiceError without an etcd.
    """
    found = asyncio.run(explain(effective, request_id))
    if as_json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))
        return
    console = wide_console()
    for at, each in enumerate(found):
        if at:
            console.print()
        _print(console, each)


async def explain(effective: EffectiveConfig, request_id: str) -> list[PromptExplanation]:
    """Return what the decode workers of the namespace remember of a request."""
    if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise ConfigError(f"REQUEST_ID has 1 to {MAX_REQUEST_ID_CHARS} characters")
    runtime = effective.config.runtime
    async with connected(effective) as discovery:
        workers = await read_instances(discovery, runtime.namespace, ("decode",))
    client = RequestClient(runtime, new_id())
    try:
        answers = await asyncio.gather(
            *(_ask(client, worker, request_id) for worker in workers.values())
        )
    finally:
        await client.close()
    found = [each for answer in answers if not isinstance(answer, str) for each in answer]
    if not found:
        silent = [answer for answer in answers if isinstance(answer, str)]
        reasons = f" ({'; '.join(silent)})" if silent else ""
        raise NotFoundError(
            f"no decode worker of namespace {runtime.namespace} ({len(workers)} asked) remembers "
            f"request {request_id!r}{reasons}: each keeps its last {MAX_REMEMBERED} requests until "
            "it ends, and the id of a request is in the header x-tandem-request-id of its response"
        )
    return found


async def _ask(
    client: RequestClient, worker: Instance, request_id: str
) -> list[PromptExplanation] | str:
    """Return the answer of one worker, or the reason why there is none."""
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S), RequestContext() as context:
            question = encode(ExplainRequest(request_id))
            answer = await client.call(worker.address, EXPLAIN_ENDPOINT, question, context)
        return _decode_answer(answer).found
    except TimeoutError:
        return f"{worker.instance_id[:8]}: no answer within {CALL_TIMEOUT_S:g} s"
    except TandemError as error:
        return f"{worker.instance_id[:8]}: {one_line(str(error), MAX_TEXT_BYTES)}"


# ---- as text ---------------------------------------------------------------------------------


def _print(console: Console, found: PromptExplanation) -> None:
    _say(
        console,
        f"request {found.request_id} at decode worker {found.decode_instance[:8]}: "
        f"{found.num_prompt_tokens} prompt tokens, {found.num_cached_tokens} cached, "
        f"{found.outcome}",
    )
    _print_routed(console, found)
    _print_considered(console, found)
    _say(console, f"decided: {found.place} ({found.cause}): {found.reason}")
    if (found.last_place, found.last_reason) != (found.place, found.reason):
        _say(console, f"then: {found.last_place}: {found.last_reason}")
    if found.prefill_instance:
        _say(console, f"computed by prefill worker {found.prefill_instance[:8]}")
    came = found.timeline_ms.get("first_token")
    if came is not None and found.predicted_ms:
        _say(console, f"first token: predicted {found.predicted_ms:.1f} ms, came {came:.1f}")
    stages = ", ".join(f"{stage} {ms:.1f}" for stage, ms in found.timeline_ms.items())
    _say(console, f"timeline in ms: {stages}")


def _print_routed(console: Console, found: PromptExplanation) -> None:
    if not found.routed:
        _say(console, "the frontend had no prediction of a decode worker")
        return
    rows = [
        (
            *(each.instance_id[:8], f"{each.first_token_ms:.1f}", f"{each.cost_ms:.1f}"),
            "yes" if each.fits else "no",
            "*" if each.instance_id == found.decode_instance else "",
        )
        for each in found.routed
    ]
    headings = ("worker", "first token", "all delays", "fits", "chosen")
    _table(console, "decode workers that the frontend compared, in ms", headings, rows)


def _print_considered(console: Console, found: PromptExplanation) -> None:
    if not found.considered:
        _say(console, "the decode worker had no prediction of a place")
        return
    rows = [
        (
            *(each.place, each.instance_id[:8], f"{each.wait_ms:.1f}", f"{each.compute_ms:.1f}"),
            *(f"{each.transfer_ms:.1f}", f"{each.first_token_ms:.1f}", f"{each.cost_ms:.1f}"),
            f"{each.num_missed}",
        )
        for each in found.considered
    ]
    headings = ("place", "worker", "wait", "computing", "transfer", "first token", "all delays")
    title = "places of the prompt that the decode worker predicted, in ms"
    _table(console, title, (*headings, "targets missed"), rows)


def _table(
    console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("place", "worker") else "right")
    for row in rows:
        table.add_row(*(Text(one_line(cell, MAX_TEXT_BYTES)) for cell in row))
    console.print(table)


def _say(console: Console, line: str) -> None:
    console.print(Text(one_line(line, MAX_TEXT_BYTES)), soft_wrap=True)
