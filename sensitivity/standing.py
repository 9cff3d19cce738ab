"""Where a run stands, however many shards it has.

Commit records are the only truth, but of a million of them nobody wants to read each. The driver keeps what every full
page of `PAGE` shards adds up to, together with the versions that its records had. While a listing says that they have
them still, a page stands for its records; otherwise they are read. Pages may be thrown away at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from .checksums import SEAL, seal
from .commits import Chunks, Commit, Odd, each_record, listed_shards, record_name
from .lease import LeaseLost
from .store import COMMITS, PAGES, Run
from .tally import Tally, sum_up

PAGE = 1000


@dataclass(frozen=True)
class Page:
    """What `PAGE` shards add up to, all of them done, while their records have that version."""

    number: int
    version: str
    tally: Tally


@dataclass(frozen=True)
class Standing:
    """done: which shards are committed, bool `(shard)`. tally: of those. unkept: pages that no file stands for."""

    done: np.ndarray
    tally: Tally
    unkept: tuple[Page, ...] = ()


def stand(run: Run, hear: Callable[[Odd], None] | None = None) -> Standing:
    """Where the run stands now. hear: is told of records that do not count.

    Listings, one small file a full page, and one a shard that is done on others.
    """
    chunks = Chunks(run)  # first: of what is committed meanwhile they are looked for one by one
    book = _Book(run, run.place.versions(COMMITS))
    done = np.zeros(run.layout.shard_count, bool)
    unkept: list[Page] = []

    def tallies() -> Iterator[Tally]:
        for number, kept in book.pages():
            shards = slice(*book.bounds(number))
            if kept is not None and chunks.hold(shards.start, shards.stop):
                done[shards] = True
                yield kept.tally
                continue
            records = list(book.records(number, chunks, hear))
            done[[record.shard for record in records]] = True
            tally = sum_up(map(Tally.of, records))
            version = book.version(number)
            if keeps_pages(run) and version is not None and done[shards].all():
                unkept.append(Page(number, version, tally))
            yield tally

    return Standing(done, sum_up(tallies()), tuple(unkept))


class _Book:
    """The pages of a run, held against the versions of its commit records, listed before they are read."""

    def __init__(self, run: Run, versions: Mapping[str, str]) -> None:
        self._run, self._versions = run, versions
        self._count = run.layout.shard_count
        self._there = sorted({index // PAGE for index in listed_shards(versions, self._count)})

    def bounds(self, number: int) -> tuple[int, int]:
        """The shards `[first, stop)` of a page."""
        return number * PAGE, min((number + 1) * PAGE, self._count)

    def records(
        self, number: int, chunks: Chunks | None = None, hear: Callable[[Odd], None] | None = None
    ) -> Iterator[Commit]:
        """The page's records that count."""
        listed = [index for index in range(*self.bounds(number)) if record_name(index) in self._versions]
        for record in each_record(self._run, chunks, listed):
            if isinstance(record, Commit):
                yield record
            elif hear is not None:
                hear(record)

    def pages(self) -> Iterator[tuple[int, Page | None]]:
        """The number of every page that has a record, with the page where a file that is up to date keeps it."""
        names = set(self._run.place.names(PAGES)) if keeps_pages(self._run) else set()
        kept = [number for number in self._there if _page_name(number) in names]
        found = iter(self._run.place.each(self._read, kept))
        return ((number, next(found) if _page_name(number) in names else None) for number in self._there)

    def _read(self, number: int) -> Page | None:
        version = self.version(number)
        content = self._run.place.read_json(f"{PAGES}/{_page_name(number)}") if version else None
        if version is None or content is None or content.get("version") != version:
            return None
        try:
            return Page(number, version, Tally.from_json(content["tally"])) if content[SEAL] == seal(content) else None
        except (KeyError, TypeError, ValueError):  # of another version of ours
            return None

    def version(self, number: int) -> str | None:
        """What changes with any of a page's records; None where one is not there."""
        try:
            found = [self._versions[record_name(index)] for index in range(*self.bounds(number))]
        except KeyError:
            return None
        return hashlib.blake2b("\n".join(found).encode(), digest_size=16).hexdigest()


def keeps_pages(run: Run) -> bool:
    """Whether there is more than one: few records are read as fast."""
    return run.layout.shard_count > PAGE


def _page_name(number: int) -> str:
    return f"{number:08d}.json"


class Keeper:
    """Keeps pages in the background as shards are committed. Only for the run's driver.

    A page that cannot be kept costs readers time and nothing else.
    """

    def __init__(self, run: Run, standing: Standing) -> None:
        self._run = replace(run, place=run.place.once())
        self._keeps = keeps_pages(run)
        starts = np.arange(0, len(standing.done), PAGE)
        self._missing = np.add.reduceat(~standing.done, starts, dtype=np.int64)
        self._pool = ThreadPoolExecutor(1)
        for page in standing.unkept:
            self._pool.submit(self._keep, page)

    def heard(self, shard: int) -> None:
        """A shard that was missing is committed now."""
        number = shard // PAGE
        self._missing[number] -= 1
        if self._keeps and self._missing[number] == 0:
            self._pool.submit(self._add_up, number)

    def close(self, *, hurry: bool = False) -> None:
        """Wait until what is full is kept, or, in a hurry, until the page in hand is."""
        self._pool.shutdown(cancel_futures=hurry)

    def _add_up(self, number: int) -> None:
        book = _Book(self._run, {})
        first, stop = book.bounds(number)
        with contextlib.suppress(OSError, LeaseLost):
            book = _Book(self._run, self._run.place.versions(COMMITS, map(record_name, range(first, stop))))
            version, records = book.version(number), list(book.records(number))
            if version is not None and len(records) == stop - first:
                self._keep(Page(number, version, sum_up(map(Tally.of, records))))

    def _keep(self, page: Page) -> None:
        content = {"version": page.version, "tally": page.tally.to_json()}
        with contextlib.suppress(OSError, LeaseLost):
            self._run.place.write_json(f"{PAGES}/{_page_name(page.number)}", {**content, SEAL: seal(content)})
