"""The opening of a connection: a nonce each way, then a proof of the cluster token each way."""

import hmac
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable

from pydantic import SecretStr

from tandem.runtime.errors import ProtocolError
from tandem.runtime.plane.framing import (
    MAGIC,
    PREAMBLE_BYTES,
    VALUE_BYTES,
    VERSION,
    Preamble,
    Status,
    decode_preamble,
    encode_preamble,
    token_proof,
)


class Handshake(ABC):
    """One side of it. `address` is the server's as discovery has it; `send` writes to the peer."""

    def __init__(
        self, token: SecretStr | None, address: str, send: Callable[[bytes], None]
    ) -> None:
        self.nonce = secrets.token_bytes(VALUE_BYTES)
        self.peer_nonce = b""
        self.address = address
        self._token = token.get_secret_value() if token is not None else None
        self._send = send
        self._received = bytearray()

    def begin(self) -> None:
        """Send the first preamble, if this side is to begin."""

    def feed(self, data: bytes) -> bytes | None:
        """Return the bytes that follow the handshake once it is complete.

        Raise ProtocolError for a peer of another protocol, version or token.
        """
        self._received += data
        while len(self._received) >= PREAMBLE_BYTES:
            preamble = decode_preamble(bytes(self._received[:PREAMBLE_BYTES]))
            del self._received[:PREAMBLE_BYTES]
            if self.peer_nonce:
                self.answer_proof(preamble)
                return bytes(self._received)
            self.peer_nonce = preamble.value
            self.answer_nonce(preamble)
        if not self._received.startswith(MAGIC[: len(self._received)]):
            raise ProtocolError("not a Tandem request plane")
        return None

    @abstractmethod
    def answer_nonce(self, preamble: Preamble) -> None:
        """Answer the peer's first preamble, or raise ProtocolError."""

    @abstractmethod
    def answer_proof(self, preamble: Preamble) -> None:
        """Accept the peer's second preamble, or raise ProtocolError."""

    @abstractmethod
    def proof(self, side: str) -> bytes:
        """Return the proof that a side has to show."""

    def greet(self, status: Status, value: bytes = bytes(VALUE_BYTES)) -> None:
        """Send a preamble; a refusal shows nothing of the token."""
        self._send(encode_preamble(Preamble(VERSION, status, value)))


class ClientHandshake(Handshake):
    """The side that dials: it begins, and shows its proof first."""

    def begin(self) -> None:
        self.greet(Status.OK, self.nonce)

    def answer_nonce(self, preamble: Preamble) -> None:
        if preamble.version != VERSION:
            raise ProtocolError(
                f"{self.address} has request-plane version {preamble.version}, not {VERSION}"
            )
        self.greet(Status.OK, self.proof("client"))

    def answer_proof(self, preamble: Preamble) -> None:
        if preamble.status is Status.WRONG_TOKEN:
            raise ProtocolError(f"{self.address} refused the cluster token of this process")
        if not hmac.compare_digest(preamble.value, self.proof("server")):
            raise ProtocolError(f"{self.address} does not have the cluster token of this process")

    def proof(self, side: str) -> bytes:
        return token_proof(self._token, side, self.nonce, self.peer_nonce, self.address)


class ServerHandshake(Handshake):
    """The side that is dialed: it shows a proof only to a client that has shown one."""

    def answer_nonce(self, preamble: Preamble) -> None:
        if preamble.version != VERSION:
            self.greet(Status.WRONG_VERSION)
            raise ProtocolError(f"request-plane version {preamble.version}, not {VERSION}")
        self.greet(Status.OK, self.nonce)

    def answer_proof(self, preamble: Preamble) -> None:
        if not hmac.compare_digest(preamble.value, self.proof("client")):
            self.greet(Status.WRONG_TOKEN)
            raise ProtocolError("wrong cluster token")
        self.greet(Status.OK, self.proof("server"))

    def proof(self, side: str) -> bytes:
        return token_proof(self._token, side, self.peer_nonce, self.nonce, self.address)
