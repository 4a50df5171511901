"""A tool that rewrites the import lines of Dynamo workers and engines for Tandem.

python -m tandem.sdk.dynamo.port my_engine.py            # show the difference
python -m tandem.sdk.dynamo.port --write my_engine.py    # and write it
"""

import argparse
import ast
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from tandem.sdk.dynamo.imports import MODULES, Place, find

_ROOTS = ("dynamo", "nixl")


@dataclass(frozen=True, slots=True)
class Unported:
    """An imported name that is not in the table; its line is left unchanged."""

    line: int
    module: str
    name: str
    note: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.module}.{self.name}: {self.note}"


@dataclass(frozen=True, slots=True)
class Ported:
    """The source with its import lines changed, and the names left to port by hand."""

    source: str
    unported: tuple[Unported, ...]


def port(source: str, package: str = "") -> Ported:
    """Change the import lines, and nothing else. Raise SyntaxError if the source is not Python.

    `package` resolves relative imports (`from .engine import ...`).
    """
    lines = source.splitlines(keepends=True)
    unported: list[Unported] = []
    found = [node for node in ast.walk(ast.parse(source)) if _is_theirs(node, package)]
    for node in sorted(found, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        first, end = node.lineno - 1, node.end_lineno or node.lineno
        before = lines[first].encode()[: node.col_offset].decode()
        after = lines[end - 1].encode()[node.end_col_offset :].decode()
        statements, missing = _rewritten(node, package)
        unported += missing
        if statements:
            lines[first:end] = [before + f"\n{before}".join(statements) + after]
    return Ported("".join(lines), tuple(sorted(unported, key=lambda each: each.line)))


def _is_theirs(node: ast.AST, package: str) -> TypeGuard[ast.Import | ast.ImportFrom]:
    if isinstance(node, ast.ImportFrom):
        return _module(node, package).split(".")[0] in _ROOTS
    return isinstance(node, ast.Import) and node.names[0].name.split(".")[0] in _ROOTS


def _module(node: ast.ImportFrom, package: str) -> str:
    """Return the full name of the imported module; empty for an unresolved relative import."""
    if not node.level:
        return node.module or ""
    parents = package.split(".")[: len(package.split(".")) - (node.level - 1)]
    return ".".join([*parents, node.module] if node.module else parents) if package else ""


def _rewritten(node: ast.Import | ast.ImportFrom, package: str) -> tuple[list[str], list[Unported]]:
    """Return the new statements, in the order of the names; none if no name is in the table."""
    if isinstance(node, ast.Import):
        return _rewritten_modules(node)
    module = _module(node, package)
    taken: dict[str, list[str]] = {}
    kept: list[str] = []
    missing: list[Unported] = []
    for alias in node.names:
        place = find(module, alias.name)
        shown = f" as {alias.asname}" if alias.asname else ""
        if not isinstance(place, Place):
            note = "it is not in the table" if place is None else place.note
            missing.append(Unported(node.lineno, module, alias.name, note))
            kept.append(f"{alias.name}{shown}")
        elif place.name is None:
            package, _, name = place.module.rpartition(".")
            same = shown or ("" if name == alias.name else f" as {alias.name}")
            taken.setdefault(package, []).append(f"{name}{same}")
        else:
            taken.setdefault(place.module, []).append(f"{place.name}{shown}")
    statements = [f"from {ours} import {', '.join(names)}" for ours, names in taken.items()]
    if statements and kept:
        statements.append(f"from {module} import {', '.join(kept)}")
    return statements, missing


def _rewritten_modules(node: ast.Import) -> tuple[list[str], list[Unported]]:
    statements: list[str] = []
    missing: list[Unported] = []
    for alias in node.names:
        ours = MODULES.get(alias.name) if alias.asname else None
        if ours is None:
            note = "import the names that you use from it"
            missing.append(Unported(node.lineno, alias.name, alias.asname or "*", note))
            statements.append(
                f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
            )
        else:
            statements.append(f"import {ours} as {alias.asname}")
    return statements, missing


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every import was ported, 1 if some are left to port by hand."""
    parser = argparse.ArgumentParser(prog="python -m tandem.sdk.dynamo.port", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="change the files in place")
    parser.add_argument("--package", default="", help="resolves `from .engine import ...`")
    options = parser.parse_args(argv)
    status = 0
    for path in options.files:
        try:
            source = path.read_text(encoding="utf-8")
            ported = port(source, options.package)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            status = 1
            continue
        difference = difflib.unified_diff(
            source.splitlines(keepends=True),
            ported.source.splitlines(keepends=True),
            str(path),
            str(path),
        )
        sys.stdout.writelines(difference)
        for each in ported.unported:
            print(f"{path}: {each}", file=sys.stderr)
            status = 1
        if options.write and ported.source != source:
            path.write_text(ported.source, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
