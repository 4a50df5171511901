"""The whole stack over the bundled model: answers of a remote prefill equal those of one worker."""

import asyncio
import json
import random
import re
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import uvloop

from tandem.bench.report.figures import Figure, at_least, counted, required
from tandem.bench.report.setting import Setting
from tandem.bench.stack.served_stack import served
from tandem.models.paths import BUNDLED_MODEL

NUM_AT_ONCE = 8
REQUEST_TIMEOUT_S = 60
ALL_FLAGS = ("--disagg.policy=always_remote", "--engine.deterministic=true")
FLAGS = (*ALL_FLAGS, "--engine.num_blocks=4096")
DRY_FLAGS = (*ALL_FLAGS, "--engine.device=cpu", "--engine.num_blocks=256")


def run(setting: Setting) -> Iterator[Figure]:
    """Yield the differences, the share of remote prefills, and what the logs warn of."""
    draw = random.Random(0)
    prompts = [
        [draw.randrange(3, 1000) for _ in range(draw.randint(20, setting.size(1500, 90)))]
        for _ in range(setting.size(64, 4))
    ]
    expected, _, _ = uvloop.run(_serve(setting, "aggregated", prompts))
    yield Figure("served_alone", "answers of one worker", "", (float(len(expected)),))
    answers, places, logs = uvloop.run(_serve(setting, "disagg-1p1d", prompts))
    num_different = sum(one != other for one, other in zip(answers, expected, strict=True))
    label = f"answers that differ from one worker's, of {len(prompts)}"
    yield counted("served_different", label, num_different)
    share = places.count("remote") / len(places)
    reasons = tuple(sorted({*re.findall(r"prefill local \(.*?\)", logs)}))
    label = "share of remote prefills"
    yield required(Figure("served_remote", label, "", (share,), at_least(0.9), notes=reasons))
    builds = re.findall(r"while serving, kernel (.*)", logs)
    notes = tuple(sorted({*builds}))
    yield counted("served_builds", "kernels built while serving", len(builds), notes=notes)
    warnings = [line for line in logs.splitlines() if re.search(r"\b(WARNING|ERROR)\b", line)]
    notes = tuple(line[:300] for line in warnings[:10])
    yield Figure(
        "served_warnings", "warnings in the logs", "", (float(len(warnings)),), notes=notes
    )


async def _serve(
    setting: Setting, topology: str, prompts: list[list[int]]
) -> tuple[list[str], list[str], str]:
    """Return the answers, the places of their prefills, and the logs of all processes."""
    flags = DRY_FLAGS if setting.is_dry else FLAGS
    with tempfile.TemporaryDirectory(prefix="tandem-served-") as name:
        folder, turns = Path(name), asyncio.Semaphore(NUM_AT_ONCE)
        async with served(BUNDLED_MODEL, topology, flags, folder) as stack:

            async def ask(prompt: list[int]) -> tuple[str, str]:
                async with turns:
                    return await asyncio.to_thread(_ask, stack.url, prompt)

            answers = await asyncio.gather(*(ask(prompt) for prompt in prompts))
        logs = _logs_in(folder)
    texts, places = zip(*answers, strict=True)
    return list(texts), list(places), logs


def _logs_in(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.rglob("*.log")))


def _ask(url: str, prompt: list[int]) -> tuple[str, str]:
    body = {"model": BUNDLED_MODEL.name, "prompt": prompt, "max_tokens": 32, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body | {"ignore_eos": True}).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        answer = json.load(response)
        return answer["choices"][0]["text"], response.headers.get("x-tandem-prefill", "")
