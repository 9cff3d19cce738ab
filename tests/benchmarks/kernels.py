"""Every way to a Jacobian, side by side in one run, on the same two cores.

    pip install '.[bench]' && python tests/benchmarks/kernels.py [part of a model's name]

For each model: the eager tape, the compiled tape, every kernel at every size, the tuner's choice, JAX and torch, with
windows/s and peak memory (of the process, imports included; of a call for single kernels), each way in a process of
its own, the same weights, every Jacobian compared with the first one found, the tape's where that has the memory. And
two processes of one thread: what a run does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the project is not where Python looks
    sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

GiB = 1 << 30
THREADS = 2
TAPE_SIZES = (16, 64, 256, 1024)  # windows a call of the compiled tape, which may take minutes to compile


def start(threads: int) -> None:
    from sensitivity.device import use_threads

    use_threads(threads, gpu=False)


def compiled_tape(path: str, windows: np.ndarray, xla: bool, sizes: Sequence[int]) -> tuple[float, np.ndarray]:
    """What a careful user writes: `batch_jacobian` in a `tf.function`, the best of several batch sizes."""
    import keras
    import tensorflow as tf

    from tests.benchmarks.others import best_rate

    model = keras.models.load_model(path)

    @tf.function(jit_compile=xla)
    def jacobian(source: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(source)
            prediction = model(source)
        return tape.batch_jacobian(prediction, source, experimental_use_pfor=not (xla and recurrent(model)))

    def make(size: int):
        some = tf.constant(np.resize(windows, (size, *windows.shape[1:])))
        return lambda: jacobian(some).numpy()

    return best_rate(make, sizes), jacobian(tf.constant(windows[:4])).numpy()


def recurrent(model: Any) -> bool:
    import keras

    return any(isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional)) for layer in model.layers)


def eager_tape(path: str, windows: np.ndarray) -> tuple[float, np.ndarray]:
    import keras
    import tensorflow as tf

    model = keras.models.load_model(path)
    source = tf.constant(windows[:64])
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        with tf.GradientTape() as tape:
            tape.watch(source)
            prediction = model(source)
        found = tape.batch_jacobian(prediction, source).numpy()
        seconds.append(time.perf_counter() - begin)
    return len(source) / min(seconds), found[:4]


def tuned(path: str, windows: np.ndarray, threads: int, exhaustive: bool, until: float = 0.0) -> dict[str, Any]:
    """The tuner's choice; exhaustive: and the best of all families at all sizes, the two timed again in turns."""
    start(threads)
    import keras

    from sensitivity import candidates, machine, meter, tuning
    from sensitivity.engine import Tuned
    from sensitivity.job import SensitivitySection
    from sensitivity.model import Target
    from tests.describing import describe_call

    model = keras.models.load_model(path)
    facts = describe_call(model, windows.shape[1:], of="output", dtype="float32")
    target, room, wanted = Target(model, facts), tuning.Room(2 * GiB), SensitivitySection()
    began = time.perf_counter()
    choice, engine = tuning.tune(wanted, target, windows, room, 4096, 10**9)
    spent = time.perf_counter() - began
    found: dict[str, Any] = {"setting": str(choice.setting), "seconds": spent, "jacobian": engine(windows[:4])[1]}
    if not exhaustive:
        sized = np.resize(windows, (choice.setting.windows_per_call, *windows.shape[1:]))
        if until:
            time.sleep(max(0.0, until - time.time()))
        rate, peak = float(np.median([tuning._time(engine, sized) for _ in range(20)])), machine.peak_memory()
        anew = Tuned(target, choice.setting)
        begin = time.perf_counter()
        anew(sized)
        return {**found, "rate": rate, "peak": peak, "compiles": time.perf_counter() - begin - len(sized) / rate}
    rates: dict[Any, float] = {}
    kernels, peaks = {}, {}
    for family in candidates.families(wanted, facts):
        for size in (4, 16, 64, 128, 256, 512, 1024, 2048):
            setting = replace(family, windows_per_call=size)
            if candidates.call_memory(facts, setting) > room.call:
                break
            kernel = Tuned(target, setting)
            sized = np.resize(windows, (size, *windows.shape[1:]))
            begin = time.perf_counter()
            kernel(sized)
            rates[setting] = tuning._time(kernel, sized)
            with meter.measured() as reading:
                kernel(sized)
            kernels[setting], peaks[setting] = kernel, reading.peak or 0
            if time.perf_counter() - begin > 15:
                break
    best = max(rates, key=lambda setting: rates[setting])
    turns: list[list[float]] = [[], []]
    for _ in range(15):
        for turn, kernel in zip(turns, (engine, kernels[best]), strict=True):
            sized = np.resize(windows, (kernel.setting.windows_per_call, *windows.shape[1:]))
            turn.append(tuning._time(kernel, sized))
    by_family: dict[str, tuple[float, int]] = {}
    for setting, rate in rates.items():
        name = str(setting).replace(f", {setting.windows_per_call:,} windows a call", "")
        by_family[name] = max((rate, peaks[setting]), by_family.get(name, (0.0, 0)))
    mine, theirs = (float(np.median(turn)) for turn in turns)
    peak = machine.peak_memory()
    return {**found, "rate": mine, "peak": peak, "best": str(best), "best_rate": theirs, "families": by_family}


