"""The limits of one API key at this frontend, as buckets that fill with time."""

import time

from tandem.frontend.access.keys import ApiKey
from tandem.frontend.errors import RateLimitError

Header = tuple[bytes, bytes]
LIMIT_HEADERS = [
    f"x-ratelimit-{fact}-{kind}"
    for kind in ("requests", "tokens")
    for fact in ("limit", "remaining", "reset")
]
_MINUTE_S = 60.0


class Bucket:
    """An amount that grows by `limit` in a minute, up to `limit`. It can be in debt."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at_s = time.perf_counter()

    @property
    def level(self) -> float:
        """The present amount."""
        now = time.perf_counter()
        grown = (now - self._at_s) * self.limit / _MINUTE_S
        self._level = min(float(self.limit), self._level + grown)
        self._at_s = now
        return self._level

    def wait_s(self, amount: float) -> float:
        """Return the time until the bucket has `amount`, or is full; 0 if it is now."""
        missing = min(amount, self.limit) - self.level
        return max(0.0, missing * _MINUTE_S / self.limit)

    def take(self, amount: float) -> None:
        """Take an amount away, which may leave a debt; a negative one is given back."""
        self._level = self.level - amount


class Charge:
    """The tokens of one request. Those of its prompt are paid, those of its answer are held."""

    def __init__(self, bucket: Bucket | None, num_prompt: int, num_held: int) -> None:
        self._bucket = bucket
        self._num_prompt = num_prompt
        self._num_held = num_held
        if bucket is not None:
            bucket.take(num_prompt + num_held)

    def end(self, num_generated: int, *, is_returned: bool) -> None:
        """Replace the held tokens by those of the answer; give all back if `is_returned`."""
        if self._bucket is not None:
            returned = self._num_prompt if is_returned else -num_generated
            self._bucket.take(-self._num_held - returned)


class Client:
    """The holder of an API key: its present limits and its requests under way."""

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self._requests = _bucket(key.requests_per_minute)
        self._tokens = _bucket(key.tokens_per_minute)

    def admit(self) -> None:
        """Count a request. Raises RateLimitError while there is no room for one."""
        if self._tokens is not None:
            self._check(self._tokens, 1, "tokens")
        if self._requests is not None:
            self._check(self._requests, 1, "requests")
            self._requests.take(1)

    def charge(self, num_prompt: int, num_held: int) -> Charge:
        """Take a prompt's tokens and the most that its answer may have, or 0 for any number.

        Raises RateLimitError without room.
        """
        if self._tokens is not None:
            self._check(self._tokens, num_prompt + num_held, "tokens")
        return Charge(self._tokens, num_prompt, num_held)

    def headers(self) -> list[Header]:
        """Return the headers that tell of the limits."""
        headers = []
        for kind, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                reset_s = bucket.wait_s(bucket.limit)
                headers += [
                    (b"x-ratelimit-limit-" + kind, b"%d" % bucket.limit),
                    (b"x-ratelimit-remaining-" + kind, b"%d" % max(0, int(bucket.level))),
                    (b"x-ratelimit-reset-" + kind, b"%.3fs" % reset_s),
                ]
        return headers

    def _check(self, bucket: Bucket, amount: int, kind: str) -> None:
        wait_s = bucket.wait_s(amount)
        if wait_s > 0:
            raise RateLimitError(
                f"the key {self.key.name!r} may have {bucket.limit} {kind} per minute; "
                f"{max(0, int(bucket.level))} are left now",
                retry_after_s=wait_s,
            )


def _bucket(limit: int | None) -> Bucket | None:
    return None if limit is None else Bucket(limit)
