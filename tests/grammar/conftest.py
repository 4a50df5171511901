"""The bundled model's tokenizer, and compilers of grammars."""

from collections.abc import AsyncIterator

import pytest_asyncio
from tokenizers import Tokenizer

from tandem.grammar.compiler import GrammarCompiler
from tandem.models.paths import BUNDLED_MODEL

VOCAB_SIZE, EOS = 2048, 2
TOKENIZER = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))


# One for a file: its process of trials takes a while to start.
@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler.of_model(BUNDLED_MODEL, VOCAB_SIZE, (EOS,))
    assert compiler is not None
    yield compiler
    await compiler.close()
