"""The named workloads of the benchmark, what each must read and compute, and its inputs made on the device.

Names: dec = decode, mtp4 = decode of 4 tokens a sequence, pre = prefill of one sequence, chunk = 2,048 rows after
30,000 cached keys, var8 = eight prompts in one batch, mix = 31 decodes and one chunk, skew = one long sequence among
short ones; g = global layer, l16 and l8 = local layer with 16 or 8 kv heads, tp8 and tp8l = one of eight devices,
global and local; b32 = 32 sequences, 8k = 8,192 keys, p16 = pages of 16 keys (128 elsewhere).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.testing.cases import Case

_GLOBAL, _LOCAL = {"rel_extent": 1024, "window_size": (-1, -1)}, {"rel_extent": 512, "window_size": (511, 0)}
_LAYERS: dict[str, dict[str, Any]] = {
    "g": {"num_heads": 64, "num_kv_heads": 8, **_GLOBAL},
    "l16": {"num_heads": 64, "num_kv_heads": 16, **_LOCAL},
    "l8": {"num_heads": 64, "num_kv_heads": 8, **_LOCAL},
    "tp8": {"num_heads": 8, "num_kv_heads": 1, **_GLOBAL},
    "tp8l": {"num_heads": 8, "num_kv_heads": 2, **_LOCAL},
}
_Lens = tuple[int, ...]
_K = 1024
_VAR8 = (100, 4096, 777, 2048, 333, 1500, 3001, 512)
_SKEWED = (256 * _K, *(_K,) * 31)


def _case(name: str, layer: str, q_lens: _Lens, kv_lens: _Lens, page: int = 128, **more: Any) -> Case:
    kind = name.split("_")[0]
    arguments = {**_LAYERS[layer], "block_size": page, "poison": (), **more}
    return Case(name=name, kind=kind, q_lens=q_lens, kv_lens=kv_lens, **arguments)


def _decode(layer: str, batch: int, kilo_keys: int, page: int = 128) -> Case:
    name = f"dec_{layer}_b{batch}_{kilo_keys}k" + ("" if page == 128 else f"_p{page}")
    return _case(name, layer, (1,) * batch, (kilo_keys * _K,) * batch, page)


def _prefill(layer: str, kilo_rows: int, page: int = 128) -> Case:
    lengths = (kilo_rows * _K,)
    name = {"tp8": "pre_tp8_g", "tp8l": "pre_tp8_l"}.get(layer, f"pre_{layer}")
    return _case(f"{name}_{kilo_rows}k" + ("" if page == 128 else f"_p{page}"), layer, lengths, lengths, page)


def _decode_cases() -> list[Case]:
    decodes = [("g", 1, 8), ("g", 1, 64), ("g", 1, 256), ("g", 8, 8), ("g", 32, 8), ("g", 32, 64), ("g", 128, 4)]
    decodes += [(layer, batch, 8) for layer in ("l16", "l8") for batch in (1, 32, 128)]
    decodes += [("tp8", 1, 64), ("tp8", 32, 8), ("tp8l", 32, 8)]
    paged = [("g", 1, 64), ("g", 32, 8), ("l16", 32, 8)]
    tokens = [_case(f"mtp4_{layer}_b32_8k", layer, (4,) * 32, (8 * _K,) * 32) for layer in ("g", "l16")]
    skewed = [
        _case("skew_g", "g", (1,) * 32, _SKEWED),
        _case("skew_l", "l16", (1,) * 32, _SKEWED),
        _case("short32_l", "l16", (1,) * 32, (_K,) * 32),
    ]
    return [_decode(*d) for d in decodes] + [_decode(*p, page=16) for p in paged] + tokens + skewed


def _prefill_cases() -> list[Case]:
    prefills = [("g", 2), ("g", 8), ("g", 32), ("l16", 2), ("l16", 8), ("l16", 32), ("l8", 8), ("tp8", 8), ("tp8l", 8)]
    batches = [_case(f"var8_{layer}", layer, _VAR8, _VAR8) for layer in ("g", "l16")]
    chunks = [_case(f"chunk_{layer}_2k_on_30000", layer, (2 * _K,), (30000 + 2 * _K,)) for layer in ("g", "l16")]
    return [_prefill(*p) for p in prefills] + [_prefill("g", 8, page=16)] + batches + chunks


def _mixed_cases() -> list[Case]:
    """Returns each mixed batch and its two halves alone."""
    decodes, chunk, cases = (1,) * 31, (2 * _K,), []
    for layer in ("g", "l16"):
        cases += [
            _case(f"mix_{layer}_31dec8k_1x2k", layer, decodes + chunk, (8 * _K,) * 32),
            _case(f"mix_{layer}_31dec8k", layer, decodes, (8 * _K,) * 31),
            _case(f"mix_{layer}_1x2k", layer, chunk, (8 * _K,)),
        ]
    return cases


def _scaling_cases() -> list[Case]:
    """Returns sweeps of length and batch, equal lengths beside skewed ones, and a bucket far above the real length."""
    lengths = [_decode("g", 1, keys) for keys in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    batches = [_decode(layer, batch, 8) for layer in ("g", "l16") for batch in (1, 2, 4, 8, 16, 32, 64, 128)]
    prefills = [_prefill(layer, rows) for layer in ("g", "l16") for rows in (1, 2, 4, 8, 16)]
    even = (math.ceil(sum(_VAR8) / len(_VAR8)),) * len(_VAR8)
    equal = [_case("var8_g", "g", _VAR8, _VAR8), _case("even8_g", "g", even, even)]
    skewed = [_case("skew_g", "g", (1,) * 32, _SKEWED), _case("even32_g", "g", (1,) * 32, (sum(_SKEWED) // 32,) * 32)]
    bucket = _case("pre_g_2k_bucket32k", "g", (2 * _K,), (2 * _K,), max_seqlen_q=32 * _K)
    return lengths + batches + prefills + equal + skewed + [bucket]


def _cpu_cases() -> list[Case]:
    """Returns a small form of each kind at Inkling's shapes of one device of eight."""
    return [
        _case("cpu_dec_tp8_b2_512", "tp8", (1, 1), (512, 512), 16),
        _case("cpu_dec_tp8l_b2_1k", "tp8l", (1, 1), (_K, _K), 16),
        _case("cpu_pre_tp8l_512", "tp8l", (512,), (512,)),
        _case("cpu_chunk_tp8_64_on_448", "tp8", (64,), (512,)),
        _case("cpu_mix_tp8_3dec512_1x64", "tp8", (1, 1, 1, 64), (512,) * 4),
    ]


