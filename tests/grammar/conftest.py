"""The bundled model's tokenizer, and a compiler of grammars for it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from tandem.grammar.compiled import load_tokenizer
from tandem.grammar.compiler import GrammarCompiler

MODEL = Path(__file__).resolve().parents[2] / "models" / "tandem-tiny"
VOCAB_SIZE, EOS = 2048, 2


@pytest.fixture(scope="session")
def tokenizer() -> LLTokenizer:
    return load_tokenizer(MODEL / "tokenizer.json", VOCAB_SIZE, (EOS,))


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler.of_model(MODEL, VOCAB_SIZE, (EOS,))
    assert compiler is not None
    yield compiler
    await compiler.close()
