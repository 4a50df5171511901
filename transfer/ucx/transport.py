"""The UCX transport: the Protocol of `transport.py` over two-sided messages, without NIXL.

A WRITE asks; the receiver checks the pieces against its own pool, posts receives into it under a
random tag and says GO; only then is the payload sent, and once it is in place the notice is
delivered and DONE comes back. For a READ the reader posts the receives and the peer sends. So

- no address of memory crosses the wire, and only who was told the tag can write;
- a stopped peer holds up its own transfers and costs no memory;
- bytes land only inside the receiver's own calls to its transport.

After `remove_peer` nothing of a write lands that had not been told GO. Of one that had, the library
stops sending and revokes the peer's right to read our memory, so at most what already lies in the
peer's queues (shared memory or sockets) still lands, in the peer's next calls to its transport, and
nothing does after that transport has read our BYE or seen the connection end: it cancels the
receives.
"""

import itertools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.runtime.errors import ProtocolError, TransferError
from tandem.transfer.transport import BlockGrid, Indices, Operation, Parts
from tandem.transfer.ucx.link import Link, Transfer
from tandem.transfer.ucx.pieces import Pairing, Pieces, spans_of
from tandem.transfer.ucx.port import Pool, UcxPort
from tandem.transfer.ucx.wire import (
    KEY_BYTES,
    MAX_BODY_BYTES,
    PAYLOAD_TAG_BITS,
    Identity,
    Kind,
    Message,
    decode_identity,
    decode_read,
    decode_tag,
    decode_write,
    encode_identity,
    encode_read,
    encode_tag,
    encode_write,
    seal,
    unseal,
)

_MAX_SERVED = 1024  # transfers of one peer at once
_PARTING_ROUNDS = 16  # rounds of progress that a BYE gets before its connection is closed
_ANSWERS = frozenset({Kind.GO, Kind.DONE, Kind.FAIL})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Tables:
    link: Link
    pairing: Pairing


