"""Jinja's sandbox for chat templates, in which every operation pays for its work."""

import functools
import types
from collections.abc import Callable, Mapping, Sized
from typing import Any

import jinja2
import jinja2.nodes as n
import jinja2.sandbox
from jinja2.runtime import Context
from jinja2.utils import Namespace

from tandem.frontend.tokens.template_rules import (
    FILTERS,
    OF_LISTS,
    TEXT_METHODS,
    Rule,
    at_most,
    work,
)
from tandem.frontend.tokens.template_work import TooMuchWorkError, formatted_size

_CHECK_TIME, _PAID, _CONCAT, _COMPARED, _SEARCHED = (f"_tandem_{i}" for i in range(5))  # filters
_CALL = 256  # characters are copied in the time of a call
_OF_JINJA = {"_loop_vars", "_block_vars"}  # arguments of each call
_MAX_INT_BITS = 2**14  # Python makes no text of a longer one
_COMPARISONS = (
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le",
    "lessthan", "lt", "ne",
)  # fmt: skip
_OF_NUMBERS = ("divisibleby", "even", "odd")  # by `%`, which formats text


class PlainNamespace(Namespace):
    """A namespace whose text is short: namespaces may be in one another."""

    def __repr__(self) -> str:
        return "<Namespace>"


class WorkSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of one template. Passes of loops and bodies of macros check the time."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(
        self,
        filters: Mapping[str, Callable[..., Any]],
        functions: Mapping[str, Callable[..., Any]],
        extensions: list[Any],
    ) -> None:
        # Nothing is computed at compile time, when no work is allowed.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=extensions,
            optimized=False,
            finalize=_shown,
        )
        known = {**self.filters, **filters}
        self.filters = {name: _bounded(known[name], rule) for name, rule in FILTERS.items()}
        self.filters[_CHECK_TIME] = lambda _: work.check_time()
        self.filters[_PAID] = work.paid
        self.filters[_CONCAT] = _concatenated
        self.filters[_COMPARED] = _compared
        self.filters[_SEARCHED] = _searched
        self.tests |= {name: _paid_test(self.tests[name]) for name in _COMPARISONS}
        self.tests |= {name: _number_test(self.tests[name]) for name in _OF_NUMBERS}
        del self.globals["lipsum"]
        self.globals |= {"namespace": PlainNamespace, **functions}

    def template_of(self, source: str) -> jinja2.Template:
        """Return a compiled template. Raises jinja2.TemplateError, RecursionError."""
        return self.from_string(_with_checks(self.parse(source)))

    @staticmethod
    def concat(parts: Any) -> str:
        """Join the text of a block, a macro or a `set`."""
        parts = list(parts)
        work.spend(sum(map(len, parts)))
        return "".join(parts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in TEXT_METHODS:
            return False
        if isinstance(obj, int | float | bytes) and callable(value):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        work.spend(_CALL)
        method = getattr(__obj, "__wrapped__", __obj)  # of `str.format`, which Jinja has wrapped
        if isinstance(method, types.BuiltinMethodType) and isinstance(method.__self__, str):
            if method.__name__ == "join" and args:
                args = (list(work.paid(iter(args[0]))), *args[1:])
            rule = TEXT_METHODS.get(method.__name__)
            if rule is None:
                raise TooMuchWorkError
            named = {name: kwargs[name] for name in kwargs.keys() - _OF_JINJA} if kwargs else {}
            work.spend(rule(method.__self__, *args, **named))
        return work.paid(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        work.spend(_binop_size(operator, left, right))
        return super().call_binop(context, operator, left, right)


def _binop_size(operator: str, left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length(), right.bit_length()
        size = bits[0] * max(right, 0) if operator == "**" else sum(bits)
        return at_most(size, _MAX_INT_BITS)
    if operator == "+":
        return work.total(left) + work.total(right)
    if operator == "*":
        value, times = (right, left) if isinstance(left, int) else (left, right)
        return work.total(value) * max(times, 0) if isinstance(times, int) else 0
    if operator == "%" and isinstance(left, str):
        return formatted_size(left, work.total(right))
    return 0


def _bounded(function: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    """Return a filter that pays for its work, with the filter's first argument of Jinja's own."""
    num_own = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        own, args = args[:num_own], args[num_own:]
        if rule in OF_LISTS and not isinstance(args[0], Sized):
            args = (list(work.paid(iter(args[0]))), *args[1:])
        work.spend(rule(*args, **kwargs))
        return work.paid(function(*own, *args, **kwargs))

    return bounded


def _paid_test(test: Any) -> Callable[..., bool]:
    def paid(value: Any, other: Any) -> bool:
        return bool(test(value, _compared(other)))

    return paid


def _number_test(test: Any) -> Callable[..., bool]:
    def of_number(value: Any, *args: Any) -> bool:
        return isinstance(value, int | float) and bool(test(value, *args))

    return of_number


@jinja2.pass_context  # so that it is not computed at compile time
def _shown(_: Context, value: Any) -> Any:
    """Return a value of the output, whose text may be long."""
    work.spend(0 if isinstance(value, str) else work.total(value))
    return value


def _concatenated(values: list[Any]) -> str:
    work.spend(work.total(values))
    return "".join(map(str, values))


def _compared(value: Any) -> Any:
    """Return a value that is compared, and pay for it: that is quick, beside making it."""
    if isinstance(value, str):
        work.spend(len(value) >> 4)
    elif not isinstance(value, int | None):
        work.spend(work.total(value) >> 4)
    return value


def _searched(value: Any) -> Any:
    """Return the right side of `in`, and pay for it; a key is found at once."""
    return value if isinstance(value, dict) else _compared(value)


def _with_checks(template: n.Template) -> n.Template:
    """Return the parsed template with checks of the time and of what has no other rule."""
    for kind in (n.For, n.Macro, n.CallBlock, n.Block):
        node: Any
        for node in template.find_all(kind):
            check = n.ExprStmt(_filter(_CHECK_TIME, n.Const(None)), lineno=node.lineno)
            node.body.insert(0, check)
    _replace_within(template)
    return template


def _replace_within(node: n.Node) -> None:
    """Replace what makes values without a call: literals, slices and `~`."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_replaced_node(each) for each in value]
        else:
            setattr(node, name, _replaced_node(value))


def _replaced_node(node: Any) -> Any:
    if not isinstance(node, n.Node):
        return node
    _replace_within(node)
    if isinstance(node, n.Operand) and not isinstance(node.expr, n.Const | n.List | n.Tuple):
        node.expr = _filter(_SEARCHED if "in" in node.op else _COMPARED, node.expr)
    if isinstance(node, n.Concat):
        return _filter(_CONCAT, n.List(node.nodes, lineno=node.lineno))
    is_made = isinstance(node, n.List | n.Dict) or (
        isinstance(node, n.Tuple) and node.ctx == "load"
    )
    if is_made and any(True for _ in node.find_all((n.Name, n.Filter, n.Call, n.Getattr))):
        return _filter(_PAID, node)
    if isinstance(node, n.Getitem) and isinstance(node.arg, n.Slice):
        return _filter(_PAID, node)
    return node


def _filter(name: str, value: n.Expr) -> n.Filter:
    return n.Filter(value, name, [], [], None, None, lineno=value.lineno)