def one(way: str, path: str, name: str, until: float) -> dict[str, Any]:
    windows = np.load(Path(path).with_suffix(".npy"))
    if way.startswith("jax"):
        os.environ["KERAS_BACKEND"] = "jax"
    if way == "torch":
        os.environ["KERAS_BACKEND"] = "torch"
    from sensitivity import machine
    from tests.benchmarks.models import LONG
    from tests.benchmarks.others import jax_rate, torch_rate

    if way in ("tuner", "exhaustive", "one thread"):
        return tuned(path, windows, 1 if way == "one thread" else THREADS, way == "exhaustive", until)
    if way in ("eager", "compiled", "compiled, XLA"):
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(THREADS)
        sizes = (LONG[name][0],) if name in LONG else TAPE_SIZES
        found = eager_tape(path, windows) if way == "eager" else compiled_tape(path, windows, "XLA" in way, sizes)
    elif way == "torch":
        found = torch_rate(path, windows, THREADS)
    else:
        found = jax_rate(path, windows, way.removeprefix("jax "))
    return {"rate": found[0], "jacobian": found[1], "peak": machine.peak_memory()}


def spawn(way: str, path: Path, name: str, until: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--one", way, str(path), name, str(until)]
    if way.startswith("jax"):
        command = ["taskset", "-c", "0,1", *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    out, errors = process.communicate()
    if process.returncode:
        print(f"    exit {process.returncode}:", " ".join(errors.strip().splitlines()[-1:])[:150])
        return None
    return json.loads(out.splitlines()[-1])


def some(jacobian: Any) -> list[float]:
    """The numbers to compare: of four windows at most, and of no more than 100,000 each, the last ones."""
    rows = np.asarray(jacobian, float)[:4]
    return rows.reshape(len(rows), -1)[:, -100_000:].ravel().tolist()


def report(way: str, found: dict[str, Any] | None, expected: np.ndarray | None) -> None:
    if found is None:
        print(f"  {way:34} not run, or failed")
        return
    off = ""
    if expected is not None:
        difference = np.abs(np.array(found["jacobian"]) - expected).max()
        off = f"  off the first by {difference / np.abs(expected).max():.0e}"
    rate = f"{found['rate']:,.0f}" if found["rate"] >= 100 else f"{found['rate']:.3g}"
    compiles = f"  compiles in {found['compiles']:.1f} s" if "compiles" in found else ""
    print(f"  {way:34} {rate:>10} windows/s  {found['peak'] / 1e6:7,.0f} MB peak{off}{compiles}", flush=True)


def compare(name: str, folder: Path) -> None:
    from tests.benchmarks.models import LONG, build, windows_for

    model = build(name)
    path = folder / "model.keras"
    model.save(path)
    np.save(path.with_suffix(".npy"), windows_for(model, 256))
    print(f"{name}: {model.input_shape[1:]} → {model.output_shape[1:]}", flush=True)
    others = LONG[name][1] if name in LONG else ("compiled", "compiled, XLA", "jax jacrev", "jax jacfwd", "torch")
    eager = None if name in LONG else answer(spawn("eager", path, name))
    expected = None if eager is None else np.array(eager["jacobian"])
    report("eager tape", eager, None)

    def told(way: str, found: dict[str, Any] | None) -> None:
        nonlocal expected
        report(way, found, expected)
        if expected is None and found is not None:
            expected = np.array(found["jacobian"])

    for way in others:
        if way.startswith("compiled"):
            told(f"{way} tape", answer(spawn(way, path, name)))
    found = None if name in LONG else answer(spawn("exhaustive", path, name))
    if found is not None:
        for family, (rate, peak) in found["families"].items():
            print(f"    {family:60} {rate:10,.0f} windows/s at its best size, {peak / 1e6:7,.0f} MB a call")
        print(f"    best of all: {found['best']}: {found['best_rate']:,.0f} windows/s")
        share = found["rate"] / found["best_rate"]
        print(f"    the tuner's: {found['setting']}, in {found['seconds']:.0f} s: {share:.2f} of the best")
    told("the tuner's choice, two threads", answer(spawn("tuner", path, name)))
    until = time.time() + 60
    pair = [answer(process) for process in [spawn("one thread", path, name, until) for _ in range(2)]]
    if all(pair):
        both = {**pair[0], "rate": sum(half["rate"] for half in pair), "peak": sum(half["peak"] for half in pair)}
        told("the same, two processes of one", both)
    for way in others:
        if way.startswith(("jax", "torch")):
            told(way, answer(spawn(way, path, name)))


def main(part: str) -> None:
    from tests.benchmarks.models import LONG, TIMED

    for name in [*TIMED, *LONG]:
        if part in name:
            with tempfile.TemporaryDirectory() as folder:
                compare(name, Path(folder))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        result = one(sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]))
        print(json.dumps({**result, "jacobian": some(result["jacobian"])}))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "")
