"""The head of a Ray cluster as its job API sees us: reached, or why not, in one screen."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import requests
from ray.job_submission import JobSubmissionClient

from sensitivity.errors import Refused, gist

OLDEST = (2, 40)
CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 20.0  # Ray itself would wait for ever
PORTS = {6379: "nodes of a cluster talk to each other", 10001: "Ray Client (ray://) connects"}
ADDRESSES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")  # Ray takes them for more than what is asked for
ALLOWED = "where a Ray head has its dashboard, such as http://head:8265"


def connected(address: str) -> JobSubmissionClient:
    """A client of the head at the address, and at no other. Raises `Refused` where there is none, or none for us."""
    for handler in logging.getLogger("ray").handlers:
        handler.setLevel(logging.WARNING)  # not every package that it uploads
    _require_http(address)
    asks_for_token = _require_ray(address.rstrip("/"))
    try:
        with _unset(ADDRESSES):
            return JobSubmissionClient(address.rstrip("/"))
    except Exception as error:
        raise (_no_token(address, error) if asks_for_token else _no_head(address, gist(error))) from error


@contextlib.contextmanager
def refused_by(address: str) -> Iterator[None]:
    """What the head answers to what it cannot serve, without the traceback that comes with it."""
    try:
        yield
    except Refused:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        said = str(error).strip().strip(".").splitlines()
        raise Refused(
            "--address",
            given=f"{address}, which does not take the job ({said[-1] if said else type(error).__name__})",
            allowed="a Ray head that can start jobs",
            remedy="look into dashboard.log of the head; 404 or 501: install 'ray[default]' there",
        ) from error


@contextlib.contextmanager
def _unset(names: tuple[str, ...]) -> Iterator[None]:
    held = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


def _require_http(address: str) -> None:
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = None, None, None
    if parts is None or parts.scheme not in ("http", "https") or not host:
        why = ""
    elif port in PORTS:
        why = f", the port where {PORTS[port]}"
    else:
        return
    likely = f"http://{host if host and host != 'auto' else 'HEAD'}:8265"
    remedy = f"give the URL of the head's dashboard: {likely}, if it has Ray's usual port"
    raise Refused("--address", given=f"{address}{why}", allowed=ALLOWED, remedy=remedy)


def _require_ray(address: str) -> bool:
    """Whether the head asks for a token; refuses what is not a head."""
    try:
        answer = requests.get(f"{address}/api/version", timeout=(CONNECT_SECONDS, ANSWER_SECONDS))
    except requests.RequestException as error:
        raise _no_head(address, _reason(error)) from error
    _require_not_sent_on(address, answer)
    if answer.status_code in (401, 403):
        return True
    version = _version(answer)
    if version is None:
        raise _no_head(address, f"what answers there, with status {answer.status_code}, is not Ray's job server")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        raise Refused(
            "--address",
            given=f"{address}, of Ray {version}",
            allowed=f"Ray {'.'.join(map(str, OLDEST))} or later",
            remedy="bring the cluster up to date",
        )
    return False


def _require_not_sent_on(address: str, answer: requests.Response) -> None:
    """A job that is sent on arrives as a question, and a token not at all."""
    there, rest, _ = answer.url.partition("/api/version")
    if answer.history and rest:
        raise Refused(
            "--address", given=f"{address}, which sends on to {there}", allowed=ALLOWED, remedy=f"--address {there}"
        )


def _version(answer: requests.Response) -> str | None:
    try:
        return str(answer.json()["ray_version"])
    except (ValueError, TypeError, KeyError):
        return None


def _reason(error: requests.RequestException) -> str:
    if isinstance(error, requests.Timeout):
        return "nothing answers there"
    known = re.search(r"\[(?:Errno -?\d+|SSL: \w+)\] ([^'\"()]+)", str(error))
    if known:
        return known[1].strip().lower()
    return "what answers there does not speak HTTP" if "aborted" in str(error) else gist(error)


def _no_head(address: str, why: str) -> Refused:
    return Refused(
        "--address",
        given=f"{address} ({why})",
        allowed=ALLOWED,
        remedy="see that the head has its dashboard (pip install 'ray[default]' there; ray start --head\n"
        "--dashboard-host 0.0.0.0 serves other machines) and that its port is open; if it is not:\n"
        "ssh -L 8265:127.0.0.1:8265 HEAD, and --address http://127.0.0.1:8265",
    )


def _no_token(address: str, error: Exception) -> Refused:
    mode = os.environ.get("RAY_AUTH_MODE")
    said = str(error).partition("\n")[0].partition(". ")[0]
    why = said if mode == "token" else f"RAY_AUTH_MODE is {mode or 'not set'} here, so that Ray sends none"
    return Refused(
        "RAY_AUTH_TOKEN",
        given=f"{address} asks for a token: {why}",
        allowed="the token of the cluster, which `ray get-auth-token` says on its head",
        remedy="export RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN=…, or RAY_AUTH_TOKEN_PATH= a file with it,\n"
        "or write it to ~/.ray/auth_token; `ray job` asks for the same",
    )
