"""Paged, variable-length attention with Inkling's learned relative bias, for JAX."""

from inkling_pallas.attention import check_batch, explain, inkling_rel_attention, plan_batch
from inkling_pallas.cache_writes import write_kv
from inkling_pallas.core.batch import Batch, make_batch
from inkling_pallas.core.buckets import Buckets, Variant, bucket_max_seqlen_q
from inkling_pallas.core.checked_call import BatchPlan
from inkling_pallas.core.dispatch import Explanation, PortableFallbackWarning
from inkling_pallas.core.num_splits import inkling_num_splits
from inkling_pallas.core.paged_cache import PagedKVCache
from inkling_pallas.core.sheared_layout import ShearedLogits
from inkling_pallas.parallel.context import ContextShards, cut_context, take_pages
from inkling_pallas.parallel.merge import merge_partials
from inkling_pallas.parallel.mesh import AttentionMesh
from inkling_pallas.relative_bias import log_scaling, relative_logits, shear, sheared_relative_logits
from inkling_pallas.serving.warmup import warmup
from inkling_pallas.testing.reference import reference_rel_attention

__version__ = "0.1.0"

__all__ = [
    "AttentionMesh",
    "Batch",
    "BatchPlan",
    "Buckets",
    "ContextShards",
    "Explanation",
    "PagedKVCache",
    "PortableFallbackWarning",
    "ShearedLogits",
    "Variant",
    "__version__",
    "bucket_max_seqlen_q",
    "check_batch",
    "cut_context",
    "explain",
    "inkling_num_splits",
    "inkling_rel_attention",
    "log_scaling",
    "make_batch",
    "merge_partials",
    "plan_batch",
    "reference_rel_attention",
    "relative_logits",
    "shear",
    "sheared_relative_logits",
    "take_pages",
    "warmup",
    "write_kv",
]
