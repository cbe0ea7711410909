"""Mosaic code for clusters of CTAs: stores into each other's shared memory. On the card only.

Each CTA has a barrier of its own, in shared memory that Pallas takes for plain words: a store to another CTA counts its
bytes on that CTA's barrier, so that data and notice are one message, and nothing waits for an answer.
"""

import math
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from inkling_pallas.kernels.mosaic.ptx import warpgroup
from inkling_pallas.kernels.mosaic.ptx.warpgroup import i32

_WORD = 4  # bytes
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
    """Makes this CTA's barrier and tells the cluster; for all threads of the CTA, once.

    Warps that take no part in the exchange never wait for the cluster: threads that have ended count as there.
    """
    _run(_OPEN, "r,r", warpgroup.shared_address(utils.memref_ptr(barrier)), utils.thread_idx())


def exchange(barrier: Any, parts: Any, lses: Any, x: Any, lse: Any, rank: Any) -> None:
    """Does what `mosaic.exchange` says."""
    here, mine = warpgroup.shared_address(utils.memref_ptr(barrier)), rank.registers.item()
    thread = arith.remui(utils.thread_idx(), i32(warpgroup.THREADS))
    words = sum(math.prod(ir.MemRefType(buffer.type).shape) for buffer in (parts, lses))
    # Bytes may come before: the phase, the first and only one, stays open until this arrival.
    _run(_EXPECT, "r,r,r", here, thread, i32(_WORD * words))
    _run("barrier.cluster.wait.acquire;", "")  # All barriers are there.
    _send_rows(here, parts, x, mine, ranks=ir.MemRefType(lses.type).shape[0])
    _send_sums(here, lses, lse, mine)
    _run(_WAIT, "r", here)


def _send_rows(barrier: Any, parts: Any, x: Any, mine: Any, *, ranks: int) -> None:
    """Sends rows of x, two neighbouring columns at a time, to the ranks that merge them."""
    width = x.shape[0] // ranks
    first_row, first_column = warpgroup.first_wgmma_row(), _first_column()
    for index, (block, eights) in warpgroup.wgmma_places(x.registers):
        row = arith.addi(first_row, i32(8 * eights))
        row_there = arith.addi(arith.muli(mine, i32(width)), arith.remui(row, i32(width)))
        column = arith.addi(first_column, i32(8 * block))
        _send(barrier, parts, row_there, column, arith.divui(row, i32(width)), x.registers[index])


def _send_sums(barrier: Any, lses: Any, lse: Any, mine: Any) -> None:
    """Sends every rank all columns of lse: of one warp, which holds them all, four lanes to each rank."""
    ranks, target = ir.MemRefType(lses.type).shape[0], arith.shrui(warpgroup.lane_in_warp(), i32(2))
    first_warp = arith.cmpi(arith.CmpIPredicate.eq, warpgroup.warp_in_group(), i32(0))
    branch = scf.IfOp(arith.andi(first_warp, arith.cmpi(arith.CmpIPredicate.ult, target, i32(ranks))))
    with ir.InsertionPoint(branch.then_block):
        for block, pair in enumerate(lse.registers.flat):
            _send(barrier, lses, mine, arith.addi(_first_column(), i32(8 * block)), target, pair)
        scf.yield_([])


def _first_column() -> Any:
    return arith.muli(arith.andi(warpgroup.lane_in_warp(), i32(3)), i32(2))


def _send(barrier: Any, buffer: Any, row: Any, column: Any, target: Any, pair: Any) -> None:
    pitch, word = ir.MemRefType(buffer.type).shape[1], ir.IntegerType.get_signless(32)
    offset = arith.muli(arith.addi(arith.muli(row, i32(pitch)), column), i32(_WORD))
    place = arith.addi(warpgroup.shared_address(utils.memref_ptr(buffer)), offset)
    values = [llvm.bitcast(word, vector.extract(pair, [], [i])) for i in (0, 1)]
    _run(_STORE, "r,r,r,r,r", place, barrier, target, *values)


def _run(code: str, operands: str, *values: Any) -> None:
    constraints = ",".join(filter(None, [operands, "~{memory}"]))
    llvm.inline_asm(None, list(values), code, constraints, has_side_effects=True)
