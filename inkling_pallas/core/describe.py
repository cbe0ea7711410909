"""Values in one line: of an array its dtype and shape, never its contents, which may lie on a card."""

import dataclasses
from typing import Any

import jax.core
import numpy as np

_LONGEST = 200  # characters of a value that is no array


def describe(value: Any) -> str:
    """Returns how a refused value, or a field, is shown."""
    if isinstance(value, jax.core.Tracer):
        return "a traced array"
    if is_like_array(value) and not isinstance(value, np.generic):
        return f"{dtype_name(value)}[{','.join(map(str, value.shape))}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return one_line_repr(value)
    if isinstance(value, tuple) and (names := getattr(value, "_fields", ())):
        return _with_fields(value, names)
    if isinstance(value, list | tuple):
        inner = ", ".join(map(describe, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def is_like_array(value: Any) -> bool:
    """Returns whether a value is an array of any library, or the shape of one."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


def dtype_name(array: Any) -> str:
    """Returns the name of an array's dtype, also of one that NumPy does not know."""
    try:
        return np.dtype(array.dtype).name
    except TypeError:
        return str(array.dtype)


def one_line_repr(self: Any) -> str:
    """Returns the repr of a dataclass; as `__repr__` of a pytree it reads no array."""
    return _with_fields(self, [field.name for field in dataclasses.fields(self)])


def _with_fields(node: Any, names: Any) -> str:
    return f"{type(node).__name__}({', '.join(f'{name}={describe(getattr(node, name))}' for name in names)})"
