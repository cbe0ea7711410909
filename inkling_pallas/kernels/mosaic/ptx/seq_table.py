"""Mosaic code for the table of lengths: the scan at the start of each kernel, and reading a word. On the card only."""

import math
from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from inkling_pallas.kernels.mosaic.ptx import from_jaxpr
from inkling_pallas.kernels.mosaic.ptx.warpgroup import LANES, THREADS, i32, plain_pointer

# Keeps the loads of this many groups of 32 sequences in flight.
_UNROLL = 8
_MOST_UNROLLED = 512  # sequences: of more, the code would take seconds to compile
_LINE = 128  # bytes
Rule = Callable[..., Any]  # of int32 scalars, in jnp
_SCANS = (arith.addi, arith.maxsi, arith.maxsi)


def load_word(ref: Any, row: Any, column: Any) -> Any:
    """Returns the int32 scalar ref[row, column]."""
    word = llvm.load(ir.IntegerType.get_signless(32), _pointer(ref, row, column))
    return fragmented_array.FragmentedArray.splat(word, (), is_signed=True)


def store_word(ref: Any, row: Any, column: Any, word: Any) -> None:
    """Writes the int32 scalar ref[row, column]."""
    llvm.store(word.registers.item(), _pointer(ref, row, column))


def _pointer(ref: Any, row: Any, column: Any) -> Any:
    pitch = ir.MemRefType(ref.type).shape[-1]
    return plain_pointer(ref, utils.memref_ptr(ref), row.registers.item(), column.registers.item(), pitch)


def prefetch_part(ref: Any, part: Any) -> None:
    """Asks for 128-byte lines of an array in global memory, one a thread of a warpgroup: its `part`-th 128 lines."""
    memref = ir.MemRefType(ref.type)
    words = math.prod(memref.shape)
    lines = -(-words * 4 // _LINE)
    line = arith.addi(arith.muli(part.registers.item(), i32(THREADS)), arith.remui(utils.thread_idx(), i32(THREADS)))
    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, line, i32(lines)))
    with ir.InsertionPoint(branch.then_block):
        place = utils.getelementptr(utils.memref_ptr(ref), [arith.muli(line, i32(_LINE // 4))], memref.element_type)
        llvm.inline_asm(None, [place], "prefetch.global.L2 [$0];", "l", has_side_effects=True)
        scf.yield_([])


def scan_table(*refs: Any, batch: int, end_of: Rule, facts_of: Rule) -> None:
    """Makes the table as `mosaic.scan_table` says; refs are the sources and the table.

    Every warp does the whole of it, 32 sequences at a time by as many shuffles as the batch needs: large batches in a
    loop over `_UNROLL` times as many, whose code is short, small ones one after the other.
    """
    *sources, table = map(utils.memref_ptr, refs)
    lane = arith.remui(utils.thread_idx(), i32(LANES))

    def scan(first: Any, starts: Any, carried: Any) -> list[Any]:
        """Scans groups at `starts` after sequence `first`, and returns what the next ones need."""
        claimed, *sums = carried
        loaded = [_load(sources, arith.addi(first, i32(start)), batch) for start in starts]
        for start, (inside, words) in zip(starts, loaded, strict=True):
            before, claimed = _largest_before(lane, _if(inside, *from_jaxpr.run(end_of, *words[:2])), claimed, live)
            *facts, work = from_jaxpr.run(facts_of, *words[:2], before, *words[2:])
            work = _if(inside, work)
            inputs = [work, arith.addi(facts[0], facts[1]), work]
            scans = [_warp_scan(lane, value, combine, live) for value, combine in zip(inputs, _SCANS, strict=True)]
            scans = [combine(value, other) for value, combine, other in zip(scans, _SCANS, sums, strict=True)]
            sums = [_last_lane(value) for value in scans] if start + LANES < batch else sums
            _store_rows(table, arith.addi(first, i32(start)), batch, [*facts, *scans])
        return [claimed, *sums]

    carried, live, step = [i32(0)] * (1 + len(_SCANS)), min(batch, LANES), LANES * _UNROLL
    if batch <= _MOST_UNROLLED:
        for start in range(0, batch, step):
            carried = scan(lane, range(start, min(start + step, batch), LANES), carried)
    else:
        loop = scf.ForOp(i32(0), i32(-(-batch // step) * step), i32(step), carried)
        with ir.InsertionPoint(loop.body):
            first = arith.addi(lane, loop.induction_variable)
            scf.yield_(scan(first, range(0, step, LANES), list(loop.inner_iter_args)))
    utils.warp_barrier()  # A lane reads words that another one wrote.


def _load(sources: list[Any], index: Any, batch: int) -> tuple[Any, list[Any]]:
    """Returns whether a sequence is one, and its words: two row offsets, then one of each other source."""
    word = ir.IntegerType.get_signless(32)
    inside = arith.cmpi(arith.CmpIPredicate.ult, index, i32(batch))
    safe = arith.minui(index, i32(batch - 1))
    places = [(sources[0], safe), (sources[0], arith.addi(safe, i32(1))), *((source, safe) for source in sources[1:])]
    return inside, [llvm.load(word, utils.getelementptr(source, [place], word)) for source, place in places]


def _if(condition: Any, value: Any) -> Any:
    return arith.select(condition, value, i32(0))


def _largest_before(lane: Any, value: Any, carried: Any, live: int) -> tuple[Any, Any]:
    """Returns the largest value of the lanes below, or carried, and that of all lanes, of which `live` count."""
    if live == 1:
        return carried, value
    largest = arith.maxsi(_warp_scan(lane, value, arith.maxsi, live), carried)
    is_first = arith.cmpi(arith.CmpIPredicate.eq, lane, i32(0))
    return arith.select(is_first, carried, _shuffle("up", largest, "1, 0")), _last_lane(largest)


def _store_rows(table: Any, index: Any, batch: int, values: list[Any]) -> None:
    word = ir.IntegerType.get_signless(32)
    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, index, i32(batch)))
    with ir.InsertionPoint(branch.then_block):
        for row, value in enumerate(values):
            llvm.store(value, utils.getelementptr(table, [arith.addi(index, i32(row * batch))], word))
        scf.yield_([])


def _shuffle(mode: str, value: Any, operand: str) -> Any:
    word = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(
        word, [value], f"shfl.sync.{mode}.b32 $0, $1, {operand}, 0xffffffff;", "=r,r", has_side_effects=True
    )


def _last_lane(value: Any) -> Any:
    return _shuffle("idx", value, "31, 31")


def _warp_scan(lane: Any, value: Any, combine: Any, live: int) -> Any:
    """Returns the inclusive scan of a value over the first `live` lanes of a warp."""
    for distance in (1 << i for i in range((live - 1).bit_length())):
        below = _shuffle("up", value, f"{distance}, 0")
        takes = arith.cmpi(arith.CmpIPredicate.uge, lane, i32(distance))
        value = arith.select(takes, combine(value, below), value)
    return value
