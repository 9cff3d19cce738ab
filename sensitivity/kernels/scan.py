"""Recurrent models: one walk back through time for all outputs at once.

The model is one causal cell. With z_s the states of all its recurrent layers after step s, x_s the window's step:

    z_s = f(z_{s-1}, x_s)        y_t = g(z_t, x_t)

so y_t depends on x_s only through the states between, and by the chain rule, for s < t,

    ∂y_t/∂x_s = ∂g/∂z_t · J_t · J_{t-1} ··· J_{s+1} · ∂f/∂x_s,        J_r = ∂f/∂z_{r-1} at step r.

The adjoints a_{t,s} = ∂y_t/∂z_s are built from the left, a_{t,t} = ∂g/∂z_t and a_{t,s-1} = a_{t,s}·J_s: every row t is
pulled back through the same step s, and gives ∂y_t/∂x_s on the way. So

1. run forward once over all steps, layer by layer, and keep the states and what pulling back needs (`cells`);
2. differentiate g at all steps at once: the rows' seeds;
3. walk from the last step to the first with all rows side by side (`walk`). Row t is seeded as the walk passes t, so
   nothing is ever computed above the diagonal; the set of rows grows in a few segments of static shape.

Cost: with U units, I inputs and n = T·O rows (O outputs a step), T·n/2 row-steps of 4·U·(U + I) multiplications and
additions for an LSTM (2·U·(U + I) for a GRU), and a step's matrices, which cost about as much as ten rows. The tape
takes 8·U·(U + I) for each of T·n, and keeps its lists beside. Memory: the states of T steps, the adjoints of one, the
result. Where T·O/2 is many times the number of states, `blocks` need fewer row-steps. With one output a window (a head
after the last step) all rows are seeded there, and the walk is the same.
"""

from __future__ import annotations

import tensorflow as tf

from ..model import CallFacts, Target
from ..recurrence import Recurrence, ScanFacts, recurrence
from ..setting import Setting
from . import blocks
from .walk import Passed, climbed_down, emission, forward, no_adjoints, pulled_back, walked


def why_not(facts: CallFacts, *, pfor: bool, xla: bool) -> str | None:
    return None if facts.scan else facts.no_scan


def build(target: Target, setting: Setting):
    facts = target.facts
    model = recurrence(target.model, facts.input_shape, target.of, facts.dtype)
    rows = setting.outputs_per_call or facts.target_size
    back = _every_step if model.is_sequence else _last_step

    def scan(windows: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        passed = forward(model, windows)
        prediction = model.read(passed.values)
        block = back(passed, first, rows, facts)
        shape = (setting.windows_per_call, rows, -1, *facts.input_shape[1:])
        return tf.reshape(prediction, (-1, *facts.target_shape)), tf.reshape(block, shape)

    return scan


def _last_step(passed: Passed, first: tf.Tensor, rows: int, facts: CallFacts) -> tf.Tensor:
    """A head after the last step: all rows begin there. (B, R, lags, features)"""
    last = passed.steps - 1
    every = _derivatives(passed.model, {v: passed.values[v][:, -1:] for v in passed.model.sources})
    seeds = {v: tf.slice(seed, [0, first, 0], [passed.batch, rows, seed.shape[2]]) for v, seed in every.items()}
    adjoints, by_step = pulled_back(passed, tf.constant(last), seeds, no_adjoints(passed, rows))
    emitted = emission(passed, rows).write(last, by_step)
    oldest = passed.steps - facts.lags
    _, emitted = walked(lambda s, there: pulled_back(passed, s, {}, there), last - 1, oldest, adjoints, emitted)
    return tf.transpose(emitted.stack()[oldest:], (1, 2, 0, 3))


def _every_step(passed: Passed, first: tf.Tensor, rows: int, facts: CallFacts) -> tf.Tensor:
    """An output at every step: rows from output `first` on. (B, R, T, features), or by lag, (B, R, lags, features)"""
    seeds, outputs = _seeds(passed), facts.target_size // passed.steps
    if facts.by_output_step:
        return _by_lag(passed, seeds, first // outputs, rows // outputs, facts)
    length = _extent(facts).length_of_all(passed.steps)
    if length and rows == facts.target_size:
        return blocks.all_lags(passed, seeds, length)
    _, emitted = climbed_down(passed, seeds, first // outputs + tf.range(rows // outputs), no_adjoints(passed, 0))
    return tf.transpose(emitted.stack(), (1, 2, 0, 3))


def _by_lag(passed: Passed, seeds: dict[int, tf.Tensor], first: tf.Tensor, count: int, facts: CallFacts) -> tf.Tensor:
    """The outputs of `count` steps from `first` on, by the nearest steps: (B, count, O, lags, features)"""
    seen, lags = passed, facts.lags
    if count < passed.steps:
        seen, seeds = blocks.reached(passed, seeds, first, count, lags)
    length = _extent(facts).length_by_lag(seen.steps)
    by_lag = blocks.some_lags(seen, seeds, length, lags)[:, -count:]
    inside = tf.range(lags)[::-1] <= (first + tf.range(count))[:, None]  # oldest first; others are before the window
    return tf.where(inside[:, None, :, None], by_lag, tf.zeros((), passed.dtype))


def _extent(facts: CallFacts) -> ScanFacts:
    if facts.scan is None:
        raise ValueError(f"no scan serves this model: {facts.no_scan}")
    return facts.scan


def _seeds(passed: Passed) -> dict[int, tf.Tensor]:
    """∂y_t by the sources at t, of all steps at once: (T, B, O, width) each."""
    batch, steps, values = passed.batch, passed.steps, passed.values
    alone = {v: tf.reshape(values[v], (batch * steps, 1, *values[v].shape[2:])) for v in passed.model.sources}
    found = _derivatives(passed.model, alone)
    shaped = {value: tf.reshape(seed, (batch, steps, *seed.shape[1:])) for value, seed in found.items()}
    return {value: tf.transpose(seed, (1, 0, 2, 3)) for value, seed in shaped.items()}


def _derivatives(model: Recurrence, sources: dict[int, tf.Tensor]) -> dict[int, tf.Tensor]:
    """∂ outputs / ∂ sources (N, 1, …), each sample alone: (N, outputs, width)"""
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(sources)
        outputs = model.read(sources)
        outputs = tf.reshape(outputs, (outputs.shape[0], -1))
    zero = tf.UnconnectedGradients.ZERO
    found = {v: tape.batch_jacobian(outputs, source, unconnected_gradients=zero) for v, source in sources.items()}
    return {value: tf.reshape(seed, (*outputs.shape, -1)) for value, seed in found.items()}
