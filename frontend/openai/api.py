"""OpenAI's chat completions and completions: an `Api` each."""

from tandem.frontend.chat.requests import ChatRequest, CompletionRequest
from tandem.frontend.chat.text_body import Route, parse_text
from tandem.frontend.errors import OpenAIErrors
from tandem.frontend.http.api import Call, Work
from tandem.frontend.openai.sse import StreamWriter
from tandem.frontend.openai.whole import WholeWriter
from tandem.frontend.shapes.generations import Generations
from tandem.frontend.text.answers import StreamedText, WholeText


class OpenAIApi:
    """Bodies of one kind. Those for a model that reads text are passed on as they are."""

    errors = OpenAIErrors()

    def __init__(
        self,
        kind: type[ChatRequest] | type[CompletionRequest],
        route: Route,
        generations: Generations,
    ) -> None:
        self._kind = kind
        self._route = route
        self._generations = generations

    async def prepare(self, raw: bytes, call: Call) -> Work:
        generations = self._generations
        if generations.is_for_text_model(raw):
            text_body = parse_text(self._route, raw)
            writer = StreamedText if text_body.stream else WholeText
            return generations.of_text(text_body, writer, call)
        body = generations.parse(self._kind, raw, call.ignored)
        new_writer = StreamWriter if body.stream else WholeWriter
        return await generations.of_tokens(body, new_writer, call)
