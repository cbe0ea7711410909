"""What only the lowering of a program knows: for which device it is.

`by_platform` gives a program for another device than an NVIDIA GPU its own code. `for_card` is a mark on what a named
kernel reads: where it is lowered for another device, we say so.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from inkling_pallas.core.devices import SPREAD

_MARK = Primitive("inkling_card_only")
_MARK.def_impl(lambda x, *, backend: x)
_MARK.def_abstract_eval(lambda x, *, backend: x)


def by_platform[Result](kernel: Callable[..., Result], other: Callable[..., Result] | None, *arrays: Any) -> Result:
    """Returns `kernel(*arrays)` in a program for NVIDIA GPUs, `other(*arrays)` in one for any other device.

    A program for one platform holds one of the two alone. Without `other` it is `kernel(*arrays)` everywhere.
    """
    return kernel(*arrays) if other is None else jax.lax.platform_dependent(*arrays, cuda=kernel, default=other)


def for_card(array: jax.Array, backend: str, interpret: Any = False) -> jax.Array:
    """Returns the array as a kernel of a backend shall have it: no operation, on a GPU.

    Only lowering knows for which device a jitted program is, which may be a card that is elsewhere.

    Args:
      array: any operand of the kernel.
      backend: name of the kernel's backend; "portable" has none.
      interpret: the kernel is interpreted, on any device.
    """
    return array if backend == "portable" or interpret else _MARK.bind(array, backend=backend)


def _refuse(context: Any, _: Any, *, backend: str) -> Any:
    advice = "Use backend='auto', or interpret=True to run it in the Pallas interpreter."
    if len(context.module_context.platforms) > 1:  # jax lowers each branch of `by_platform` for all of them
        advice = "Export for one platform at a time, or name backend='portable'."
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
