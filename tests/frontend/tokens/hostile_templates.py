"""Templates of one hostile operation each, from all that Jinja has; run as a program, a judge.

`python -m tests.frontend.tokens.hostile_templates STRIDE` renders them with a limit of memory that
the kernel holds, and prints those that took too much, as JSON.
"""

import inspect
import itertools
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from jinja2.filters import FILTERS
from jinja2.tests import TESTS

from tandem.frontend.tokens.template import ChatTemplate
from tandem.runtime.errors import InvalidRequestError, ModelError

LIMIT_S = 0.1
MOST_S = 2.0  # of CPU time: the limit, and the last operation
MAX_GROWTH_BYTES = 2**30

BIG = "messages[0].content"  # 100,000 characters
VALUES = ("9999999999", "messages[1].content", BIG, f"{BIG}.split(' ')", "messages")
HUGE = ("9999999999", BIG, "'%9999999999d%*d%.999999999f'", "'{:>9999999999}'")
NUMBER = HUGE[0]
MESSAGES = [
    {"role": "user", "content": "a b\n<c>\t" * 12_500},
    {"role": "user", "content": "%9999999999d {:>9999999999} {0:{1}}"},
]


def filters() -> Iterator[str]:
    for name, function in FILTERS.items():
        names = list(inspect.signature(function).parameters)
        for value in VALUES:
            yield f"{value} | {name}"
            for huge in (NUMBER, BIG):
                yield f"{value} | {name}({huge})"
                yield f"{value} | {name}('a', {huge})"
                yield from (f"{value} | {name}({each}={huge})" for each in names)
    yield from (f"{value} | round(9, '{how}')" for value in VALUES for how in ("ceil", "common"))
    yield from (f"{form} | format({given})" for form in HUGE for given in HUGE)


def methods() -> Iterator[str]:
    values = {**dict.fromkeys(VALUES), "messages[0]": None, "(1, 2)": None, "1.5": None}
    kinds = (int, str, str, list, list, dict, tuple, float)
    for value, kind in zip(values, kinds, strict=True):
        for name in dir(kind):
            givens = ["", NUMBER, BIG, f"'a', {BIG}", f"[{BIG}, {BIG}]", f"{NUMBER}, 'little'"]
            for given in givens if name[0] != "_" else [NUMBER]:
                yield f"({value}).{name}({given})"
            yield f"(({value}) | attr('{name}'))({NUMBER})"
    yield from (f"({form}).format({given}, {given})" for form in HUGE for given in HUGE)


def operators() -> Iterator[str]:
    signs = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and")
    for sign in signs:
        yield from (f"({a}) {sign} ({b})" for a in VALUES for b in (*VALUES, *HUGE))
    for name in TESTS:
        yield from (f"{a} is {name}" for a in VALUES)
        yield from (f"{a} is {name}({b})" for a in VALUES for b in (NUMBER, BIG))


def functions() -> Iterator[str]:
    for name in ("range", "dict", "lipsum", "cycler", "joiner", "namespace", "strftime_now"):
        for huge in (*HUGE, "'%999999999Y'", "'%A' * 99999"):
            yield f"{name}({huge}) | string"
            yield f"{name}({huge}, {huge}) | string"
            yield f"{name}(a={huge}) | string"


