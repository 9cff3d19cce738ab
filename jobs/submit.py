"""A job handed to a Ray cluster that is elsewhere, over HTTP: it goes on when this machine is away."""

from __future__ import annotations

import getpass
import math
import os
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensitivity import __version__
from sensitivity.addresses import scheme
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.patience import PATIENCE
from sensitivity.plan import human_bytes
from sensitivity.store import RESULTS

from .follow import Lost, follow
from .head import ADDRESSES, connected, refused_by
from .parcel import JOB_FILE, Parcel, our_code, pack, pinned, write

DONE, FAILED, INVALID, INTERRUPTED = 0, 1, 2, 130
RUN_PATH, VERSION, USER = "sensitivity_run", "sensitivity_version", "sensitivity_user"  # what a job says of itself
SHOWN = 15  # lines
TRIES = 20  # at an id, where others submit at the same moment
MARGIN_SECONDS = 10  # for what a driver does after its grace


@dataclass(frozen=True)
class How:
    """address: of the head's dashboard. wait: until the job has ended. shared: what the cluster sees under the same
    path. code: what the model needs besides its module. env: variables to pass on. install: what we depend on, on the
    nodes. Others: as in `driver.How`.
    """

    address: str
    wait: bool = False
    shared: tuple[str, ...] = ()
    code: tuple[Path, ...] = ()
    env: tuple[str, ...] = ()
    install: bool = False
    retry_failed: bool = False
    allow_version_change: bool = False
    trust_model: bool = False
    autoscale: bool = False
    grace: float = 0.0

    def entrypoint(self, *, copy_series: bool) -> str:
        """What the cluster's head is to run."""
        words = ["python", "-m", "jobs.cli", "run", JOB_FILE, "--address", "auto", "--grace", f"{self.grace:g}"]
        words += ["--log-shards"]
        chosen = {
            "--retry-failed": self.retry_failed,
            "--allow-version-change": self.allow_version_change,
            "--trust-model": self.trust_model,
            "--autoscale": self.autoscale,
            "--copy-series": copy_series,
        }
        return shlex.join([*words, *(flag for flag, given in chosen.items() if given)])

    def variables(self) -> dict[str, str]:
        """The environment of the driver and its workers."""
        absent = [name for name in self.env if name not in os.environ]
        if absent:
            raise Refused(
                "--env",
                given=f"{', '.join(map(_named, absent))}, which is not set here",
                allowed="names of variables that are, without their values",
                remedy="export it, or leave it out",
            )
        passed = [*self.env, *([PATIENCE] if PATIENCE in os.environ else [])]
        ours = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(self.grace) + MARGIN_SECONDS),  # from SIGTERM to SIGKILL
        }
        return ours | {name: os.environ[name] for name in passed}


def _named(variable: str) -> str:
    """What stands behind `=` may be a secret."""
    name, given, _ = variable.partition("=")
    return f"{name}=…" if given else name


def submit(file: Path, how: How) -> int:
    """Hand the job over, and wait for its end where asked to; the exit status.

    Raises `Refused` where the job cannot go, or another of the same run is under way.
    """
    shared = tuple(path if scheme(path) else os.path.abspath(os.path.expanduser(path)) for path in how.shared)
    job = Job.load(file, elsewhere=shared)
    parcel, variables = pack(job, shared, how.code), how.variables()
    environment = {"env_vars": variables} | ({"pip": {"packages": pinned(), "pip_check": False}} if how.install else {})
    client = connected(how.address)
    with tempfile.TemporaryDirectory(prefix="sensitivity-") as folder:
        environment |= written(parcel, Path(folder))
        _say_what_goes(parcel)
        entrypoint = how.entrypoint(copy_series=parcel.takes_series)
        try:
            with refused_by(how.address):
                submission_id = hand_over(client, job.run.path.rstrip("/"), how.address, entrypoint, environment)
        except KeyboardInterrupt:
            say("interrupted: given again, the same command says whether the head has the job already")
            return INTERRUPTED
    print(submission_id, flush=True)
    say(_commands(job.run.path, how.address, submission_id))
    return _waited_for(client, submission_id, job.run.path, how.address) if how.wait else DONE


def written(parcel: Parcel, folder: Path) -> dict[str, Any]:
    """The parcel in a folder, as Ray is told of it; packages of the same content are uploaded once."""
    work, ours = folder / "job", folder / "ours"
    work.mkdir()
    parcel.write(work)
    write(our_code(), ours)
    return {"working_dir": str(work), "py_modules": [str(package) for package in sorted(ours.iterdir())]}


