"""A real Prometheus before a cluster, for tests; Debian's package `prometheus` has it."""

import asyncio
import math
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tandem.runtime.local.child_process import ChildProcess
from tests.services import free_port

BINARY = shutil.which("prometheus")  # None: not installed


class Prometheus:
    """Looks every second what a frontend lists, scrapes that, and evaluates `rules`."""

    def __init__(self, folder: Path, targets_url: str, rules: str) -> None:
        self._folder = folder
        self._config = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
            },
            "rule_files": ["alerts.yml"],
            "scrape_configs": [
                {
                    "job_name": "tandem",
                    "http_sd_configs": [{"url": targets_url, "refresh_interval": "1s"}],
                }
            ],
        }
        self._rules = rules

    async def __aenter__(self) -> "Prometheus":
        (self._folder / "alerts.yml").write_text(self._rules)
        config = self._folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(self._config))
        address = f"127.0.0.1:{free_port()}"
        assert BINARY is not None
        command = [BINARY, f"--config.file={config}", f"--web.listen-address={address}"]
        command += [f"--storage.tsdb.path={self._folder / 'data'}", "--log.level=warn"]
        self._child = await ChildProcess.start(command, self._folder / "prometheus.log")
        self._http = aiohttp.ClientSession(f"http://{address}")
        try:
            await self._ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        await self._child.stop(10.0)

    async def _ready(self) -> None:
        while not await self._is_ready():
            assert self._child.exit_code is None, self._child.log_tail()
            await asyncio.sleep(0.05)

    async def _is_ready(self) -> bool:
        try:
            async with self._http.get("/-/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now; those without a number are left out."""
        parameters = {"query": expression}
        async with self._http.get("/api/v1/query", params=parameters) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return [s for s in answer["data"]["result"] if not math.isnan(float(s["value"][1]))]

    async def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        series = await self.query('ALERTS{alertstate="firing"}')
        return {each["metric"]["alertname"] for each in series}

    async def fired(self, over: str = "1h") -> set[str]:
        """The names of the alerts that fire, or did within this time."""
        series = await self.query(f'last_over_time(ALERTS{{alertstate="firing"}}[{over}])')
        return {each["metric"]["alertname"] for each in series}
