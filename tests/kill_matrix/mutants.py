"""Mutants of a module: one condition, comparison, sum, number or statement of a function changed.

They are generated from the module's syntax tree. A mutant is named by its function, its kind and
its place among those of its kind.
"""

import ast
import difflib
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import Literal

Kind = Literal["always", "never", "without", "swap", "number", "drop"]
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}  # fmt: skip
DROPPED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one change in one function, which is named as in its class."""

    module: str
    function: str
    kind: Kind
    index: int

    @property
    def name(self) -> str:
        return f"{self.function} {self.kind} {self.index}"

    @property
    def change(self) -> str:
        """The lines that differ from the original's."""
        trees = (ast.parse(inspect.getsource(importlib.import_module(self.module))), self._tree())
        lines = (ast.unparse(_defined(tree)[self.function]).splitlines() for tree in trees)
        return "\n".join(line for line in difflib.ndiff(*lines) if line[0] in "+-")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The function is this mutant within, for all who have imported it."""
        module = importlib.import_module(self.module)
        code = compile(self._tree(), str(module.__file__), "exec")
        function = functions(module)[self.function]
        kept, function.__code__ = function.__code__, _codes(code)[self.function]
        try:
            yield
        finally:
            function.__code__ = kept

    def _tree(self) -> ast.Module:
        tree = ast.parse(inspect.getsource(importlib.import_module(self.module)))
        function = _defined(tree)[self.function]
        changes = [change for kind, change in _changes(function) if kind == self.kind]
        changes[self.index]()
        return ast.fix_missing_locations(tree)


def mutants(module: str, unless: frozenset[str] = frozenset()) -> list[Mutant]:
    """Return every mutant of the module's functions, `unless` their last names are these."""
    imported = importlib.import_module(module)
    found = []
    for name, tree in _defined(ast.parse(inspect.getsource(imported))).items():
        counts: dict[Kind, int] = {}
        for kind, _ in _changes(tree) if name in functions(imported) else ():
            index = counts[kind] = counts.get(kind, -1) + 1
            if name.rpartition(".")[2] not in unless:
                found.append(Mutant(module, name, kind, index))
    return found


@cache
def functions(module: ModuleType) -> dict[str, FunctionType]:
    """Return the functions that the module defines, those of its classes too."""
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    found = {}
    for owner in (module, *(each for each in classes if each.__module__ == module.__name__)):
        for value in vars(owner).values():
            for wrapped in ("fget", "__func__", "func", "__wrapped__"):
                value = getattr(value, wrapped, value)
            if isinstance(value, FunctionType) and value.__code__.co_filename == module.__file__:
                found[value.__qualname__] = value
    return found


def _defined(tree: ast.Module | ast.ClassDef, prefix: str = "") -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                found |= _defined(node, f"{prefix}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[prefix + name] = node
    return found


def _codes(code: CodeType) -> dict[str, CodeType]:
    found = {}
    for each in code.co_consts:
        if isinstance(each, CodeType) and "<locals>" not in each.co_qualname:
            found |= {each.co_qualname: each} | _codes(each)
    return found


def _changes(tree: ast.AST) -> Iterator[tuple[Kind, Callable[[], None]]]:
    """Yield the changes of a function's tree; each is made in place, and one at most."""
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
            case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
                yield "swap", partial(setattr, node, "op", SWAPS[type(op)]())
            case ast.Call(func=ast.Name(id="min" | "max" as name)):
                other = ast.Name("max" if name == "min" else "min", ast.Load())
                yield "swap", partial(setattr, node, "func", other)
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                yield "number", partial(setattr, node, "value", 2 * value + 1)
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                for index, statement in enumerate(body):
                    if isinstance(statement, DROPPED) and not _is_void(statement):
                        yield "drop", partial(body.__setitem__, index, ast.Pass())


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that a test can tell from another: no assertion, no text for people."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("args", "returns", "annotation", "decorator_list") or isinstance(
            node, ast.Call
        ):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.Assert | ast.JoinedStr):
                    yield from _walk(child)


def _is_void(statement: ast.stmt) -> bool:
    """A docstring, or `return None`: without it nothing changes."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.Return(value=ast.Constant(value=None)):
            return True
    return False
