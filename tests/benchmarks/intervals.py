"""How often 90 % intervals hold the truth: `sensitivity.query.bootstrap` on simulated AR(1) series.

    python -m tests.benchmarks.intervals [--series 200] [--resamples 500] [--seed 0]

Normal series of mean 0 and variance 1, in up to 512 leaves. Printed, per dependence and length: the share of series
whose interval holds the truth, for the mean, mean |x|, rms, and the share of Σ|x| in that of two series; the median
block; the median inflation. Of 200 series a share of 90 % is known to 4 points (two standard errors).

Then of groups, in series of 20,000 that remember longer: the mean and mean |x| of the group's windows, and by how much
their mean |x| differs from that of all others. Groups are windows chosen at random (2 %), in events (2 %), and in
seasons (a quarter of each of five years).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy import signal

from sensitivity.query.bootstrap import Resampling, interval, resampling, spread

DEPENDENCE, LENGTHS, LEAVES = (0.0, 0.3, 0.5, 0.7, 0.9), (200, 500, 2000, 20000), 512
GROUPED, GROUP_LENGTH = (0.9, 0.99, 0.995, 0.998), 20_000
GROUPS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "random": lambda random: random.random(GROUP_LENGTH) < 0.02,
    "events": lambda random: ar1(0.9, (1, GROUP_LENGTH), random)[0] > 2.05,
    "seasons": lambda random: np.arange(GROUP_LENGTH) % (GROUP_LENGTH // 5) < GROUP_LENGTH // 20,
}
OF_GROUPS = {"mean": 0.0, "mean abs": np.sqrt(2 / np.pi), "difference": 0.0}
STATISTICS = {"mean": 0.0, "mean abs": np.sqrt(2 / np.pi), "rms": 1.0, "share": 0.5}


def ar1(dependence: float, shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """Stationary normal series `(series, time)` of variance 1."""
    noise = random.standard_normal(shape)
    noise[:, 1:] *= np.sqrt(1 - dependence**2)
    return signal.lfilter([1], [1, -dependence], noise, axis=1)


def leaf_sums(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """`(leaf, 5)`: count, Σx, Σ|x|, Σx², Σ|y| of two series `(time,)`."""
    leaves = min(len(first), LEAVES)
    terms = np.stack([np.ones_like(first), first, abs(first), first**2, abs(second)], axis=-1)
    return np.add.reduceat(terms, np.arange(leaves) * len(first) // leaves, axis=0)


def finish(sums: np.ndarray) -> np.ndarray:
    """`(…, 5)` sums → `(…, 4)` statistics, as `STATISTICS` names them."""
    count, total, total_abs, squares, other = np.moveaxis(sums, -1, 0)
    return np.stack([total / count, total_abs / count, np.sqrt(squares / count), total_abs / (total_abs + other)], -1)


def holds(sums: np.ndarray, resamples: int, seed: int, level: float = 0.9) -> tuple[np.ndarray, Resampling]:
    """Whether the intervals of a record hold the truth `(statistic,)`, and how it was resampled."""
    kinds = [sums[:, [column]] / sums[:, :1] for column in (1, 2)]
    how = resampling(kinds, sums[:, 0], resamples, seed)
    low, high = interval(finish(sums.sum(axis=0)), finish(how.weights @ sums), how, level)
    truth = np.array(list(STATISTICS.values()))
    return (low <= truth) & (truth <= high), how


def coverage(
    dependence: float, length: int, series: int, resamples: int, seed: int, hears: Callable[[Resampling], None]
) -> np.ndarray:
    """The share of `series` whose intervals hold the truth `(statistic,)`."""
    random = np.random.default_rng([seed, length, round(100 * dependence)])
    found = []
    for number in range(series):
        held, how = holds(leaf_sums(*ar1(dependence, (2, length), random)), resamples, number)
        found.append(held)
        hears(how)
    return np.mean(found, axis=0)


def finish_group(sums: np.ndarray) -> np.ndarray:
    """`(…, 6)` sums of all windows and of the group's, each count, Σx, Σ|x| → `(…, 3)`, as `OF_GROUPS` names them."""
    count, _, total_abs, members, member_total, member_abs = np.moveaxis(sums, -1, 0)
    of_group, of_others = member_abs / members, (total_abs - member_abs) / (count - members)
    return np.stack([member_total / members, of_group, of_group - of_others], -1)


def group_coverage(dependence: float, group: str, series: int, resamples: int, seed: int) -> np.ndarray:
    """The share of `series` whose intervals hold the truth of a group `(statistic,)`; blocks are those of all."""
    random = np.random.default_rng([seed, list(GROUPS).index(group), round(1000 * dependence)])
    found = []
    for number in range(series):
        values, member = ar1(dependence, (1, GROUP_LENGTH), random)[0], GROUPS[group](random)
        terms = [np.ones_like(values), values, abs(values)]
        terms = np.stack([*terms, *(member * term for term in terms)], axis=-1)
        sums = np.add.reduceat(terms, np.arange(LEAVES) * GROUP_LENGTH // LEAVES, axis=0)
        how = resampling([sums[:, [column]] / sums[:, :1] for column in (1, 2)], sums[:, 0], resamples, number)
        own = replace(how, leaves=spread(sums[:, 3], how.block))
        low, high = interval(finish_group(sums.sum(axis=0)), finish_group(how.weights @ sums), own)
        truth = np.array(list(OF_GROUPS.values()))
        found.append((low <= truth) & (truth <= high))
    return np.mean(found, axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"series": 200, "resamples": 500, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    print("     n   phi " + "".join(f"{name:>10}" for name in STATISTICS) + "  block  inflation")
    for length in LENGTHS:
        for dependence in DEPENDENCE:
            heard: list[Resampling] = []
            found = coverage(dependence, length, given.series, given.resamples, given.seed, heard.append)
            block, inflation = (float(np.median([getattr(how, of) for how in heard])) for of in ("block", "inflation"))
            shares = "".join(f"{share:10.1%}" for share in found)
            print(f"{length:6} {dependence:5} {shares} {block:6g} {inflation:10.2f}", flush=True)
    print("\n group    phi " + "".join(f"{name:>12}" for name in OF_GROUPS))
    for group in GROUPS:
        for dependence in GROUPED:
            found = group_coverage(dependence, group, given.series, given.resamples, given.seed)
            print(f"{group:8} {dependence:5} " + "".join(f"{share:12.1%}" for share in found), flush=True)


if __name__ == "__main__":
    main()
