"""The files that a job names: whether they are there, and of a kind that is served."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .addresses import CREDENTIALS, place_of, scheme
from .errors import Refused
from .patience import reason

SERIES_FORMATS = (".csv", ".csv.gz", ".parquet", ".nc", ".zarr", ".npy")
_OF_OLD = (".h5", ".hdf5")
SAVED_GRAPH = "saved_model.pb"  # what makes a directory a SavedModel
LONGEST_PATH = 1000  # of 4,096 that Linux takes


def _version(key: str, path: str) -> str | None:
    """What a file is now, or None where there is none; refuses an object store that cannot be reached."""
    folder, name = place_of(path)
    try:
        return folder.once().version(name)
    except OSError as error:
        if not scheme(path):  # a name that is too long, say
            return None
        raise Refused(
            key,
            given=f"{path} ({reason(error)})",
            allowed="a place that can be reached",
            remedy=f"check the URL, and in the environment what the store asks for: {CREDENTIALS[scheme(path)]}",
        ) from error


def _missing(key: str, path: str) -> str:
    """Why there is nothing that can be read; empty where there is."""
    if _version(key, path) is None:
        return "no such file"
    return "" if scheme(path) or Path(path).is_file() or Path(path).is_dir() else "no file that can be read twice"


def require_run_path(path: str) -> None:
    if scheme(path):
        _version("run.path", f"{path}/job.json")
    elif trouble := _run_trouble(path):
        raise Refused(
            "run.path",
            given=f"{path} ({trouble})",
            allowed="a directory, or a path where one can be made",
            remedy="choose another path",
        )


def _run_trouble(path: str) -> str:
    if len(os.fsencode(path)) > LONGEST_PATH:
        return f"more than {LONGEST_PATH:,} bytes, too long for files below it"
    try:
        return "" if stat.S_ISDIR(os.stat(path).st_mode) else "a file is in the way"
    except FileNotFoundError:
        return "a link to nothing" if os.path.islink(path) else ""
    except OSError as error:
        return reason(error)


def require_model_file(path: str, *, look: bool) -> None:
    allowed = "a .keras file, a SavedModel's directory, or package.module:function returning a keras.Model"
    if not look:
        return
    is_file = path.endswith(".keras")
    if path.endswith(_OF_OLD):
        raise Refused(
            "model.path",
            given=f"{path}, an HDF5 file, Keras' former format",
            allowed=allowed,
            remedy=f"load it, save it as .keras, and set model.path to that:\n"
            f"keras.models.load_model({path!r}, compile=False).save({str(Path(path).with_suffix('.keras'))!r})",
        )
    if trouble := _missing("model.path", path if is_file else f"{path.rstrip('/')}/{SAVED_GRAPH}"):
        is_there = not scheme(path) and os.path.exists(path)
        what = f"no {SAVED_GRAPH} in it" if is_there and not is_file else trouble
        raise Refused(
            "model.path",
            given=f"{path} ({what})",
            allowed=allowed,
            remedy='save the model with model.save("model.keras") or model.export("saved")'
            if is_there
            else "check the path",
        )
    if is_file and Path(path).is_dir():
        raise Refused(
            "model.path", given=f"{path} (a directory)", allowed=allowed, remedy="name a SavedModel otherwise"
        )


def require_series_file(path: str, *, look: bool) -> None:
    if not path.endswith(SERIES_FORMATS):
        raise Refused(
            "series.path",
            given=path,
            allowed=" ".join(SERIES_FORMATS),
            remedy="convert the series to one of these formats",
        )
    if not look:
        return
    is_far_zarr = scheme(path) and path.endswith(".zarr")
    files = [f"{path}/{name}" for name in ("zarr.json", ".zgroup", ".zarray")] if is_far_zarr else [path]
    trouble = min((_missing("series.path", file) for file in files), key=len)
    if not trouble and Path(path).is_dir() and not path.endswith(".zarr"):
        trouble = "a directory"
    if trouble:
        raise Refused("series.path", given=f"{path} ({trouble})", allowed="an existing series", remedy="check the path")
