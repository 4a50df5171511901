"""The addresses of NATS and etcd in a file, for services that come back at another address."""

import json
from pathlib import Path

KEYS = ("nats_url", "etcd_endpoints")


def read_services(path: str) -> dict[str, str]:
    """Return the values of `KEYS`. Raise ValueError for a file that does not have them."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON") from error
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in KEYS):
        raise ValueError(f"{path} must be an object with the texts {' and '.join(KEYS)}")
    return {key: found[key] for key in KEYS}
