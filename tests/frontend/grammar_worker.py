"""A fake worker whose model calls tools, reasons, and takes grammars."""

import msgspec

from tandem.runtime.wire.cluster_messages import ModelCard
from tandem.runtime.wire.messages import Grammar
from tests.frontend.frontend_stack import FakeWorker, Stack, model_files
from tests.services import eventually

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}"
)


class GrammarWorker(FakeWorker):
    """A worker whose model calls tools, reasons, and takes grammars."""

    supports_grammar = True
    length = 4096

    def card(self) -> ModelCard:
        return msgspec.structs.replace(
            super().card(),
            supports_grammar=self.supports_grammar,
            supports_token_rules=True,
            context_length=self.length,
        )


async def join(stack: Stack, kind: type[GrammarWorker], template: str = TEMPLATE) -> None:
    await stack.add_worker(kind, files=model_files(template))
    await eventually(lambda: bool(stack.server.catalog.models))


def grammar_of(stack: Stack) -> Grammar | None:
    return stack.worker.requests[-1].grammar