def _say_what_goes(parcel: Parcel) -> None:
    for note in parcel.notes:
        say(note)
    if parcel.items:
        size = human_bytes(sum(item.size for item in parcel.items))
        names = [os.path.basename(name) for name in dict.fromkeys(str(item.origin) for item in parcel.items)]
        say(f"{size} go along: {', '.join(names[:8])}{' and others' if len(names) > 8 else ''}")


def hand_over(client: Any, run: str, address: str, entrypoint: str, environment: dict[str, Any]) -> str:
    """Submit under an id of the run's own, the next that is free. Ray gives an id once: that tells two apart who
    submit the same run at the same moment.
    """
    metadata = {RUN_PATH: run, VERSION: __version__, USER: _user()}
    for _ in range(TRIES):
        known = client.list_jobs()
        require_idle(known, run, address)
        submission_id = next_id(run, [str(job.submission_id) for job in known])
        try:
            return client.submit_job(
                entrypoint=entrypoint,
                submission_id=submission_id,
                runtime_env=environment,
                metadata=metadata,
                entrypoint_num_cpus=0,  # it runs on the head, also where that has none for tasks
                entrypoint_num_gpus=0,
            )
        except RuntimeError as error:
            if "already exists" not in str(error):
                raise
    raise RuntimeError(f"{TRIES} ids in a row were taken by others")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id that has no name
        return str(os.getuid())


def next_id(run: str, known: list[str]) -> str:
    """`soil-a3` where `soil-a2` was the last submission of a run called soil."""
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", run.rpartition("/")[2]).strip("-.")[:60] or "run"
    numbers = [int(match[1]) for text in known if (match := re.fullmatch(rf"{re.escape(name)}-a(\d+)", text))]
    return f"{name}-a{max(numbers, default=0) + 1}"


def require_idle(known: list[Any], run: str, address: str) -> None:
    """Refuse a second submission of a run that is under way."""
    for job in known:
        if (job.metadata or {}).get(RUN_PATH) == run and not job.status.is_terminal():
            who = (job.metadata or {}).get(USER, "somebody")
            raise Refused(
                "run.path",
                given=f"{run}, which {job.submission_id} of {who} is at work on ({job.status.value.lower()})",
                allowed="one job of a run at a time",
                remedy=f"follow it:  {_ray('logs --follow', address, job.submission_id)}\n"
                f"or stop it:  {_ray('stop', address, job.submission_id)}",
            )


def _commands(run: str, address: str, submission_id: str) -> str:
    return "\n".join(
        (
            f"status:  sensitivity status {shlex.quote(run)}",
            f"follow:  {_ray('logs --follow', address, submission_id)}",
            f"stop:    {_ray('stop', address, submission_id)}",
        )
    )


def _ray(command: str, address: str, submission_id: str) -> str:
    """A command of Ray's, which would listen to the environment first."""
    unset = "".join(f"-u {name} " for name in ADDRESSES if name in os.environ)
    env = f"env {unset}" if unset else ""
    return f"{env}ray job {command} --address {shlex.quote(address)} {shlex.quote(submission_id)}"


def _waited_for(client: Any, submission_id: str, run: str, address: str) -> int:
    """The exit status of what ran there, or why there is none."""
    try:
        details = follow(client, submission_id, lambda text: print(text, end="", file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        say(f"{submission_id} goes on without us\n{_commands(run, address, submission_id)}")
        return INTERRUPTED
    except Lost as lost:
        say(f"{lost}\n{_commands(run, address, submission_id)}")
        return FAILED
    return concluded(details, run)


def concluded(details: Any, run: str) -> int:
    """Say how a job ended, and give the exit status of what it ran."""
    status, code = details.status, details.driver_exit_code
    if status == "SUCCEEDED":
        print(f"{run.rstrip('/')}/{RESULTS}")
        return DONE
    if code in (FAILED, INVALID):  # it has said why itself
        if "No module named" in (details.message or ""):
            say("what is missing there can be installed: --install, or an image for the nodes; your own code: --code")
        return code
    why = _gist(details.message or "no reason is known") if code is None else f"exit status {code}, {_meaning(code)}"
    say(f"{details.submission_id} {status.value.lower()}: {why}")
    say("what is committed is kept; the same command goes on")
    return FAILED


def _meaning(code: int) -> str:
    """Of an exit status that is none of ours."""
    if code == 127:
        return "python is not on the PATH of the head"
    return "the driver was killed, perhaps for want of memory" if code < 0 or code > 128 else "which is none of a run's"


def _gist(message: str) -> str:
    """What Ray says of a job that could not begin, without most of its traceback."""
    first, *others = message.strip().splitlines()
    return "\n".join([first, *(["…"] if len(others) > SHOWN else []), *(line[:300] for line in others[-SHOWN:])])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
