"""The UCX transport: the Protocol of `transport.py` over two-sided messages, without NIXL.

A WRITE is a request. The receiver checks the pieces against its own pool, posts receives into it
under a random tag and answers GO. Only then is the payload sent. Once the payload is in place, the
notice is delivered and DONE comes back. For a READ the reader posts the receives and the peer
sends. Therefore

- no address of memory crosses the wire, and only a process that was sent the tag can write;
- a stopped peer delays its own transfers only, and costs no memory;
- bytes land only inside the receiver's own calls to its transport.

After `remove_peer` nothing lands of a write without a GO. For a write with a GO, the library stops
sending and revokes the peer's right to read this process's memory. At most the bytes in the peer's
queues (shared memory or sockets) still land, in the peer's next calls to its transport. Nothing
lands after that transport has read the BYE or seen the connection end: it cancels the receives.
"""

import itertools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.runtime.errors import ProtocolError, TransferError
from tandem.transfer.transport import BlockGrid, Indices, Operation, Parts
from tandem.transfer.ucx.pieces import Pairing, Pieces, spans_of
from tandem.transfer.ucx.port import Pool, UcxPort
from tandem.transfer.ucx.session import UcxSession, UcxTransfer
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
_PARTING_ROUNDS = 16  # rounds of progress for a BYE before its connection is closed
_ANSWERS = frozenset({Kind.GO, Kind.DONE, Kind.FAIL})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Tables:
    session: UcxSession
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
        self._sessions: dict[int, UcxSession] = {}
        self._peers: dict[str, UcxSession] = {}  # sessions that this process opened
        self._inbox: list[tuple[str, bytes]] = []
        self._ids = itertools.count(1)
        self._handlers: dict[Kind, Callable[[UcxSession, Message], None]] = {
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
        session_id = secrets.randbits(64)
        session = UcxSession(identity.name, session_id, identity.key, endpoint, grid)
        self._sessions[session_id] = self._peers[identity.name] = session
        self._send_message(session, Kind.HELLO, body=encode_identity(self._identity()))
        return identity.name

    def remove_peer(self, peer: str) -> None:
        session = self._peers.pop(peer, None)
        if session is not None:
            self._end(session, "removed")

    def prepare(self, peer: str, local_parts: Parts, remote_parts: Parts) -> object:
        session = self._peers[peer]
        assert self._grid is not None and session.grid is not None, "register() comes first"
        pairing = Pairing.of(self._grid, local_parts, session.grid, remote_parts)
        return _Tables(session, pairing)

    def post(
        self,
        operation: Operation,
        tables: object,
        local_indices: Indices,
        remote_indices: Indices,
        notice: bytes,
    ) -> object:
        assert isinstance(tables, _Tables)
        session = tables.session
        self._check(session)
        spans, pieces = tables.pairing.pick(local_indices, remote_indices)
        transfer = UcxTransfer(session, next(self._ids), Kind[operation], spans)
        tag = secrets.randbits(PAYLOAD_TAG_BITS)
        reading = transfer.kind is Kind.READ
        body = encode_read(tag, pieces) if reading else encode_write(pieces, notice)
        if len(body) > MAX_BODY_BYTES:
            raise TransferError(
                f"{operation} with {session.name}: {len(pieces)} pieces are too many"
            )
        if reading:
            self._receive_payload(transfer, tag)
        session.transfers[transfer.transfer_id] = transfer
        self._send_message(session, transfer.kind, transfer.transfer_id, body)
        self._check(session)
        return transfer

    def poll(self, handle: object) -> bool:
        assert isinstance(handle, UcxTransfer)
        self._advance()
        arrived = handle.settle() and (handle.answered or handle.kind is Kind.READ)
        if handle.error:
            raise TransferError(f"{handle.kind.name} with {handle.session.name}: {handle.error}")
        handle.answered = handle.answered or arrived  # a READ's data are its answer
        return arrived

    def release(self, handle: object) -> None:
        assert isinstance(handle, UcxTransfer)
        session = handle.session
        if session.transfers.pop(handle.transfer_id, None) is None:
            return
        if not (handle.answered or handle.error or session.broken):
            self._send_message(session, Kind.ABORT, handle.transfer_id)
        handle.requests.clear()

    def notify(self, peer: str, notice: bytes) -> None:
        session = self._peers.get(peer)
        if session is None:
            raise TransferError(f"notify {peer}: not connected")
        if len(notice) > MAX_BODY_BYTES:
            raise TransferError(f"notify {peer}: {len(notice)} bytes are too many")
        self._check(session)
        self._send_message(session, Kind.NOTE, body=notice)
        self._check(session)

    def notifications(self) -> list[tuple[str, bytes]]:
        self._advance()
        found, self._inbox = self._inbox, []
        return found

    def close(self) -> None:
        for session in list(self._sessions.values()):
            self._end(session, "this transport is closed")
        self._peers.clear()
        self._handlers.clear()  # they refer to this object, and the worker must end on this thread
        self._port.close()

    def _identity(self) -> Identity:
        assert self._grid is not None, "register() comes first"
        return Identity(self._name, self._key, self._address, self._grid.block_bytes)

    def _check(self, session: UcxSession) -> None:
        if session.broken:
            raise TransferError(f"{session.name}: {session.broken}")

    def _send_message(
        self, session: UcxSession, kind: Kind, transfer_id: int = 0, body: bytes = b""
    ) -> None:
        """Send a control message; a session that does not take it is broken."""
        if session.broken:
            return
        sealed = seal(session.key, Message(kind, session.session_id, transfer_id, body))
        try:
            self._port.send_message(session.endpoint, sealed)
        except TransferError as exc:
            session.sever(exc.message)

    def _end(self, session: UcxSession, reason: str) -> None:
        self._send_message(session, Kind.BYE)
        for _ in range(_PARTING_ROUNDS):
            # No more rounds than needed: payload under way would be sent after the BYE.
            if self._port.all_messages_sent:
                break
            self._port.progress()
        self._forget(session, reason)

    def _forget(self, session: UcxSession, reason: str) -> None:
        """Close the connection, which cancels its receives and fails its sends."""
        if self._sessions.pop(session.session_id, None) is not None:
            self._port.close_endpoint(session.endpoint)
            session.endpoint = None
            session.sever(reason)

    def _advance(self) -> None:
        """Move data, handle messages, notice deaths and finish transfers that peers asked for."""
        self._port.progress()
        for sealed in self._port.messages():
            try:
                self._handle_message(unseal(self._key, sealed))
            except (ProtocolError, TransferError) as exc:
                logger.warning("%s, UCX, dropped a message: %s", self._name, exc.message)
        for session in list(self._sessions.values()):
            if not session.endpoint.alive:
                session.sever("the connection is lost")
            if not session.is_own:
                self._serve(session)

    def _handle_message(self, message: Message) -> None:
        if message.kind is Kind.HELLO:
            self._on_hello(message)
            return
        session = self._sessions.get(message.session)
        if session is None or session.broken:
            return  # of a session that has ended here
        if message.kind is Kind.BYE:
            session.sever("the peer closed the connection")
        elif (message.kind in _ANSWERS) is session.is_own:
            self._handlers[message.kind](session, message)
        else:
            raise ProtocolError(f"{message.kind.name} from {session.name} in the wrong direction")

    # Messages of peers, in sessions that they opened.

    def _on_hello(self, message: Message) -> None:
        identity = decode_identity(message.body)
        if message.session in self._sessions:
            return
        for session in list(self._sessions.values()):
            if session.name == identity.name and not session.is_own:
                self._forget(session, "replaced by a new connection")
        endpoint = self._port.connect(identity.address)
        self._sessions[message.session] = UcxSession(
            identity.name, message.session, identity.key, endpoint, grid=None
        )

    def _on_note(self, session: UcxSession, message: Message) -> None:
        self._inbox.append((session.name, message.body))

    def _on_write(self, session: UcxSession, message: Message) -> None:
        pieces, notice = decode_write(message.body)
        transfer = self._accept(session, message, pieces)
        if transfer is not None:
            transfer.notice = notice
            tag = secrets.randbits(PAYLOAD_TAG_BITS)
            self._receive_payload(transfer, tag)
            self._send_message(session, Kind.GO, transfer.transfer_id, encode_tag(tag))

    def _on_read(self, session: UcxSession, message: Message) -> None:
        tag, pieces = decode_read(message.body)
        transfer = self._accept(session, message, pieces)
        if transfer is not None:
            self._send_payload(transfer, tag)

    def _on_abort(self, session: UcxSession, message: Message) -> None:
        session.transfers.pop(message.transfer_id, None)

    def _accept(self, session: UcxSession, message: Message, pieces: Pieces) -> UcxTransfer | None:
        """Return the transfer that a peer asks for, or refuse it and return None."""
        assert self._grid is not None
        spans = spans_of(pieces, self._grid)
        refusal = ""
        if spans is None:
            refusal = f"pieces outside of the {self._grid.num_blocks} blocks of {self._name}"
        elif len(session.transfers) >= _MAX_SERVED or message.transfer_id in session.transfers:
            refusal = f"{len(session.transfers)} transfers are under way, or this very one"
        if spans is None or refusal:
            logger.warning(
                "%s, UCX, refused a transfer of %s: %s", self._name, session.name, refusal
            )
            self._send_message(session, Kind.FAIL, message.transfer_id, refusal.encode())
            return None
        transfer = UcxTransfer(session, message.transfer_id, message.kind, spans)
        session.transfers[message.transfer_id] = transfer
        return transfer

    def _serve(self, session: UcxSession) -> None:
        for transfer in [t for t in session.transfers.values() if t.settle()]:
            del session.transfers[transfer.transfer_id]
            if error := transfer.error:
                self._send_message(session, Kind.FAIL, transfer.transfer_id, error.encode())
            elif transfer.kind is Kind.WRITE:
                self._inbox.append((session.name, transfer.notice))
                self._send_message(session, Kind.DONE, transfer.transfer_id)
        if session.broken:
            self._forget(session, session.broken)

    # Messages of peers, in sessions that this process opened.

    def _on_go(self, session: UcxSession, message: Message) -> None:
        tag = decode_tag(message.body)
        transfer = session.transfers.get(message.transfer_id)
        if transfer is not None and transfer.kind is Kind.WRITE and not transfer.has_go:
            transfer.has_go = True
            self._send_payload(transfer, tag)

    def _on_done(self, session: UcxSession, message: Message) -> None:
        transfer = session.transfers.get(message.transfer_id)
        if transfer is not None and transfer.has_go:
            transfer.answered = True

    def _on_fail(self, session: UcxSession, message: Message) -> None:
        transfer = session.transfers.get(message.transfer_id)
        if transfer is not None:
            transfer.fail(message.body.decode(errors="replace") or "refused")

    def _send_payload(self, transfer: UcxTransfer, tag: int) -> None:
        self._move(transfer, tag, self._port.send_payload)

    def _receive_payload(self, transfer: UcxTransfer, tag: int) -> None:
        self._move(transfer, tag, self._port.receive_payload)

    def _move(self, transfer: UcxTransfer, tag: int, move: Callable[[Any, Any, int], Any]) -> None:
        assert self._pool is not None
        endpoint = transfer.session.endpoint
        try:
            for offset, num_bytes in transfer.spans:
                transfer.requests.append(move(endpoint, self._pool.view(offset, num_bytes), tag))
        except TransferError as exc:
            transfer.fail(exc.message)
