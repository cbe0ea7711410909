"""The operator: checks a call, chooses backend and config, runs it; plus what a caller needs around it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inkling_pallas.core.card_only import by_platform, for_card
from inkling_pallas.core.checked_call import BatchPlan, check_call, planned_problem
from inkling_pallas.core.devices import device_capability, on_auto_axes
from inkling_pallas.core.dispatch import (
    Choice,
    Explanation,
    choose,
    load_backend,
    require_device,
    require_threads,
    warn_on_fallback,
)
from inkling_pallas.core.errors import refuse
from inkling_pallas.core.host_checks import check_batch_contents, check_plan, check_shifts
from inkling_pallas.core.paged_cache import PagedKVCache
from inkling_pallas.core.problem import Lengths, Operands, Problem
from inkling_pallas.core.sheared_layout import ShearedLogits


class _Static(NamedTuple):
    """The static part of the jit key."""

    problem: Problem
    choice: Choice
    interpret: bool


def inkling_rel_attention(
    q: jax.Array,
    key_cache: jax.Array | PagedKVCache,
    value_cache: jax.Array | None,
    *,
    block_table: jax.Array,
    cache_seqlens: jax.Array,
    cu_seqlens_q: jax.Array,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    rel_extent: int,
    rel_logits: jax.Array | ShearedLogits,
    kv_offset: jax.Array | None = None,
    total_seqlens: jax.Array | None = None,
    plan: BatchPlan | None = None,
    num_splits: int | None = None,
    out: jax.Array | None = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    backend: str = "auto",
    config: Any = None,
    interpret: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns paged, variable-length attention with Inkling's learned relative bias.

    For packed row t = cu_seqlens_q[b] + i of sequence b, head h and key j of its block table::

        dist   = (total_seqlens[b] - q_len + i) - (kv_offset[b] + j)
        bias   = rel_logits[t, h, dist] if 0 <= dist < rel_extent else 0
        logit  = softmax_scale * dot(q[t, h], k[j, h // group]) + bias
        masked : dist < 0 if causal; dist > left or -dist > right; j on a page id outside the pool
        out    = softmax_j(logit) @ v

    Args:
      q: bf16, f16 or f32 [num_tokens, num_heads, head_dim]; rows of all sequences packed.
      key_cache: [num_blocks, block_size, num_kv_heads, head_dim] in the dtype of q; or a `PagedKVCache`, which may have
        another layout.
      value_cache: like key_cache; None with a PagedKVCache.
      block_table: int32[batch, max_blocks]; page ids. Entries past the live pages are never used; the keys of an id
        outside the pool are masked.
      cache_seqlens: int32[batch]; keys in the table, those of the q rows included.
      cu_seqlens_q: int32[batch + 1]; row offsets. Rows past its last entry are padding: they give 0 and -inf.
      max_seqlen_q: static; at least the longest q_len. Rounded up to a power of two inside; rows past that are 0.
      softmax_scale: static; Inkling uses 1 / head_dim. It does not multiply the bias.
      causal: static; hide keys after the query.
      window_size: static (left, right) in keys, -1 for unlimited. A left window keeps dist = left.
      rel_extent: static; distances that have a bias.
      rel_logits: [num_tokens, num_heads, rel_extent] in the dtype of q; or `ShearedLogits` made with these lengths. A
        logit below -1e30 may count as masked in the kernels.
      kv_offset: int32[batch]; position of the first key of the table, for a part of a sequence. Default 0.
      total_seqlens: int32[batch]; length of the whole sequence. Default kv_offset + cache_seqlens.
      plan: from `plan_batch`, shared by the layers of a kind; its lengths are then the ones used.
      num_splits: static upper bound of the parts a sequence's keys are split into; None chooses.
      out: an array like the result; the result uses its buffer when it is donated under jax.jit.
      out_dtype: dtype of the result; default that of q.
      return_lse: also return the log-sum-exp.
      backend: "auto" takes the fastest that can on the device of the arrays, or that a traced call is compiled for, and
        portable for arrays of several devices outside `jax.shard_map`; or a name: "portable", "hopper" or "blackwell",
        which was interpreted and assembled, never run on a card, so that "auto" leaves it out.
      config: a Config of the backend; None chooses.
      interpret: run the named kernel in the Pallas GPU interpreter; portable has no kernel and refuses.

    Returns:
      [num_tokens, num_heads, head_dim], and with return_lse natural-log float32[num_tokens, num_heads]. Rows without a
      key: 0 and -inf.

    Raises:
      ValueError: at trace time, for a wrong shape, dtype or static argument. Contents are made safe, not checked: see
        `check_batch`.
      NotImplementedError: where no (or not the named) backend takes the call, as no kernel takes arrays of several
        devices outside `jax.shard_map`: see `AttentionMesh`. And when differentiated.

    Numerics:
      A row has the same bits in every run of the same batch. With a kernel that splits keys, the lengths of other
      sequences move the cuts and so the last bits of a row; `num_splits=1` keeps each sequence whole.
      float32 scores, softmax and accumulation; weights are rounded to the dtype of the cache before they meet the
      values.

    Example:
      >>> import jax.numpy as jnp, inkling_pallas as ip
      >>> pages = jnp.ones((4, 16, 1, 64), jnp.bfloat16)
      >>> ip.inkling_rel_attention(
      ...     jnp.ones((3, 2, 64), jnp.bfloat16), pages, pages,
      ...     block_table=jnp.array([[2, 0], [3, 1]], jnp.int32), cache_seqlens=jnp.array([20, 7], jnp.int32),
      ...     cu_seqlens_q=jnp.array([0, 2, 3], jnp.int32), max_seqlen_q=2, softmax_scale=1 / 64, causal=True,
      ...     window_size=(-1, -1), rel_extent=8, rel_logits=jnp.zeros((3, 2, 8), jnp.bfloat16)).shape
      (3, 2, 64)
    """
    call = check_call(locals())
    if rel_logits is None:
        raise refuse(
            "rel_logits", "be an array", "None", "It is [num_tokens, num_heads, rel_extent]; see relative_logits()."
        )
    if backend == "auto" and plan is None:
        warn_on_fallback(call.choice, call.place.device)
    require_device(call.choice.backend, call.place, call.interpret)
    run = functools.partial(_jitted_operator, _Static(call.problem, call.choice, call.interpret))
    arrays = (call.operands, call.lengths, call.plan)
    if call.spread is not None:
        run = on_auto_axes(run, arrays, call.operands.q, return_lse)
    other = None
    if call.takes_either:
        other = functools.partial(_jitted_operator, _Static(call.problem, call.elsewhere(), interpret=False))
    result, lse = by_platform(run, other, *arrays)
    return (result, lse) if return_lse else result


