"""`sensitivity.jacobian` of each published kind of model beside the plain compiled tape, in turns.

    python -m tests.benchmarks.architectures [--windows 32 2048] [--only NAME] [--seconds 4]

The tape is what people write: `batch_jacobian`, or of one output `gradient`, in a `tf.function`, of all windows at once
or of as many at a time as give the most windows/s. Where pfor fails or ends the process, it loops. Both give the same
NumPy array. Each row has a process of its own. first: seconds of the first call, with tracing and trials; tape: the
same of the tape, at 32 windows. off: the largest difference, relative to the largest entry. Exit status 1 where a row
is below 0.9.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

LEAST = 0.9  # of the tape's windows/s
SIZES = (32, 128, 512, 2048)  # windows a call of the tape
CALLS = 5  # of each, at least


def compiled_tape(name: str, model: Any, pfor: bool) -> Callable[[Any], Any]:
    """Windows → their Jacobian, `(batch, *target, *source)`."""
    import tensorflow as tf

    from tests.architectures import WRT, output_of

    @tf.function(autograph=False)
    def jacobian(given: Any) -> Any:
        source = given[WRT[name]] if name in WRT else given
        with tf.GradientTape() as tape:
            tape.watch(source)
            found = output_of(model, given)
        if found.shape[1:].num_elements() == 1:
            derived = tape.gradient(found, source)
        else:
            derived = tape.batch_jacobian(found, source, experimental_use_pfor=pfor)
        return tf.reshape(derived, (source.shape[0], *found.shape[1:], *source.shape[1:]))

    return jacobian


def in_chunks(tape: Callable[[Any], Any], windows: Any, size: int) -> Callable[[], Any]:
    import numpy as np
    import tensorflow as tf

    count = len(tf.nest.flatten(windows)[0])

    def part(start: int) -> Any:
        return tf.nest.map_structure(lambda array: tf.constant(array[start : start + size]), windows)

    return lambda: np.concatenate([tape(part(start)).numpy() for start in range(0, count, size)])


def measured(name: str, count: int, seconds: float, pfor: bool) -> dict[str, Any]:
    """A row: the two call by call in turns, each in the caches that the other left, for so many seconds."""
    import numpy as np
    import tensorflow as tf

    import sensitivity
    from tests.architectures import WRT, built, windows_of
    from tests.benchmarks.others import best_size
    from tests.conftest import worst

    model = built(name)
    windows = windows_of(name, model, count)

    def ours(**more: Any) -> Any:
        return sensitivity.jacobian(model, windows, wrt=WRT.get(name, "input"), **more)

    began = time.perf_counter()
    found, report = ours(report=True)
    first = time.perf_counter() - began
    tape = compiled_tape(name, model, pfor)
    one = in_chunks(tape, tf.nest.map_structure(lambda array: array[:32], windows), 32)
    began = time.perf_counter()
    one()
    tape_first = time.perf_counter() - began

    def make(size: int) -> Callable[[], Any]:
        return in_chunks(tape, tf.nest.map_structure(lambda array: array[:size], windows), size)

    size, _ = best_size(make, [size for size in SIZES if size <= count] or [count])
    theirs = in_chunks(tape, windows, size)
    error = worst(found, theirs())
    took: dict[str, list[float]] = {"ours": [], "tape": []}
    end = time.perf_counter() + seconds
    while len(took["tape"]) < CALLS or time.perf_counter() < end:
        for who, call in (("ours", ours), ("tape", theirs)):
            began = time.perf_counter()
            call()
            took[who].append(time.perf_counter() - began)
    rates = {who: count / float(np.median(each)) for who, each in took.items()}
    return {**rates, "first": first, "tape_first": tape_first, "size": size, "error": error} | {
        "setting": str(report.setting)
    }


def row(name: str, count: int, seconds: float) -> tuple[dict[str, Any] | None, str]:
    """The row, and what is to be said of it."""
    said = ""
    for pfor in (True, False):
        command = [sys.executable, "-m", __spec__.name, "--one", name, str(count), str(seconds), str(int(pfor))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1]), said
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        said = f"{said}exit {done.returncode} with{'' if pfor else 'out'} pfor: {last[:100]}; "
    return None, said


def main(names: list[str], counts: list[int], seconds: float) -> int:
    below = []
    print(
        f"{'':34} {'windows':>7} {'ours/s':>9} {'tape/s':>9} {'ratio':>6} {'first':>6} {'tape':>6} {'off':>7}  setting"
    )
    for name in names:
        for count in counts:
            found, said = row(name, count, seconds)
            if found is None:
                below.append(f"{name}, {count:,} windows: {said}")
                print(f"{name:34} {count:7,} failed: {said}", flush=True)
                continue
            ratio = found["ours"] / found["tape"]
            if ratio < LEAST:
                below.append(f"{name}, {count:,} windows: {ratio:.2f}")
            how = f"{found['setting']} (tape: {found['size']:,}) {said}"
            print(
                f"{name:34} {count:7,} {found['ours']:9,.0f} {found['tape']:9,.0f} {ratio:6.2f} {found['first']:5.1f}s "
                f"{found['tape_first']:5.1f}s {found['error']:7.0e}  {how}",
                flush=True,
            )
    print(f"{len(below)} below {LEAST} of the compiled tape", *below, sep="\n  ")
    return bool(below)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        which, windows, time_for_it, pfor = sys.argv[2:6]
        print(json.dumps(measured(which, int(windows), float(time_for_it), pfor == "1")))
        sys.exit()
    from tests.architectures import ARCHITECTURES

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--windows", type=int, nargs="+", default=[32, 2048])
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a row's timed calls")
    given = parser.parse_args()
    sys.exit(main([name for name in ARCHITECTURES if given.only in name], given.windows, given.seconds))
