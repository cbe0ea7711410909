"""What the benchmark takes from jax itself, its profiler, queue and paged kernel: on each version of jax."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData
from tiny_benchmark import DECODE

from inkling_pallas.bench import clocks, workloads
from inkling_pallas.bench.clocks import Span
from inkling_pallas.bench.peers import jax_paged
from inkling_pallas.testing import row_errors
from inkling_pallas.testing.reference import reference_rel_attention


def test_queue_clock_counts_each_call(monkeypatch):
    monkeypatch.setattr(clocks, "_FLUSH_BYTES", 1 << 16)
    ran = []
    times = clocks.QueueClock().measure({"a": ran.append}, [("a", 0), ("a", 1)])
    assert ran == [0, 1] * clocks.MIN_CALLS
    assert len(times["a"]) == clocks.MIN_CALLS


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
def test_kernels_are_read_from_the_streams_of_a_gpu():
    trace = ProfileData.text_proto_to_serialized_xspace("""
      planes {
        name: "/device:GPU:0"
        lines { name: "Stream #14(Compute)" timestamp_ns: 1000 events {
          metadata_id: 1 offset_ps: 2000000 duration_ps: 3000000 stats { metadata_id: 7 str_value: "jit_f" } } }
        lines { name: "XLA Modules" timestamp_ns: 1000 events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 } }
        event_metadata { key: 1 value { id: 1 name: "kernel" } }
        stat_metadata { key: 7 value { id: 7 name: "hlo_module" } }
      }
      planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 9000000 } } }
    """)
    spans = list(clocks.device_spans(ProfileData.from_serialized_xspace(trace)))
    assert spans == [Span(3000.0, 6000.0, "jit_f")]


@pytest.mark.gpu
def test_trace_clock_times_a_long_call_longer():
    small, large = jnp.ones((1 << 20,)), jnp.ones((1 << 28,))
    calls = {"small": lambda _: small + 1, "large": lambda _: large + 1}
    times = clocks.time_calls(calls, clocks.TraceClock())
    assert times["large"].us > 20 * times["small"].us > 0


@pytest.mark.parametrize("window", [(-1, -1), (16, 0)], ids=["global", "window"])
def test_the_paged_kernel_of_jax_computes_decode_without_the_bias(window):
    kv_lens = (70, 33) if window == (-1, -1) else (65, 33)  # a window that starts where a page does
    case = dataclasses.replace(DECODE, kv_lens=kv_lens, window_size=window)
    arguments = workloads.device_inputs(case, seed=0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        call, form, rows = jax_paged.jax_paged_nobias(case, [arguments], interpret=True)
        assert rows is not None
        result = rows(call(0))
    without = dict(arguments, rel_logits=arguments["rel_logits"] * 0)
    assert row_errors(result, reference_rel_attention(**without)).max() < 8e-3
    assert bool(form) == (window != (-1, -1))