def plan_batch(q: Any, key_cache: Any, value_cache: Any, **arguments: Any) -> BatchPlan:
    """Returns what the layers of one kind can share in a step: lengths made safe and the list of work.

    Make one plan for each kind of layer (heads, window and extent differ) and pass it as `plan`, also inside `lax.scan`
    over layers.

    Args:
      q: as in `inkling_rel_attention`; only its shape and dtype count, so a jax.ShapeDtypeStruct will do.
      key_cache: likewise.
      value_cache: likewise.
      **arguments: the other arguments of `inkling_rel_attention`. `softmax_scale` and `rel_logits` may be left out;
        for a plan of calls with ShearedLogits give one, of which only the shapes count: `ShearedLogits.shape`.

    Returns:
      A pytree; its static part is checked against each call.

    Raises:
      ValueError: as `inkling_rel_attention` would.
      NotImplementedError: likewise.

    Example:
      >>> from inkling_pallas.testing.cases import Case, build
      >>> call = build(Case(name="two", kind="example", q_lens=(3, 1), kv_lens=(3, 40)))
      >>> plan = plan_batch(**call)
      >>> inkling_rel_attention(**call, plan=plan).shape
      (4, 8, 128)
    """
    call = check_call(_bound(q, key_cache, value_cache, {"softmax_scale": 1.0, "rel_logits": None, **arguments}))
    if call.interpret:
        require_threads()
    if arguments.get("backend", "auto") == "auto":
        warn_on_fallback(call.choice, call.place.device)
    run = functools.partial(_jitted_plan, call.problem, call.choice, call.interpret)
    return BatchPlan(
        work=by_platform(run, functools.partial(_no_plan, run) if call.takes_either else None, call.lengths),
        problem=planned_problem(call.problem),
        backend=call.choice.backend,
        config=call.choice.config,
    )


