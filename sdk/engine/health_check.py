"""The health check: a request that an idle worker sends through its own engine."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

HEALTH_CHECK_KEY = "_HEALTH_CHECK"
_VARIABLES = ("TANDEM_HEALTH_CHECK_PAYLOAD", "DYN_HEALTH_CHECK_PAYLOAD")


def is_probe(request: Mapping[str, Any]) -> bool:
    """Return True for a health check, which needs no prefill result."""
    return request.get(HEALTH_CHECK_KEY) is True


def build_health_check_payload(
    bos_token_id: int, *, extras: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a request for one greedy token after `bos_token_id`, updated with `extras`.

    The variable TANDEM_HEALTH_CHECK_PAYLOAD (or DYN_HEALTH_CHECK_PAYLOAD), JSON or @file, replaces
    the whole request.
    """
    payload: dict[str, Any] = {
        "token_ids": [bos_token_id],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
    }
    name = next((name for name in _VARIABLES if os.environ.get(name)), None)
    chosen = None if name is None else _parse(os.environ[name], name)
    return _marked(payload | (extras or {}) if chosen is None else chosen)


def parse_health_check_payload_cli(value: str | None) -> dict[str, Any] | None:
    """Return the payload of a flag, JSON or @file. Log a warning and return None for others."""
    return _parse(value, "--health-check-payload") if value else None


def bos_token_id_or(tokenizer: object, default: int = 1) -> int:
    """Return `bos_token_id` of a tokenizer, or of the one in its `.tokenizer`, or `default`."""
    found = getattr(tokenizer, "bos_token_id", None)
    if found is None:
        found = getattr(getattr(tokenizer, "tokenizer", None), "bos_token_id", None)
    return default if found is None else int(found)


def _parse(value: str, origin: str) -> dict[str, Any] | None:
    try:
        payload = json.loads(Path(value[1:]).read_text() if value.startswith("@") else value)
    except (OSError, ValueError) as error:
        logger.warning("%s is not used: %s", origin, error)
        return None
    if not isinstance(payload, dict):
        logger.warning("%s is not used: %s is not a JSON object", origin, type(payload).__name__)
        return None
    return _marked(payload)


def _marked(payload: dict[str, Any]) -> dict[str, Any]:
    return payload | {HEALTH_CHECK_KEY: True}
