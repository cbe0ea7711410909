"""Into how many parts the keys of a sequence may be split."""

from inkling_pallas.core.buckets import bucket_max_seqlen_q
from inkling_pallas.core.devices import H200, card_of, device_capability
from inkling_pallas.core.errors import refuse, static_int

_KEYS_PER_SPLIT = 128


def inkling_num_splits(
    *,
    is_local: bool,
    batch_size: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    max_kv_len: int,
    capability: tuple[int, int] | None = None,
    match_vllm: bool = False,
) -> int:
    """Returns an upper bound of the parts that the keys of one sequence are split into, for `num_splits`.

    Args:
      is_local: a sliding-window layer.
      batch_size: sequences in the batch.
      max_query_len: rows of the longest of them.
      num_heads: query heads on this device.
      num_kv_heads: kv heads on this device.
      max_kv_len: keys of the longest sequence.
      capability: compute capability (major, minor); None is that of the default device, or none where it has none.
      match_vllm: return vLLM's value also on capability 9, where its kernel cannot split (1).

    Returns:
      A static int >= 1. On capability 9 it is this project's own bound, from max_kv_len alone; elsewhere it is the
      table that vLLM's Inkling model uses for its FlashAttention-4 kernel.

    Raises:
      ValueError: if a size is not a static int >= 1, or num_heads no multiple of num_kv_heads.

    Example:
      >>> sizes = dict(batch_size=8, max_query_len=1, num_heads=64, num_kv_heads=8, max_kv_len=131072)
      >>> inkling_num_splits(is_local=False, capability=(10, 0), **sizes)
      2
    """
    sizes = {
        "batch_size": batch_size,
        "max_query_len": max_query_len,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "max_kv_len": max_kv_len,
    }
    for argument, value in sizes.items():
        static_int(argument, value, 1)
    if num_heads % num_kv_heads:
        rule, advice = f"be a multiple of num_kv_heads = {num_kv_heads}", "Both are those of one device."
        raise refuse("num_heads", rule, num_heads, advice)
    major = (capability or device_capability() or (0, 0))[0]
    if major == 9 and not match_vllm:
        # One sequence can use every SM; powers of two keep the compiled variants few as max_kv_len grows.
        most = (card_of() if capability is None else None) or H200
        return bucket_max_seqlen_q(min(most.num_sms, -(-max_kv_len // _KEYS_PER_SPLIT)))
    if is_local or major == 9:
        return 1
    q_tiles = -(-max_query_len * (num_heads // num_kv_heads) // 256)
    single = q_tiles == 1 and batch_size == 1
    wanted_ctas = 256 if single else 128 if q_tiles == 1 else 64
    splits = wanted_ctas // (batch_size * num_kv_heads * q_tiles)
    cap = _single_sequence_cap(num_kv_heads, max_kv_len) if single else 128
    return max(1, min(splits, cap, -(-max_kv_len // _KEYS_PER_SPLIT)))


def _single_sequence_cap(num_kv_heads: int, max_kv_len: int) -> int:
    """Returns vLLM's cap for a batch of one decoding sequence."""
    if num_kv_heads == 8:
        return 16
    if num_kv_heads == 4 or max_kv_len <= 8192:
        return 32
    return 64 if max_kv_len <= 65536 else 128
