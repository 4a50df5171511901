"""Tests as functions, to be run on a mutant: all of a module, with all of their parameters."""

import inspect
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest


def fails_a_test(*modules: ModuleType) -> bool:
    """Return True if a test of these modules fails now. The tests use no fixtures."""
    for module in modules:
        for name, test in vars(module).items():
            if name.startswith("test_"):
                for arguments in _parameters(test):
                    try:
                        test(**arguments)
                    except (Exception, pytest.fail.Exception):
                        return True
    return False


def _parameters(test: Any) -> Iterator[dict[str, object]]:
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    choices = []
    for mark in marks:
        names, values = mark.args
        if isinstance(names, str):
            choices.append([{names: value} for value in values])
        else:
            choices.append([dict(zip(names, value, strict=True)) for value in values])
    for chosen in itertools.product(*choices):
        arguments = {name: value for part in chosen for name, value in part.items()}
        assert arguments.keys() == inspect.signature(test).parameters.keys()
        yield arguments
