"""The `sensitivity` command. Each command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from sensitivity import __version__

from .stopping import GRACE_SECONDS

FAILED, INVALID = 1, 2
TRACEBACKS = "SENSITIVITY_TRACEBACKS"
FORMATS = click.Choice(["table", "csv", "json"])
RUN = click.argument("run")
JOB = click.argument("job", type=click.Path(path_type=Path))

TRUST = click.option("--trust-model", is_flag=True, help="Let Python code run that is stored in the model's file.")


def errors_explained(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a user asked in vain is said on stderr in one screen, with exit status 2; never a traceback."""

    @functools.wraps(command)
    def explained(*args: Any, **kwargs: Any) -> Any:
        from sensitivity.errors import Refused

        try:
            return command(*args, **kwargs)
        except Refused as refusal:
            click.echo(f"sensitivity: {refusal}", err=True)
            sys.exit(INVALID)
        except Exception as error:
            if os.environ.get(TRACEBACKS):
                raise
            reason = str(error).strip() or "no message"
            click.echo(f"sensitivity: {type(error).__name__}: {reason[:1000]}", err=True)
            click.echo(f"Nothing committed is lost. {TRACEBACKS}=1 shows where it happened.", err=True)
            sys.exit(FAILED)

    return explained


def _together(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Several options as one, in the order that help shows them."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


work_options = _together(
    click.option("--retry-failed", is_flag=True, help="Try shards again that were given up."),
    TRUST,
    click.option(
        "--allow-version-change",
        is_flag=True,
        help="Go on with other versions of what computes numbers; it is recorded.",
    ),
    click.option(
        "--autoscale", is_flag=True, help="The cluster adds nodes while workers wait: ask for all of run.workers."
    ),
    click.option(
        "--grace",
        type=click.FloatRange(0, 86_400),
        default=GRACE_SECONDS,
        show_default=True,
        metavar="SECONDS",
        help="Time that shards in hand have to finish after SIGTERM.",
    ),
)
run_options = _together(
    click.option("--address", metavar="A", help="An existing Ray cluster, such as auto or 10.0.0.5:6379."),
    click.option("--serial", is_flag=True, help="One worker in this process, without Ray."),
    click.option("--log-shards", is_flag=True, help="A line of JSON a shard on stderr, in place of progress."),
    work_options,
)
submit_options = _together(
    click.option("--address", metavar="URL", required=True, help="The head's dashboard, such as http://head:8265."),
    click.option("--wait", is_flag=True, help="Show what the job says, and end as it does. Ctrl-C leaves it running."),
    click.option(
        "--shared",
        multiple=True,
        metavar="PATH",
        help="A folder, or URL, that the cluster sees under the same path: what is below it is neither looked for here "
        "nor sent along. May be repeated.",
    ),
    click.option(
        "--code",
        multiple=True,
        type=click.Path(exists=True, path_type=Path),
        help="A further module or package that the model needs. May be repeated.",
    ),
    click.option(
        "--env",
        multiple=True,
        metavar="NAME",
        help="A variable of this environment to pass on, such as AWS_ACCESS_KEY_ID: who sees Ray's dashboard may read "
        "it. May be repeated.",
    ),
    click.option(
        "--install",
        is_flag=True,
        help="Install on the nodes, with pip, what this library depends on, in the versions that are here.",
    ),
    work_options,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sensitivity")
def main() -> None:
    """Derivatives of a time-series model's every output by every input at every lag, for every window of a record.

    Exit status: 0 done, 1 the run ended with shards missing, 2 what was asked is invalid.
    """


@main.command()
@click.argument("path", type=click.Path(path_type=Path), default=Path("sensitivity-demo"))
@errors_explained
def demo(path: Path) -> None:
    """Real data, a model trained on the spot, the whole job on an embedded Ray, tables and pictures in PATH."""
    from .demo import run_demo

    sys.exit(run_demo(path))


@main.command()
@JOB
@TRUST
@errors_explained
def plan(job: Path, trust_model: bool) -> None:
    """Say what JOB would do, and refuse what cannot fit. Writes nothing."""
    from sensitivity.job import Job

    from .describe import described
    from .prepare import prepare

    click.echo(described(prepare(Job.load(job), trust_model=trust_model)))


@main.command()
@JOB
@run_options
@click.option("--copy-series", is_flag=True, help="Keep a series in a new run that workers could read where it is.")
@errors_explained
def run(job: Path, **how: Any) -> None:
    """Run JOB to the end; on an existing run of the same job, only what is missing."""
    from sensitivity.job import Job

    from .driver import How, run_job
    from .status import conclude

    sys.exit(conclude(run_job(Job.load(job), How(**how))))


@main.command()
@JOB
@submit_options
@errors_explained
def submit(job: Path, **how: Any) -> None:
    """Run JOB on a Ray cluster that is elsewhere, as a job of Ray's: it goes on when this machine is away.

    The job's local files, its model's code and this version of the library go along; the run directory is a URL, or
    below a --shared folder. Submitted again, it computes what is missing. --wait ends as the run does, and with 130 on
    Ctrl-C, which leaves the job running.
    """
    from .submit import How
    from .submit import submit as submit_job

    sys.exit(submit_job(job, How(**how)))


@main.command()
@RUN
@run_options
@errors_explained
def resume(run: str, **how: Any) -> None:
    """Finish RUN from its own directory, without the job file."""
    from .driver import How
    from .driver import resume as resume_run
    from .status import conclude

    sys.exit(conclude(resume_run(run, How(**how))))


@main.command()
@RUN
@click.option("--watch", is_flag=True, help="Show it again --every so often, until the run ends.")
@click.option(
    "--every", type=click.FloatRange(0.1), default=5.0, show_default=True, metavar="SECONDS", help="With --watch."
)
@errors_explained
def status(run: str, watch: bool, every: float) -> None:
    """Shards done, failed and missing, rate and time left, workers and their settings; also while RUN is at work."""
    from sensitivity.store import Run

    from .status import look
    from .status import watch as watch_run

    if watch:
        sys.exit(watch_run(Run.open(run), every))
    click.echo(look(Run.open(run)).text)


@main.command()
@RUN
@click.option("--repair", is_flag=True, help="Make damaged shards missing, for resume to compute; restore the rest.")
@errors_explained
def verify(run: str, repair: bool) -> None:
    """Re-read every committed chunk of RUN against its checksum; exit status 1 where one is damaged."""
    from sensitivity.store import Run

    from .verify import verify_run

    sys.exit(verify_run(Run.open(run, to_mend=True), repair=repair))


@main.command()
@RUN
@click.argument("statistic", type=click.Choice(["importance", "lag-profile"]))
@click.option("--format", "form", type=FORMATS, default="table", show_default=True)
@click.option("--site", "sites", multiple=True, metavar="NAME", help="Of this site by itself. May be repeated.")
@click.option(
    "--on",
    "where",
    default="threads",
    show_default=True,
    metavar="WHERE",
    help="What computes it: threads of this process; a Dask cluster, by its scheduler's address, such as "
    "tcp://10.0.0.5:8786; ray, the cluster that this machine is part of; ray:10.0.0.5:6379, another one. Workers must "
    "see RUN, and what it has as its series, under the same path.",
)
@errors_explained
def query(run: str, statistic: str, form: str, sites: tuple[str, ...], where: str) -> None:
    """A STATISTIC of RUN, in one pass over its store."""
    import sensitivity.query as queries

    from .query_on import on
    from .tables import render

    with _damage_refused(run):
        dataset = queries.open_run(run)
    committed = int(dataset["committed"].sum())
    if committed < dataset.sizes["time"]:
        click.echo(
            f"the run is not complete: {committed:,} of {dataset.sizes['time']:,} windows are committed", err=True
        )
    with _damage_refused(run), on(where):
        wanted = queries.asking(statistic)
        found = (queries.of_sites(wanted, dataset, sites) if sites else wanted(dataset)).compute()
    click.echo(render(queries.rows(found), form))


@main.command()
@RUN
@click.argument("kind", type=click.Choice(["lag-profile", "heatmap"]))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="PNG, SVG or PDF file."
)
@click.option("--site", metavar="NAME", help="Of this site alone.")
@errors_explained
def plot(run: str, kind: str, output: Path, site: str | None) -> None:
    """Draw a picture of RUN into a file."""
    from sensitivity.errors import Refused
    from sensitivity.plots import plot as draw
    from sensitivity.query import of_site, open_run

    if output.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise Refused(
            "--output", given=output, allowed="a file ending in .png, .svg or .pdf", remedy="change its ending"
        )
    if not output.absolute().parent.is_dir():
        raise Refused("--output", given=output, allowed="a file in an existing directory", remedy="make the directory")
    with _damage_refused(run):
        dataset = open_run(run)
        draw(dataset if site is None else of_site(dataset, site), kind, output)
    click.echo(str(output))


@contextlib.contextmanager
def _damage_refused(run: str) -> Iterator[None]:
    """A committed chunk that cannot be decoded is told apart from a mistake of ours."""
    from sensitivity.errors import Refused

    try:
        yield
    except Refused:
        raise
    except (RuntimeError, ValueError) as error:
        raise Refused(
            "run directory",
            given=f"{run}, of which a chunk cannot be read ({str(error).strip()})",
            allowed="a store as it was committed",
            remedy=f"sensitivity verify {shlex.quote(run)} names the damaged shards",
        ) from error


if __name__ == "__main__":  # as a submitted job starts it
    main()
