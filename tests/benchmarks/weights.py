"""What Jacobians by weights cost, window by window, beside what people write, side by side.

    python -m tests.benchmarks.weights [--windows 512] [--size 64] [--turns 3]

Hand-written are `tape.jacobian` of one window after the other in one compiled function, and the same under
`tf.vectorized_map` of `--size` windows, which fails for recurrent layers in a graph. All give `(batch, output,
parameter)` in float32. Ours takes as many windows a call as `--size`; the kernel is the tuner's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import sensitivity


def model(shape: tuple[int, int], *parts: keras.Layer) -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input(shape), *parts])


MODELS: dict[str, Callable[[], keras.Model]] = {
    "LSTM(64), 60 steps, 1 output": lambda: model((60, 5), layers.LSTM(64), layers.Dense(1)),
    "GRU(32), 60 steps, 8 outputs": lambda: model((60, 5), layers.GRU(32), layers.Dense(8)),
    "bidirectional LSTM(16), 30 steps": lambda: model((30, 5), layers.Bidirectional(layers.LSTM(16)), layers.Dense(4)),
    "Conv1D and Dense, 4 outputs": lambda: model(
        (60, 5), layers.Conv1D(32, 5, activation="tanh"), layers.Flatten(), layers.Dense(64, "tanh"), layers.Dense(4)
    ),
    "Dense(64) twice, 4 outputs": lambda: model(
        (60, 5), layers.Flatten(), layers.Dense(64, "tanh"), layers.Dense(64, "tanh"), layers.Dense(4)
    ),
}


def of_one(made: keras.Model) -> Callable[[tf.Tensor], tf.Tensor]:
    """`(lag, feature)` → `(output, parameter)`"""

    def jacobian(window: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(persistent=True) as tape:
            outputs = made(window[None])[0]
        if outputs.shape[0] == 1:
            parts = [part[None] for part in tape.gradient(outputs, made.trainable_variables)]
        else:
            parts = tape.jacobian(outputs, made.trainable_variables)
        return tf.concat([tf.reshape(part, (outputs.shape[0], -1)) for part in parts], -1)

    return jacobian


def by_loop(made: keras.Model, windows: np.ndarray) -> Callable[[], np.ndarray]:
    compiled = tf.function(of_one(made), input_signature=[tf.TensorSpec(windows.shape[1:])], autograph=False)
    return lambda: np.stack([compiled(tf.constant(window)).numpy() for window in windows])


def vectorized(made: keras.Model, windows: np.ndarray, size: int) -> Callable[[], np.ndarray]:
    signature = [tf.TensorSpec((size, *windows.shape[1:]))]
    compiled = tf.function(
        lambda batch: tf.vectorized_map(of_one(made), batch), input_signature=signature, autograph=False
    )
    return lambda: np.concatenate(
        [compiled(tf.constant(windows[i : i + size])).numpy() for i in range(0, len(windows), size)]
    )


def rate(act: Callable[[], np.ndarray], windows: int) -> float:
    started = time.perf_counter()
    act()
    return windows / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=512)
    parser.add_argument("--size", type=int, default=64, help="windows a call")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--models", default=";".join(MODELS), help="names, separated by semicolons")
    asked = parser.parse_args()
    for name, build in MODELS.items():
        if name not in asked.models.split(";"):
            continue
        made = build()
        windows = np.random.default_rng(0).standard_normal((asked.windows, *made.input_shape[1:])).astype("float32")

        def ours(made: keras.Model = made, windows: np.ndarray = windows) -> np.ndarray:
            return sensitivity.jacobian(made, windows, wrt="weights", windows_per_call=asked.size)

        ways = {
            "ours": ours,
            "tape.jacobian, window by window": by_loop(made, windows),
            "tape.jacobian under tf.vectorized_map": vectorized(made, windows, asked.size),
        }
        print(f"{name}: {made.count_params():,} weights")
        expected = None
        for way, act in ways.items():
            try:
                found = act()
            except Exception as error:
                print(f"  {way}: fails ({type(error).__name__})")
                continue
            expected = found if expected is None else expected
            difference = np.abs(found - expected).max() / np.abs(expected).max()
            best = max(rate(act, asked.windows) for _ in range(asked.turns))
            print(f"  {way}: {best:,.0f} windows/s, {difference:.0e} from ours", flush=True)


if __name__ == "__main__":
    main()
