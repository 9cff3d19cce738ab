"""Questions to a store: any set of statistics, for any groups of windows, in one pass."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xarray as xr

from ..errors import Refused, suggested
from ..sections import parse_bytes
from . import screening, statistics, subspace
from .alignment import aligned
from .conditions import By
from .intervals import Sure
from .naming import named, noted, shared_by
from .near_zero import near_zero
from .question import Question, answered_together, question
from .roles import restored, roles_of
from .statistics import Statistic

FACTORIES: dict[str, Callable[..., Statistic]] = {
    "importance": statistics.importance,
    "lag-profile": statistics.lag_profile,
    "mean": statistics.mean,
    "mean-abs": statistics.mean_abs,
    "rms": statistics.rms,
    "std": statistics.std,
    "min": statistics.minimum,
    "max": statistics.maximum,
    "share-positive": statistics.share_positive,
    "summary": statistics.summary,
    "quantiles": statistics.quantiles,
    "effective-memory": statistics.effective_memory,
    "gradient-input": statistics.gradient_input,
    "elasticity": statistics.elasticity,
    "dgsm": screening.dgsm,
    "active-subspace": subspace.active_subspace,
}
MEMORY = "1GB"


def statistic(name: str, **options: Any) -> Statistic:
    """A statistic by its name, with its options. Raises `Refused` for another name."""
    made = FACTORIES.get(name.replace("_", "-"))
    if made is None:
        raise Refused(
            "statistic",
            given=name,
            allowed=", ".join(FACTORIES),
            remedy=suggested(name, FACTORIES, "ask for one of these"),
        )
    return made(**options)


def ask(
    dataset: xr.Dataset,
    names: Sequence[str | Statistic],
    *,
    by: By = None,
    where: str | None = None,
    lags: Any = None,
    features: Any = None,
    outputs: Any = None,
    output_steps: Any = None,
    ci: float | None = None,
    seed: int = 0,
    memory: str | int = MEMORY,
    align: str | None = None,
) -> dict[str, xr.Dataset]:
    """Any set of statistics of a run's dataset in one pass over its store: lazy datasets by the statistics' names.

    dataset: what `open_run` returned, or a selection of it. names: of `FACTORIES`, or `Statistic`s.
    by: groups of windows, a dimension each: "season", "month", "hour", "weekday", "year", "site", any coordinate along
        time; "rain:4", "prediction:3": quantile bins of an input at the window's last step, of the prediction, or of a
        numeric coordinate; "rain:0,1.5": bins with these edges. Quantiles are those of all windows of the dataset,
        and read when the question is put. Where a feature has a name of the calendar's, the calendar is meant.
    where: only windows for which this holds, such as "rain > 0.5 and month in (6, 7, 8)".
    lags: "0:24" (both included), or a list; features, outputs, output_steps: lists of labels.
    ci: level of confidence intervals, such as 0.9: `NAME_low` and `NAME_high` beside every variable but counts and
        extremes, by a block bootstrap that respects serial dependence, drawn from `seed`.
    memory: what sums may take, in bytes or as "2GB". Raises `Refused` where they would take more.
    align: what lags count back from: "output", the output's own step, or "window", the window's last one. By default
        the first where outputs stand at steps of the window: then only entries that exist count, and others are NaN.

    Each dataset has `count`: how many windows its values are from, which are those that are committed, whole, and
    chosen. The attribute `windows` says how many the dataset has, `committed` how many of these are committed.
    """
    how = {"by": by, "where": where, "lags": lags, "features": features, "outputs": outputs}
    how |= {"output_steps": output_steps, "ci": ci, "seed": seed, "memory": memory, "align": align}
    return ask_together(dataset, [{"names": names, **how}])[0]


def ask_together(dataset: xr.Dataset, each: Sequence[Mapping[str, Any]]) -> list[dict[str, xr.Dataset]]:
    """Several questions to one dataset, each the arguments of `ask`: blocks that several need are read once for all.

    They need the same where they are about the same lags, features, outputs and output steps.
    """
    found = answers(dataset, [put(dataset, **one) for one in each])
    return [{name: restored(answer) for name, answer in several.items()} for several in found]


def answers(dataset: xr.Dataset, asked: Sequence[Question]) -> list[dict[str, xr.Dataset]]:
    """Those to several questions that were `put` to the dataset, by the dims that stand for the dataset's own."""
    known, features = facts(dataset), _features(dataset)
    found = zip(asked, answered_together(asked), strict=True)
    return [
        {
            made.name: _named(_doubted(answer, made, one), made, one, features).assign_attrs(known)
            for made, answer in zip(one.statistics, several, strict=True)
        }
        for one, several in found
    ]


