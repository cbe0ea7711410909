"""The one form of error messages, and the checks that use it."""

import operator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from inkling_pallas.core.describe import describe, dtype_name, is_like_array

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, jax.core.ShapedArray)


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


def static_int(argument: str, value: Any, minimum: int, most: int | None = None) -> int:
    """Returns value as an int, or raises ValueError where it is no static integer from `minimum` to `most`."""
    rule = f"be a static int >= {minimum}" if most is None else f"be a static int in [{minimum}, {most}]"
    if isinstance(value, jax.core.Tracer):
        raise refuse(
            argument, rule, "a traced array", "Pass a Python int; under jax.jit name the argument in static_argnames."
        )
    if isinstance(value, jax.Array):
        raise refuse(argument, rule, describe(value), "Pass int(x): to read a jax.Array waits for its device.")
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if isinstance(value, bool) or number < minimum or (most is not None and number > most):
        raise refuse(argument, rule, describe(value), "Pass a Python int in that range.")
    return number


def one_of(argument: str, value: Any, allowed: tuple[Any, ...], advice: str) -> None:
    """Raises ValueError unless a value is one of a few, of the same type."""
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise refuse(argument, f"be one of {', '.join(map(repr, allowed))}", describe(value), advice)


def static_bool(argument: str, value: Any) -> bool:
    """Returns value as a bool, or raises ValueError where it is anything else."""
    if not isinstance(value, bool | np.bool_):
        raise refuse(argument, "be True or False", describe(value), "It is part of the compiled program.")
    return bool(value)


def require_plain(argument: str, array: Any) -> None:
    """Raises ValueError unless a value is None, or an array of numbers of jax or NumPy, of a fixed shape."""
    if array is None:
        return
    if not isinstance(array, _ARRAYS):
        kind = f"{type(array).__module__}.{type(array).__qualname__}".removeprefix("builtins.")
        advice = "Convert it with jnp.asarray, or a torch tensor with jnp.from_dlpack."
        raise refuse(argument, "be a jax.Array or a NumPy array", kind, advice)
    if isinstance(array, np.ndarray | np.generic) and (array.dtype.kind in "OSUMm" or array.dtype.names):
        raise refuse(argument, "be an array of numbers", str(array.dtype), "Its entries must be all of one length.")
    if not all(isinstance(n, int) for n in array.shape):
        advice = "Shapes are part of the program: export one for each bucket, and pad batches to it."
        raise refuse(argument, "have a fixed shape", f"({', '.join(map(str, array.shape))})", advice)


def require_array(argument: str, array: Any, shape: tuple[int | str, ...], dtype: str, advice: str) -> None:
    """Raises ValueError unless the array has the dtype and the shape; a string in shape is a free dimension's name."""
    if not is_like_array(array):
        raise refuse(argument, "be an array", "None" if array is None else type(array).__name__, advice)
    fits = len(array.shape) == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
        raise refuse(argument, f"have shape {wanted}", tuple(array.shape), advice)
    if dtype_name(array) != dtype:
        raise refuse(argument, f"have dtype {dtype}", dtype_name(array), advice)


def require_floats(argument: str, array: Any, advice: str) -> str:
    """Returns the name of the dtype of an array that the package computes with, or raises ValueError."""
    got = dtype_name(array) if is_like_array(array) else "None"
    if got not in FLOAT_DTYPES:
        raise refuse(argument, f"be an array of {', '.join(FLOAT_DTYPES)}", got, advice)
    return got


def require_cache_floats(argument: str, array: Any) -> str:
    """Returns the same for an array of a cache."""
    small = is_like_array(array) and any(f"t{bits}" in dtype_name(array) for bits in (2, 4, 8))
    advice = "Its dtype is that of q."
    return require_floats(argument, array, f"Entries of 8 bits or fewer are not read. {advice}" if small else advice)


def float_dtype(argument: str, dtype: Any, advice: str) -> str:
    """Returns the name of a float dtype that the package computes with, or raises ValueError for any other value."""
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = describe(dtype)
    if name not in FLOAT_DTYPES:
        raise refuse(argument, f"be one of {', '.join(FLOAT_DTYPES)}", name, advice)
    return name


def one_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
