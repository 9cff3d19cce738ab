"""The highest scores of windows that stand apart, exactly, from candidates found part by part.

Greedy: the highest score first, then the highest among the windows at least a separation away from every pick of the
same site, and so on; of equal scores the window that stands first. Which windows can never be picked is told from any
part of a record:

Cut each site into half-open cells one separation long, aligned to absolute places. What a pick rules out, itself
included, lies less than a separation from it: in its own cell and the two beside it. So k - 1 picks touch at most
3k - 3 cells, and of the best windows of any 3k - 2 cells at least one is left: the k-th pick comes no later than the
last of them in the order of scores, nor do the picks before it. All that comes later can be dropped, and dropping it
changes no pick, as none of it is ever the best one left. What is kept lies in at most 3k - 2 cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np


@dataclass(frozen=True)
class Rule:
    """How many windows are picked and the separation of those of a site, at least 1, in units of their places."""

    count: int
    separation: int


@dataclass(frozen=True)
class Candidates:
    """Windows that may be picked, all `(candidate)`: number in the dataset, finite score, site, place in the site.

    int64, float64, int64, int64.
    """

    window: np.ndarray
    score: np.ndarray
    site: np.ndarray
    place: np.ndarray

    def __len__(self) -> int:
        return len(self.window)

    def at(self, chosen: np.ndarray) -> Candidates:
        return Candidates(self.window[chosen], self.score[chosen], self.site[chosen], self.place[chosen])


def merged(parts: Sequence[Candidates], rule: Rule) -> Candidates:
    """What may still be picked of several parts of a record."""
    joined = zip(*(astuple(part) for part in parts), strict=True)
    return thinned(Candidates(*(np.concatenate(columns) for columns in joined)), rule)


def thinned(found: Candidates, rule: Rule) -> Candidates:
    """`found` without what is never picked, best first."""
    order = np.lexsort((found.window, -found.score))
    cell = found.place[order] // rule.separation
    best = _firsts(found.site[order], cell)
    enough = 3 * rule.count - 2
    return found.at(order[: best[enough - 1] + 1] if len(best) >= enough else order)


def _firsts(site: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Where each cell of a site appears first, rising."""
    line = np.lexsort((cell, site))
    new = np.ones(len(line), bool)
    new[1:] = (site[line][1:] != site[line][:-1]) | (cell[line][1:] != cell[line][:-1])
    return np.sort(line[new])


def picked(found: Candidates, rule: Rule) -> Candidates:
    """The picks, best first; `found` is best first, as `thinned` leaves it."""
    line = np.lexsort((found.place, found.site))
    sites, places = found.site[line], found.place[line]
    picks: list[int] = []
    free, best = np.ones(len(found), bool), 0
    while len(picks) < rule.count and free[best:].any():
        best += int(free[best:].argmax())
        picks.append(best)
        near = _near(sites, places, found.site[best], int(found.place[best]), rule.separation)
        free[line[near]] = False
    return found.at(np.array(picks, np.int64))


def _near(sites: np.ndarray, places: np.ndarray, site: int, place: int, separation: int) -> slice:
    """Of windows ordered by site and place: those of `site` less than a separation from `place`."""
    start, stop = (int(np.searchsorted(sites, site, side)) for side in ("left", "right"))
    limits, less = np.iinfo(np.int64), separation - 1
    first = np.searchsorted(places[start:stop], max(place - less, limits.min), "left")
    end = np.searchsorted(places[start:stop], min(place + less, limits.max), "right")
    return slice(start + int(first), start + int(end))
