"""The fields of sampling, which the bodies of all three APIs have."""

from typing import Annotated, Any

from msgspec import Meta

from tandem.frontend.bodies.typed import Body, Share
from tandem.runtime.wire.bounds import LARGEST_INT, LEAST_REPETITION_PENALTY

MAX_TOKEN_ID = 2**32 - 1
_MAX_I64 = 2**63 - 1
_MAX_ALLOWED = 16_384
_MAX_BAD_WORDS = 128
BadWord = Annotated[str, Meta(min_length=1, max_length=128)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
AllowedTokens = Annotated[list[TokenId], Meta(max_length=_MAX_ALLOWED)]
BadWords = Annotated[list[BadWord], Meta(max_length=_MAX_BAD_WORDS)]
CacheSalt = Annotated[str, Meta(max_length=256)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=LEAST_REPETITION_PENALTY, le=10)]
Seed = Annotated[int, Meta(ge=-_MAX_I64 - 1, le=_MAX_I64)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=-1, le=LARGEST_INT)]


class SamplingFields(Body, frozen=True, kw_only=True):
    """The fields of sampling that all three APIs have, under one name in each.

    Beyond temperature, top_p and penalties they are those of other servers of open models.
    """

    temperature: Temperature | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords | None = None
    cache_salt: CacheSalt | None = None

    def sampling(self) -> dict[str, Any]:
        """Return these fields, for another body that has them."""
        return {name: getattr(self, name) for name in SamplingFields.__struct_fields__}
