"""The bodies of embeddings, rerank and score requests, and their answers."""

from collections.abc import Collection
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
# The names of the first texts of pairs, and of the second ones.
_TEXTS = (("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2"))
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


class ScoreBody(Body, frozen=True, kw_only=True):
    """POST /v1/score, in the shape of vLLM, where the texts have one of several names."""

    no_effect = frozenset(("user", "priority"))

    model: str
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The fields of the first and the second texts. Raises InvalidRequestError."""
        first, second = (
            [name for name in names if getattr(self, name) is not None] for names in _TEXTS
        )
        for given, names in ((first, _TEXTS[0]), (second, _TEXTS[1])):
            if len(given) != 1:
                raise invalid_field(names[0], f"is required, or one of {', '.join(names[1:])}")
        return first[0], second[0]

    def sides(self, most: int) -> tuple[list[str], list[str]]:
        """Return the first and the second texts; a single first one is that of all pairs.

        Raises InvalidRequestError naming the field.
        """
        first, second = (
            [texts] if isinstance(texts := getattr(self, name), str) else texts
            for name in self.names
        )
        name = self.names[1]
        if not 1 <= len(second) <= most:
            raise invalid_field(name, f"has {len(second)} entries; it must have 1 to {most}")
        if len(first) not in (1, len(second)):
            reason = f"has {len(second)} entries; {self.names[0]!r} has {len(first)}, not one"
            raise invalid_field(name, reason)
        return first, second


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
    most = config.max_inputs
    _check_num_texts(raw, ("documents",), most)
    body = read_body(RerankBody, raw, ("query", "documents"), ignored)
    if not 1 <= len(body.documents) <= most:
        raise invalid_field(
            "documents", f"has {len(body.documents)} entries; it must have 1 to {most}"
        )
    return body


def parse_score(raw: bytes, config: FrontendConfig, ignored: Ignored) -> ScoreBody:
    """Return the body. Raises InvalidRequestError naming the field."""
    names = [name for names in _TEXTS for name in names]
    _check_num_texts(raw, names, config.max_inputs)
    return read_body(ScoreBody, raw, names, ignored)


def _check_num_texts(raw: bytes, names: Collection[str], most: int) -> None:
    """Raise InvalidRequestError for a list of far more texts than may be, before any is made."""
    fields = read_fields(raw)
    for name in names:
        if (given := fields.get(name)) is not None and begins(given, b"["):
            text = bytes(given)
            num_quotes = text.count(b'"') - text.count(b'\\"')
            if num_quotes > most * _QUOTES_OF_DOCUMENT:
                raise invalid_field(name, f"has over {most} entries, the most is {most}")


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


class Score(msgspec.Struct, frozen=True):
    """The score of one pair."""

    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct, frozen=True):
    """The answer of /v1/score, in the order of the pairs."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage
    object: str = "list"
