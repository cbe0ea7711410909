"""What a write must leave, and what a compiled step does with the buffers that it was given."""

import re
from typing import Any

import numpy as np

import inkling_pallas as ip


def written_by_hand(cache: ip.PagedKVCache, k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> list[np.ndarray]:
    """Returns (keys, values) after the writes, one token after the other."""
    keys, values = (np.array(array) for array in cache.copy_to("separate").arrays)
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < cache.num_blocks * cache.block_size:
            page, offset = divmod(slot, cache.block_size)
            keys[page, offset], values[page, offset] = k[token], v[token]
    return [keys, values]


def aliased_outputs(compiled: Any) -> int:
    """Returns how many results of a compiled module use the buffer of an argument."""
    header = compiled.as_text().splitlines()[0]
    return len(re.findall(r"\{[\d, ]*\}: \(\d+", header.partition("input_output_alias=")[2].partition(" entry_")[0]))


def assert_pool_in_place(compiled: Any) -> None:
    """Asserts that a step of `steps` uses the buffer of its packed pool and copies it nowhere."""
    shape = re.escape("bf16[54,2,16,128]")
    assert aliased_outputs(compiled) == 1
    assert re.search(shape + r"\S* (copy|transpose)\(", compiled.as_text()) is None
    assert compiled.memory_analysis().alias_size_in_bytes >= 54 * 2 * 16 * 128 * 2