def _suites() -> tuple[dict[str, tuple[str, ...]], dict[str, Case]]:
    groups = {
        "decode": _decode_cases(),
        "prefill": _prefill_cases(),
        "mixed": _mixed_cases(),
        "scaling": _scaling_cases(),
        "cpu": _cpu_cases(),
    }
    cases = {case.name: case for group in groups.values() for case in group}
    suites = {name: tuple(dict.fromkeys(case.name for case in group)) for name, group in groups.items()}
    real = suites["decode"] + suites["prefill"] + suites["mixed"]
    # Plain and sheared biases side by side.
    suites["sheared"] = ("pre_g_8k", "pre_l16_8k", "dec_g_b32_8k")
    suites["local"] = tuple(name for name in real if cases[name].window_size != (-1, -1))
    return suites, cases


_SUITES, _CASES = _suites()
SUITES: Mapping[str, tuple[str, ...]] = MappingProxyType(_SUITES)
WORKLOADS: Mapping[str, Case] = MappingProxyType(_CASES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The least that a call can read and write (bytes), and the flops of the visible pairs of a query and a key."""

    num_bytes: int
    flops: int


def cost(case: Case) -> Cost:
    """Returns what any implementation must do: move live keys, values, biases, q and the result; 2 products a pair.

    Exact to the key, not the page; a row uses the biases of d < rel_extent that its window and its sequence have.
    """
    pairs = keys = biases = 0
    for q_len, kv_len in zip(case.all_q_lens, case.all_kv_lens, strict=True):
        first, end = visible_keys(case, kv_len - q_len + np.arange(q_len), kv_len)
        seen = np.maximum(0, end - first)
        pairs += int(seen.sum())
        keys += int(end.max() - first.min()) if seen.any() else 0
        biases += int(_biases(case, kv_len - q_len + np.arange(q_len), first, end).sum())
    itemsize = np.dtype(jnp.dtype(case.dtype)).itemsize
    rows = sum(case.q_lens) * case.num_heads * case.head_dim
    elements = 2 * keys * case.num_kv_heads * case.head_dim + biases * case.num_heads + 2 * rows
    return Cost(num_bytes=elements * itemsize, flops=4 * case.head_dim * case.num_heads * pairs)


def visible_keys(case: Case, position: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys [first, end) that rows at some positions of a sequence see; end <= first where none."""
    left, right = case.window_size
    first = np.zeros_like(position) if left == -1 else np.maximum(0, position - left)
    reach = 0 if case.causal else right
    end = np.full_like(position, kv_len) if reach == -1 else np.minimum(kv_len, position + reach + 1)
    return first, end


def _biases(case: Case, position: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns how many visible keys of each row stand at 0 <= dist < rel_extent."""
    return np.maximum(0, np.minimum(end, position + 1) - np.maximum(first, position - (case.rel_extent - 1)))


def device_inputs(case: Case, seed: int) -> dict[str, Any]:
    """Returns the arguments of `inkling_rel_attention` for a case, N(0, 1) arrays made on the default device.

    Pages are a random permutation of the pool, which holds nothing else.
    """
    pages = [-(-kv_len // case.block_size) for kv_len in case.all_kv_lens]
    table = np.zeros((len(pages), max(1, *pages)), np.int32)
    order = iter(np.random.default_rng(seed).permutation(sum(pages)).tolist())
    for row, count in zip(table, pages, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    keys = jax.random.split(jax.random.key(seed), 4)
    normal = functools.partial(_normal, dtype=case.dtype)
    cache = (max(1, sum(pages)), case.block_size, case.num_kv_heads, case.head_dim)
    rows = (case.num_tokens, case.num_heads)
    return {
        "q": normal(keys[0], (*rows, case.head_dim)),
        "key_cache": normal(keys[1], cache),
        "value_cache": normal(keys[2], cache),
        "block_table": jnp.asarray(table),
        "cache_seqlens": jnp.asarray(case.all_kv_lens, jnp.int32),
        "cu_seqlens_q": jnp.asarray(np.cumsum((0, *case.all_q_lens)), jnp.int32),
        "max_seqlen_q": case.max_seqlen_q or max(1, *case.all_q_lens),
        "softmax_scale": 1.0 / case.head_dim,
        "causal": case.causal,
        "window_size": case.window_size,
        "rel_extent": case.rel_extent,
        "rel_logits": normal(keys[3], (*rows, case.rel_extent)),
    }


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Returns float32 normals rounded to dtype; drawn in a 16-bit dtype they would take few values."""
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def input_bytes(case: Case) -> int:
    """Returns the device memory that one set of inputs takes."""
    pages = sum(-(-kv_len // case.block_size) for kv_len in case.all_kv_lens)
    cache = 2 * pages * case.block_size * case.num_kv_heads * case.head_dim
    rows = case.num_tokens * case.num_heads * (case.head_dim + case.rel_extent)
    return (cache + rows) * np.dtype(jnp.dtype(case.dtype)).itemsize
