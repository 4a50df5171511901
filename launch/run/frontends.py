"""A frontend in this process, which loads nothing of the engine."""

from functools import partial

import uvloop

from tandem.config.live import parse_live
from tandem.config.model import EffectiveConfig
from tandem.config.sources import Setting
from tandem.frontend.config import new_page_key
from tandem.frontend.serving.server import run_frontend
from tandem.runtime.local.ports import free_port, require_free_port
from tandem.runtime.process.logs import setup_logging


def run_frontend_role(effective: EffectiveConfig) -> None:
    """Block until a signal ends the frontend."""
    config = effective.config
    if config.frontend.listen_fd is None:
        require_free_port(config.frontend.host, config.frontend.port, "--port")
    setup_logging(config.runtime.log_level, "frontend", format=config.runtime.log_format)
    live = partial(parse_live, effective)
    uvloop.run(run_frontend(config.frontend, config.runtime, config.router, live))


def run_page(effective: EffectiveConfig, port: int) -> None:
    """Block until a signal ends a frontend for this machine alone, whose page is printed."""
    port = port or free_port("127.0.0.1")
    key = effective.config.frontend.page_key or new_page_key()
    own = {"host": "127.0.0.1", "port": port, "api_keys": "", "api_keys_file": None}
    own |= {"page_key": key, "tls_cert_file": None, "tls_key_file": None}
    settings = [Setting(f"frontend.{name}", value, "tandem ui") for name, value in own.items()]
    effective = effective.with_settings(settings)
    link = effective.config.frontend.page_url(f"http://127.0.0.1:{port}")
    print(f"live page: {link}", flush=True)
    run_frontend_role(effective)
