"""`module:Class`: the name of an author's class on a command line."""

import importlib
import os
import sys

from tandem.runtime.errors import ConfigError


def load_class(target: str) -> type:
    """Return the class `package.module:Class`; modules of the working directory count too.

    Raise ConfigError without such a module or class; errors of the module's own import propagate.
    """
    module_name, separator, class_name = target.partition(":")
    if not separator or not module_name or not class_name or module_name.endswith(".py"):
        raise ConfigError(f"{target!r} must read module:Class, as in hello_world:Frontend")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
            raise
        raise ConfigError(f"no module {exc.name!r} here; searched from {os.getcwd()}") from exc
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(
            f"{module_name} has no class {class_name}; it has {', '.join(classes) or 'none'}"
        )
    return found
