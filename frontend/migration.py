"""Where a choice goes on when a worker fails it, and what the next worker is asked. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from tandem.runtime.errors import (
    ConnectionLostError,
    IncompleteError,
    OverloadedError,
    ProtocolError,
    TandemError,
    UnavailableError,
)
from tandem.runtime.messages import GenerateRequest, pack_tokens

# What another worker may do better. The rest would fail anywhere, or is the caller's own doing.
MIGRATABLE = (ConnectionLostError, ProtocolError, OverloadedError)
MigrationKind = Literal["new_request", "ongoing"]


@dataclass(slots=True)
class Attempts:
    """The workers that one choice has tried, and how often it may still go to another."""

    limit: int  # migrations; 0: the first failure is the end
    num_migrations: int = 0
    _failed: set[str] = field(default_factory=set)  # instance ids; not asked again
    _gave_up: set[str] = field(default_factory=set)  # well, but asked again only at need

    def failed(self, instance_id: str, error: TandemError) -> None:
        """This worker did not bring the choice to its end."""
        kept = self._gave_up if isinstance(error, IncompleteError) else self._failed
        kept.add(instance_id)

    def begun(self) -> None:
        """A worker answers. Should it fail too, those that failed before it may be well again."""
        self._failed.clear()
        self._gave_up.clear()

    def eligible(self, instance_ids: Iterable[str]) -> list[str]:
        """Those of `instance_ids` to go to: new ones, else ones that gave the choice up once."""
        left = [each for each in instance_ids if each not in self._failed]
        return [each for each in left if each not in self._gave_up] or left

    @property
    def has_more(self) -> bool:
        """Whether the limit allows another migration."""
        return self.num_migrations < self.limit


def is_worker_at_fault(error: TandemError) -> bool:
    """Whether the worker should get no requests for a while.

    An overloaded worker is well, and so is one that gave up a single stream: if it is about to
    stop, it refuses the next one.
    """
    if isinstance(error, OverloadedError):
        return isinstance(error, UnavailableError)
    return not isinstance(error, IncompleteError)


def continued(request: GenerateRequest, said: list[int]) -> GenerateRequest:
    """`request`, to be answered from behind the tokens that were `said` already."""
    if not said:
        return request
    return msgspec.structs.replace(
        request, token_ids=request.token_ids + pack_tokens(said), num_generated=len(said)
    )
