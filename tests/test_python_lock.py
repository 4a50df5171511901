"""Calls of native libraries on what a client, or a model folder, has sent.

Such a call holds Python's lock to its end unless it releases it, and every stream of the process
waits. Each module that may make one is listed here with the bound of what its calls get, and the
reason why the streams go on. JSON of clients is bounded where it enters: 64 KiB of a field, 1 MiB
of tools, 2^18 values in the arguments of all calls of a chat; that is 50 ms at most.
"""

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIBRARIES = ("tokenizers", "llguidance", "jinja2")
# What answers requests. The other rooms load trusted files, or run commands of an operator.
ROOMS = ("frontend", "router", "grammar", "decode", "prefill", "queue")


class Calls(NamedTuple):
    """Calls of one library in one module."""

    bound: str
    reason: str


LISTED: dict[str, dict[str, Calls]] = {
    "tokenizers": {
        "frontend/tokens/codec.py": Calls(
            "4,096 characters, 1,024 tokens; the context in the batch forms",
            "2 ms; the batch forms release the lock (tests/frontend/tokens/test_codec.py)",
        ),
        "frontend/tokens/tokenizer.py": Calls("48 MiB of files", "once a model, in a thread: 1 s"),
        "frontend/tokens/folder_tokens.py": Calls("the same", "adds a folder's own tokens"),
        "frontend/tokens/tokenizer_bounds.py": Calls("the same", "reads the tokenizer's parts"),
        "frontend/tokens/cuts.py": Calls("the same", "reads the tokenizer's parts"),
    },
    "jinja2": {
        "frontend/tokens/template.py": Calls(
            "2 s of work, 16 Mi characters for an operation, before it is done",
            "20 ms for an operation (tests/frontend/tokens/test_tokenizer.py)",
        ),
        "frontend/tokens/template_sandbox.py": Calls("the same", "its operations"),
    },
    "llguidance": {
        "grammar/compiled.py": Calls("256 KiB of source", "the constructor releases the lock"),
        "grammar/source.py": Calls("256 KiB of source", "in the process of trials"),
        "grammar/structural_tag.py": Calls("256 KiB of source", "in the process of trials"),
        "grammar/trial_server.py": Calls("256 KiB of source", "is the process of trials"),
        "grammar/compiler.py": Calls("one matcher", "`deep_copy`: 20 µs of the largest grammar"),
        "grammar/matcher.py": Calls(
            "1,250 rules in a row; 2 ms a token of each answer",
            "masks release the lock; `consume_token` after a mask of 0.3 ms at most",
        ),
        "grammar/consuming.py": Calls("the same", "the form for several matchers releases it"),
    },
}


def test_every_module_that_gives_texts_of_strangers_to_a_library_is_listed_with_its_bound() -> None:
    found: dict[str, set[str]] = {library: set() for library in LIBRARIES}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text()
            if not any(library in text for library in LIBRARIES):
                continue
            for node in ast.walk(ast.parse(text)):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                for library in {name.split(".")[0] for name in names} & {*LIBRARIES}:
                    found[library].add(str(path.relative_to(ROOT)))
    for library, modules in found.items():
        assert modules - LISTED[library].keys() == set(), library
