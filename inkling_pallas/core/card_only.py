"""A mark on what kernels read: where a program with it is lowered for another device than a GPU, we say so."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from inkling_pallas.core.devices import SPREAD

_MARK = Primitive("inkling_card_only")
_MARK.def_impl(lambda x, *, backend: x)
_MARK.def_abstract_eval(lambda x, *, backend: x)


def for_card(array: jax.Array, backend: str, interpret: Any = False) -> jax.Array:
    """Returns the array as a kernel of a backend shall have it: no operation, on a GPU.

    Only lowering knows for which device a jitted program is, which may be a card that is elsewhere.

    Args:
      array: any operand of the kernel.
      backend: name of the kernel's backend; "portable" has none.
      interpret: the kernel is interpreted, on any device.
    """
    return array if backend == "portable" or interpret else _MARK.bind(array, backend=backend)


def _refuse(_: Any, __: Any, *, backend: str) -> Any:
    advice = "Use backend='auto', or interpret=True to run it in the Pallas interpreter."
    raise NotImplementedError(f"backend {backend!r} must run on its own GPUs; got another device. {advice}")


mlir.register_lowering(_MARK, _refuse)


def _allow(context: Any, x: Any, *, backend: str) -> Any:
    """Lets a kernel pass, but not in a program that XLA cuts for several devices, as by the in_shardings of a jit."""
    count = getattr(context.module_context.axis_context, "num_devices", None) or 1
    if count > 1:
        raise NotImplementedError(SPREAD.format(name=f"backend {backend!r}", count=f"a program for {count} devices"))
    return [x]


mlir.register_lowering(_MARK, _allow, platform="cuda")
batching.primitive_batchers[_MARK] = lambda args, axes, *, backend: (_MARK.bind(*args, backend=backend), axes[0])
