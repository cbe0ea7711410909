"""What the attention kernels read in global memory, and the references that a kernel gets for it."""

from typing import Any, NamedTuple

from inkling_pallas.kernels import band, pages
from inkling_pallas.kernels.tiling import Tiling
from inkling_pallas.problem import Operands


class Gmem(NamedTuple):
    """Arrays in global memory; caches in chunks."""

    q: Any
    key: Any
    value: Any
    block_table: Any
    rel_logits: Any
    plan: Any  # what says which CTA does what: `Lengths` for the decode kernel, a `Worklist` for the prefill kernel


def of_operands(operands: Operands, plan: Any, tiling: Tiling) -> Gmem:
    """Returns the arrays as a kernel takes them."""
    return Gmem(
        q=operands.q,
        key=pages.split_pages(operands.cache_arrays[0], tiling),
        value=pages.split_pages(operands.cache_arrays[-1], tiling),
        block_table=operands.block_table,
        rel_logits=band.pad_for_interpreter(operands.rel_logits, tiling),
        plan=plan,
    )
