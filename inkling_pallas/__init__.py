"""Paged, variable-length attention with Inkling's learned relative bias, for JAX."""

from inkling_pallas.attention import check_batch, explain, inkling_rel_attention, plan_batch
from inkling_pallas.batch import Batch, make_batch
from inkling_pallas.buckets import Buckets, Variant
from inkling_pallas.cache import PagedKVCache, write_kv
from inkling_pallas.call import BatchPlan
from inkling_pallas.context import ContextShards, cut_context, take_pages
from inkling_pallas.dispatch import Explanation, PortableFallbackWarning
from inkling_pallas.reference import reference_rel_attention
from inkling_pallas.relative import log_scaling, merge_partials, relative_logits
from inkling_pallas.sharding import AttentionMesh
from inkling_pallas.sheared import ShearedLogits
from inkling_pallas.shearing import shear, sheared_relative_logits
from inkling_pallas.splits import bucket_max_seqlen_q, inkling_num_splits
from inkling_pallas.warm import warmup

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