class UcxTransport:
    """One UCX worker and its pool; `name` must be unique among all that may ever meet."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._key = secrets.token_bytes(KEY_BYTES)
        self._port = UcxPort()
        self._address = self._port.address
        self._grid: BlockGrid | None = None
        self._pool: Pool | None = None
        self._links: dict[int, Link] = {}
        self._peers: dict[str, Link] = {}  # those that we opened
        self._inbox: list[tuple[str, bytes]] = []
        self._ids = itertools.count(1)
        self._handlers: dict[Kind, Callable[[Link, Message], None]] = {
            Kind.NOTE: self._on_note,
            Kind.WRITE: self._on_write,
            Kind.READ: self._on_read,
            Kind.ABORT: self._on_abort,
            Kind.GO: self._on_go,
            Kind.DONE: self._on_done,
            Kind.FAIL: self._on_fail,
        }

    def register(self, grid: BlockGrid) -> None:
        self._grid = grid
        self._pool = self._port.pool(grid)

    def metadata(self) -> bytes:
        return encode_identity(self._identity())

    def add_peer(self, metadata: bytes, grid: BlockGrid) -> str:
        try:
            identity = decode_identity(metadata)
        except ProtocolError as exc:
            raise TransferError(f"UCX, add peer: {exc.message}") from exc
        if identity.block_bytes != grid.block_bytes:
            raise TransferError(
                f"UCX, add peer: blocks of {identity.name} are {identity.block_bytes} bytes, "
                f"not {grid.block_bytes}"
            )
        self.remove_peer(identity.name)
        endpoint = self._port.connect(identity.address)
        session = secrets.randbits(64)
        link = Link(identity.name, session, identity.key, endpoint, grid)
        self._links[session] = self._peers[identity.name] = link
        self._say(link, Kind.HELLO, body=encode_identity(self._identity()))
        return identity.name

    def remove_peer(self, peer: str) -> None:
        link = self._peers.pop(peer, None)
        if link is not None:
            self._part(link, "removed")

    def prepare(self, peer: str, local_parts: Parts, remote_parts: Parts) -> object:
        link = self._peers[peer]
        assert self._grid is not None and link.grid is not None, "register() comes first"
        pairing = Pairing.of(self._grid, local_parts, link.grid, remote_parts)
        return _Tables(link, pairing)

    def post(
        self,
        operation: Operation,
        tables: object,
        local_indices: Indices,
        remote_indices: Indices,
        notice: bytes,
    ) -> object:
        assert isinstance(tables, _Tables)
        link = tables.link
        self._check(link)
        spans, pieces = tables.pairing.pick(local_indices, remote_indices)
        transfer = Transfer(link, next(self._ids), Kind[operation], spans)
        tag = secrets.randbits(PAYLOAD_TAG_BITS)
        reading = transfer.kind is Kind.READ
        body = encode_read(tag, pieces) if reading else encode_write(pieces, notice)
        if len(body) > MAX_BODY_BYTES:
            raise TransferError(f"{operation} with {link.name}: {len(pieces)} pieces are too many")
        if reading:
            self._receive(transfer, tag)
        link.transfers[transfer.transfer_id] = transfer
        self._say(link, transfer.kind, transfer.transfer_id, body)
        self._check(link)
        return transfer

    def poll(self, handle: object) -> bool:
        assert isinstance(handle, Transfer)
        self._advance()
        arrived = handle.settle() and (handle.answered or handle.kind is Kind.READ)
        if handle.error:
            raise TransferError(f"{handle.kind.name} with {handle.link.name}: {handle.error}")
        handle.answered = handle.answered or arrived  # a READ's data are its answer
        return arrived

    def release(self, handle: object) -> None:
        assert isinstance(handle, Transfer)
        link = handle.link
        if link.transfers.pop(handle.transfer_id, None) is None:
            return
        if not (handle.answered or handle.error or link.broken):
            self._say(link, Kind.ABORT, handle.transfer_id)
        handle.requests.clear()

    def notify(self, peer: str, notice: bytes) -> None:
        link = self._peers.get(peer)
        if link is None:
            raise TransferError(f"notify {peer}: not connected")
        if len(notice) > MAX_BODY_BYTES:
            raise TransferError(f"notify {peer}: {len(notice)} bytes are too many")
        self._check(link)
        self._say(link, Kind.NOTE, body=notice)
        self._check(link)

    def notifications(self) -> list[tuple[str, bytes]]:
        self._advance()
        found, self._inbox = self._inbox, []
        return found

    def close(self) -> None:
        for link in list(self._links.values()):
            self._part(link, "this transport is closed")
        self._peers.clear()
        self._handlers.clear()  # they refer to us: the worker must end here, on its own thread
        self._port.close()

    def _identity(self) -> Identity:
        assert self._grid is not None, "register() comes first"
        return Identity(self._name, self._key, self._address, self._grid.block_bytes)

    def _check(self, link: Link) -> None:
        if link.broken:
            raise TransferError(f"{link.name}: {link.broken}")

    def _say(self, link: Link, kind: Kind, transfer_id: int = 0, body: bytes = b"") -> None:
        """Send a control message; a link that does not take it is broken."""
        if link.broken:
            return
        sealed = seal(link.key, Message(kind, link.session, transfer_id, body))
        try:
            self._port.say(link.endpoint, sealed)
        except TransferError as exc:
            link.sever(exc.message)

    def _part(self, link: Link, reason: str) -> None:
        self._say(link, Kind.BYE)
        for _ in range(_PARTING_ROUNDS):
            # Not once more than it takes: payload under way would go on behind the BYE.
            if self._port.all_said:
                break
            self._port.progress()
        self._forget(link, reason)

    def _forget(self, link: Link, reason: str) -> None:
        """Close the connection: cancels our receives, fails our sends."""
        if self._links.pop(link.session, None) is not None:
            self._port.close_endpoint(link.endpoint)
            link.endpoint = None
            link.sever(reason)

    def _advance(self) -> None:
        """Move data, hear messages, notice deaths and finish what we serve."""
        self._port.progress()
        for sealed in self._port.messages():
            try:
                self._hear(unseal(self._key, sealed))
            except (ProtocolError, TransferError) as exc:
                logger.warning("%s, UCX, dropped a message: %s", self._name, exc.message)
        for link in list(self._links.values()):
            if not link.endpoint.alive:
                link.sever("the connection is lost")
            if not link.ours:
                self._serve(link)

    def _hear(self, message: Message) -> None:
        if message.kind is Kind.HELLO:
            self._on_hello(message)
            return
        link = self._links.get(message.session)
        if link is None or link.broken:
            return  # of a session that is over here
        if message.kind is Kind.BYE:
            link.sever("the peer closed the connection")
        elif (message.kind in _ANSWERS) is link.ours:
            self._handlers[message.kind](link, message)
        else:
            raise ProtocolError(f"{message.kind.name} from {link.name} in the wrong direction")

    # What a transport hears from peers that opened a session with it.

    def _on_hello(self, message: Message) -> None:
        identity = decode_identity(message.body)
        if message.session in self._links:
            return
        for link in [link for link in self._links.values() if link.name == identity.name]:
            if not link.ours:
                self._forget(link, "replaced by a new connection")
        endpoint = self._port.connect(identity.address)
        self._links[message.session] = Link(
            identity.name, message.session, identity.key, endpoint, grid=None
        )

    def _on_note(self, link: Link, message: Message) -> None:
        self._inbox.append((link.name, message.body))

    def _on_write(self, link: Link, message: Message) -> None:
        pieces, notice = decode_write(message.body)
        transfer = self._accept(link, message, pieces)
        if transfer is not None:
            transfer.notice = notice
            tag = secrets.randbits(PAYLOAD_TAG_BITS)
            self._receive(transfer, tag)
            self._say(link, Kind.GO, transfer.transfer_id, encode_tag(tag))

    def _on_read(self, link: Link, message: Message) -> None:
        tag, pieces = decode_read(message.body)
        transfer = self._accept(link, message, pieces)
        if transfer is not None:
            self._send(transfer, tag)

    def _on_abort(self, link: Link, message: Message) -> None:
        link.transfers.pop(message.transfer_id, None)

    def _accept(self, link: Link, message: Message, pieces: Pieces) -> Transfer | None:
        """The transfer that a peer asks for, or None and a refusal sent."""
        assert self._grid is not None
        spans = spans_of(pieces, self._grid)
        refusal = ""
        if spans is None:
            refusal = f"pieces outside of the {self._grid.num_blocks} blocks of {self._name}"
        elif len(link.transfers) >= _MAX_SERVED or message.transfer_id in link.transfers:
            refusal = f"{len(link.transfers)} transfers are under way, or this very one"
        if spans is None or refusal:
            logger.warning("%s, UCX, refused a transfer of %s: %s", self._name, link.name, refusal)
            self._say(link, Kind.FAIL, message.transfer_id, refusal.encode())
            return None
        transfer = Transfer(link, message.transfer_id, message.kind, spans)
        link.transfers[message.transfer_id] = transfer
        return transfer

    def _serve(self, link: Link) -> None:
        for transfer in [t for t in link.transfers.values() if t.settle()]:
            del link.transfers[transfer.transfer_id]
            if transfer.error:
                self._say(link, Kind.FAIL, transfer.transfer_id, transfer.error.encode())
            elif transfer.kind is Kind.WRITE:
                self._inbox.append((link.name, transfer.notice))
                self._say(link, Kind.DONE, transfer.transfer_id)
        if link.broken:
            self._forget(link, link.broken)

    # What it hears in the sessions that it opened itself.

    def _on_go(self, link: Link, message: Message) -> None:
        tag = decode_tag(message.body)
        transfer = link.transfers.get(message.transfer_id)
        if transfer is not None and transfer.kind is Kind.WRITE and not transfer.told_go:
            transfer.told_go = True
            self._send(transfer, tag)

    def _on_done(self, link: Link, message: Message) -> None:
        transfer = link.transfers.get(message.transfer_id)
        if transfer is not None and transfer.told_go:
            transfer.answered = True

    def _on_fail(self, link: Link, message: Message) -> None:
        transfer = link.transfers.get(message.transfer_id)
        if transfer is not None:
            transfer.fail(message.body.decode(errors="replace") or "refused")

    def _send(self, transfer: Transfer, tag: int) -> None:
        self._move(transfer, tag, self._port.send)

    def _receive(self, transfer: Transfer, tag: int) -> None:
        self._move(transfer, tag, self._port.receive)

    def _move(self, transfer: Transfer, tag: int, move: Callable[[Any, Any, int], Any]) -> None:
        assert self._pool is not None
        endpoint = transfer.link.endpoint
        try:
            for offset, num_bytes in transfer.spans:
                transfer.requests.append(move(endpoint, self._pool.view(offset, num_bytes), tag))
        except TransferError as exc:
            transfer.fail(exc.message)
