"""Workloads that are timed in a moment, and what is said of the card in place of a measurement."""

from inkling_pallas.bench.ceilings import Ceilings, Read
from inkling_pallas.testing.cases import Case

TINY = Case(
    name="tiny",
    kind="tiny",
    q_lens=(1, 7),
    kv_lens=(40, 33),
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rel_extent=16,
    window_size=(20, 0),
    poison=(),
)
DECODE = Case(
    name="decode",
    kind="",
    q_lens=(1, 1),
    kv_lens=(70, 33),
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rel_extent=16,
    poison=(),
)
FIXED = Ceilings(reads=(Read(num_bytes=1, us=1.0, kernel="k"),), matmul_tflops=1.0, matmul_kernel="m")
