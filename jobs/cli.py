"""The `sensitivity` command. Each command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sensitivity.plan import Plan

    from .driver import Summary

DONE, INCOMPLETE, INVALID = 0, 1, 2
FORMATS = click.Choice(["table", "csv", "json"])
RUN = click.argument("run", type=click.Path(path_type=Path))
JOB = click.argument("job", type=click.Path(path_type=Path))


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

    return explained


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--serial", is_flag=True, help="One worker in this process, without Ray.")(command)
    return click.option("--address", metavar="A", help="An existing Ray cluster, such as auto or 10.0.0.5:6379.")(
        command
    )


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sensitivity-jobs", prog_name="sensitivity")
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
@errors_explained
def plan(job: Path) -> None:
    """Say what JOB would do, and refuse what cannot fit. Writes nothing."""
    from sensitivity.job import Job

    from .prepare import prepare

    prepared = prepare(Job.load(job))
    click.echo(described(prepared.plan))
    if prepared.audit is not None:
        difference = prepared.audit.difference_error
        click.echo(f"audit            vector-Jacobian product agrees to {prepared.audit.vjp_error:.1e}")
        shown = "not possible: the model has no float64 twin" if difference is None else f"agrees to {difference:.1e}"
        click.echo(f"                 central difference in float64 {shown}")


def described(plan: Plan) -> str:
    from sensitivity.plan import human_bytes

    layout, workers = plan.layout, plan.workers
    each = f"{workers.cpus} core{'s' if workers.cpus > 1 else ''}" + (f", {workers.gpus:g} GPU" if workers.gpus else "")
    lines = [
        ("features", ", ".join(plan.features) + "  (in the order the model takes them)"),
        ("windows", f"{layout.windows:,}, of which {plan.skipped:,} touch a missing value and are skipped"),
        ("shards", f"{layout.shard_count:,} of {layout.shard_windows:,} windows"),
        ("chunk shape", " × ".join(f"{n:,}" for n in plan.chunk_shape) + "  (time, output_step, output, lag, feature)"),
        ("to be stored", f"{human_bytes(plan.stored_bytes)} before compression, {plan.stored_bytes:,} bytes"),
        ("workers", f"{workers.count} of {each}, {human_bytes(workers.memory)} each"),
        ("projected memory", f"{human_bytes(plan.worker_bytes)} a worker"),
        ("kernel", str(plan.setting)),
        *(("lost", lost) for lost in plan.setting.lost),
    ]
    return "\n".join(f"{name:16} {value}" for name, value in lines)


@main.command()
@JOB
@run_options
@errors_explained
def run(job: Path, address: str | None, serial: bool) -> None:
    """Run JOB to the end; on an existing run of the same job, only what is missing."""
    from sensitivity.job import Job

    from .driver import How, run_job

    sys.exit(concluded(run_job(Job.load(job), How(address, serial))))


@main.command()
@RUN
@run_options
@errors_explained
def resume(run: Path, address: str | None, serial: bool) -> None:
    """Finish RUN from its own directory, without the job file."""
    from .driver import How
    from .driver import resume as resume_run

    sys.exit(concluded(resume_run(run, How(address, serial))))


def concluded(summary: Summary) -> int:
    """Say how a run ended, and give its exit status."""
    path = summary.run.path
    if summary.computed:
        click.echo(f"computed {summary.computed:,} windows at {summary.rate:,.0f} windows/s", err=True)
    for failure in summary.failed[:5]:
        click.echo(
            f"shard {failure.shard} (windows {failure.start}–{failure.stop - 1}) failed {failure.attempts} times: "
            f"{failure.reason.partition(chr(10))[0]}",
            err=True,
        )
    if summary.complete:
        click.echo(str(path / "results.zarr"))
        return DONE
    why = "stopped" if summary.interrupted else f"ended with {len(summary.failed)} failed shards"
    click.echo(f"{why}: {summary.done:,} of {summary.shards:,} shards are committed", err=True)
    click.echo(f"to go on:  sensitivity resume {path}", err=True)
    return INCOMPLETE


@main.command()
@RUN
@errors_explained
def status(run: Path) -> None:
    """Shards done, failed and missing, with throughput, attempts and reasons."""
    from sensitivity.store import Run

    from .status import report

    click.echo(report(Run.open(run)))


@main.command()
@RUN
@errors_explained
def verify(run: Path) -> None:
    """Re-read every committed chunk of RUN against its checksum; exit status 1 where one is damaged."""
    from sensitivity.commits import read_commits
    from sensitivity.commits import verify as verify_chunks
    from sensitivity.store import Run

    from .progress import progress

    opened = Run.open(run)
    records = read_commits(opened).values()
    chunks, damaged, started = 0, [], time.time()
    with progress(sum(len(record.chunks) for record in records), 0, "chunks") as advance:
        for record, damages in verify_chunks(opened, records):
            damaged += damages
            chunks += len(record.chunks)
            advance(len(record.chunks), started)
    for damage in damaged:
        click.echo(f"shard {damage.shard}: {damage.chunk}: {damage.what}")
    if damaged:
        sys.exit(INCOMPLETE)
    click.echo(
        f"{len(records):,} of {opened.layout.shard_count:,} shards committed, {chunks:,} chunks, all as committed"
    )


@main.command()
@RUN
@click.argument("statistic", type=click.Choice(["importance", "lag-profile"]))
@click.option("--format", "form", type=FORMATS, default="table", show_default=True)
@errors_explained
def query(run: Path, statistic: str, form: str) -> None:
    """A STATISTIC of RUN, in one pass over its store."""
    import sensitivity.query as queries

    from .tables import render

    dataset = queries.open_run(run)
    committed = int(dataset["committed"].sum())
    if committed < dataset.sizes["time"]:
        click.echo(
            f"the run is not complete: {committed:,} of {dataset.sizes['time']:,} windows are committed", err=True
        )
    click.echo(render(queries.rows(queries.STATISTICS[statistic](dataset).compute()), form))


@main.command()
@RUN
@click.argument("kind", type=click.Choice(["lag-profile", "heatmap"]))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="PNG, SVG or PDF file."
)
@errors_explained
def plot(run: Path, kind: str, output: Path) -> None:
    """Draw a picture of RUN into a file."""
    from sensitivity.errors import Refused
    from sensitivity.plots import plot as draw
    from sensitivity.query import open_run

    if output.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise Refused(
            "--output", given=output, allowed="a file ending in .png, .svg or .pdf", remedy="change its ending"
        )
    if not output.absolute().parent.is_dir():
        raise Refused("--output", given=output, allowed="a file in an existing directory", remedy="make the directory")
    draw(open_run(run), kind, output)
    click.echo(str(output))
