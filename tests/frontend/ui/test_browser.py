"""The page in a real browser, before a real cluster: what a person sees, and can do by keyboard."""

import asyncio
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tandem.config.live import parse_live
from tandem.config.model import load_config
from tandem.frontend.config import FrontendConfig
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.local.child_process import ChildProcess
from tandem.runtime.local.ports import is_port_free
from tandem.runtime.process import progress
from tandem.runtime.process.progress import ProgressBar
from tandem.runtime.store.discovery import config_key
from tandem.runtime.store.progress_report import reported
from tests.e2e.cluster import Cluster
from tests.frontend.access.test_access import entry
from tests.frontend.frontend_stack import MODEL, Stack
from tests.frontend.ui.page_stack import KEY, StatusWorker, page_config, page_stack
from tests.services import eventually, free_port

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
expect = playwright.expect
expect.set_options(timeout=60_000)  # a busy machine takes its time

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
ATTACKS = """async (url) => {
  const image = () => new Promise((resolve) => {
    const made = new Image();
    made.onerror = () => resolve("failed");
    made.onload = () => resolve("loaded");
    made.src = `${url}/ui/states?${Math.random()}`;
  });
  const json = JSON.stringify({ model: "test/model", prompt: "Hi" });
  const asked = (path, options) =>
    fetch(url + path, options).then(() => "answered", () => "failed");
  return [
    ...(await Promise.all(Array.from({ length: 4 }, image))),
    await asked("/ui/config/disagg.policy?value=threshold", { method: "PUT" }),
    await asked("/v1/models"),
    await asked("/v1/completions", { method: "POST", body: json }),
    await asked("/v1/completions",
      { method: "POST", body: json, headers: { "content-type": "application/json" } }),
  ];
}"""
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[playwright.Browser]:
    async with playwright.async_playwright() as started:
        # no sandbox: containers that run tests as root have none to give
        found = await started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        await found.close()


@pytest_asyncio.fixture(loop_scope="module")
async def tab(browser: playwright.Browser) -> AsyncIterator[playwright.Page]:
    """A tab in which neither a script nor the policy may fail."""
    opened = await browser.new_page()
    faults: list[str] = []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("dialog", lambda dialog: faults.append(dialog.message))
    opened.on("console", lambda line: faults.append(line.text) if "Policy" in line.text else None)
    yield opened
    await opened.close()
    assert not faults


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    flags = ("--disagg.policy=threshold", "--disagg.claim_timeout_ms=10000")
    async with Cluster(tmp_path_factory.mktemp("cluster")) as started:
        await started.start_all(1, 1, *flags)
        yield started


async def test_a_newcomer_finds_the_worker_that_is_stopped(
    cluster: Cluster, tab: playwright.Page
) -> None:
    await tab.goto(cluster.page_url)
    cards = tab.locator(".worker")
    await expect(cards).to_have_count(2)
    await expect(tab.get_by_text("STOPPED")).to_have_count(0)
    pid = cluster.children["prefill0"].pid
    stopped = next(each for each in await cluster.instances() if each.pid == pid)
    cluster.send_signal("prefill0", signal.SIGSTOP)
    try:
        marked = cards.filter(has_text="STOPPED")
        await expect(marked).to_have_count(1)
        await expect(marked).to_contain_text(stopped.instance_id[:8])
        await expect(tab.locator("#alerts")).to_contain_text(
            f"worker {stopped.instance_id[:8]} is stopped"
        )
    finally:
        cluster.send_signal("prefill0", signal.SIGCONT)
    await expect(tab.get_by_text("STOPPED")).to_have_count(0)
    await cluster.ready(1, 1)


async def test_a_newcomer_finds_why_prompts_stay_local_and_changes_it_by_keyboard(
    cluster: Cluster, tab: playwright.Page
) -> None:
    await tab.goto(cluster.page_url)
    await expect(tab.locator(".worker")).to_have_count(2)
    await cluster.complete("one short prompt", max_tokens=2)
    why = tab.locator("#placements li")
    await expect(why).to_have_count(1)
    await expect(why).to_contain_text("local")
    await expect(why).to_contain_text("short: at most max_local_prefill_length tokens to compute")
    slider = tab.get_by_label("Longest local prompt")
    await expect(slider).to_have_value(re.compile("^(992|1000|1008)$"))
    await slider.focus()
    await tab.keyboard.press("Home")
    undo = tab.get_by_role("button", name="Undo: Longest local prompt 0 tokens")
    await expect(undo).to_be_enabled()
    while (await cluster.complete("another prompt, as short", max_tokens=4)).place == "local":
        await asyncio.sleep(0.05)
    await expect(why.filter(has_text="remote")).to_contain_text("long: over max_local_prefill")
    bars = tab.locator("#handoffs li").first
    for stage in ("queue", "compute", "exposed transfer", "verification"):
        await expect(bars).to_contain_text(stage)
    await undo.focus()
    await tab.keyboard.press("Enter")
    await expect(tab.get_by_role("button", name="Undo")).to_be_disabled()
    await expect(slider).to_have_value(re.compile("^(992|1000|1008)$"))
    (decode,) = await cluster.statuses("decode")
    assert decode.details["disagg.max_local_prefill_length"] == 1000


