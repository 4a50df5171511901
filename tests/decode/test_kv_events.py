import asyncio

from tandem.decode.kv_events import KvEventPublisher
from tandem.router.kv_follower import decode_kv_event
from tandem.router.kv_index import KvIndex
from tandem.runtime.bus.events import MemoryEvents, kv_subject

A, B = (bytes([byte]) * 16 for byte in range(2))


async def test_a_lost_last_event_is_noticed_at_the_next_beat() -> None:
    events, index, heard = MemoryEvents(), KvIndex(100), []
    await events.start()
    await events.subscribe(
        kv_subject("n"), lambda _, payload: heard.append(index.apply(decode_kv_event(payload)))
    )
    publisher = KvEventPublisher(events, "n", "w", "e")
    publisher.beat()
    assert heard == []  # there was no event
    publisher.stored([A, B])
    await asyncio.sleep(0)
    publisher.beat()  # the event itself was news enough
    assert heard == [True] and index.match([A, B]) == {"w": 2}
    publisher.beat()
    assert heard == [True, True] and index.match([A, B]) == {"w": 2}
    events.connected = False
    publisher.removed([B])
    await asyncio.sleep(0)
    events.connected = True
    publisher.beat()
    publisher.beat()
    assert heard == [True, True, False] and index.match([A]) == {}
    index.load_snapshot(publisher.snapshot())
    publisher.beat()
    assert heard[-1] and index.match([A, B]) == {"w": 1}