# `x` is what it was before, twice or more; each is repeated without a loop.
GROWTHS = (
    "{% set x = x ~ x %}", "{% set x = x + x %}", "{% set x = x * 2 %}", "{% set x = 2 * x %}",
    "{% set x = x * x %}", "{% set x = x ** 9 %}", "{% set x = [x, x] %}", "{% set x = (x, x) %}",
    "{% set x = {'a': x, 'b': x} %}", "{% set x = dict(a=x, b=x) %}",
    "{% set x = namespace(a=x, b=x) %}", "{% set x = [x, x] | list %}", "{% set x = [x] * 9 %}",
    "{% set x = [x] + [x] %}", "{% set x = [x, x] | join %}", "{% set x = ''.join([x, x]) %}",
    "{% set x = x | replace('a', 'aaa') %}", "{% set x = x.replace('', 'aa') %}",
    "{% set x = '%s%s' % (x, x) %}", "{% set x = '%s%s' | format(x, x) %}",
    "{% set x = '{0}{0}'.format(x) %}", "{% set x %}{{ x }}{{ x }}{% endset %}",
    "{% set x = [x, x] | tojson %}", "{% set x = x | tojson | tojson %}", "{% set x = x | e %}",
    "{% set x = [x, x] | string %}", "{% set x = [x, x] | map('string') | join %}",
    "{% set x = x | urlencode %}", "{% set x = x | indent(x | length) %}",
    "{% macro m(y) %}{{ y }}{{ y }}{% endmacro %}{% set x = m(x) %}",
    "{% set x = [x, x] | batch(9, x) | list %}", "{% set x = x | center((x | length) * 2) %}",
)  # fmt: skip
# Each leaves what it makes; together they are large, or take long.
KEPT = (
    "{{% set x{} = y[1:] %}}", "{{% set x{} = z[1:] %}}", "{{% set x{} = y ~ 'a' %}}",
    "{{% set x{} = y | upper %}}", "{{% set x{} = z | sort %}}", "{{% set x{} = y == y ~ 'a' %}}",
    "{{% set x{} = 'b' in y %}}", "{{% set x{} = y | title %}}", "{{% set x{} = z | list %}}",
    "{{% set x{} = y.rfind('b' * 4000 ~ 'a' * 40000) %}}",
    "{{% set x{} = y.strip('bcdefgh' * 4000) %}}", "{{% set x{} = y | wordcount %}}",
    "{{% set x{} %}}{{{{ y }}}}{{% endset %}}", "{{% set x{} = y is eq(y ~ 'a') %}}",
)  # fmt: skip
CALLS = (
    "{% block b0 %}a{% endblock %}"
    + "".join(
        f"{{% block b{i} %}}{{{{ self.b{i - 1}() }}}}{{{{ self.b{i - 1}() }}}}{{% endblock %}}"
        for i in range(1, 60)
    ),
    "{% macro m0() %}a{% endmacro %}"
    + "".join(
        f"{{% macro m{i}() %}}{{{{ m{i - 1}() }}}}{{{{ m{i - 1}() }}}}{{% endmacro %}}"
        for i in range(1, 60)
    )
    + "{{ m59() }}",
    "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 50
    + "a"
    + "{% endcall %}" * 50,
)


def templates() -> Iterator[str]:
    for expressions in (filters(), methods(), operators(), functions()):
        for expression in expressions:
            yield "{{ (" + expression + ") }}"
    for growth in GROWTHS:
        yield from ("{% set x = " + x + " %}" + growth * 60 + "{{ x }}" for x in ("'a'", "7"))
    for kept in KEPT:
        lines = "".join(kept.format(i) for i in range(40))
        yield "{% set y = 'a' * 10**6 %}{% set z = y[:9999] | list %}" + lines
    yield from CALLS


def main() -> None:
    """Render one in STRIDE of the templates, the first argument."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = size + MAX_GROWTH_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    failed: list[tuple[str, str]] = []
    num_rendered = 0
    for source in itertools.islice(templates(), 0, None, int(sys.argv[1])):
        started_s = time.thread_time()
        try:
            ChatTemplate(source).render({"messages": MESSAGES}, 10**7, LIMIT_S)
        except (ModelError, InvalidRequestError) as error:
            if isinstance(error.__cause__, MemoryError):
                failed.append((source[:200], "memory"))
        took_s = time.thread_time() - started_s
        if took_s > MOST_S:
            failed.append((source[:200], f"{took_s:.1f} s"))
        num_rendered += 1
    print(json.dumps({"num_rendered": num_rendered, "failed": failed}))


if __name__ == "__main__":
    main()
