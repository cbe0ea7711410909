"""Buckets and split bounds."""

import itertools

import pytest

import inkling_pallas as ip
from inkling_pallas.core import devices, num_splits

pytestmark = pytest.mark.host


def test_buckets():
    assert [ip.bucket_max_seqlen_q(n) for n in range(10)] == [1, 1, 2, 4, 4, 8, 8, 8, 8, 16]
    with pytest.raises(ValueError, match=r"^max_seqlen_q must be a static int >= 0; got -1"):
        ip.bucket_max_seqlen_q(-1)


_TP = [(64, 8), (32, 4), (16, 2), (8, 1)]


@pytest.mark.parametrize(
    ("batch", "rows", "expected"),
    [
        (1, 1, (16, 32, 128, 128)),
        (8, 1, (2, 4, 8, 16)),
        (32, 1, (1, 1, 2, 4)),
        (1, 128, (2, 4, 8, 16)),
        (1, 2048, (1,) * 4),
    ],
)
@pytest.mark.parametrize("capability", [(10, 0), (8, 9), (12, 0)])
def test_table_values(batch, rows, expected, capability):
    got = tuple(
        ip.inkling_num_splits(
            is_local=False,
            batch_size=batch,
            max_query_len=rows,
            num_heads=heads,
            num_kv_heads=kv_heads,
            max_kv_len=131072,
            capability=capability,
        )
        for heads, kv_heads in _TP
    )
    assert got == expected


def _bound(**changes):
    sizes = {
        "is_local": False,
        "batch_size": 1,
        "max_query_len": 1,
        "num_heads": 64,
        "num_kv_heads": 8,
        "max_kv_len": 65536,
    }
    return ip.inkling_num_splits(**{**sizes, **changes})


def test_single_sequence_caps():
    one = {"num_heads": 8, "num_kv_heads": 1, "capability": (10, 0)}
    assert [_bound(max_kv_len=n, **one) for n in (128, 8192, 8193, 65536, 65537)] == [1, 32, 64, 64, 128]


def test_local_layers_and_vllm_on_hopper():
    assert _bound(is_local=True, capability=(10, 0)) == 1
    assert _bound(capability=(9, 0), match_vllm=True) == 1
    assert _bound(capability=(9, 0)) > 1
    assert _bound(is_local=True, capability=(9, 0)) > 1


def test_the_hopper_bound_takes_few_values():
    values = {_bound(capability=(9, 0), max_kv_len=n) for n in range(1, 1_048_577, 1021)}
    assert len(values) <= 10
    assert max(values) >= 132


def test_without_a_capability_the_table_holds(monkeypatch):
    monkeypatch.setattr(devices, "default_device", lambda: object())
    assert num_splits.device_capability() is None
    assert _bound() == _bound(capability=(10, 0))


def test_sizes_are_checked():
    for name in ("batch_size", "max_query_len", "num_heads", "num_kv_heads", "max_kv_len"):
        with pytest.raises(ValueError, match=f"^{name} must be a static int >= 1; got 0"):
            _bound(**{name: 0})


@pytest.mark.parametrize(("text", "expected"), [("9.0", (9, 0)), ("12.1", (12, 1)), ("gfx942", None), (None, None)])
def test_capability_of_a_device(text, expected):
    device = type("Device", (), {"compute_capability": text})()
    assert num_splits.device_capability(device) == expected


def test_every_bound_is_at_least_one():
    for batch, rows, heads, kv_len in itertools.product((1, 2, 128, 500), (1, 9, 2048), _TP, (1, 600, 10**6)):
        sizes = {
            "batch_size": batch,
            "max_query_len": rows,
            "num_heads": heads[0],
            "num_kv_heads": heads[1],
            "max_kv_len": kv_len,
        }
        assert all(_bound(**sizes, capability=c) >= 1 for c in [(9, 0), (10, 0), None])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 8), (12, 5)])
def test_heads_must_be_those_of_one_device(heads, kv_heads):
    with pytest.raises(ValueError, match=rf"^num_heads must be a multiple of num_kv_heads = {kv_heads}; got {heads}"):
        _bound(num_heads=heads, num_kv_heads=kv_heads, capability=(10, 0))