async def test_a_newcomer_finds_the_target_that_is_missed(
    cluster: Cluster, tab: playwright.Page
) -> None:
    await cluster.set_config("disagg.ttft_target_ms", 0.01)
    await cluster.set_config("disagg.itl_target_ms", 60_000.0)
    await tab.goto(cluster.page_url)
    await expect(tab.locator(".worker")).to_have_count(2)
    rows = tab.locator(".latency")
    while not await rows.filter(has_text="ITL").count():  # where tokens come apart from others
        await cluster.complete("a prompt", max_tokens=8)
    await expect(rows.filter(has_text="TTFT")).to_contain_text("target missed")
    await expect(rows.filter(has_text="ITL")).to_contain_text("target kept")
    alerts = tab.locator("#alerts")
    await expect(alerts).to_have_text(f"the TTFT target of {cluster.model_name} is missed")


async def test_an_answer_of_the_chat_shows_its_own_timeline(
    cluster: Cluster, tab: playwright.Page
) -> None:
    await tab.goto(cluster.page_url)
    model = tab.locator("#chat-model")
    await expect(model).to_have_value(cluster.model_name)
    await tab.get_by_label("Message").fill("Tell me a story.")
    await tab.keyboard.press("Tab")
    await tab.keyboard.press("Enter")
    answer = tab.locator(".answer")
    await expect(answer).to_contain_text("Prompt computed")
    await expect(answer.locator(".text")).not_to_be_empty()
    await expect(answer.locator(".stages")).to_contain_text("first step")


async def test_a_message_waits_for_a_model(tab: playwright.Page) -> None:
    parse = partial(parse_live, load_config())
    async with Stack(num_workers=0, parse_live=parse, config=page_config()) as stack:
        await tab.goto(page_config().page_url(stack.url))
        message = tab.get_by_label("Message")
        await message.fill("Tell me a story.")
        send = tab.get_by_role("button", name="Send")
        await send.click()
        await expect(tab.locator("#chat-model:invalid")).to_be_visible()
        await expect(message).to_have_value("Tell me a story.")
        assert await tab.locator(".answer").count() == 0
        await stack.add_worker(StatusWorker)
        await expect(tab.locator("#chat-model")).to_have_value(MODEL)
        await send.click()
        await expect(tab.locator(".answer strong")).to_have_text("Tell me a story.")


async def test_a_role_is_changed_and_undone(cluster: Cluster, tab: playwright.Page) -> None:
    await tab.goto(cluster.page_url)
    (prefill,) = await cluster.statuses("prefill")
    role = tab.get_by_label(f"Role of worker {prefill.instance.instance_id[:8]}")
    await role.select_option("both")
    undo = tab.get_by_role("button", name=re.compile("Undo: worker .* is both"))
    await expect(undo).to_be_enabled()
    assert len(await cluster.statuses("decode")) == 2
    await undo.click()
    await expect(role).to_have_value("prefill")


async def test_a_worker_that_loads_is_shown_with_its_remaining_time(
    cluster: Cluster, tab: playwright.Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "EVENT_INTERVAL_S", 0.0)
    runtime = RuntimeConfig(
        namespace="test", nats_url=cluster.nats.url, etcd_endpoints=cluster.etcd.url
    )
    await tab.goto(cluster.page_url)
    starting = tab.locator("#starting li")
    with reported(runtime, "prefill", HOSTILE), ProgressBar("weights", total=10) as bar:
        bar.advance()
        bar.advance(3)
        await expect(starting).to_have_count(1)
        await expect(starting).to_contain_text(f"prefill of {HOSTILE}")
        await expect(starting).to_contain_text(re.compile("weights: 0 s, 40 %"))
        await expect(starting.get_by_role("progressbar")).to_have_js_property("value", 0.4)
    await expect(starting).to_have_count(0)


