"""Which backend and config a call takes, and why not a faster one."""

import dataclasses
import functools
import importlib
import os
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from inkling_pallas.core.describe import describe
from inkling_pallas.core.devices import B200, H200, Card, Place, card_of, default_device, device_capability
from inkling_pallas.core.errors import refuse
from inkling_pallas.core.problem import Problem

BACKENDS = ("portable", "hopper", "blackwell")
# Fastest first, by the major compute capability of the device; any other device takes portable.
_KERNELS_BY_CAPABILITY: dict[int, tuple[str, ...]] = {9: ("hopper",), 10: ("blackwell",), 11: ("blackwell",)}
INTERPRETER_THREADS = 16  # one for each warp of a kernel's four warpgroups
_USUAL_CARDS = {"hopper": H200, "blackwell": B200}  # of kernels that are named where no card of theirs is


class PortableFallbackWarning(UserWarning):
    """A GPU call takes the portable backend; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A backend, its config, and the faster backends that were passed over, each with the reason."""

    backend: str
    config: Any
    passed_over: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a call would do. `print` it."""

    backend: str
    config: Any
    device: str
    capability: tuple[int, int] | None
    passed_over: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"backend {self.backend!r} with {self.config} on {self.device}"]
        lines += [f"not {name!r}: {reason}" for name, reason in self.passed_over.items()]
        if self.backend == "portable" and not self.passed_over:
            none_here = f"there is no kernel for {self.device} yet."
            no_card = "kernels need an NVIDIA GPU, and this device is none."
            lines.append(f"no faster one: {no_card if self.capability is None else none_here}")
        return "\n".join(lines)


def load_backend(name: str) -> ModuleType:
    """Returns the module of a backend; kernels are imported when first used, so that a CPU user never loads Mosaic."""
    return importlib.import_module(f"inkling_pallas.kernels.{name}")


def choose(problem: Problem, backend: str, config: Any, spread: str | None = None, device: Any = None) -> Choice:
    """Returns the backend and config for a problem on a device, the default one if None.

    Args:
      problem: static facts.
      backend: a name, or "auto".
      config: a Config, or None.
      spread: why no kernel may take the arrays, or None.
      device: where the call runs.

    Raises:
      ValueError: for an unknown backend, or a config that is not of the chosen backend.
      NotImplementedError: where the named backend, or each one for "auto", lacks this problem.
    """
    passed_over = []
    for name in _candidates(known_backend(backend), device):
        module = load_backend(name)
        card = card_of(device) if name == "portable" else usual_card(name, device)
        no_kernel = None if name == "portable" else spread
        reason = no_kernel or module.unsupported(problem, card) or _wrong_config(module, config, name, backend)
        if reason is None and backend == "auto":
            reason = getattr(module, "unproven", _proven)(problem)
        if reason is None:
            chosen = module.choose_config(problem, card) if config is None else complete_config(config, card)
            if config is not None and hasattr(module, "config_fits") and not module.config_fits(problem, chosen, card):
                advice = "Use fewer stages or smaller tiles, or None."
                raise refuse("config", "fit the shared memory of a CTA", describe(config), advice)
            return Choice(backend=name, config=chosen, passed_over=tuple(passed_over))
        passed_over.append((name, reason))
    reasons = " ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise NotImplementedError(f"No backend takes this call. {reasons}")


def usual_card(name: str, device: Any = None) -> Card:
    """Returns the card for the kernels of a backend: a device (the default one if None), or what they are meant for.

    They are for another card than the device's where a call is exported, compiled elsewhere or interpreted.
    """
    device = device or default_device()
    card = card_of(device) if name in kernels_of(device) else None
    return card or _USUAL_CARDS.get(name, H200)


def complete_config(config: Any, card: Card | None) -> Any:
    """Returns a config with what it leaves to the card filled in."""
    return config.on(card) if hasattr(config, "on") else config


def known_backend(backend: str, names: tuple[str, ...] = BACKENDS) -> str:
    """Returns the name of a backend or "auto"; raises ValueError for any other."""
    if backend != "auto" and backend not in names:
        rule = f"be 'auto' or one of {', '.join(map(repr, names))}"
        raise refuse("backend", rule, repr(backend), "'auto' takes the fastest that can.")
    return backend


def _proven(problem: Problem) -> None:
    """Stands for the `unproven` of a backend that has run all it takes on a device."""


def _candidates(backend: str, device: Any = None) -> tuple[str, ...]:
    if backend != "auto":
        return (backend,)
    return (*kernels_of(device or default_device()), "portable")


def kernels_of(device: Any) -> tuple[str, ...]:
    """Returns the backends that are for a device alone, fastest first."""
    return _KERNELS_BY_CAPABILITY.get((device_capability(device) or (0, 0))[0], ())


def machine_backends() -> tuple[str, ...]:
    """Returns the backends that the default device runs, fastest first."""
    return _candidates("auto")


def _wrong_config(module: ModuleType, config: Any, name: str, backend: str) -> str | None:
    """Returns why a config keeps `auto` from a backend; raises where the caller named that backend."""
    if config is None or isinstance(config, module.Config):
        return None
    expected = f"be a Config of inkling_pallas.kernels.{name} or None"
    if backend == "auto" and name != "portable":
        return f"config must {expected}; got {type(config).__name__}."
    raise refuse("config", expected, type(config).__name__, "None lets the backend choose.")


def require_threads() -> None:
    """Raises ValueError where the interpreter would wait for ever: XLA has too few threads for the warps of a kernel.

    Each warp takes a thread, and XLA has one for each core, of which it reads the number when jax starts.
    """
    given = os.environ.get("NPROC", "")
    cores = int(given) if given.isdecimal() else os.cpu_count() or 1
    if cores < INTERPRETER_THREADS:
        advice = "Set NPROC=16 in the environment of a new process, before jax starts."
        raise refuse("interpret", f"be False with fewer than {INTERPRETER_THREADS} threads", f"True on {cores}", advice)


def require_device(backend: str, place: Place, interpret: bool) -> None:
    """Raises NotImplementedError where a kernel is to run now on a device that it is not for.

    A traced call may be compiled for a card that is elsewhere.

    Raises:
      ValueError: where the interpreter has too few threads.
    """
    if interpret and backend != "portable":
        require_threads()
    device = place.device
    if backend == "portable" or interpret or place.is_guess:
        return
    if backend not in kernels_of(device):
        capability = device_capability(device)
        what = device.device_kind if capability is None else f"{device.device_kind}, compute capability {capability}"
        advice = "Use backend='auto', or interpret=True to run it in the Pallas interpreter."
        raise NotImplementedError(f"backend {backend!r} must run on its own GPUs; got {what}. {advice}")


def warn_on_fallback(choice: Choice, device: Any) -> None:
    """Warns once per reason when a call on a GPU takes the portable backend."""
    if choice.backend == "portable" and device_capability(device) is not None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.passed_over)
        _warn_once(reasons or f"there is no kernel for {device.device_kind} yet.")


@functools.cache
def _warn_once(reason: str) -> None:
    message = f"inkling_rel_attention takes the portable backend on a GPU, which is slower than a kernel: {reason}"
    warnings.warn(message, PortableFallbackWarning, stacklevel=4)
