"""What Jacobians of recurrent SavedModels cost, beside what people write, side by side.

    python -m tests.benchmarks.saved_models [--windows 1024] [--turns 3]

Hand-written is one compiled gradient of one output, called for each output in turn, with as many windows a call as is
fastest of a few numbers: a tape that is used twice fails on a restored loop (tensorflow#57343). The Keras model that
was exported is timed as well. All give `(batch, output, lag, feature)` in float32; ours takes 4 GB at most.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import sensitivity
from tests.benchmarks.models import MODELS
from tests.benchmarks.weights import rate

CASES: dict[str, Callable[[], keras.Model]] = {
    name: MODELS[name] for name in ("LSTM 120 relu, 20 steps, one", "Bidirectional LSTM 24, 30 steps, five")
}
CASES["GRU 32, 48 steps, sequence"] = lambda: keras.Sequential(
    [keras.Input((48, 3)), keras.layers.GRU(32, return_sequences=True), keras.layers.Dense(1)]
)
SIZES = (64, 256, 1024)


def row_by_row(restored: tf.Module, windows: np.ndarray, size: int, outputs: int):
    """Windows → `(batch, outputs, lag, feature)`"""

    def gradient(batch: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(batch)
            found = tf.reshape(restored.serve(batch), (size, -1))[:, output]
        return tape.gradient(found, batch)

    signature = [tf.TensorSpec((size, *windows.shape[1:])), tf.TensorSpec((), "int32")]
    compiled = tf.function(gradient, input_signature=signature, autograph=False)

    def act() -> np.ndarray:
        found = np.empty((len(windows), outputs, *windows.shape[1:]), "float32")
        for start in range(0, len(windows), size):
            batch = tf.constant(windows[start : start + size])
            for output in range(outputs):
                found[start : start + size, output] = compiled(batch, tf.constant(output))
        return found

    return act


def ours(model: keras.Model, windows: np.ndarray, outputs: int) -> Callable[[], np.ndarray]:
    shape = (len(windows), outputs, *windows.shape[1:])
    return lambda: sensitivity.jacobian(model, windows, memory="4GB").reshape(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=1024, help=f"a multiple of {SIZES[-1]}")
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    for name, build in CASES.items():
        keras.utils.set_random_seed(0)
        model = build()
        outputs = int(np.prod(model.output_shape[1:]))
        windows = np.random.default_rng(0).standard_normal((asked.windows, *model.input_shape[1:])).astype("float32")
        with tempfile.TemporaryDirectory() as folder:
            model.export(folder, verbose=False)
            restored = tf.saved_model.load(folder)
            ways = {"ours": ours(restored, windows, outputs), "ours, of the Keras model": ours(model, windows, outputs)}
            plain = tf.saved_model.load(folder)
            ways |= {f"row by row, {size} a call": row_by_row(plain, windows, size, outputs) for size in SIZES}
            print(name, flush=True)
            expected = None
            for way, act in ways.items():
                found = act()  # compiles, and finds the kernel
                expected = found if expected is None else expected
                difference = np.abs(found - expected).max() / np.abs(expected).max()
                best = max(rate(act, asked.windows) for _ in range(asked.turns))
                print(f"  {way}: {best:,.0f} windows/s, {difference:.0e} from ours", flush=True)


if __name__ == "__main__":
    main()
