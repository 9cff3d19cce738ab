"""Which codec should `jacobian` have? Writes and reads real Jacobians through Zarr, every codec in one run.

    python tests/benchmarks/codecs.py RUN [RUN ...]

Prints, per run and codec: compressed share, MB/s written and read (one thread computes, as in a worker), medians.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import zarr
from zarr.codecs import BloscCodec, ZstdCodec

import sensitivity

CODECS = {
    "none": None,
    "zstd 1": ZstdCodec(level=1),
    **{
        f"blosc {name} {level} {shuffle}": BloscCodec(cname=name, clevel=level, shuffle=shuffle)
        for name, level in (("lz4", 1), ("lz4", 5), ("zstd", 1), ("zstd", 3), ("zstd", 5))
        for shuffle in ("noshuffle", "shuffle", "bitshuffle")
        if not (shuffle == "noshuffle" and level > 1)
    },
}


def measure(values: np.ndarray, codec: object) -> tuple[float, float, float]:
    """Compressed share, seconds to write, seconds to read."""
    writes, reads = [], []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(5):
            path = Path(folder) / f"{repeat}.zarr"
            array = zarr.create_array(
                path, shape=values.shape, chunks=values.shape, dtype=values.dtype, compressors=codec
            )
            start = time.perf_counter()
            array[:] = values
            written = time.perf_counter()
            assert np.array_equal(array[:], values, equal_nan=True)
            writes.append(written - start)
            reads.append(time.perf_counter() - written)
        stored = sum(file.stat().st_size for file in (path / "c").rglob("*") if file.is_file())
    return stored / values.nbytes, statistics.median(writes), statistics.median(reads)


def main(runs: list[str]) -> None:
    for run in runs:
        jacobian = sensitivity.open_run(run)["jacobian"]
        values = jacobian.values
        values = np.tile(values, (max(1, (32 << 20) // values.nbytes), 1, 1, 1, 1))
        print(f"{run}: {values.shape} {values.dtype}, {values.nbytes / 1e6:.0f} MB")
        for name, codec in CODECS.items():
            share, write, read = measure(values, codec)
            speed = values.nbytes / 1e6
            print(f"  {name:24} {share:6.1%} stored {speed / write:7,.0f} MB/s written {speed / read:7,.0f} MB/s read")


if __name__ == "__main__":
    main(sys.argv[1:])
