"""What products cost beside one plain gradient of the same windows, side by side.

    python -m tests.benchmarks.products [--windows 4096] [--size 512] [--turns 5]

The gradient is what people write: `tape.gradient` of the outputs' sum in one compiled function, with XLA or without,
whichever is faster. All take as many windows a call; kernels are the tuner's. vjp is to cost at most 1.5 × one of it,
whatever the number of outputs, jvp at most 2 ×.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import sensitivity

MODELS: dict[str, Callable[[], keras.Model]] = {
    "LSTM(64), 60 steps, 1 output": lambda: model((60, 5), layers.LSTM(64), layers.Dense(1)),
    "LSTM(64), 60 steps, 48 outputs": lambda: model((60, 5), layers.LSTM(64), layers.Dense(48)),
    "GRU(32), 100 steps, an output a step": lambda: model(
        (100, 3), layers.GRU(32, return_sequences=True), layers.Dense(1)
    ),
    "bidirectional LSTM(32), 60 steps": lambda: model((60, 5), layers.Bidirectional(layers.LSTM(32)), layers.Dense(4)),
    "Conv1D and Dense, 24 outputs": lambda: model(
        (60, 5), layers.Conv1D(32, 5, activation="tanh"), layers.Flatten(), layers.Dense(64, "tanh"), layers.Dense(24)
    ),
}


def model(shape: tuple[int, int], *parts: keras.Layer) -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input(shape), *parts])


def gradient(model: keras.Model, size: int, *, xla: bool) -> Callable[[tf.Tensor], tf.Tensor]:
    @tf.function(jit_compile=xla, input_signature=[tf.TensorSpec((size, *model.input_shape[1:]))])
    def compiled(windows: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(windows)
            total = tf.reduce_sum(model(windows))
        return tape.gradient(total, windows)

    return compiled


def by_tape(model: keras.Model, windows: np.ndarray, size: int) -> list[Callable[[], object]]:
    """Gradients of all windows, compiled in both ways."""

    def whole(compiled: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[], object]:
        return lambda: [compiled(tf.constant(windows[i : i + size])).numpy() for i in range(0, len(windows), size)]

    ways = [whole(gradient(model, size, xla=xla)) for xla in (True, False)]
    for way in ways:
        way()
    return ways


def seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=4096)
    parser.add_argument("--size", type=int, default=512, help="windows a call")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--models", default=";".join(MODELS), help="names, separated by semicolons")
    asked = parser.parse_args()
    for name, build in MODELS.items():
        if name not in asked.models.split(";"):
            continue
        made = build()
        windows = np.random.default_rng(0).standard_normal((asked.windows, *made.input_shape[1:])).astype("float32")
        directions = np.ones((1, *windows.shape[1:]))
        how = {"windows_per_call": asked.size, "report": True}
        products = {
            "vjp": functools.partial(sensitivity.vjp, made, windows, **how),
            "jvp": functools.partial(sensitivity.jvp, made, windows, directions, **how),
        }
        ways = by_tape(made, windows, asked.size)
        settings = {product: act()[1].setting for product, act in products.items()}
        taken: dict[str, list[float]] = {"gradient": [], **{product: [] for product in products}}
        for _ in range(asked.turns):
            taken["gradient"].append(min(map(seconds, ways)))
            for product, act in products.items():
                taken[product].append(seconds(act))
        one = float(np.median(taken["gradient"]))
        print(f"{name}: one gradient {asked.windows / one:,.0f} windows/s")
        for product, setting in settings.items():
            own = float(np.median(taken[product]))
            print(f"  {product}: {asked.windows / own:,.0f} windows/s, {own / one:.2f} × one gradient, by {setting}")


if __name__ == "__main__":
    main()
