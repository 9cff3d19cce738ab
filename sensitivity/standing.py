"""Where a run stands, however many shards it has.

Commit records are the only truth, but of a million of them nobody wants to read each. The driver keeps what every full
page of `PAGE` shards adds up to, together with the versions that its records had. While a listing says that they have
them still, a page stands for its records; otherwise they are read. Pages may be thrown away at any time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
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
class Standing:
    """done: which shards are committed, bool `(shard)`. tally: of those. unkept: full pages that no file stands for."""

    done: np.ndarray
    tally: Tally
    unkept: tuple[int, ...] = ()


def stand(run: Run, hear: Callable[[Odd], None] | None = None) -> Standing:
    """Where the run stands now. hear: is told of records that do not count.

    Listings, one small file a full page, and one a shard that is done on others. Dims: see `Standing`.
    """
    chunks = Chunks(run)  # first: of what is committed meanwhile they are looked for one by one
    versions = run.place.versions(COMMITS)
    book = _Book(run, versions)
    done = np.zeros(run.layout.shard_count, bool)
    tallies, unkept = [], []
    for page, known in book.pages():
        first, stop = book.bounds(page)
        if known is not None and chunks.hold(first, stop):
            tallies.append(known)
            done[first:stop] = True
            continue
        records = [Tally()]
        for record in each_record(run, chunks, book.listed(page)):
            if isinstance(record, Commit):
                done[record.shard] = True
                records.append(Tally.of(record))
            elif hear is not None:
                hear(record)
        tallies.append(sum_up(records))
        if book.keeps and done[first:stop].all():
            unkept.append(page)
    return Standing(done, sum_up(tallies), tuple(unkept))


class _Book:
    """The pages of a run, held against the versions of its commit records."""

    def __init__(self, run: Run, versions: Mapping[str, str]) -> None:
        self._run, self._versions = run, versions
        self._count = run.layout.shard_count
        self.keeps = keeps_pages(run)
        self._there = sorted({index // PAGE for index in listed_shards(versions, self._count)})

    def bounds(self, page: int) -> tuple[int, int]:
        """The shards `[first, stop)` of a page."""
        return page * PAGE, min((page + 1) * PAGE, self._count)

    def listed(self, page: int) -> list[int]:
        """The page's shards that have a record."""
        return [index for index in range(*self.bounds(page)) if record_name(index) in self._versions]

    def pages(self) -> Iterable[tuple[int, Tally | None]]:
        """Every page that has a record, with its tally where a file that is up to date keeps it."""
        names = set(self._run.place.names(PAGES)) if self.keeps else set()
        kept = [page for page in self._there if _page_name(page) in names]
        tallies = dict(zip(kept, self._run.place.each(self._read, kept), strict=True))
        return ((page, tallies.get(page)) for page in self._there)

    def _read(self, page: int) -> Tally | None:
        version = self.version(page)
        content = self._run.place.read_json(f"{PAGES}/{_page_name(page)}") if version else None
        if content is None or content.get("version") != version or content.get(SEAL) != seal(content):
            return None
        return Tally.from_json(content["tally"])

    def version(self, page: int) -> str | None:
        """What changes with any of a page's records; None where one is not there."""
        first, stop = self.bounds(page)
        try:
            found = [self._versions[record_name(index)] for index in range(first, stop)]
        except KeyError:
            return None
        return hashlib.blake2b("\n".join(found).encode(), digest_size=16).hexdigest()

    def write(self, page: int) -> None:
        """Keep a full page: of records as they were listed before they are read."""
        version = self.version(page)
        records = [record for record in each_record(self._run, shards=self.listed(page)) if isinstance(record, Commit)]
        first, stop = self.bounds(page)
        if version is None or len(records) < stop - first:
            return
        content = {"version": version, "tally": sum_up(map(Tally.of, records)).to_json()}
        content = json.loads(json.dumps(content))  # tuples are lists from here on, as for whoever reads it
        self._run.place.write_json(f"{PAGES}/{_page_name(page)}", {**content, SEAL: seal(content)})


def keeps_pages(run: Run) -> bool:
    """Whether there is more than one: few records are read as fast."""
    return run.layout.shard_count > PAGE


def _page_name(page: int) -> str:
    return f"{page:08d}.json"


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
        page = shard // PAGE
        self._missing[page] -= 1
        if self._keeps and self._missing[page] == 0:
            self._pool.submit(self._keep, page)

    def close(self) -> None:
        """Wait until what is full is kept."""
        self._pool.shutdown()

    def _keep(self, page: int) -> None:
        book = _Book(self._run, {})
        try:
            names = [record_name(index) for index in range(*book.bounds(page))]
            _Book(self._run, self._run.place.versions(COMMITS, names)).write(page)
        except (OSError, LeaseLost):
            pass