def check_batch(q: Any, key_cache: Any, value_cache: Any, **arguments: Any) -> None:
    """Checks on the host everything about a call, contents included.

    Args:
      q: as in `inkling_rel_attention`, as are the others; arrays must be concrete.
      key_cache: its cache of keys.
      value_cache: its cache of values.
      **arguments: its other arguments.

    Raises:
      ValueError: naming the array, the index, the value and the rule. `inkling_rel_attention` itself cannot see
        contents; it only makes them safe.

    Example:
      >>> from inkling_pallas.testing.cases import Case, build
      >>> call = build(Case(name="two", kind="example", q_lens=(3, 1), kv_lens=(3, 40)))
      >>> check_batch(**call)
      >>> check_batch(**{**call, "cache_seqlens": call["cache_seqlens"] + 100})
      Traceback (most recent call last):
      ...
      ValueError: cache_seqlens[0] must lie in [0, 48], the keys its table row can hold; got 103. ...
    """
    bound = _bound(q, key_cache, value_cache, arguments)
    call = check_call(bound)
    check_batch_contents(call.problem, call.operands.block_table, call.lengths, bound["max_seqlen_q"])
    if isinstance(call.operands.rel_logits, ShearedLogits):
        check_shifts(call.operands.rel_logits, call.lengths)
    if call.plan is not None and call.plan.backend == call.choice.backend:
        check_plan(call.plan.work, _jitted_plan(call.problem, call.choice, call.interpret, call.lengths))


def explain(q: Any, key_cache: Any, value_cache: Any, **arguments: Any) -> Explanation:
    """Returns which backend and config a call would take, and why not a faster one.

    Args:
      q: as in `inkling_rel_attention`, as are the others; arrays may be jax.ShapeDtypeStruct.
      key_cache: its cache of keys.
      value_cache: its cache of values.
      **arguments: its other arguments.

    Example:
      >>> from inkling_pallas.testing.cases import Case, build
      >>> call = build(Case(name="two", kind="example", q_lens=(3, 1), kv_lens=(3, 40)))
      >>> explain(**call, backend="portable").backend
      'portable'
    """
    call = check_call(_bound(q, key_cache, value_cache, arguments))
    faster = call.choice.passed_over
    if call.plan is not None and arguments.get("backend", "auto") == "auto":
        # The plan was made with these in mind.
        faster = choose(call.problem, "auto", None, call.spread, call.place.device).passed_over
    return Explanation(
        backend=call.choice.backend,
        config=call.choice.config,
        device=call.place.device.device_kind,
        capability=device_capability(call.place.device),
        passed_over=dict(faster),
    )


def _bound(q: Any, key_cache: Any, value_cache: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a call with the defaults filled in; a wrong name is a TypeError."""
    bound = inspect.signature(inkling_rel_attention).bind(q, key_cache, value_cache, **arguments)
    bound.apply_defaults()
    return bound.arguments


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _jitted_plan(problem: Problem, choice: Choice, interpret: bool, lengths: Lengths) -> Any:
    """Returns what depends on lengths alone."""
    if problem.is_empty:
        return ()
    lengths = lengths._replace(cache_seqlens=for_card(lengths.cache_seqlens, choice.backend, interpret))
    with jax.named_scope("inkling_plan_batch"):
        return load_backend(choice.backend).plan(problem, choice.config, lengths, interpret)


def _no_plan(run: Callable[[Lengths], Any], lengths: Lengths) -> Any:
    """Returns zeros like a plan: the operator makes its own where the plan is of another backend."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run, lengths))


@functools.partial(jax.jit, static_argnums=(0,))
def _jitted_operator(
    static: _Static, operands: Operands, lengths: Lengths, plan: BatchPlan | None
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the chosen backend."""
    problem, choice, interpret = static
    backend, config = choice.backend, choice.config
    operands = _without_derivative(operands)
    if problem.is_empty:
        rows = (problem.num_tokens, problem.num_heads)
        lse = jnp.full(rows, -jnp.inf, jnp.float32) if problem.return_lse else None
        return jnp.zeros((*rows, problem.head_dim), problem.out_dtype), lse
    operands = operands._replace(q=for_card(operands.q, backend, interpret))
    if plan is not None and plan.backend == backend:
        work = plan.work
    else:
        work = _jitted_plan(problem, choice, interpret, lengths)
    with jax.named_scope(f"inkling_rel_attention_{backend}"):
        return load_backend(backend).attend(problem, config, operands, work, interpret)


@jax.custom_jvp
def _without_derivative(operands: Operands) -> Operands:
    """Returns the operands. On them and not on the result: a kernel's references cannot pass through a custom_jvp."""
    return operands


@_without_derivative.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "inkling_rel_attention has no derivative: it is an inference operator over a cache. "
        "Keep it out of jax.grad, jax.jvp and jax.linearize, or put jax.lax.stop_gradient around its inputs."
    )
