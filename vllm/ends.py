"""The ends of loads and writes, from the connector's thread to that of vLLM's engine."""

import threading


class Ends:
    """Ends that vLLM has not been given yet. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._named: set[str] = set()
        self._failed: dict[str, str] = {}
        self._quarantined: list[str] = []
        self._released: list[str] = []

    def loaded(self, request_id: str) -> None:
        """Every block of the request is proven."""
        with self._lock:
            self._named.add(request_id)

    def given_up(self, request_id: str, key: str, reason: str | None, *, quarantined: bool) -> None:
        """vLLM gets the blocks of the request back, without their KV.

        With a `reason` the prompt is computed anew; without one its request is over.
        `quarantined`: writes may land until `released`.
        """
        with self._lock:
            self._named.add(request_id)
            if reason is not None:
                self._failed[request_id] = reason
            if quarantined:
                self._quarantined.append(key)

    def released(self, key: str) -> None:
        """No transfer of the handoff or of the ticket uses blocks of this process any more."""
        with self._lock:
            self._released.append(key)

    def take(self) -> tuple[set[str], dict[str, str], list[str]]:
        """Return the requests to name, the reasons of failed ones, and handoffs in quarantine."""
        with self._lock:
            taken = self._named, self._failed, self._quarantined
            self._named, self._failed, self._quarantined = set(), {}, []
            return taken

    def take_released(self) -> list[str]:
        """Return the keys that were released."""
        with self._lock:
            released, self._released = self._released, []
            return released
