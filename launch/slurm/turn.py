"""Whose turn it is to serve: of a deployment's service jobs, the one that services.json names."""

import asyncio
import math
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from tandem.runtime.errors import ServiceError
from tandem.runtime.local.ports import http_status
from tandem.runtime.local.private_file import write_private

SILENCE_S = 3.0  # a frontend that answers nothing for longer is replaced
RESTART_S = 8.0  # the same while its host refuses connections: its script starts it again there
POLL_S = 0.25


class Services(msgspec.Struct, frozen=True):
    """The addresses of a service job; other processes read those of NATS and etcd."""

    nats_url: str
    etcd_endpoints: str
    http_url: str  # for a moment still that of the job that left
    job_id: str  # empty once the job leaves


class Turn:
    """The turn of one service job, by the file that all of them read and write."""

    def __init__(self, path: Path, job_id: str) -> None:
        self._path, self._job_id = path, job_id

    def now(self) -> Services | None:
        """Return what the file says, as `serving`."""
        return serving(self._path)

    async def until_mine(self) -> None:
        """Return at once where no other job serves, else when it leaves or is silent."""
        seen, answered_s = None, time.perf_counter()
        while (now := self.now()) is not None and now.job_id not in ("", self._job_id):
            patience_s = await _patience_s(now.http_url)
            if now != seen or patience_s == math.inf:
                seen, answered_s = now, time.perf_counter()
            elif time.perf_counter() - answered_s > patience_s:
                return
            await asyncio.sleep(POLL_S)

    async def left_url(self) -> str | None:
        """Return the address of the frontend whose job gave the turn away, while it answers."""
        now = self.now()
        if now is None or now.job_id or await _patience_s(now.http_url) != math.inf:
            return None
        return now.http_url

    def take(self, nats_url: str, etcd_endpoints: str, http_url: str) -> None:
        """Let every process of the deployment come to these addresses."""
        self._write(Services(nats_url, etcd_endpoints, http_url, self._job_id))

    async def until_lost(self) -> Services:
        """Return the services of another job once it has taken the turn."""
        while (now := self.now()) is None or now.job_id in ("", self._job_id):
            await asyncio.sleep(POLL_S)
        return now

    def hand_over(self) -> bool:
        """Give another job the turn at once; return False if this one does not have it."""
        if (now := self.now()) is None or now.job_id != self._job_id:
            return False
        self._write(msgspec.structs.replace(now, job_id=""))
        return True

    async def until_answered_elsewhere(self, http_url: str) -> None:
        """Return once clients find another address than this one."""
        while (now := self.now()) is not None and now.http_url == http_url:
            await asyncio.sleep(POLL_S)

    def _write(self, services: Services) -> None:
        write_private(self._path, msgspec.json.encode(services).decode())


def serving(path: Path) -> Services | None:
    """Return the services that `services.json` names; None without a file that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Services)
    except (OSError, msgspec.MsgspecError):
        return None


async def _patience_s(http_url: str) -> float:
    """Return how long a frontend may go on as it is now: without end where it answers (s)."""
    url = urlsplit(http_url)
    try:
        port = url.port or 0
        await http_status(url.hostname or "", port, "/live", SILENCE_S / 2, scheme=url.scheme)
    except (ServiceError, ValueError) as error:
        is_refused = isinstance(error.__cause__, ConnectionRefusedError)
        return RESTART_S if is_refused else SILENCE_S
    return math.inf
