"""The one form of error messages, and the checks that use it."""

import operator
from typing import Any

import jax.core
import jax.numpy as jnp
import numpy as np

FLOAT_DTYPES = ("bfloat16", "float16", "float32")


def refuse(argument: str, rule: str, value: object, advice: str) -> ValueError:
    """Returns the error for a wrong argument, in the one form that all messages have."""
    return ValueError(f"{argument} must {rule}; got {value}. {advice}")


def int32_array(argument: str, array: Any) -> Any:
    """Returns a NumPy array of integers as a jax.Array of int32, and anything else as it is.

    Raises:
      ValueError: naming the first entry that is no int32: it must not wrap around to one that is right.
    """
    if not isinstance(array, np.ndarray | np.generic):
        return array
    values: Any = np.asarray(array)
    if values.dtype.kind in "iu" and values.dtype != np.int32:
        least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
        wrong = np.argwhere((values < least) | (values > most))
        for index in wrong[:1]:
            where = f"{argument}[{', '.join(map(str, index))}]"
            advice = f"{len(wrong)} entries of {argument} break this rule."
            raise refuse(where, "be an int32", values[tuple(index)], advice)
        values = values.astype(np.int32)
    return jnp.asarray(values)


def static_int(argument: str, value: Any, minimum: int) -> int:
    """Returns value as an int, or raises ValueError where it is no static integer of at least `minimum`."""
    advice = "Pass a Python int; under jax.jit name the argument in static_argnames."
    if isinstance(value, jax.core.Tracer):
        raise refuse(argument, f"be a static int >= {minimum}", "a traced array", advice)
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if isinstance(value, bool) or number < minimum:
        raise refuse(argument, f"be a static int >= {minimum}", repr(value), advice)
    return number


def static_bool(argument: str, value: Any) -> bool:
    """Returns value as a bool, or raises ValueError where it is anything else."""
    if not isinstance(value, bool | np.bool_):
        raise refuse(argument, "be True or False", describe(value), "It is part of the compiled program.")
    return bool(value)


def describe(value: Any) -> str:
    """Returns how a refused value is shown."""
    return "a traced array" if isinstance(value, jax.core.Tracer) else repr(value)


def require_array(argument: str, array: Any, shape: tuple[int | str, ...], dtype: str, advice: str) -> None:
    """Raises ValueError unless the array has the dtype and the shape; a string in shape is a free dimension's name."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise refuse(argument, "be an array", type(array).__name__, advice)
    fits = len(array.shape) == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
        raise refuse(argument, f"have shape {wanted}", tuple(array.shape), advice)
    if np.dtype(array.dtype).name != dtype:
        raise refuse(argument, f"have dtype {dtype}", np.dtype(array.dtype).name, advice)


def float_dtype(argument: str, dtype: Any, advice: str) -> str:
    """Returns the name of a float dtype that the package computes with, or raises ValueError for any other value."""
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in FLOAT_DTYPES:
        raise refuse(argument, f"be one of {', '.join(FLOAT_DTYPES)}", name, advice)
    return name


def one_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