async def test_tandem_ui_shows_a_cluster_without_a_frontend_of_its_own(
    cluster: Cluster, tab: playwright.Page, tmp_path: Path
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tandem.launch", "ui", "--port", str(port)]
    command += ["--nats-url", cluster.nats.url, "--etcd-endpoints", cluster.etcd.url]
    child = await ChildProcess.start([*command, "--namespace", "test"], tmp_path / "ui.log")
    try:
        while is_port_free("127.0.0.1", port):
            assert child.exit_code is None, child.log_tail()
            await asyncio.sleep(0.05)
        (link,) = re.findall(r"live page: (\S+)", (tmp_path / "ui.log").read_text())
        assert link.startswith(f"http://127.0.0.1:{port}/ui#key=")
        await tab.goto(link)
        await expect(tab.locator(".worker")).to_have_count(2)
    finally:
        await child.stop(15.0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_is_readable_on_a_phone_and_all_controls_have_names(
    cluster: Cluster, browser: playwright.Browser, scheme: str
) -> None:
    phone = await browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    await phone.goto(cluster.page_url)
    await expect(phone.locator(".worker")).to_have_count(2)
    await expect(phone.locator(".control")).to_have_count(5)
    width = await phone.evaluate("document.documentElement.scrollWidth")
    assert width <= 360
    nameless = await phone.evaluate(
        "[...document.querySelectorAll('input, select, textarea')]"
        ".filter((each) => !each.labels.length && !each.ariaLabel).length"
    )
    assert nameless == 0
    back = await phone.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", back)[:3])) / 3
    assert (brightness < 60) == (scheme == "dark")
    await phone.close()


async def test_the_page_asks_for_a_key_and_shows_hostile_names_as_text(
    tab: playwright.Page,
) -> None:
    keys = ";".join([entry("alice"), entry("olga", "operator")])
    config = FrontendConfig(port=0, api_keys=keys)
    async with page_stack(config=config, model=HOSTILE) as stack:
        await tab.goto(f"{stack.url}/ui")
        key = tab.get_by_label("Key")
        await key.fill("key of mallory")
        await tab.keyboard.press("Enter")
        await expect(tab.locator("#connection")).to_contain_text("the API key is not valid")
        await expect(tab.locator("#content")).to_be_hidden()
        await key.fill("key of alice")
        await tab.keyboard.press("Enter")
        await expect(tab.locator("#connection")).to_contain_text("lacks the option `operator`")
        await key.fill("key of olga")
        await tab.keyboard.press("Enter")
        await expect(tab.locator(".worker .name")).to_contain_text(HOSTILE)
        assert await tab.locator("img").count() == 0


async def test_a_worker_of_several_ranks_says_so(tab: playwright.Page) -> None:
    async with page_stack() as stack:
        stack.worker.details["tp"] = 4
        await tab.goto(page_config().page_url(stack.url))
        await expect(tab.locator(".worker .state")).to_have_text("● serving, 4 ranks")


async def test_the_link_opens_the_page_in_every_tab_of_one_browser(
    browser: playwright.Browser,
) -> None:
    async with page_stack() as stack:
        link = page_config().page_url(stack.url)
        for way in ("at once", "from the form"):
            context = await browser.new_context()
            tab = await context.new_page()
            if way == "from the form":
                await tab.goto(f"{stack.url}/ui")
                await expect(tab.locator("#connection")).to_contain_text("tandem serve")
                await expect(tab.get_by_label("Key")).to_be_visible()
                await expect(tab.locator("#content")).to_be_hidden()
            await tab.goto(link)
            await expect(tab.locator(".worker")).to_have_count(1)
            assert KEY not in tab.url
            other = await context.new_page()
            await other.goto(f"{stack.url}/ui")
            await expect(other.locator(".worker")).to_have_count(1)
            assert KEY not in await other.content()
            await context.close()


async def test_a_page_of_another_origin_takes_no_place_and_changes_nothing(
    browser: playwright.Browser,
) -> None:
    """The other page is of the same machine, and the browser has the key of the live page."""
    config = page_config(max_pages=1)
    async with page_stack(config=config) as stack, Stack() as evil:
        context = await browser.new_context()
        tab = await context.new_page()
        await tab.goto(config.page_url(stack.url))
        await expect(tab.locator(".worker")).to_have_count(1)
        await tab.close()
        await eventually(lambda: not stack.server.recent.is_open)
        other = await context.new_page()
        await other.goto(f"{evil.url}/live")
        told = await other.evaluate(ATTACKS, stack.url)
        assert told == ["failed"] * len(told)
        assert not stack.server.recent.is_open
        assert config_key("tandem", "disagg.policy") not in stack.store.items
        assert not stack.worker.requests
        await context.close()
