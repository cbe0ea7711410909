"""Continuous batching on the host: which requests have how many rows in a step, first come, first served."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from inkling_pallas.core.errors import refuse, static_int
from inkling_pallas.serving.page_pool import PagePool
from inkling_pallas.serving.trace import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a step and a request may be at most.

    Attributes:
      token_budget: rows of a step.
      chunk: rows of one request in a step.
      max_seqs: requests of a step.
      max_model_len: tokens of a request, which is what a row of the block table can hold.
    """

    token_budget: int
    chunk: int
    max_seqs: int
    max_model_len: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            static_int(name, value, 1)
        if self.chunk > self.token_budget:
            raise refuse("chunk", f"be at most token_budget, {self.token_budget}", self.chunk, "It is a part of it.")


@dataclasses.dataclass(kw_only=True, eq=False)
class Progress:
    """How far a request has come; the scheduler alone changes it."""

    number: int
    request: Request
    computed: int = 0  # keys in the cache
    generated: int = 0  # tokens sampled

    @property
    def known(self) -> int:
        """Tokens that there are: those of the prompt and those sampled."""
        return self.request.context + self.generated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one request in a step: positions [begin, end)."""

    number: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preemption:
    """A request that gave up its pages for an older one; `print` it."""

    number: int
    pool: str
    num_pages: int
    missing: int
    lost_keys: int

    def __str__(self) -> str:
        return (
            f"pool {self.pool!r} of {self.num_pages} pages is exhausted, {self.missing} short: request {self.number} "
            f"waits, and its {self.lost_keys} keys are computed again."
        )


class Scheduler:
    """Gives each step its rows: running requests in order of arrival, then waiting ones while budget and pages last.

    When a pool is exhausted, the newest running request is preempted as in vLLM: its pages are freed, it goes to the
    head of the queue, and its keys are computed again from its tokens, those it had sampled included. Recomputing needs
    no memory on the host and no copies, and happens in chunks as any prompt does; swapping would need both.
    """

    def __init__(self, requests: Sequence[Request], pools: Mapping[str, PagePool], limits: Limits) -> None:
        self.limits = limits
        self.pools = dict(pools)
        self.running: list[Progress] = []
        self.waiting = collections.deque(Progress(number=i, request=r) for i, r in enumerate(requests))
        self.finished: list[Progress] = []
        self.preemptions: list[Preemption] = []
        for progress in self.waiting:
            self._require_room_alone(progress)

    @property
    def unfinished(self) -> bool:
        """True while a request runs or waits."""
        return bool(self.running or self.waiting)

    def schedule(self) -> tuple[Rows, ...]:
        """Returns the rows of the next step, at least one, and reserves the pages for them."""
        before = len(self.preemptions)
        scheduled: list[Rows] = []
        for progress in tuple(self.running):
            rows = self._rows(progress, scheduled)
            if rows is not None and progress in self.running and self._reserve_or_preempt(progress, rows):
                scheduled.append(rows)
        while self.waiting and len(self.running) < self.limits.max_seqs and len(self.preemptions) == before:
            rows = self._rows(self.waiting[0], scheduled)
            if rows is None or not self._admit(rows):
                break
            scheduled.append(rows)
        return tuple(scheduled)

    def complete(self, scheduled: Sequence[Rows]) -> None:
        """Records that a step has run: its keys are in the cache, and whoever has all of them has sampled a token."""
        by_number = {progress.number: progress for progress in self.running}
        for rows in scheduled:
            progress = by_number[rows.number]
            progress.computed = rows.end
            if progress.computed < progress.known:
                continue
            progress.generated = min(progress.generated + 1, progress.request.generated)
            if progress.generated == progress.request.generated:
                self._stop(progress)
                self.finished.append(progress)

    def _rows(self, progress: Progress, scheduled: Sequence[Rows]) -> Rows | None:
        """Returns what a request can have of the budget that is left, or None where there is none."""
        left = self.limits.token_budget - sum(rows.end - rows.begin for rows in scheduled)
        count = min(progress.known - progress.computed, self.limits.chunk, left)
        if count == 0:
            return None
        return Rows(number=progress.number, begin=progress.computed, end=progress.computed + count)

    def _missing(self, rows: Rows) -> Preemption | None:
        """Reserves the pages of some rows in each pool; returns what is missing in the first that has too few."""
        for name, pool in self.pools.items():
            missing = pool.reserve(rows.number, rows.begin, rows.end - rows.begin)
            if missing:
                facts = {"pool": name, "num_pages": pool.num_pages, "missing": missing}
                return Preemption(number=rows.number, lost_keys=0, **facts)
        return None

    def _reserve_or_preempt(self, progress: Progress, rows: Rows) -> bool:
        """Returns True once the pages are there; False where the request itself was the newest and had to go."""
        while (missing := self._missing(rows)) is not None:
            newest = self.running[-1]
            self.preemptions.append(dataclasses.replace(missing, number=newest.number, lost_keys=newest.computed))
            self._stop(newest)
            newest.computed = 0
            self.waiting.appendleft(newest)
            if newest is progress:
                return False
        return True

    def _admit(self, rows: Rows) -> bool:
        if self._missing(rows) is not None:
            for pool in self.pools.values():
                pool.release(rows.number)
            return False
        self.running.append(self.waiting.popleft())
        return True

    def _stop(self, progress: Progress) -> None:
        self.running.remove(progress)
        for pool in self.pools.values():
            pool.release(progress.number)

    def _require_room_alone(self, progress: Progress) -> None:
        """Raises unless the request fits while no other runs, so that the oldest one always gets on."""
        tokens = progress.request.context + progress.request.generated
        what = f"request {progress.number}"
        if tokens > self.limits.max_model_len:
            rule = f"have at most max_model_len = {self.limits.max_model_len} tokens, prompt and answer together"
            raise refuse(what, rule, tokens, "A longer table takes it.")
        for name, pool in self.pools.items():
            pages = pool.most_pages(tokens, self.limits.chunk)
            if pages > pool.num_pages:
                rule = f"need at most the {pool.num_pages} pages of pool {name!r}"
                raise refuse(what, rule, f"{pages} for {tokens} tokens", "It could not run even alone.")
