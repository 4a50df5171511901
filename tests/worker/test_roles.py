"""Workers that have both roles, and change them while they serve."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tandem.decode.transfer_cost import FIXED_S
from tandem.engine.config import STEP_TOKENS
from tandem.engine.schedule.outputs import SequenceOutput
from tandem.engine.schedule.sequence import Sequence
from tandem.prefill import worker as prefill_worker
from tandem.prefill.compute import PromptComputation
from tandem.prefill.job import GIVE_BACK_DELAY_S
from tandem.queue.jetstream import JetStreamDelivery
from tandem.runtime.address import EndpointAddress, new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import (
    IncompleteError,
    InvalidRequestError,
    ServiceError,
    UnavailableError,
)
from tandem.runtime.store.discovery import instances_prefix, register_instance
from tandem.runtime.wire.cluster_messages import StepCosts, WorkerRole
from tandem.runtime.wire.messages import PrefillPlace, encode
from tandem.worker import roles
from tests.decode.prefill_peer import count
from tests.handoff_peer import fresh_prompt
from tests.services import EtcdServer, NatsServer, eventually
from tests.worker.pair import Both, Pair

LONG_S = 600.0


@pytest.fixture
async def pair(runtime_config: RuntimeConfig, tiny_model: Path) -> AsyncIterator[Pair]:
    """Two workers of the test's own; afterwards every block must be free or cached."""
    async with Pair(runtime_config, tiny_model) as running:
        yield running
        await running.balanced()


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays by which tickets are given back."""
    noted, give_back = list[float](), JetStreamDelivery.give_back

    async def note(delivery: JetStreamDelivery, delay_s: float = 0.0) -> None:
        noted.append(delay_s)
        await give_back(delivery, delay_s)

    monkeypatch.setattr(JetStreamDelivery, "give_back", note)
    return noted


async def test_a_prompt_is_computed_by_the_other_worker_where_that_is_asked_for(pair: Pair) -> None:
    for seed in range(8):
        prompt, (asked, other) = fresh_prompt(21, seed), (pair.one, pair.two)[:: 1 - 2 * (seed % 2)]
        report = await pair.answered(asked, prompt, place="remote")
        assert report.place == "remote"
        assert report.prefill_instance == other.node.instance_id


async def test_each_computes_prompts_of_the_other_while_it_answers(pair: Pair) -> None:
    prompts = [fresh_prompt(13, seed) for seed in range(12)]
    await asyncio.gather(
        *(
            pair.answered((pair.one, pair.two)[index % 2], prompt, place="remote")
            for index, prompt in enumerate(prompts)
        )
    )


async def test_a_worker_takes_its_own_ticket_back_and_computes_the_prompt(
    runtime_config: RuntimeConfig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_worker, "TURN_S", LONG_S)
    limits = {"policy": "threshold", "max_local_prefill_length": 8}
    async with Pair(runtime_config, tiny_model, **limits) as pair:
        pair.two.worker.own_prompts.add("a prompt that never ends", 1)
        before = count("decode_handoffs_total", end="taken_back")
        assert (await pair.answered(pair.one, fresh_prompt(21, seed=1))).place == "local"
        assert count("decode_handoffs_total", end="taken_back") == before + 1
        await pair.balanced()


async def test_a_worker_is_not_asked_for_a_prompt_beyond_its_context(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    one, node = pair.one, pair.two.node
    assert node.max_prompt_tokens == pair.two.worker.engine.max_model_len - 1
    node.max_prompt_tokens = 16
    await register_instance(node, node.instance(pair.two.prefill.endpoint))
    known = one.decode._prefill_instances.items
    await eventually(lambda: known[node.instance_id].max_prompt_tokens == 16)
    caplog.clear()
    for num_tokens, place in ((16, "remote"), (17, "local")):
        report = await pair.answered(one, fresh_prompt(num_tokens, seed=3), place="remote")
        assert report.place == place
    assert report.reason == "no prefill worker"
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


async def test_a_ticket_beyond_its_context_is_left_to_other_workers(
    pair: Pair, delays: list[float]
) -> None:
    node, prompt = pair.two.node, fresh_prompt(21, seed=4)
    longest, node.max_prompt_tokens = node.max_prompt_tokens, 16  # not yet known to the other one
    answer = await pair.ask(pair.one, prompt, place="remote")
    await eventually(lambda: delays.count(GIVE_BACK_DELAY_S) > 2)
    assert pair.one.decode.handoffs.num_unclaimed == 1
    node.max_prompt_tokens = longest
    assert (await pair.checked(answer, prompt)).prefill_instance == node.instance_id


@pytest.mark.parametrize(("role", "num_tokens"), [("both", 16), ("prefill", 16), ("decode", 2048)])
async def test_a_worker_that_begins_with_the_prompts_of_others_has_the_device_s_longest_steps(
    role: WorkerRole,
    num_tokens: int,
    runtime_config: RuntimeConfig,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STEP_TOKENS, "cpu", 16)
    async with Both(runtime_config, tiny_model, role=role) as each:
        assert each.worker.engine.scheduler.max_num_batched_tokens == num_tokens
        assert each.worker.engine.runner.config.max_num_batched_tokens == num_tokens


async def test_a_worker_with_a_prompt_of_its_own_takes_none_of_others(
    runtime_config: RuntimeConfig,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    delays: list[float],
) -> None:
    monkeypatch.setattr(prefill_worker, "TURN_S", LONG_S)
    async with Pair(runtime_config, tiny_model, policy="always_remote") as pair:
        pair.two.worker.own_prompts.add("a", 1)
        prompt = fresh_prompt(21, seed=1)
        answer = await pair.ask(pair.one, prompt)
        await eventually(lambda: len(delays) > 3)  # at the worker that asks, which offers it again
        assert pair.one.decode.handoffs.num_unclaimed == 1
        pair.two.worker.own_prompts.discard("a")
        report = await pair.checked(answer, prompt)
        assert report.prefill_instance == pair.two.node.instance_id
        assert set(delays) == {0.0}, "the worker that has room first does not see it at once"
        await pair.balanced()


@pytest.mark.parametrize("busy_by", ["prompts", "answers"])
async def test_tickets_have_their_turn_where_every_worker_is_as_busy(
    busy_by: str, runtime_config: RuntimeConfig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_worker, "TURN_S", 0.1)
    async with Pair(runtime_config, tiny_model, policy="always_remote") as pair:
        for each in (pair.one, pair.two):
            if busy_by == "prompts":
                each.worker.own_prompts.add("a prompt that never ends", 1)
            else:
                monkeypatch.setattr(each.prefill, "_leaves_tickets", lambda: True)
        prompts = [fresh_prompt(21, seed) for seed in range(4)]
        asked = (pair.one, pair.two, pair.one, pair.two)
        answers = [await pair.ask(each, p) for each, p in zip(asked, prompts, strict=True)]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert (await pair.checked(answer, prompt)).place == "remote"
        await pair.balanced()


async def test_a_worker_leaves_tickets_while_another_should_take_them(
    runtime_config: RuntimeConfig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_worker, "TURN_S", LONG_S)
    limits = {"policy": "always_remote", "claim_timeout_ms": 60_000, "itl_target_ms": 1000}
    async with Pair(runtime_config, tiny_model, **limits) as pair:
        two, looks = pair.two.worker, []
        two.engine.aim(1000)
        with monkeypatch.context() as patch:
            patch.setattr(
                pair.two.decode.tickets, "leaves_tickets", lambda load: looks.append(load) or True
            )
            prompt = fresh_prompt(21, seed=1)
            answer = await pair.ask(pair.one, prompt)
            await eventually(lambda: len(looks) >= 3)
            assert (
                pair.one.decode.handoffs.num_open == 1
                and not pair.one.decode.prefill_view.num_taken
            )
        report = await pair.checked(answer, prompt)
        assert report.prefill_instance == pair.two.node.instance_id
        await pair.balanced()


async def test_the_loads_of_others_decide_who_takes_tickets(pair: Pair) -> None:
    costs = StepCosts((0.01, 0.001, 0.0), (0.005, 0.0001, 0.0), 0.04, 2048, 512, has_target=True)
    one, other = pair.one.worker, pair.two.node.instance_id
    idle = replace(await one.load(), costs=costs)
    busy = replace(idle, num_decodes=8)
    view = pair.one.decode.prefill_view
    await eventually(lambda: other in view._instances)
    view.on_load(f"load.{other}", encode(idle.report(other, "e", "both")))
    assert view.leaves_tickets(busy) and not view.leaves_tickets(idle)
    view.on_load(f"load.{other}", encode(busy.report(other, "e", "both")))
    assert not view.leaves_tickets(busy)
    untargeted = replace(busy, costs=replace(costs, has_target=False))
    waiting = replace(idle, num_waiting_tokens=20_000)
    view.on_load(f"load.{other}", encode(waiting.report(other, "e", "both")))
    assert not view.leaves_tickets(untargeted)
    for _ in range(8):  # the tickets of this worker are longer than was thought
        view.reserved(4000)
    assert view.leaves_tickets(untargeted)
    view.taken(0)


async def test_transfers_are_first_taken_to_have_the_rate_of_the_measured_link(pair: Pair) -> None:
    one, view = pair.one.worker, pair.one.decode.prefill_view
    other, num_tokens = pair.two.node.instance_id, 1_000_000
    await eventually(lambda: one.group.s_per_byte is not None and other in view._instances)
    view.on_load(f"load.{other}", encode((await one.load()).report(other, "e", "both")))
    s_per_byte = one.group.s_per_byte
    assert s_per_byte is not None
    measured_s = FIXED_S + num_tokens * one.group.layout.token_bytes * s_per_byte
    assert view.transfer_cost.seconds(num_tokens) == pytest.approx(measured_s, rel=0.01)


async def test_a_worker_lays_one_role_down_and_takes_it_up_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "HANDOVER_S", 0.0)
    address, one = EndpointAddress(pair.one.node.config.namespace, "decode", "generate"), pair.one
    running = await pair.ask(one, fresh_prompt(9, seed=1), num_tokens=200)
    await eventually(lambda: bool(running.text.token_ids))
    status = await pair.change(one, "prefill")
    assert status.load.role == "prefill"
    with pytest.raises(IncompleteError, match="another role"):
        await running.whole()
    with pytest.raises(UnavailableError):
        await (await pair.ask(one, fresh_prompt(9, seed=2))).whole()
    store = pair.peer.node.discovery
    assert address.instance_key(one.node.instance_id) not in await store.get_prefix(
        instances_prefix(address.namespace, "decode")
    )
    for seed in range(3):  # it computes prompts still
        report = await pair.answered(pair.two, fresh_prompt(21, seed), place="remote")
        assert report.prefill_instance == one.node.instance_id
    assert (await pair.change(one, "decode")).load.role == "decode"
    report = await pair.answered(one, fresh_prompt(21, seed=9), place="remote")
    assert report.prefill_instance == pair.two.node.instance_id
    assert (await pair.change(one, "both")).load.role == "both"


async def test_the_status_has_a_role_as_soon_as_the_worker_can_be_found_by_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.change(pair.one, "prefill")
    discovery, statuses = pair.one.node.discovery, []
    put = discovery.put

    async def put_and_ask(key: str, value: bytes) -> None:
        await put(key, value)
        statuses.append(await pair.one.worker._worker_status())

    monkeypatch.setattr(discovery, "put", put_and_ask)
    await pair.change(pair.one, "both")
    assert statuses[-1].load.role == "both"
    assert statuses[-1].details["num_prefill_instances"] == 2


async def test_tickets_go_past_a_worker_that_laid_the_prefill_role_down(pair: Pair) -> None:
    await pair.change(pair.two, "decode")
    await eventually(
        lambda: pair.one.decode._prefill_instances.items.keys() == {pair.one.node.instance_id}
    )
    report = await pair.answered(pair.one, fresh_prompt(21, seed=1), place="remote")
    assert report.place == "local"  # there is no other


async def test_a_worker_keeps_its_prefix_cache_through_a_change(pair: Pair) -> None:
    prompt = fresh_prompt(21, seed=1)
    await (await pair.ask(pair.one, prompt)).whole()
    await pair.change(pair.one, "prefill")
    await pair.change(pair.one, "both")
    assert (await pair.answered(pair.one, prompt)).num_cached_tokens == 20


async def test_the_last_decode_worker_keeps_its_role(pair: Pair) -> None:
    await pair.change(pair.one, "prefill")
    with pytest.raises(InvalidRequestError, match="last decode worker"):
        await pair.change(pair.two, "prefill")
    assert pair.two.worker.role == "both"
    await pair.answered(pair.two, fresh_prompt(9, seed=1))


async def test_of_two_changes_at_once_one_is_refused(pair: Pair) -> None:
    await pair.ask(pair.one, fresh_prompt(9, seed=1), num_tokens=200)  # the change takes a while
    changes = [pair.change(pair.one, "prefill"), pair.change(pair.one, "decode")]
    first, second = await asyncio.gather(*changes, return_exceptions=True)
    assert isinstance(second, UnavailableError) and "changing" in second.message
    assert not isinstance(first, BaseException) and first.load.role == "prefill"


async def test_of_the_last_two_decode_workers_that_leave_at_once_one_stays(pair: Pair) -> None:
    changes = [pair.change(each, "prefill") for each in (pair.one, pair.two)]
    results = await asyncio.gather(*changes, return_exceptions=True)
    assert any(isinstance(result, InvalidRequestError) for result in results)
    [stayed, *_] = [each for each in (pair.one, pair.two) if each.worker.role == "both"]
    await pair.answered(stayed, fresh_prompt(9, seed=1))
    keys = await pair.peer.node.discovery.get_prefix(stayed.decode.endpoint.key_prefix())
    assert any(key.endswith(stayed.node.instance_id) for key in keys)


async def test_a_worker_that_ends_during_a_change_leaves_discovery_all_the_same(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    pair = Pair(runtime_config, tiny_model)
    async with pair.peer, Both(runtime_config, tiny_model, role="prefill") as alone:
        prefix = instances_prefix(runtime_config.namespace, "")[:-1]
        assert await pair.peer.node.discovery.get_prefix(prefix)
        changing = asyncio.create_task(alone.worker.roles.change("both"))
        await asyncio.sleep(0)  # the change is under way
        draining = asyncio.create_task(alone.worker.drain())
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="ending"):
            await pair.change(alone, "decode")
        await asyncio.gather(changing, draining)
        assert not await pair.peer.node.discovery.get_prefix(prefix)


async def test_a_role_that_could_not_begin_can_be_taken_up_later(
    nats: NatsServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EtcdServer() as etcd:
        config = RuntimeConfig(namespace=new_id(), nats_url=nats.url, etcd_endpoints=etcd.url)
        pair = Pair(config, tiny_model)
        async with pair.peer, Both(config, tiny_model, role="prefill") as alone:
            etcd.kill()
            with monkeypatch.context() as patch:
                patch.setattr(roles, "START_TIMEOUT_S", 0.1)
                with pytest.raises(ServiceError, match="could not begin the role decode"):
                    await pair.change(alone, "both")
            assert alone.worker.role == "prefill"
            etcd.restart()
            assert (await pair.change(alone, "both")).load.role == "both"
            await pair.answered(alone, fresh_prompt(9, seed=1))
            await asyncio.gather(*pair._readers)


async def test_blocks_of_a_handoff_come_back_after_the_decode_role_was_laid_down(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "HANDOVER_S", 0.0)
    computed = asyncio.Event()
    pull_prefix = PromptComputation._pull_prefix

    async def pull_late(self: PromptComputation, seq: Sequence) -> int:
        await computed.wait()
        return await pull_prefix(self, seq)

    monkeypatch.setattr(PromptComputation, "_pull_prefix", pull_late)
    answer = await pair.ask(pair.one, fresh_prompt(21, seed=1), place="remote")
    await eventually(lambda: pair.one.decode.prefill_view.num_taken == 1)
    await pair.change(pair.one, "prefill")
    with pytest.raises(IncompleteError):
        await answer.whole()
    assert (await pair.one.worker.load()).num_quarantined_blocks
    computed.set()
    await pair.balanced()
    assert not (await pair.one.worker.load()).num_quarantined_blocks


async def test_an_unknown_role_is_refused(pair: Pair) -> None:
    with pytest.raises(InvalidRequestError, match="role"):
        await pair.change(pair.one, "neither")  # type: ignore[arg-type]


async def test_many_changes_under_load_lose_no_token(pair: Pair) -> None:
    """Answers that are handed over end typed; all others are whole and right."""
    stopped = asyncio.Event()
    num_whole = 0

    async def ask_for_ever(seed: int) -> None:
        nonlocal num_whole
        while not stopped.is_set():
            place: PrefillPlace | None = "remote" if seed % 2 else None
            await pair.answered(pair.two, fresh_prompt(13 + seed, seed), place=place)
            num_whole += 1

    asking = [asyncio.create_task(ask_for_ever(seed)) for seed in range(4)]
    for role in ("decode", "both", "prefill", "both") * 3:
        status = await pair.change(pair.one, role)
        assert status.load.role == role
        num_before = num_whole
        await eventually(lambda num_before=num_before: num_whole > num_before)  # type: ignore[misc]
    stopped.set()
    await asyncio.gather(*asking)


async def test_a_worker_without_others_answers_alone(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    pair = Pair(runtime_config, tiny_model)
    async with pair.peer, Both(runtime_config, tiny_model) as alone:
        instance = pair.peer.node.instance(
            EndpointAddress(runtime_config.namespace, "prefill", "prefill")
        )
        assert instance.pid == os.getpid()
        await register_instance(pair.peer.node.discovery, instance)  # takes no ticket
        await pair.answered(alone, fresh_prompt(9, seed=1))
        await asyncio.gather(*pair._readers)


async def test_a_request_that_comes_again_gets_nothing_of_the_stream_before(pair: Pair) -> None:
    """Its caller lost that stream, whose last outputs may still be on their way."""
    prompt = fresh_prompt(13, seed=1)
    role, expected = pair.one.decode, pair.undisturbed(prompt, 30).token_ids
    lost = await pair.ask(pair.one, prompt, num_tokens=60, request_id="again")
    await eventually(lambda: "again" in role.active and bool(lost.text.token_ids))
    before = role.active["again"].seq
    lost.context.cancel("lost")
    await eventually(lambda: not role.active)
    generated = expected[:3]
    answer = await pair.ask(
        pair.one,
        [*prompt, *generated],
        num_tokens=30,
        request_id="again",
        num_generated=len(generated),
    )
    await eventually(lambda: "again" in role.active)
    role.on_outputs([SequenceOutput("again", [7], seq=before)])
    assert (await answer.whole()).token_ids == expected[3:]
