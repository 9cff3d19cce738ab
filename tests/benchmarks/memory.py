"""Memory: thirteen models with three budgets, each in a process of its own; the example that freezes machines, here and
by the eager tape; and windows of 5,000 and 10,000 steps with their last lags.

    python tests/benchmarks/memory.py [part of a model's name]

Prints, in MB above what the process had before the call: the budget, what the report projected, and the peak resident
set as the system saw it. Says at the end whether a peak was over its budget, or a projection below or over twice what
was measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":  # run as a script: the project is not where Python looks
    sys.path.insert(0, str(Path(__file__).parents[2]))

BUDGETS = ("512MB", "1GB", "2GB")
MOST_WINDOWS = 2000


def one(name: str, budget: str | None, windows: int) -> dict[str, float | str]:
    """The call in this process: megabytes."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(2)
    import sensitivity
    from sensitivity import machine, tuning
    from tests.benchmarks.models import build, windows_for

    model = build(name)
    source = windows_for(model, windows)
    model(source[:2])
    if budget:  # trials as for hours of work: those take most memory
        tuning.LEAST_SECONDS = tuning.MOST_SECONDS
    machine.restart_peak()
    before = machine.resident_memory()
    _, report = sensitivity.jacobian(model, source, budget, report=True)
    peak = machine.peak_memory() - before
    limit = 0 if budget is None else sensitivity.sections.parse_bytes(budget)
    return {
        "budget": limit / 1e6,
        "projected": report.projected / 1e6,
        "measured": peak / 1e6,
        "setting": str(report.setting),
    }


def eager(name: str, windows: int) -> dict[str, float]:
    """The same by what people write: megabytes of two calls."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(2)
    from sensitivity import machine
    from tests.benchmarks.models import build, windows_for

    model = build(name)
    source = tf.constant(windows_for(model, windows))
    model(source[:2])
    machine.restart_peak()
    before = machine.resident_memory()
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(source)
            prediction = model(source)
        tape.batch_jacobian(prediction, source).numpy()
    return {"measured": (machine.peak_memory() - before) / 1e6}


def band(steps: int, max_lag: int) -> dict[str, float]:
    """Two windows of many steps by their last lags, twice: megabytes, seconds of the first, of a window of the next."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(2)
    import keras
    from keras import layers

    import sensitivity
    from tests.benchmarks.models import windows_for

    model = keras.Sequential([keras.Input((steps, 3)), layers.LSTM(64, return_sequences=True), layers.Dense(1)])
    given: dict = {"kernel": "scan", "max_lag": max_lag, "report": True}
    (_, first), (_, again) = (sensitivity.jacobian(model, windows_for(model, 2), "1GB", **given) for _ in range(2))
    return {"measured": first.measured / 1e6, "first": first.seconds, "window": again.seconds / 2}


def in_a_process(*arguments: object) -> dict[str, float | str]:
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def count_for(name: str) -> int:
    return {"100": 128, "200": 48, "000": 16}.get(name.partition(" steps")[0][-3:], MOST_WINDOWS)


def main(part: str) -> None:
    from tests.benchmarks.models import MODELS

    cases: list[tuple[str, str | None, int]] = [
        (name, budget, count_for(name)) for name in MODELS if part in name for budget in BUDGETS
    ]
    tight = "MLP 256, 256, 40 inputs, 100 outputs"
    if part in tight:  # the result alone takes 0.82 GB of 1 GB
        cases.append((tight, "1GB", 50_000))
    example = "LSTM 32, 100 steps, sequence"
    if part in example:
        cases.append((example, None, 64))
    over, outside = [], []
    print(f"{'model':42} {'budget':>8} {'projected':>10} {'measured':>9}  setting")
    for case in cases:
        found = in_a_process(*case)
        budget, projected, measured = (float(found[key]) for key in ("budget", "projected", "measured"))
        print(f"{case[0]:42} {budget or 0:8.0f} {projected:10.0f} {measured:9.0f}  {found['setting']}", flush=True)
        over += [case] if budget and measured > budget else []
        outside += [case] if not measured <= projected <= 2 * measured else []
    if part in example:
        print(f"{example:42} {'eager':>8} {'':10} {in_a_process('eager', example, 64)['measured']:9.0f}")
    for steps in (5000, 10_000):
        name = f"LSTM 64, {steps:,} steps, lags up to 200"
        if part in name:
            found = in_a_process("band", steps, 200)
            times = f"first call {found['first']:.0f} s, then {found['window']:.2f} s a window"
            print(f"{name:42} {1000:8} {'':10} {found['measured']:9.0f}  {times}", flush=True)
            over += [name] if found["measured"] > 1000 else []
    print(f"over the budget: {over or 'none'}")
    print(f"projected below or over twice what was measured: {outside or 'none'}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        arguments = json.loads(sys.argv[2])
        ways = {"eager": eager, "band": band}
        print(json.dumps(ways[arguments[0]](*arguments[1:]) if arguments[0] in ways else one(*arguments)))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "")
