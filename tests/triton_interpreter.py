"""Triton's interpreter, faster: what it looks up again at every call of a function is looked up once."""

import inspect
from functools import cache
from typing import Any


@cache  # once in a process
def hasten() -> None:
    """Keep the numpy types of Triton's types, and which names of a module are Triton's own; results are the same."""
    from triton import language as tl
    from triton.runtime import interpreter

    find_type, numpy_types, names = interpreter._get_np_dtype, {}, {}

    def numpy_type(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        key = "pointer" if isinstance(element, tl.pointer_type) else element.name
        if key not in numpy_types:
            numpy_types[key] = find_type(dtype)
        return numpy_types[key]

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:  # a function that another one calls finds them patched already
            names[package] = [name for name, found in inspect.getmembers(package) if tl.core.is_builtin(found)]
        for name in names[package]:
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._get_np_dtype, interpreter._patch_builtin = numpy_type, patch_builtins
