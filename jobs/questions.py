"""The commands that ask a run: `query`, `top`, `compare`. Each imports what it needs when it runs."""

from __future__ import annotations

import contextlib
import shlex
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .commands import OneOf, errors_explained, together

if TYPE_CHECKING:
    import xarray as xr

STATISTICS = (
    *("importance", "lag-profile", "mean", "mean-abs", "rms", "std", "min", "max", "share-positive", "summary"),
    *("quantiles", "effective-memory", "gradient-input", "elasticity", "dgsm", "active-subspace", "trend"),
)
RUN = click.argument("run")
STATISTIC = click.argument("statistic", type=OneOf(STATISTICS), metavar="STATISTIC")
ALIGN = click.option(
    "--align",
    type=OneOf(["output", "window"]),
    help="Where lag 0 is. output: at the output's own step, the default where the model has an output at each step of "
    "the window. window: at the window's last step.",
)

selection_options = together(
    click.option("--lags", metavar="LAGS", help="Only these lags: 3, 0,1,5, or 0:24 (both included)."),
    click.option("--features", metavar="NAMES", multiple=True, help="Only these features. May be repeated."),
    click.option("--outputs", metavar="NAMES", multiple=True, help="Only these outputs. May be repeated."),
    click.option("--output-steps", metavar="STEPS", help="Only these output steps, written like lags."),
    ALIGN,
    click.option("--site", "sites", multiple=True, metavar="NAME", help="Only this site. May be repeated."),
    click.option(
        "--columns",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="A CSV or Parquet file with columns of your own to ask by, beside the run's time (and site).",
    ),
)
condition_options = together(
    click.option(
        "--by",
        multiple=True,
        metavar="NAME",
        help="Groups: season, month, hour, weekday, year, site, a column; rain:4 (quantile bins of an input, the "
        "prediction, a column), rain:0,1.5 (edges). May be repeated.",
    ),
    click.option("--where", metavar="EXPRESSION", help='Only windows such as "rain > 0.5 and month in (6, 7, 8)".'),
    click.option("--ci", type=float, metavar="LEVEL", help="Confidence intervals, such as 0.9, by a block bootstrap."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the bootstrap."),
    click.option("--memory", default="1GB", show_default=True, help="What sums may take."),
)
output_options = together(
    click.option(
        "--on",
        "scheduler",
        default="threads",
        show_default=True,
        metavar="WHERE",
        help="What computes it: threads of this process; a Dask cluster, by its scheduler's address, such as "
        "tcp://10.0.0.5:8786; ray, the cluster that this machine is part of; ray:10.0.0.5:6379, another one. Workers "
        "must see RUN, and what it has as its series, under the same path.",
    ),
    click.option(
        "--format",
        "form",
        type=OneOf(["table", "csv", "json", "parquet", "netcdf", "zarr"]),
        help="By default a table, or what the ending of --output says.",
    ),
    click.option("-o", "--output", type=click.Path(path_type=Path), help="Write it here."),
)


@click.command()
@RUN
@STATISTIC
@selection_options
@condition_options
@click.option("--between", nargs=2, metavar="A B", help="The difference of two groups of the first --by.")
@click.option("--at", metavar="SHARES", help="Of quantiles: 0.05,0.5,0.95.")
@click.option("--held", metavar="SHARES", help="Of effective-memory: 0.5,0.9,0.99.")
@click.option("--distribution", multiple=True, metavar="[FEATURE=]NAME", help="Of dgsm: normal, uniform, exponential.")
@click.option("--components", type=int, help="Of active-subspace: how many.")
@click.option("--of", type=OneOf(STATISTICS[:-1]), metavar="STATISTIC", help="Of trend: of what. [mean-abs]")
@click.option("--every", metavar="PERIOD", help="Of trend: year, month, or a number of stretches of time.")
@output_options
@errors_explained
def query(run: str, statistic: str, scheduler: str, form: str | None, output: Path | None, **asked: Any) -> None:
    """A STATISTIC of RUN, in one pass over its store.

    \b
    importance        mean |J| x the input's standard deviation, and its share
    lag-profile       mean, mean |J| and rms of J by lag and feature
    mean, mean-abs, rms, std, min, max, share-positive, summary (all of these)
    quantiles         of J, within 1.6 %
    effective-memory  lags that hold 50, 90, 99 % of |J|
    gradient-input    J x the input; elasticity: that by the prediction
    dgsm              screening index: a bound of the total Sobol index
    active-subspace   directions along which the output moves most
    trend             over the years, of a statistic (--of)

    J is the derivative of an output by an input at a lag, or what else RUN computed: attributions, say.
    Then lags, features and outputs are the dims that play their part: source steps, units or parameters, vectors.
    """
    from sensitivity import query as queries
    from sensitivity.errors import Refused

    from .export import export, require_writable
    from .query_on import on

    require_writable(form, output)
    options = _options(statistic, asked)
    between, by = asked.pop("between"), asked.pop("by")
    if between and statistic == "trend":
        raise Refused("--between", given="between with trend", allowed="no trend", remedy="leave it out")
    with damage_refused(run), on(scheduler):
        dataset, sites = opened(run, asked.pop("sites"), asked.pop("columns"))
        how = {**_selected(asked), "by": _by(by, sites, last=bool(between)), "where": asked["where"]}
        how |= {name: asked[name] for name in ("ci", "seed", "memory")}
        if statistic == "trend":
            found = queries.trend(dataset, **options, **_without_ci(how))
        elif between:
            found = queries.difference(dataset, queries.statistic(statistic, **options), between, **how)
        else:
            made = queries.statistic(statistic, **options)
            found = queries.ask(dataset, [made], **how)[made.name]
        export(found.compute(), form, output)


@click.command()
@RUN
@click.option("--count", type=int, default=10, show_default=True, help="How many windows.")
@click.option("--score", type=OneOf(["max", "sum"]), default="max", show_default=True, help="Largest |J|, or sum.")
@click.option("--separation", metavar="STEPS", help="At least so far apart: windows, or a time such as 3D.")
@click.option("--scaled", is_flag=True, help="|J| x the feature's standard deviation: features can be compared.")
@selection_options
@output_options
@errors_explained
def top(run: str, scheduler: str, form: str | None, output: Path | None, **asked: Any) -> None:
    """The windows of RUN with the largest |J|, no two of the same event.

    JSON, NetCDF and Zarr have each window's input and Jacobian, too.
    """
    from sensitivity import query as queries
    from sensitivity.query.roles import roles_of

    from .export import export_top, require_writable, shows_windows
    from .query_on import on

    require_writable(form, output)
    separation = asked["separation"]
    with damage_refused(run), on(scheduler):
        dataset, _ = opened(run, asked.pop("sites"), asked.pop("columns"))
        found = queries.top(
            queries.with_inputs(dataset) if shows_windows(form, output) and roles_of(dataset).by_input else dataset,
            asked["count"],
            by=asked["score"],
            separation=int(separation) if separation and separation.isdecimal() else separation,
            scaled=asked["scaled"],
            **_selected(asked),
        )
        export_top(found, form, output)


@click.command()
@click.argument("run_a")
@click.argument("run_b")
@click.argument("statistic", type=OneOf(STATISTICS[:-1]), metavar="STATISTIC")
@selection_options
@condition_options
@output_options
@errors_explained
def compare(
    run_a: str, run_b: str, statistic: str, scheduler: str, form: str | None, output: Path | None, **asked: Any
) -> None:
    """A STATISTIC of RUN_A less that of RUN_B: two models, or one in two periods.

    Every difference is A - B, positive where RUN_A has more; pictures of comparisons have the same sign.

    Runs with other lags, features or outputs are refused: choose those that both have.
    """
    from sensitivity import query as queries

    from .export import export, require_writable
    from .query_on import on

    require_writable(form, output)
    with damage_refused(f"{run_a} or {run_b}"), on(scheduler):
        sites, columns = asked.pop("sites"), asked.pop("columns")
        a, b = (opened(run, sites, columns, run)[0] for run in (run_a, run_b))
        by = _by(asked.pop("by"), sites)
        how = {**_selected(asked), **{name: asked[name] for name in ("where", "ci", "seed", "memory")}}
        export(queries.compare(a, b, statistic, by=by, **how).compute(), form, output)


def opened(
    run: str, sites: tuple[str, ...], columns: Path | None, called: str = "the run"
) -> tuple[xr.Dataset, tuple[str, ...]]:
    """The run's dataset, of these sites alone, with columns of the user's; what it lacks is said."""
    from sensitivity import query as queries

    dataset = queries.open_run(run)
    committed = int(dataset["committed"].sum())
    if committed < dataset.sizes["time"]:
        click.echo(
            f"{called} is not complete: {committed:,} of {dataset.sizes['time']:,} windows are committed", err=True
        )
    if sites:
        for site in sites:
            queries.of_site(dataset, site)
        dataset = queries.of_site(dataset, sites[0]) if len(sites) == 1 else dataset.sel(site=list(sites))
    if columns is not None:
        dataset = queries.with_columns(dataset, columns)
    return dataset, sites


def _by(names: tuple[str, ...], sites: tuple[str, ...], *, last: bool = False) -> list[str]:
    """Sites that are named are told apart."""
    own = ["site"] if sites and "site" not in names else []
    return [*names, *own] if last else [*own, *names]


def _selected(asked: dict[str, Any]) -> dict[str, Any]:
    names = {name: list(asked.pop(name)) or None for name in ("features", "outputs")}
    return {name: asked.pop(name) for name in ("lags", "output_steps", "align")} | names


def _options(statistic: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What is for this statistic alone. Raises `Refused` for what is for another."""
    from sensitivity.errors import Refused

    own = {"quantiles": ["at"], "effective-memory": ["held"], "dgsm": ["distribution"], "trend": ["of", "every"]}
    own["active-subspace"] = ["components"]
    given = {name: asked.pop(name) for names in own.values() for name in names}
    given = {name: value for name, value in given.items() if value not in (None, ())}
    for name in given:
        if name not in own.get(statistic, []):
            raise Refused(
                f"--{name}",
                given=f"{name} with {statistic}",
                allowed=f"only {', '.join(one for one, names in own.items() if name in names)}",
                remedy="leave it out",
            )
    return {name: _PARSED.get(name, lambda value: value)(value) for name, value in given.items()}


def _shares(text: str) -> list[float]:
    from sensitivity.errors import Refused

    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise Refused(
            "shares", given=text, allowed="numbers from 0 to 1, joined by commas", remedy="write 0.05,0.5,0.95"
        ) from error


def _distribution(given: tuple[str, ...]) -> dict[str, str]:
    return {name or "*": text for name, _, text in (one.rpartition("=") for one in given)}


_PARSED: dict[str, Callable[[Any], Any]] = {
    "at": _shares,
    "held": _shares,
    "distribution": _distribution,
    "every": lambda text: int(text) if text.isdecimal() else text,
}


def _without_ci(how: dict[str, Any]) -> dict[str, Any]:
    """A trend has an interval of its own, of that level."""
    level = how.pop("ci")
    how.pop("seed")
    return how | ({} if level is None else {"level": level})


@contextlib.contextmanager
def damage_refused(run: str) -> Iterator[None]:
    """A committed chunk that cannot be decoded is told apart from a mistake of ours."""
    from sensitivity.errors import Refused

    try:
        yield
    except Refused:
        raise
    except (RuntimeError, ValueError) as error:
        if not _in_store(error):
            raise
        raise Refused(
            "run directory",
            given=f"{run}, of which a chunk cannot be read ({str(error).strip()})",
            allowed="a store as it was committed",
            remedy=f"sensitivity verify {shlex.quote(run)} names the damaged shards",
        ) from error


def _in_store(error: BaseException) -> bool:
    """Whether it was raised while a chunk was read."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").partition(".")[0] in ("zarr", "numcodecs") for frame in frames)
