"""Triton's interpreter, without what it does again for each helper that a kernel calls."""

import inspect
import operator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

EXACT = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def hasten() -> None:
    """Have each module searched for builtins once, and NumPy's types looked up by name.

    Have a helper's modules patched once in a launch, too, and not for each of its calls, and
    overflows of integers looked for by NumPy.
    """
    builtins: dict[Any, list[str]] = {}
    np_types: dict[str, Any] = {}
    np_type_of = interpreter._get_np_dtype

    def patch_builtin(module: Any, builder: Any, scope: Any) -> None:
        if module not in builtins:
            members = inspect.getmembers(module, tl.core.is_builtin)
            builtins[module] = [name for name, _ in members]
        for name in builtins[module]:
            member = getattr(module, name)
            if tl.core.is_builtin(member):  # another patch may be in force
                interpreter._patch_attr(module, name, member, builder, scope)

    def np_type(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if type(element) is not tl.dtype:
            return np_type_of(dtype)
        if element.name not in np_types:
            np_types[element.name] = np_type_of(element)
        return np_types[element.name]

    patch_modules = interpreter._patch_lang
    patched: set[Any] = set()  # helpers, since the launch began

    def patch_for_launch(kernel: Any) -> Any:
        patched.clear()
        return patch_modules(kernel)

    def call_helper(helper: Any, *arguments: Any, **options: Any) -> Any:
        if helper.fn not in patched:
            patched.add(helper.fn)
            patch_modules(helper.fn)
        return helper.rewrite()(*arguments, **options)

    semantic = interpreter.interpreter_semantic

    def judge_overflow(left: Any, right: Any, operation: Any) -> None:
        element, name = left.type.scalar, operation.__name__
        if element.int_bitwidth >= 64 or not semantic.builder.options.sanitize_overflow:
            return
        result = EXACT[name](*(each.handle.data.astype(np.int64) for each in (left, right)))
        least, largest = element.get_int_min_value(), element.get_int_max_value()
        fits = (result >= least).all() and (result <= largest).all()
        assert fits, f"int{element.int_bitwidth} overflow detected for operation {name}"

    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = np_type
    interpreter._patch_lang = patch_for_launch
    interpreter.InterpretedFunction.__call__ = call_helper
    semantic.binary_op_sanitize_overflow_impl = judge_overflow
