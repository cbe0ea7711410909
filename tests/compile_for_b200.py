"""Run by test_blackwell_compile.py: compiles variants of the Blackwell kernel for a card that is not there.

In a process of its own, since Mosaic registers the pass that calls ptxas once in a process, with the architecture of
the first kernel compiled (`absent_card` refuses a second one). The argument is the program whose variants it takes.
Prints `variant NAME` before what jax and ptxas tell of its kernels, as the environment asks them to.
"""

import sys

import absent_card
import jax
from lowered import lower, make_problem

from inkling_pallas.kernels import blackwell

# Both programs with and without a window; sizes, dtypes, layouts, outputs and kinds of table spread over them.
VARIANTS = {
    "prefill, global": make_problem(64, 8, batch=1, q_len=8192, sheared=True),
    "prefill, local, lse": make_problem(64, 16, q_len=64, local=True, sheared=True, return_lse=True),
    "prefill, group 3, page 16, float32 out": make_problem(
        24, 8, batch=3, q_len=256, block_size=16, rel_extent=20, sheared=True, out_dtype="float32"
    ),
    "prefill, local, group 12, head_dim 64, float16, interleaved": make_problem(
        24, 2, q_len=64, head_dim=64, dtype="float16", local=True, sheared=True, layout="interleaved"
    ),
    "decode, global, plain table": make_problem(64, 8),
    "decode, local, 4 tokens, packed": make_problem(64, 16, q_len=4, local=True, sheared=True, layout="packed"),
    "decode, no splits, group 16, lse": make_problem(16, 1, batch=1, num_splits=1, sheared=True, return_lse=True),
    "decode, local, group 7, head_dim 64, float16, page 48": make_problem(
        14, 2, q_len=8, head_dim=64, dtype="float16", block_size=48, local=True, sheared=True
    ),
}


def main(program: str) -> None:
    """Compiles the variants of "prefill" or "decode"."""
    card = absent_card.device("B200")
    for name, problem in VARIANTS.items():
        if not name.startswith(program):
            continue
        print("variant", name, flush=True)
        with jax.default_device(card):
            lower(problem, card, blackwell).compile()


if __name__ == "__main__":
    main(sys.argv[1])
