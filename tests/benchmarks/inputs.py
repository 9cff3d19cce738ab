"""What Jacobians of models with several inputs cost, by one of them, beside what people write, side by side.

    python -m tests.benchmarks.inputs [--windows 512] [--turns 3]

Hand-written is `tape.batch_jacobian` of the series in one compiled function, with the static input beside it, by pfor,
a loop or a loop under XLA (which does not take pfor's), with as many windows a call as is fastest of a few numbers. All
give `(batch, output_step, output, lag, feature)` in float32; ours takes 4 GB at most.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import sensitivity
from tests.benchmarks.weights import rate

SERIES, SITE = 3, 10
SIZES = (16, 128)
WAYS = {"pfor": (True, False), "loop": (False, False), "loop, XLA": (False, True)}  # pfor, XLA


def beside_every_step(steps: int, states: Callable[[], keras.Layer]) -> keras.Model:
    """What a site is, at every step beside its weather, as rainfall-runoff models have it; an output at every step."""
    weather, site = keras.Input((steps, SERIES), name="weather"), keras.Input((SITE,), name="site")
    both = layers.Concatenate()([weather, layers.RepeatVector(steps)(layers.Dense(8, "tanh")(site))])
    return keras.Model([weather, site], layers.Dense(1)(states()(both)))


def after_the_last_step() -> keras.Model:
    weather, site = keras.Input((60, SERIES), name="weather"), keras.Input((SITE,), name="site")
    both = layers.Concatenate()([layers.LSTM(64)(weather), site])
    return keras.Model([weather, site], layers.Dense(24)(layers.Dense(64, "tanh")(both)))


CASES: dict[str, Callable[[], keras.Model]] = {
    "LSTM(32), 48 steps, an output at each": lambda: beside_every_step(
        48, lambda: layers.LSTM(32, return_sequences=True)
    ),
    "GRU(64), 120 steps, an output at each": lambda: beside_every_step(
        120, lambda: layers.GRU(64, return_sequences=True)
    ),
    "LSTM(64), 60 steps, 24 outputs of the last": after_the_last_step,
}


def by_tape(model: keras.Model, given: dict[str, np.ndarray], size: int, *, pfor: bool, xla: bool):
    """() → the Jacobian of all windows."""
    signature = [tf.TensorSpec((size, *given[name].shape[1:])) for name in ("weather", "site")]

    @tf.function(jit_compile=xla, input_signature=signature, autograph=False)
    def compiled(weather: tf.Tensor, site: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(weather)
            found = model([weather, site])
        return tape.batch_jacobian(found, weather, experimental_use_pfor=pfor)

    count = len(given["weather"])
    starts = range(0, count, size)
    return lambda: np.concatenate(
        [compiled(*(tf.constant(given[name][i : i + size]) for name in ("weather", "site"))).numpy() for i in starts]
    )


def best_by_tape(model: keras.Model, given: dict[str, np.ndarray]) -> tuple[str, Callable[[], np.ndarray]]:
    """The fastest way of all, and its name."""
    found: list[tuple[float, str, Any]] = []
    for (way, (pfor, xla)), size in itertools.product(WAYS.items(), SIZES):
        act = by_tape(model, given, size, pfor=pfor, xla=xla)
        act()
        found.append((rate(act, len(given["weather"])), f"{way}, {size} a call", act))
    _, name, act = max(found, key=lambda one: one[0])
    return name, act


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=512, help=f"a multiple of {SIZES[-1]}")
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    for name, build in CASES.items():
        keras.utils.set_random_seed(0)
        model, random = build(), np.random.default_rng(0)
        given = {
            tensor.name: random.standard_normal((asked.windows, *tensor.shape[1:])).astype("float32")
            for tensor in model.inputs
        }
        ours = functools.partial(sensitivity.jacobian, model, given, wrt="weather", memory="4GB")
        expected, report = ours(report=True)
        way, taped = best_by_tape(model, given)
        difference = np.abs(taped() - expected).max() / np.abs(expected).max()
        own = [rate(ours, asked.windows) for _ in range(asked.turns)]
        other = [rate(taped, asked.windows) for _ in range(asked.turns)]
        print(f"{name}\n  ours: {max(own):,.0f} windows/s, by {report.setting}", flush=True)
        print(f"  best tape: {max(other):,.0f} windows/s, by {way}, {difference:.0e} from ours", flush=True)


if __name__ == "__main__":
    main()
