"""Pages of one kind of layer on the host: who owns which, and what a sliding window gives back."""

from collections.abc import Hashable

from inkling_pallas.core.errors import static_int


class PageOwnershipError(RuntimeError):
    """A page with two owners, with none, or with an owner that does not know of it; the message names the page."""


class PagePool:
    """Hands out pages 1 .. num_pages and takes them back; page 0 belongs to nobody and stands for a page given back.

    A sequence is any hashable. Its table has one entry per page of keys, from its first key on.

    Attributes:
      num_pages: pages that can be owned.
      block_size: tokens of a page.
      window_left: keys that a row sees before its own, or None for all.
      peak: the most pages that were owned at once.
    """

    def __init__(self, *, num_pages: int, block_size: int, window_left: int | None = None) -> None:
        self.num_pages = static_int("num_pages", num_pages, 1)
        self.block_size = static_int("block_size", block_size, 1)
        self.window_left = window_left
        self.peak = 0
        self._free = list(range(num_pages, 0, -1))
        self._owner: dict[int, Hashable] = {}
        self._tables: dict[Hashable, list[int]] = {}

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Pages that are owned."""
        return len(self._owner)

    def table(self, sequence: Hashable) -> list[int]:
        """Returns a copy of a sequence's page ids; 0 where the window has left a page behind."""
        return list(self._tables.get(sequence, ()))

    def most_pages(self, keys: int, rows: int) -> int:
        """Returns how many pages a sequence can own at once that grows to `keys`, at most `rows` in a step."""
        whole = -(-keys // self.block_size)
        if self.window_left is None:
            return whole
        return min(whole, -(-(self.window_left + rows) // self.block_size) + 1)

    def reserve(self, sequence: Hashable, computed: int, rows: int) -> int:
        """Makes room for a step of a sequence: gives back what its window has left, then takes what its rows need.

        Args:
          sequence: the owner.
          computed: keys that it has.
          rows: keys that the step adds.

        Returns:
          0, or how many pages are missing; then none was taken.
        """
        table = self._tables.get(sequence, [])
        if self.window_left is not None:
            self._give_back(sequence, table, max(0, computed - self.window_left) // self.block_size)
        needed = -(-(computed + rows) // self.block_size) - len(table)
        if needed > len(self._free):
            return needed - len(self._free)
        for _ in range(needed):
            page = self._free.pop()
            self._owner[page] = sequence
            table.append(page)
        if table:
            self._tables[sequence] = table
        self.peak = max(self.peak, self.in_use)
        return 0

    def release(self, sequence: Hashable) -> None:
        """Takes back all pages of a sequence; one that has none may be released, too."""
        table = self._tables.pop(sequence, [])
        self._give_back(sequence, table, len(table))

    def check(self) -> None:
        """Raises PageOwnershipError unless every page is either free or owned by one sequence, whose table has it."""
        held = {}
        for sequence, table in self._tables.items():
            for page in filter(None, table):
                if page in held:
                    raise PageOwnershipError(f"page {page} is owned twice: by {held[page]!r} and by {sequence!r}.")
                held[page] = sequence
        if held != self._owner:
            page, owner = next(iter(set(held.items()) ^ set(self._owner.items())))
            raise PageOwnershipError(f"page {page} of {owner!r} is in its table or in the list of owners, not in both.")
        if both := held.keys() & set(self._free):
            raise PageOwnershipError(f"page {min(both)} is free and owned by {held[min(both)]!r} at once.")
        if len(self._free) != len(set(self._free)) or len(held) + len(self._free) != self.num_pages:
            count = f"{len(held)} owned and {len(self._free)} free"
            raise PageOwnershipError(f"a page has leaked or is free twice: {count} of {self.num_pages}.")

    def _give_back(self, sequence: Hashable, table: list[int], end: int) -> None:
        """Frees the pages of entries [0, end) that are still owned, the last of them first."""
        for index in range(min(end, len(table)) - 1, -1, -1):
            page = table[index]
            if page == 0:
                return  # What lies before a page that was given back was given back, too.
            if self._owner.get(page) != sequence:
                owner = self._owner.get(page)
                raise PageOwnershipError(f"page {page} is given back by {sequence!r}; its owner is {owner!r}.")
            del self._owner[page]
            self._free.append(page)
            table[index] = 0
