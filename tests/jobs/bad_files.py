"""Writers of series and model files that cannot be served. Each is given the folder and what is in it by default."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import xarray as xr
import zarr

from tests.conftest import frame

GARBAGE = bytes(np.random.default_rng(5).integers(0, 256, 3000, np.uint8))
FORMATS = ("csv", "csv.gz", "parquet", "nc", "npy", "zarr")


def save(table: pd.DataFrame, file: Path) -> None:
    """A series in the format of the file's ending."""
    match "".join(file.suffixes):
        case ".csv" | ".csv.gz":
            table.to_csv(file, index=False)
        case ".parquet":
            table.to_parquet(file)
        case ".nc":
            table.set_index("time").to_xarray().to_netcdf(file)
        case ".zarr":
            table.set_index("time").to_xarray().to_zarr(file, consolidated=False)
        case ".npy":
            np.save(file, table.drop(columns="time").to_numpy())


def content(data: bytes | str) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(data if isinstance(data, bytes) else data.encode()) and None


def rows(*lines: str) -> Callable[[Path], None]:
    return content("\n".join(["time,rain,heat", *lines, ""]))


def table(change: Callable[[pd.DataFrame], pd.DataFrame]) -> Callable[[Path], None]:
    return lambda file: save(change(frame(60)), file)


def cells(column: str, row: int, value: Any) -> Callable[[Path], None]:
    """The usual series with one other cell; rows count from 1."""

    def change(found: pd.DataFrame) -> pd.DataFrame:
        found = found.astype({column: object})
        found.loc[row - 1, column] = value
        return found

    return table(change)


def torn(share: float) -> Callable[[Path], None]:
    """A file that ends before its end."""

    def write(file: Path) -> None:
        save(frame(60), file)
        whole = file.read_bytes()
        file.write_bytes(whole[: int(len(whole) * share)])

    return write


def array(values: Any) -> Callable[[Path], None]:
    return lambda file: np.save(file, values, allow_pickle=True)


def dataset(found: xr.Dataset) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        if file.suffix == ".nc":
            found.to_netcdf(file)
        else:
            found.to_zarr(file, consolidated=False)

    return write


def parquet_twice(file: Path) -> None:
    found = pa.Table.from_pandas(frame(60))
    pq.write_table(found.append_column("heat", found["rain"]), file)


def directory(file: Path) -> None:
    file.mkdir()


def zarr_array(**options: Any) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        zarr.create_array(file, **{"shape": (60, 2), "dtype": "f8", **options})[:] = 1

    return write


def zarr_with(name: str, text: bytes | str) -> Callable[[Path], None]:
    """A Zarr group one of whose files holds something else."""

    def write(file: Path) -> None:
        save(frame(60), file)
        (file / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


def pickling_zarr(file: Path) -> None:
    """An array of Zarr v2 whose filter would unpickle what it reads."""
    metadata = {"zarr_format": 2, "shape": [60, 2], "chunks": [60, 2], "dtype": "|O", "compressor": None}
    metadata |= {"filters": [{"id": "pickle", "protocol": 5}], "fill_value": None, "order": "C"}
    file.mkdir()
    (file / ".zarray").write_text(json.dumps(metadata))
    (file / "0.0").write_bytes(b"cos\nsystem\n(S'touch unpickled'\ntR.")


def members(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def zipped(parts: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    return written.getvalue()


def without(name: str) -> Callable[[bytes], bytes]:
    return lambda archive: zipped({key: part for key, part in members(archive).items() if key != name})


def with_part(name: str, part: bytes) -> Callable[[bytes], bytes]:
    return lambda archive: zipped({**members(archive), name: part})


def with_config(old: str, new: str) -> Callable[[bytes], bytes]:
    """An archive whose architecture says something else."""

    def change(archive: bytes) -> bytes:
        config = members(archive)["config.json"].decode()
        assert old in config
        return with_part("config.json", config.replace(old, new).encode())(archive)

    return change


def locked(archive: bytes) -> bytes:
    """An archive whose parts ask for a password."""
    changed = bytearray(archive)
    for mark, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = changed.find(mark)
        while at >= 0:
            changed[at + flags] |= 1
            at = changed.find(mark, at + 1)
    return bytes(changed)


def gzipped(text: str) -> Callable[[Path], None]:
    return content(gzip.compress(text.encode()))
