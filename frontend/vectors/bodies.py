"""The bodies of embeddings and rerank requests, and their answers."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.bodies.outline import PROMPT_FORMS, begins, check_prompts, is_null, read_fields
from tandem.frontend.bodies.typed import Body, Count, read_body
from tandem.frontend.config import FrontendConfig
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.wire.messages import MAX_DIMENSIONS

_QUOTES_OF_DOCUMENT = 16  # far more than one has that is `{"text": ...}`
Input = str | list[int]


class EmbeddingsBody(Body, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    no_effect = frozenset(("user", "priority"))

    model: str
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] | None = None
    add_special_tokens: bool | None = None

    def inputs(self, config: FrontendConfig) -> list[Input]:
        """Return each input as text or token ids. Raises InvalidRequestError naming it."""
        if isinstance(self.input, str):
            return [self.input]
        if not self.input:
            raise invalid_field("input", "is empty")
        kinds = set(map(type, self.input))
        if _are_token_ids(self.input):
            return [self.input]
        if len(self.input) > config.max_inputs:
            raise invalid_field(
                "input", f"has {len(self.input)} entries, the most is {config.max_inputs}"
            )
        are_ids = kinds == {list} and all(map(_are_token_ids, self.input))
        if kinds != {str} and not are_ids:
            raise InvalidRequestError(PROMPT_FORMS.format("input"), param="input")
        return self.input


def _are_token_ids(values: list[Any]) -> bool:
    return {*map(type, values)} == {int} and min(values) >= 0


class Document(msgspec.Struct, frozen=True):
    """A document with a text of its own."""

    text: str


class RerankBody(Body, frozen=True, kw_only=True):
    """POST /v1/rerank, in the shape of Jina and Cohere."""

    no_effect = frozenset(("user", "priority"))

    model: str
    query: str
    documents: list[str | Document]
    top_n: Count | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


def parse_embeddings(
    raw: bytes, config: FrontendConfig, longest_context: int, ignored: Ignored
) -> EmbeddingsBody:
    """Return the checked body. Raises InvalidRequestError naming the field."""
    given = read_fields(raw).get("input")
    if given is not None and not is_null(given):
        check_prompts(given, config.max_inputs, longest_context, "input")
    return read_body(EmbeddingsBody, raw, ("input",), ignored)


def parse_rerank(raw: bytes, config: FrontendConfig, ignored: Ignored) -> RerankBody:
    """Return the checked body. Raises InvalidRequestError naming the field."""
    given, most = read_fields(raw).get("documents"), config.max_inputs
    if given is not None and begins(given, b"["):
        # counted before any object is made of them
        text = bytes(given)
        num_quotes = text.count(b'"') - text.count(b'\\"')
        if num_quotes > most * _QUOTES_OF_DOCUMENT:
            raise invalid_field("documents", f"has over {most} entries, the most is {most}")
    body = read_body(RerankBody, raw, ("query", "documents"), ignored)
    if not 1 <= len(body.documents) <= most:
        raise invalid_field(
            "documents", f"has {len(body.documents)} entries; it must have 1 to {most}"
        )
    return body


class VectorUsage(msgspec.Struct, frozen=True):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True):
    """The vector of one input, as a list of numbers, or as base64 of float32."""

    index: int
    embedding: Raw
    object: str = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    """The answer of /v1/embeddings."""

    model: str
    data: list[Embedding]
    usage: VectorUsage
    object: str = "list"


class RankedDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """The score of one document."""

    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(msgspec.Struct, frozen=True):
    """The answer of /v1/rerank, best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: VectorUsage