def _doubted(answer: xr.Dataset, made: Statistic, asked: Question) -> xr.Dataset:
    """An elasticity with the share of outputs that are near zero, which it divides by."""
    return answer.assign(near_zero=near_zero(asked.dataset, asked.codes)) if made.name == "elasticity" else answer


def _named(answer: xr.Dataset, made: Statistic, asked: Question, features: int) -> xr.Dataset:
    """With words of its own; it is noted where a share is of a selection of the features, or of one alone."""
    chosen = asked.dataset
    found = named(answer, made.words, chosen).assign_attrs(asked.roles | answer.attrs)
    some = made.name == "importance" and chosen.sizes["feature"] < max(2, features)
    return noted(found, f"share: of the importance of {shared_by(chosen)}" if some else "")


def _features(dataset: xr.Dataset) -> int:
    """How many labels the role of features has, before any are chosen."""
    own = ("feature",) if "roles" in dataset.attrs else roles_of(dataset).of("feature")
    return math.prod(dataset.sizes.get(dim, 1) for dim in own)


def put(
    dataset: xr.Dataset,
    names: Sequence[str | Statistic],
    by: By = None,
    where: str | None = None,
    lags: Any = None,
    features: Any = None,
    outputs: Any = None,
    output_steps: Any = None,
    ci: float | None = None,
    seed: int = 0,
    memory: str | int = MEMORY,
    align: str | None = None,
) -> Question:
    """One question, its arguments as of `ask`, with nothing read but what bins need. Raises `Refused` as `ask` does."""
    chosen = tuple(statistic(name) if isinstance(name, str) else name for name in names)
    if len({one.name for one in chosen}) < len(chosen):
        given = ", ".join(one.name for one in chosen)
        raise Refused("names", given=given, allowed="each statistic once", remedy="ask twice, with ask_together")
    room = memory if isinstance(memory, int) else parse_bytes(memory)
    part, alignment = aligned(dataset, align, lags, features, outputs, output_steps)
    return question(part, chosen, by, where, None if ci is None else Sure(ci, seed), room, alignment=alignment)


def facts(dataset: xr.Dataset) -> dict[str, Any]:
    committed = dataset["committed"] if "committed" in dataset.coords else dataset["time"].notnull()
    facts = {"windows": dataset.sizes["time"], "committed": int(committed.sum())}
    return facts | ({"run": dataset.attrs["run"]} if "run" in dataset.attrs else {})


def asking(name: str) -> Callable[..., xr.Dataset]:
    """The function that asks for one statistic by itself."""
    factory = FACTORIES[name]
    own = set(inspect.signature(factory).parameters)

    def asked(dataset: xr.Dataset, **options: Any) -> xr.Dataset:
        made = factory(**{key: options.pop(key) for key in own & {*options}})
        return ask(dataset, [made], **options)[name]

    asked.__name__ = asked.__qualname__ = factory.__name__
    asked.__doc__ = (
        f"{factory.__doc__}\n\n    Lazy. Further arguments (by, where, lags, features, …) are those of `ask`.\n    "
    )
    return asked
