"""What goes along with a job to a cluster: its files, its code, and ours. Planned as data, then written."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import jobs
import sensitivity
from sensitivity.addresses import is_below, scheme
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.plan import human_bytes
from sensitivity.versions import OURS, version_of

LIMIT = 64 << 20  # bytes in all; Ray's head takes 100 MiB, and keeps them in memory
BULKY = 8 << 20  # bytes; a larger file among code is data, and goes along only where it is asked for
JOB_FILE, FILES = "job.toml", "uploaded-files"  # no module can be called that
PACKAGES = (sensitivity, jobs)
OUR_NAMES = frozenset(package.__name__ for package in PACKAGES)
_REQUIREMENT = re.compile(r"([\w.-]+)(\[[^\]]*\])?[^;]*(;.*)?")


@dataclass(frozen=True)
class Item:
    """A file that goes along: `source` here, `name` there. origin: what the user knows it by."""

    name: str
    source: Path
    size: int
    origin: Path


@dataclass(frozen=True)
class Parcel:
    """A job as it goes to a cluster. text: its job file, as it is to be there; notes: what its user should know."""

    text: str
    items: tuple[Item, ...]
    notes: tuple[str, ...]
    takes_series: bool

    def write(self, folder: Path) -> None:
        write(self.items, folder)
        (folder / JOB_FILE).write_text(self.text, encoding="utf-8")


def write(items: Iterable[Item], folder: Path) -> None:
    """Copies that are of today: Ray cannot pack what is older than 1980, as files of some installations are."""
    for item in items:
        target = folder / item.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(item.source, target)


def pack(job: Job, shared: Collection[str] = (), code: Iterable[Path] = ()) -> Parcel:
    """What a job needs that a cluster does not see. Reads names and sizes only.

    shared: folders and URLs that the cluster sees under the same path. code: files and packages that the model needs.

    Raises `Refused` where that is too much, or where the run directory would be on the cluster's own disks.
    """
    _require_seen(job.run.path, shared)
    content = job.model_dump(exclude={"directory"}, exclude_unset=True)
    files = {"series": job.series.path} | ({} if job.model.is_function else {"model": job.model.path})
    items = []
    for key, path in files.items():
        if not _is_seen(path, shared):
            content[key]["path"] = f"{FILES}/{key}/{Path(path).name}"
            items += _data(content[key]["path"], Path(path))
    for key, path in job.sensitivity.array_files.items():
        if not _is_seen(path, shared):
            content["sensitivity"][key] = f"{FILES}/{key}/{Path(path).name}"
            items += _data(content["sensitivity"][key], Path(path))
    taken, notes = _code(job, code)
    _require_small([*items, *taken])
    return Parcel(toml(content), (*items, *taken), tuple(notes), not _is_seen(job.series.path, shared))


def _is_seen(path: str, shared: Collection[str]) -> bool:
    return bool(scheme(path)) or is_below(path, shared)


def _require_seen(run: str, shared: Collection[str]) -> None:
    if not _is_seen(run, shared):
        raise Refused(
            "run.path",
            given=f"{run}, which would be made on a disk of the cluster's head",
            allowed="a URL such as s3://bucket/run, or a path below a folder given with --shared",
            remedy="give the run a URL; or, where every node of the cluster sees a folder under the same path as here,"
            f"\nadd it, such as --shared {os.path.dirname(run)}",
        )


def _data(name: str, path: Path) -> list[Item]:
    files = [(f"{name}/{inner}", file) for inner, file in _files(path)] if path.is_dir() else [(name, path)]
    return [Item(inner, file, file.stat().st_size, path) for inner, file in files]


def _code(job: Job, paths: Iterable[Path]) -> tuple[list[Item], list[str]]:
    """The user's code: what was asked for, the module of the model's function, and modules beside it."""
    asked = [item for path in paths for item in _asked(Path(os.path.abspath(path)))]
    _require_apart(asked)
    if not job.model.is_function:
        return asked, []
    top, here = job.model.path.partition(":")[0].partition(".")[0], Path(job.directory)
    _require_not_ours(top, job.model.path)
    names = {item.name for item in asked}
    found = [item for item in (*_package(here / top), *_beside(here)) if item.name not in names]
    if not any(item.name == f"{top}.py" or item.name.startswith(f"{top}/") for item in (*asked, *found)):
        return asked, [f"{top} is not in {here}: the cluster must have it installed, or be given it with --code"]
    left = {item: why for item in found if (why := _why_left(item))}
    notes = [f"{item.source} ({why}) stays here, unless with --code {item.source}" for item, why in left.items()]
    return [*asked, *(item for item in found if item not in left)], notes


def _why_left(item: Item) -> str:
    """Why code does not go along unasked; on the cluster a module hides Python's own even from Ray."""
    hides = item.name.removesuffix(".py") in sys.stdlib_module_names
    return "named as a module of Python's own" if hides else human_bytes(item.size) if item.size > BULKY else ""


