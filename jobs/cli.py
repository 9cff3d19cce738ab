"""The `sensitivity` command. Each command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from sensitivity import __version__

from .commands import TRUST, Commands, OneOf, errors_explained, together
from .questions import ALIGN, RUN, compare, damage_refused, query, top
from .recurrent import recurrent
from .reports import report
from .stopping import GRACE_SECONDS

PICTURES = [
    *("lag-profile", "lag-band", "heatmap", "time-lag", "month-lag", "importance", "step-lag"),
    *("window", "distribution", "comparison"),
]
JOB = click.argument("job", type=click.Path(path_type=Path))


work_options = together(
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
run_options = together(
    click.option("--address", metavar="A", help="An existing Ray cluster, such as auto or 10.0.0.5:6379."),
    click.option("--serial", is_flag=True, help="One worker in this process, without Ray."),
    click.option("--log-shards", is_flag=True, help="A line of JSON a shard on stderr, in place of progress."),
    work_options,
)
submit_options = together(
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


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
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


for command in (query, top, compare, recurrent, report):
    main.add_command(command)


@main.command()
@RUN
@click.argument("kind", type=OneOf(PICTURES), metavar="KIND")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="PNG, SVG or PDF file."
)
@click.option("--site", metavar="NAME", help="Of this site alone.")
@click.option("--feature", "features", multiple=True, metavar="NAME", help="Of this feature alone. May be repeated.")
@click.option("--of", "outputs", multiple=True, metavar="NAME", help="Of this output alone. May be repeated.")
@click.option("--time", metavar="TIME", help="window: the one whose last step this is, in place of the largest |J|.")
@click.option("--against", metavar="RUN", help="comparison: the run to set beside RUN.")
@ALIGN
@errors_explained
def plot(
    run: str,
    kind: str,
    output: Path,
    site: str | None,
    time: str | None,
    against: str | None,
    align: str | None,
    **chosen: Any,
) -> None:
    """Draw a picture of RUN into a file, in one pass over its store.

    \b
    KIND is one of
      lag-profile   mean |J| × the input's std by lag, a line for each feature
      lag-band      the same with bands that hold half, and nine tenths, of all windows
      heatmap       lag × feature
      time-lag      time × lag, of a record of any length
      month-lag     month × lag; by season where months have few windows
      importance    a bar for each feature; of a Hessian a matrix of feature pairs
      step-lag      output step × lag, of a model with several output steps
      window        one window: its input, its prediction, its derivatives
      distribution  of J over windows and lags, for each feature
      comparison    RUN and the one to set --against it
    """
    from sensitivity.errors import Refused
    from sensitivity.plots import plot as draw
    from sensitivity.query import of_site, open_run

    for key, value, only in (("--time", time, "window"), ("--against", against, "comparison")):
        if value is not None and kind != only:
            raise Refused(key, given=f"{value}, with {kind}", allowed=f"with {only} alone", remedy="leave it out")

    if output.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise Refused(
            "--output", given=output, allowed="a file ending in .png, .svg or .pdf", remedy="change its ending"
        )
    if not output.absolute().parent.is_dir():
        raise Refused("--output", given=output, allowed="a file in an existing directory", remedy="make the directory")
    with damage_refused(run):
        datasets = [open_run(path) for path in (run, against) if path is not None]
        first, *other = datasets if site is None else [of_site(dataset, site) for dataset in datasets]
        how: dict[str, Any] = {key: list(labels) for key, labels in chosen.items() if labels}
        draw(first, kind, output, time=time, against=other[0] if other else None, align=align, **how)
    click.echo(str(output))


if __name__ == "__main__":  # as a submitted job starts it
    main()
