"""Mutants of the handoff's state machines: one condition, comparison, sum or statement changed.

The mutants are generated from the syntax trees of the classes. A mutant is named by its method, its
kind and its place among those of its kind.
"""

import ast
import copy
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal
from unittest import mock

from tandem.transfer.handoff.coverage import Coverage
from tandem.transfer.handoff.decode import DecodeHandoff
from tandem.transfer.handoff.prefill import PrefillHandoff

Kind = Literal["always", "never", "without", "swap", "drop"]
CLASSES: tuple[type, ...] = (DecodeHandoff, Coverage, PrefillHandoff)
UNTESTED = frozenset({"check_invariants", "_claimant_name"})  # asserts, and words for people
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip
DROPPED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A class with one change in one method."""

    owner: type
    method: str
    kind: Kind
    index: int

    @property
    def name(self) -> str:
        return f"{self.owner.__name__}.{self.method} {self.kind} {self.index}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The class is this mutant within."""
        tree = copy.deepcopy(_methods(self.owner)[self.method])
        [change] = [
            change
            for index, change in enumerate(c for kind, c in _changes(tree) if kind == self.kind)
            if index == self.index
        ]
        change()
        module = sys.modules[self.owner.__module__]
        found: dict[str, object] = {}
        code = ast.fix_missing_locations(ast.Module([tree], []))
        exec(compile(code, self.name, "exec"), module.__dict__, found)
        with mock.patch.object(self.owner, self.method, found[self.method]):
            yield


def mutants() -> list[Mutant]:
    """Return every mutant of every class."""
    found = []
    for owner in CLASSES:
        for method, tree in _methods(owner).items():
            counts: dict[Kind, int] = {}
            for kind, _ in _changes(tree):
                index = counts[kind] = counts.get(kind, -1) + 1
                if not (method == "__init__" and kind == "drop"):
                    found.append(Mutant(owner, method, kind, index))
    return found


@cache
def _methods(owner: type) -> dict[str, ast.FunctionDef]:
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name not in UNTESTED
    }


def _changes(tree: ast.AST) -> Iterator[tuple[Kind, Callable[[], None]]]:
    """Yield the changes of a method's tree; each is made in place, and one at most."""
    for node in _walk(tree):
        match node:
            case ast.If() | ast.IfExp():
                yield "always", partial(setattr, node, "test", ast.Constant(True))
                yield "never", partial(setattr, node, "test", ast.Constant(False))
            case ast.BoolOp(values=values):
                for index in range(len(values)):
                    rest = values[:index] + values[index + 1 :]
                    yield "without", partial(setattr, node, "values", [*rest, rest[-1]])
            case ast.Compare(ops=ops):
                for index, op in enumerate(ops):
                    yield "swap", partial(ops.__setitem__, index, SWAPS[type(op)]())
            case ast.BinOp(op=ast.Add() | ast.Sub() as op):
                yield "swap", partial(setattr, node, "op", SWAPS[type(op)]())
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                for index, statement in enumerate(body):
                    if isinstance(statement, DROPPED) and not _is_void(statement):
                        yield "drop", partial(body.__setitem__, index, ast.Pass())


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that a test can tell from another: no assertion, no text for people."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Assert | ast.JoinedStr):
            yield from _walk(child)


def _is_void(statement: ast.stmt) -> bool:
    """A docstring, or `return None`: without it nothing changes."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.Return(value=ast.Constant(value=None)):
            return True
    return False
