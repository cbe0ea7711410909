"""Mosaic code for clusters of CTAs: stores into each other's shared memory. On the card only.

Each CTA has a barrier of its own, in shared memory that Pallas takes for plain words: a store to another CTA counts its
bytes on that CTA's barrier, so that data and notice are one message, and nothing waits for an answer.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from inkling_pallas.kernels import inline
from inkling_pallas.kernels.inline import i32

_OPEN = """{
.reg .pred first;
setp.eq.u32 first, $1, 0;
@first mbarrier.init.shared::cta.b64 [$0], 1;
@first fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.release;
}"""
_EXPECT = """{
.reg .pred first;
setp.eq.u32 first, $1, 0;
@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $2;
}"""
_STORE = """{
.reg .b32 place, barrier;
mapa.shared::cluster.u32 place, $0, $2;
mapa.shared::cluster.u32 barrier, $1, $2;
st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [place], {$3, $4}, [barrier];
}"""
_WAIT = """{
.reg .pred done;
again:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], 0;
@!done bra again;
}"""


def open_exchange(barrier: Any) -> None:
    """Makes this CTA's barrier and tells the cluster; for all threads of the CTA, once."""
    _run(_OPEN, "r,r", inline.shared_address(utils.memref_ptr(barrier)), utils.thread_idx())


def exchange(barrier: Any, parts: Any, lses: Any, x: Any, lse: Any, rank: Any) -> None:
    """Does what `mosaic.exchange` says, two neighbouring columns at a time."""
    ranks, columns = ir.MemRefType(lses.type).shape
    width, mine = x.shape[0] // ranks, rank.registers.item()
    lane, warp = inline.lane_in_warp(), inline.warp_in_group()
    first_row, first_column = inline.first_wgmma_row(), arith.muli(arith.andi(lane, i32(3)), i32(2))
    here = inline.shared_address(utils.memref_ptr(barrier))
    thread = arith.remui(utils.thread_idx(), i32(inline.THREADS))
    _run(_EXPECT, "r,r,r", here, thread, i32(4 * ranks * columns * (width + 1)))
    _run("barrier.cluster.wait.acquire;", "")  # All barriers are there.
    start = inline.shared_address(utils.memref_ptr(parts))

    def store(start: Any, row: Any, column: Any, target: Any, pair: Any) -> None:
        place = arith.addi(start, arith.muli(arith.addi(arith.muli(row, i32(columns)), column), i32(4)))
        word = ir.IntegerType.get_signless(32)
        values = [llvm.bitcast(word, vector.extract(pair, [], [i])) for i in (0, 1)]
        _run(_STORE, "r,r,r,r,r", place, here, target, *values)

    for index, (block, eights) in inline.wgmma_places(x.registers):
        row = arith.addi(first_row, i32(8 * eights))
        row_there = arith.addi(arith.muli(mine, i32(width)), arith.remui(row, i32(width)))
        column = arith.addi(first_column, i32(8 * block))
        store(start, row_there, column, arith.divui(row, i32(width)), x.registers[index])
    # Lanes of one warp send the sums, four of them to each rank.
    target = arith.shrui(lane, i32(2))
    chosen = arith.andi(
        arith.cmpi(arith.CmpIPredicate.eq, warp, i32(0)), arith.cmpi(arith.CmpIPredicate.ult, target, i32(ranks))
    )
    branch = scf.IfOp(chosen)
    with ir.InsertionPoint(branch.then_block):
        start = inline.shared_address(utils.memref_ptr(lses))
        for block, pair in enumerate(lse.registers.flat):
            store(start, mine, arith.addi(first_column, i32(8 * block)), target, pair)
        scf.yield_([])
    _run(_WAIT, "r", here)


def _run(code: str, operands: str, *values: Any) -> None:
    constraints = ",".join(filter(None, [operands, "~{memory}"]))
    llvm.inline_asm(None, list(values), code, constraints, has_side_effects=True)