def _asked(path: Path) -> list[Item]:
    _require_not_ours(path.stem if path.suffix == ".py" else path.name, str(path))
    return _package(path) if path.is_dir() else [_code_item(path.name, path)]


def _package(folder: Path) -> list[Item]:
    files = _files(folder, _is_for_code)
    return [_code_item(f"{folder.name}/{name}", file) for name, file in files if file.suffix not in (".pyc", ".pyo")]


def _beside(folder: Path) -> list[Item]:
    files = sorted(file for file in folder.glob("[!.]*.py") if file.is_file() and file.stem not in OUR_NAMES)
    return [_code_item(file.name, file) for file in files]


def _code_item(name: str, file: Path) -> Item:
    return Item(name, file, file.stat().st_size, file)


def _is_for_code(path: Path) -> bool:
    """Whether code may be in it, or what it needs: nothing hidden or compiled, no environment, no run directory."""
    if path.name.startswith(".") or path.name == "__pycache__" or (path / "pyvenv.cfg").exists():
        return False
    return not ((path / "job.json").exists() and (path / "results.zarr").exists())


def _require_not_ours(name: str, given: str) -> None:
    if name in OUR_NAMES:
        raise Refused(
            "model.path, --code",
            given=given,
            allowed=f"modules of other names than {' and '.join(sorted(OUR_NAMES))}, which this library goes by",
            remedy="rename the module",
        )


def _files(
    folder: Path, wanted: Callable[[Path], bool] | None = None, above: tuple[str, ...] = ()
) -> Iterator[tuple[str, Path]]:
    """Every file below a folder that is wanted, by its name there. Links are followed, but not in circles."""
    here = os.path.realpath(folder)
    if here in above or not folder.is_dir():
        return
    for path in sorted(filter(wanted or Path.exists, folder.iterdir())):
        if path.is_file():
            yield path.name, path
        for name, file in _files(path, wanted, (*above, here)):
            yield f"{path.name}/{name}", file


def _require_apart(items: list[Item]) -> None:
    names = Counter(item.name for item in items)
    twice = [str(item.source) for item in items if names[item.name] > 1]
    if twice:
        raise Refused(
            "--code",
            given=", ".join(twice[:5]),
            allowed="files and packages of different names: they come to lie beside each other",
            remedy="give the folder above, or rename one",
        )


def _require_small(items: list[Item]) -> None:
    """Refuse what Ray would refuse after minutes, naming what is largest."""
    sizes: Counter[Path] = Counter()
    for item in items:
        sizes[item.origin] += item.size
    if sizes.total() > LIMIT:
        raise Refused(
            "what goes along with the job",
            given="\n".join(f"{path} ({human_bytes(size)})" for path, size in sizes.most_common(5)),
            allowed=f"{human_bytes(LIMIT)} in all, which Ray's head keeps in memory",
            remedy="put what is large where the cluster sees it: on an object store, such as s3://bucket/series.zarr,\n"
            "or in a folder that every node sees under the same path, given with --shared",
        )


def our_code() -> list[Item]:
    """This version of ours, as it runs here."""
    return [item for package in PACKAGES for item in _package(Path(package.__path__[0]))]


def pinned() -> list[str]:
    """What we depend on, in the versions that are installed here; Ray is the cluster's own."""
    try:
        found = [match.groups("") for text in requires(OURS) or () if (match := _REQUIREMENT.fullmatch(text))]
    except PackageNotFoundError as error:
        raise Refused(
            "--install",
            given=f"a checkout of {OURS} that is not installed, so that nobody knows what it depends on",
            allowed="an installed one",
            remedy="pip install it here, or give the cluster's nodes an image with what it depends on",
        ) from error
    wanted = [(name, extras) for name, extras, marker in found if "extra" not in marker and name != "ray"]
    return [f"{name}{extras}{_pin(version_of(name))}" for name, extras in wanted]


def _pin(version: str | None) -> str:
    """Without what a vendor adds to a version, which no index knows."""
    return f"=={version.partition('+')[0]}" if version else ""


def toml(content: dict[str, dict[str, Any]]) -> str:
    """The text of a job file: sections of keys."""
    return "\n".join(
        "\n".join([f"[{name}]", *(f"{key} = {_value(value)}" for key, value in keys.items() if value is not None), ""])
        for name, keys in content.items()
    )


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items() if item is not None) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
