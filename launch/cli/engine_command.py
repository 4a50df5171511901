"""`tandem engine`: runs an author's engine in this process."""

from collections.abc import Sequence

from tandem.runtime.errors import ConfigError
from tandem.sdk.engine.llm_engine import LLMEngine
from tandem.sdk.engine.run import run
from tandem.sdk.worker.targets import load_class

USAGE = "usage: tandem engine {module:Engine | vllm} [the engine's arguments; --help shows them]"
NAMED = {"vllm": "tandem.vllm.engine:VllmEngine"}


def run_engine(words: Sequence[str]) -> None:
    """Block until a signal ends the engine. Raises ConfigError when there is no such engine."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        raise SystemExit(0 if words else 2)
    found = load_class(NAMED.get(words[0], words[0]))
    if not issubclass(found, LLMEngine):
        raise ConfigError(f"{words[0]} is no engine: it must be a subclass of LLMEngine")
    run(found, list(words[1:]))
