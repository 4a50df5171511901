"""Figures of handoffs between served processes: handover, verification, streaming, resting."""

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tandem.bench.handoff.plan import Plan
from tandem.bench.handoff.served import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    SHAPE,
    STREAMING,
    Course,
    Streaming,
    Topology,
    both_topologies,
    in_turns,
    last_chunk_tokens,
    share_while_waiting,
)
from tandem.bench.handoff.wire_figures import WireResults
from tandem.bench.report.figures import Figure, at_most, medians, percentile, ratio


@dataclass(slots=True)
class ServedResults:
    """Requests of each topology by length and round; the decode worker's shares of a core."""

    courses: dict[tuple[Streaming, int], list[list[Course]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    resting: dict[str, float] = field(default_factory=dict)

    def lengths(self) -> list[int]:
        return sorted({num_tokens for _, num_tokens in self.courses})


async def measure_served(plan: Plan, run_dir: Path) -> ServedResults:
    """Measure requests to served processes in turns, and their decode worker at rest."""
    results = ServedResults()
    async with both_topologies(run_dir) as topologies:
        for num_tokens in plan.requests:
            await in_turns(topologies, num_tokens, plan.num_warmups)
        for index in range(plan.rounds):
            for num_tokens, count in plan.requests.items():
                _keep(results, num_tokens, await in_turns(topologies, num_tokens, count))
            if index < plan.long_rounds:
                await _long_round(results, plan, topologies)
        resting = asyncio.sleep(plan.rest_s)
        results.resting["idle"] = await topologies["by layers"].decode_share(resting)
    return results


async def _long_round(
    results: ServedResults, plan: Plan, topologies: Mapping[Streaming, Topology]
) -> None:
    """Send one long prompt to each; measure the decode worker while the first is computed."""
    share, first = await share_while_waiting(topologies["by layers"], plan.long_tokens, plan.rest_s)
    results.resting["handoff expected"] = share
    other = await topologies["whole"].ask(plan.long_tokens)
    _keep(results, plan.long_tokens, {"by layers": [first], "whole": [other]})


def _keep(results: ServedResults, num_tokens: int, found: Mapping[Streaming, list[Course]]) -> None:
    for streaming, courses in found.items():
        results.courses[streaming, num_tokens].append(courses)


def served_figures(results: ServedResults, wires: WireResults) -> Iterator[Figure]:
    """Yield (a), the rest of (c), (d) and (e)."""
    yield from _handover_figures(results, wires)
    for state, share in results.resting.items():
        label = f"(c) decode worker, {state}: share of a core"
        name = f"decode_{state.replace(' ', '_')}_percent"
        yield Figure(name, label, "%", (100 * share,), at_most(5.0))
    yield from _verification_figures(results, wires)
    yield from _streaming_figures(results)


def _handover_figures(results: ServedResults, wires: WireResults) -> Iterator[Figure]:
    def overhead_ms(course: Course) -> float:
        # at least so much was exposed: the last step's KV, or of it the smallest last group
        num_blocks = -(-last_chunk_tokens(course.num_tokens) // BLOCK_TOKENS)
        return course.handover_ms - wires.wire_ms(num_blocks * BLOCK_BYTES / SHAPE.num_layers)

    def to_step_ms(course: Course) -> float:
        return overhead_ms(course) + course.second_token_ms - course.handover_ms - course.step_ms

    # the second includes the extra time of a first step, so it has no target
    for key, words, measure, p50_target, p99_target in (
        ("handover", "handover", overhead_ms, at_most(5.0), at_most(15.0)),
        ("handover_to_step", "  and the first step less a later one", to_step_ms, None, None),
    ):
        pooled: list[float] = []
        for num_tokens in results.lengths():
            rounds = results.courses["by layers", num_tokens]
            p50 = tuple(statistics.median(map(measure, each)) for each in rounds)
            label = f"(a) {words}, {num_tokens} tokens, p50"
            yield Figure(f"{key}_{num_tokens}_p50_ms", label, "ms", p50, p50_target)
            pooled += [measure(course) for each in rounds for course in each]
        what = f"{len(pooled)} prompts of all lengths"
        p50_ms, p99_ms = (percentile(pooled, share) for share in (0.5, 0.99))
        yield Figure(f"{key}_p50_ms", f"(a) {words}, {what}, p50", "ms", (p50_ms,), p50_target)
        yield Figure(f"{key}_p99_ms", f"(a) {words}, {what}, p99", "ms", (p99_ms,), p99_target)


def _verification_figures(results: ServedResults, wires: WireResults) -> Iterator[Figure]:
    rate = statistics.median(wires.checksum_bytes_per_s)
    for num_tokens in results.lengths():
        rounds = results.courses["by layers", num_tokens]
        exposed = tuple(
            statistics.median(
                100 * each.between("landed", "verified") / each.ttft_ms for each in courses
            )
            for courses in rounds
        )
        num_bytes = -(-num_tokens // BLOCK_TOKENS) * BLOCK_BYTES
        ttft_ms = statistics.median(course.ttft_ms for each in rounds for course in each)
        work = 100 * 2 * num_bytes / rate * 1e3 / ttft_ms
        label = f"(d) verifying, {num_tokens} tokens: landed to verified, share of TTFT"
        yield Figure(f"verification_{num_tokens}_percent", label, "%", exposed)
        label = "(d)   checksums of both topologies, share of TTFT"
        yield Figure(f"checksums_{num_tokens}_percent", label, "%", (work,))


def _streaming_figures(results: ServedResults) -> Iterator[Figure]:
    for num_tokens in results.lengths():
        exposed = {
            streaming: [
                [course.handover_ms for course in each]
                for each in results.courses[streaming, num_tokens]
            ]
            for streaming in STREAMING
        }
        for streaming, rounds in exposed.items():
            label = f"(e) exposed transfer, {num_tokens} tokens, {streaming}"
            name = f"exposed_{streaming.replace(' ', '_')}_{num_tokens}_ms"
            yield Figure(name, label, "ms", tuple(medians(rounds)))
        streamed, whole = exposed["by layers"], exposed["whole"]
        label = "(e)   by layers / whole"
        yield ratio(f"streaming_{num_tokens}_ratio", label, streamed, whole, at_most(1.02))
