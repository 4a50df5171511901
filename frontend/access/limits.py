"""The limits of one API key at this frontend, as buckets that fill with time."""

import itertools
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
_serials = itertools.count()


class Bucket:
    """An amount that grows by `limit` in a minute, up to `limit`. It can be in debt."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_spent = 0.0  # of it here, since its begin
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
        self.lower(amount)
        self.num_spent += amount

    def lower(self, amount: float) -> None:
        """Take away what was spent elsewhere."""
        self._level = self.level - amount

    def lower_to(self, level: float) -> None:
        """Have at most `level`."""
        self._level = min(self.level, level)


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
        self.serial = next(_serials)  # of its counts
        self.requests = _bucket(key.requests_per_minute)
        self.tokens = _bucket(key.tokens_per_minute)

    @property
    def is_full(self) -> bool:
        """True where nothing of a limit is spent, and without limits."""
        buckets = (self.requests, self.tokens)
        return all(each is None or each.level == each.limit for each in buckets)

    def admit(self) -> None:
        """Count a request. Raises RateLimitError while there is no room for one."""
        if self.tokens is not None:
            self._check(self.tokens, 1, "tokens")
        if self.requests is not None:
            self._check(self.requests, 1, "requests")
            self.requests.take(1)

    def charge(self, num_prompt: int, num_held: int) -> Charge:
        """Take a prompt's tokens and the most that its answer may have, or 0 for any number.

        Raises RateLimitError without room.
        """
        if self.tokens is not None:
            self._check(self.tokens, num_prompt + num_held, "tokens")
        return Charge(self.tokens, num_prompt, num_held)

    def headers(self) -> list[Header]:
        """Return the headers that tell of the limits."""
        headers = []
        for kind, bucket in ((b"requests", self.requests), (b"tokens", self.tokens)):
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
