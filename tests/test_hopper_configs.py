"""The config of the Hopper kernels for a problem: what is chosen, and what is refused."""

import dataclasses

import pytest
from lowered import make_problem

from inkling_pallas.core.devices import H200
from inkling_pallas.kernels import hopper
from inkling_pallas.kernels.hopper import configs

pytestmark = pytest.mark.host


@pytest.mark.parametrize("q_len", [1, 64])
def test_refuses_more_sequences_than_shared_memory_holds(q_len):
    assert hopper.unsupported(make_problem(8, 1, batch=3000, q_len=q_len)) is None
    refusal = hopper.unsupported(make_problem(8, 1, batch=9000, q_len=q_len))
    assert "batch_size must leave room for its lengths in shared memory on Hopper; got 9000." in str(refusal)


def test_refuses_what_does_not_fit_with_its_own_reason():
    long = make_problem(128, 16, batch=1024, q_len=32, block_size=128, max_blocks=2**13)
    assert hopper.unsupported(dataclasses.replace(long, batch_size=1023)) is None
    assert "must make fewer than 2**30 tiles" in str(hopper.unsupported(long))
    assert "num_heads / num_kv_heads must be at most 16" in str(hopper.unsupported(make_problem(128, 1)))
    rule = "num_ctas must be a multiple of cluster_size = 2, or None; got 131"
    with pytest.raises(ValueError, match=rule):
        hopper.Config(program="prefill", block_kv=128, num_stages=2, num_ctas=131, cluster_size=2)
    with pytest.raises(ValueError, match="cluster_size must be one of 1, 2, 4, 8; got 3"):
        hopper.Config(block_kv=64, num_stages=2, num_ctas=132, cluster_size=3)


def test_two_ctas_share_an_sm_where_units_are_many_and_short():
    many = make_problem(64, 16, batch=128, local=True)
    assert hopper.choose_config(many).num_ctas == 264
    others = {"batch_size": 32}, {"window_left": None}, {"head_dim": 256}, {"num_heads": 256}, {"num_splits": 3}
    for facts in others:
        assert hopper.choose_config(dataclasses.replace(many, **facts)).num_ctas == 132


def test_a_cta_of_one_tile_has_two_stages():
    few = dataclasses.replace(make_problem(8, 1, batch=2, local=True), window_left=2000)
    assert hopper.choose_config(few) == hopper.Config(block_kv=64, num_stages=2).on(H200)
    assert hopper.choose_config(dataclasses.replace(few, batch_size=16)).num_stages > 2


@pytest.mark.parametrize(
    ("facts", "size", "block_kv"),
    [
        ({}, 8, 64),
        ({"batch_size": 2}, 4, 64),
        ({"batch_size": 4}, 2, 128),
        ({"batch_size": 8}, 1, 128),
        ({"num_splits": 3}, 2, 128),
        ({"head_dim": 64}, 4, 128),
        ({"num_tokens": 2, "max_seqlen_q": 2}, 8, 64),
        ({"num_tokens": 4, "max_seqlen_q": 4}, 4, 128),
        ({"num_tokens": 8, "max_seqlen_q": 8}, 4, 64),
        ({"num_tokens": 16, "max_seqlen_q": 16}, 1, 64),
        ({"num_tokens": 16, "max_seqlen_q": 8, "batch_size": 2}, 1, 128),
        ({"window_left": 2000}, 4, 128),
        ({"window_left": 2000, "batch_size": 2}, 1, 128),
        ({"window_left": None, "num_kv_heads": 8}, 8, 128),
        ({"window_left": None, "num_kv_heads": 8, "num_tokens": 2, "max_seqlen_q": 2}, 1, 128),
        ({"window_left": None, "num_kv_heads": 4}, 1, 128),
        ({"window_left": None, "head_dim": 64}, 1, 128),
        ({"window_left": None, "batch_size": 2}, 1, 128),
        ({"window_left": None, "batch_size": 2, "num_kv_heads": 8, "max_blocks": 8}, 8, 64),
    ],
)
def test_clusters_share_units_that_are_few_and_short_or_of_one_sequence(facts, size, block_kv):
    problem = dataclasses.replace(make_problem(64, 16, batch=1, local=True), **facts)
    config = hopper.choose_config(problem)
    assert (config.cluster_size, config.block_kv) == (size, block_kv)
    assert size == 1 or config.num_ctas == size * problem.num_kv_heads * problem.batch_size


def test_refuses_clusters_that_are_too_few_or_too_large():
    call = make_problem(64, 16, batch=1, local=True)
    with pytest.raises(ValueError, match="config must leave a cluster for each of 16 units; got 15 clusters"):
        configs.tiling_of(call, hopper.Config(block_kv=64, num_stages=2, num_ctas=60, cluster_size=4))
    with pytest.raises(ValueError, match="config must have a cluster_size of at most num_splits = 3; got 4"):
        configs.tiling_of(
            dataclasses.replace(call, num_splits=3),
            hopper.Config(block_kv=64, num_stages=2, num_ctas=64, cluster_size=4),
        )
    narrow = dataclasses.replace(call, head_dim=64)
    with pytest.raises(ValueError, match="leave each CTA of a cluster a multiple of 128 elements to merge; got 64"):
        configs.tiling_of(narrow, hopper.Config(block_kv=64, num_stages=2, num_ctas=128, cluster_size=8))
