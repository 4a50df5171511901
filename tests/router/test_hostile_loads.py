"""The choice of a worker and the place of a prompt, whatever numbers workers report."""

import dataclasses
import random
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.decode.admission import PrefillSide, decide, decide_again, gives_way, leaves_tickets
from tandem.decode.config import DisaggConfig, Policy
from tandem.router.config import RouterConfig
from tandem.router.policy import Router
from tandem.router.predict import PlaceLoad
from tandem.runtime.bus.events import load_subject
from tandem.runtime.errors import ProtocolError
from tandem.runtime.wire.bounds import MAX_COUNT
from tandem.runtime.wire.cluster_messages import Instance, LoadReport, StepCosts
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.messages import encode
from tandem.sdk.engine_worker.prefill_stage import PrefillStage

NO_NUMBERS = ("instance_id", "epoch", "role", "costs")
COUNTS = [name for name in LoadReport.__struct_fields__ if name not in NO_NUMBERS]
HONEST = StepCosts((4e-3, 3e-5, 1e-8), (2e-3, 2.5e-5, 2e-9), 0.05, 8192, 2048)
NAMES = ["a", "b", "c"]
SIZES = st.sampled_from([0, 1, 2, 1000, 2**31, MAX_COUNT]) | st.integers(0, MAX_COUNT)
SECONDS = st.sampled_from([0.0, 5e-324, 1e-9, 1e-3, 1.0, 3600.0]) | st.floats(0, 3600)
TOKENS = st.sampled_from([1, 2, 512, 2**24]) | st.integers(1, 2**24)
COSTS = st.builds(
    StepCosts,
    st.tuples(SECONDS, SECONDS, SECONDS),
    st.tuples(SECONDS, SECONDS, SECONDS),
    SECONDS,
    TOKENS,
    TOKENS,
    st.booleans(),
    st.none() | SECONDS,
    st.floats(0, 1),
    SECONDS,
)
REPORTS = st.builds(
    LoadReport,
    st.sampled_from(NAMES),
    st.just("e"),
    st.sampled_from(["both", "decode", "prefill"]),
    **dict.fromkeys(COUNTS, SIZES),
    costs=st.none() | COSTS,
)
# Reports that no decoder passes: the rules must not be all that stands between a number and a 500.
WILD = st.integers(-(2**62), 2**62)
WILD_REPORTS = st.builds(
    LoadReport,
    st.sampled_from(NAMES),
    st.just("e"),
    st.just("both"),
    **dict.fromkeys(COUNTS, WILD),
    costs=st.none() | COSTS,
)
PATIENT = settings(deadline=None, max_examples=40)


def chosen(reports: list[LoadReport], num_blocks: int, seed: int) -> None:
    """Choose, send, and end requests between the reports."""
    router = Router(RouterConfig(), random.Random(seed))
    for number, each in enumerate(reports):
        router.update_load(each, 16)
        for size in (1, 2, 3):
            decision = router.choose(NAMES[:size], [], num_blocks)
            assert decision.instance_id in NAMES[:size] and decision.reason
        router.started(str(number), decision, num_blocks)
        router.prefilled(str(number - 1))
        router.finished(str(number - 2))


@PATIENT
@given(st.lists(REPORTS, min_size=1, max_size=6), st.integers(0, 2**20), st.integers())
def test_somebody_is_chosen_whatever_workers_report(
    reports: list[LoadReport], num_blocks: int, seed: int
) -> None:
    decode = decoder(LoadReport)
    chosen([decode(encode(each)) for each in reports], num_blocks, seed)


@PATIENT
@given(st.lists(WILD_REPORTS, min_size=1, max_size=6), st.integers(0, 2**20), st.integers())
def test_somebody_is_chosen_also_without_the_bounds_of_reports(
    reports: list[LoadReport], num_blocks: int, seed: int
) -> None:
    chosen(reports, num_blocks, seed)


@pytest.mark.parametrize("policy", list(Policy))
@PATIENT
@given(
    st.lists(REPORTS, max_size=3),
    REPORTS,
    SIZES,
    st.integers(0, 2**22),
    st.integers(0, 2**22),
    st.none() | st.floats(0.001, 1e6),
)
def test_a_place_is_found_whatever_workers_report(
    policy: Policy,
    others: list[LoadReport],
    here: LoadReport,
    num_ticket_tokens: int,
    num_uncached: int,
    num_cached: int,
    target_ms: float | None,
) -> None:
    config = DisaggConfig(policy=policy, ttft_target_ms=target_ms, itl_target_ms=target_ms)
    places = [place for each in others if (place := PlaceLoad.of(each)) is not None]
    side = PrefillSide(len(others), True, num_ticket_tokens, num_ticket_tokens)
    side = dataclasses.replace(side, here=PlaceLoad.of(here), others=places)
    decision = decide(config, num_uncached, side, num_cached_tokens=num_cached)
    assert decision.place in ("local", "remote") and decision.reason
    assert decision.claim_timeout_ms <= config.claim_timeout_ms
    again = decide_again(config, num_uncached, side, num_cached_tokens=num_cached)
    assert again.place in ("local", "remote") and again.reason
    if side.here is not None:
        leaves_tickets(side.here, places, num_uncached)
        gives_way(config, side.here, num_uncached, 1.0)


class Client:
    """The prefill workers of a decode engine of the kit."""

    def instance_ids(self) -> list[str]:
        return NAMES

    available_ids = instance_ids

    def instances(self) -> list[Instance]:
        return []

    async def close(self) -> None:
        """Do nothing."""


@PATIENT
@given(st.lists(REPORTS, min_size=1, max_size=5), st.integers(0, 2**20))
def test_an_engine_of_the_kit_finds_a_place_whatever_workers_report(
    reports: list[LoadReport], num_tokens: int
) -> None:
    stage = PrefillStage(cast(Any, Client()), NAMES[0])
    for report in reports:
        stage._on_load(load_subject("ns", report.instance_id), encode(report))
        decision = stage.decide(num_tokens)
        assert decision is None or decision.instance_id in NAMES


LIES: list[dict[str, Any]] = [
    {"decode_context": -(10**12)},
    dict.fromkeys(COUNTS, -5),
    dict.fromkeys(COUNTS, 2**62),
]


@pytest.mark.parametrize("lie", LIES)
def test_a_report_that_lies_is_refused_and_the_others_are_chosen(lie: dict[str, Any]) -> None:
    honest = LoadReport("a", "e", "both", 1, 0, 0, 100, 50, 0, 1, 100, costs=HONEST)
    with pytest.raises(ProtocolError):
        decoder(LoadReport)(encode(msgspec.structs.replace(honest, instance_id="b", **lie)))
