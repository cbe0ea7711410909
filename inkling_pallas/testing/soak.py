"""Runs random batches: draw, operator, dense form and comparison are one program, whose verdict is a few numbers."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.core.errors import one_line
from inkling_pallas.core.paged_cache import PagedKVCache
from inkling_pallas.testing.dense import Call, Marks, compare
from inkling_pallas.testing.judge import OPERATORS, Operator, interpreted
from inkling_pallas.testing.soak_batches import draw, seed_key
from inkling_pallas.testing.soak_shapes import SHAPES, Shape

# Batches whose verdicts are read together, while the next ones are queued.
_BLOCK = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Soak:
    """What a run judges, whoever runs it."""

    seed: int
    first: int
    random: int  # batches, from `first` on
    backend: str
    bias: str = "plain"
    layout: str = "separate"
    kind: str | None = None
    interpret: bool = False  # then operator and judge are programs of their own, and each batch is waited for

    def indices(self, shape: Shape) -> range:
        """Returns the batches of a shape, in order."""
        place = SHAPES.index(shape)
        return range(self.first + (place - self.first) % len(SHAPES), self.first + self.random, len(SHAPES))

    def shapes(self) -> list[Shape]:
        """Returns the shapes that have a batch in this run."""
        return [shape for shape in SHAPES if self.kind in (None, shape.kind) and self.indices(shape)]

    def operator(self) -> Operator:
        """Returns what is judged."""
        operator = OPERATORS[self.bias]
        return interpreted(operator) if self.interpret else operator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What has become known of a shape since its last report."""

    shape: str
    done: int = 0  # batches judged
    worst: float = 0.0  # error over its limit, of out or LSE
    wrong: tuple[dict[str, Any], ...] = ()
    refused: str = ""  # by the backend: portable takes such calls
    failed: str = ""  # an exception in place of a result


def run_shape(soak: Soak, shape: Shape, done: int = 0, operator: Operator | None = None) -> Iterator[Report]:
    """Yields reports on the batches of a shape, of which the first `done` are left out.

    Args:
      soak: the run.
      shape: one of its shapes.
      done: batches that an earlier run has judged.
      operator: in place of the run's own, such as a broken variant.
    """
    try:
        program = make_program(shape, soak, operator or soak.operator())
        for block in _in_blocks(program, seed_key(soak.seed), soak.indices(shape)[done:], soak.interpret):
            wrong = tuple(_describe(shape, index, marks) for index, marks in block if marks.wrong > 0)
            worst = max(max(float(marks.error / marks.limit), float(marks.lse_error)) for _, marks in block)
            yield Report(shape=shape.name, done=len(block), worst=worst, wrong=wrong)
    except NotImplementedError as error:
        yield Report(shape=shape.name, refused=str(error))
    except Exception as error:  # a kernel that does not compile or dies must not hide what the others do
        yield Report(shape=shape.name, failed=one_line(error))


def make_program(shape: Shape, soak: Soak, operator: Operator) -> Callable[[jax.Array, Any], jax.Array]:
    """Returns a function of a key and the number of a batch that gives its marks, float32[6]."""

    def attend(call: Call) -> tuple[jax.Array, jax.Array | None]:
        given = in_layout(soak.layout, call)
        result = operator(**given, **shape.statics(), backend=soak.backend)
        return result if shape.return_lse else (result, None)

    make, judge = _ends_of(shape)

    def one_by_one(key: jax.Array, index: jax.Array) -> jax.Array:
        call = make(key, index)
        return judge(call, *attend(call))

    return one_by_one if soak.interpret else jax.jit(one_by_one)


@functools.cache
def _ends_of(shape: Shape) -> tuple[Callable[..., Call], Callable[..., jax.Array]]:
    """Returns what comes before and after the operator, jitted: the draw, and the marks as one array."""

    def judge(call: Call, out: jax.Array, lse: jax.Array | None) -> jax.Array:
        return jnp.stack(compare(shape, call, out, lse))

    return jax.jit(functools.partial(draw, shape)), jax.jit(judge)


def in_layout(layout: str, call: Call) -> Call:
    """Returns a call of two caches with its cache in a layout."""
    if layout == "separate":
        return call
    keys, values = call["key_cache"], call["value_cache"]
    if layout == "packed":
        cache = PagedKVCache.packed(jnp.concatenate([keys, values], axis=-1).transpose(0, 2, 1, 3))
    else:
        num_blocks, block_size, num_kv_heads, head_dim = keys.shape
        pairs = jnp.stack([keys, values], axis=3)
        cache = PagedKVCache.interleaved(pairs.reshape(num_blocks, block_size, 2 * num_kv_heads, head_dim))
    return call | {"key_cache": cache, "value_cache": None}


def _in_blocks(
    program: Callable[[jax.Array, Any], jax.Array], key: jax.Array, indices: Iterable[int], waits: bool
) -> Iterator[list[tuple[int, Marks]]]:
    """Yields some batches with their marks at a time; the next are queued before, unless each is waited for."""
    queue: collections.deque[tuple[Sequence[int], list[jax.Array]]] = collections.deque()
    for block in itertools.batched(indices, 1 if waits else _BLOCK):
        queue.append((block, [program(key, np.int32(index)) for index in block]))
        if waits or len(queue) > 1:
            yield _read(*queue.popleft())
    while queue:
        yield _read(*queue.popleft())


def _read(block: Sequence[int], verdicts: list[jax.Array]) -> list[tuple[int, Marks]]:
    return [(index, Marks(*marks)) for index, marks in zip(block, jax.device_get(verdicts), strict=True)]


def _describe(shape: Shape, index: int, marks: Marks) -> dict[str, Any]:
    """Returns what is wrong with a batch, for a table or a file."""
    row, lse_row = (divmod(int(place), shape.num_heads) for place in (marks.worst, marks.worst_lse))
    return {
        "batch": index,
        "shape": shape.name,
        "rows": int(marks.wrong),
        "error": _number(marks.error),
        "limit": _number(marks.limit),
        "row": list(row),
        "lse_error": _number(marks.lse_error),
        "lse_row": list(lse_row),
    }


def _number(value: Any) -> float | str:
    """Returns a number that JSON has, or else its name."""
    return float(value) if math.isfinite(value) else str(float(value))
