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

Cost: with U units, I inputs and n = T·O rows (O outputs a step), T·n/2 row-steps (1 + 1/k times as many, as rows are
added in k segments) of 4·U·(U + I) multiplications and additions for an LSTM (2·U·(U + I) for a GRU), and a step's
matrices, which cost about as much as ten rows. The tape takes 8·U·(U + I) for each of T·n, and keeps its lists beside.
Memory: the states of T steps, the adjoints of one, the result (`walks.numbers`). Where T·O/2 is many times the number
of states, `blocks` need fewer row-steps. With outputs of the last step alone (any head after it) all rows are seeded
there, and the walk is the same.

x is what is differentiated by: the window, one of several inputs, or what an inner layer gives. What does not depend on
it is computed once, before the pass forward (`held`), by any layers; f and g take it as constants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from ..facts import CallFacts
from ..model import Target
from ..products.product import Given, some
from ..products.vjp import contracted
from ..setting import Setting
from . import blocks
from .walk import Adjoints, Passed, climbed_down, emission, forward, no_adjoints, pulled_back, walked


def why_not(facts: CallFacts, *, pfor: bool, xla: bool) -> str | None:
    return None if facts.scan else facts.no_scan


def build(target: Target, setting: Setting):
    facts = target.facts
    model = target.recurrence
    rows = setting.outputs_per_call or facts.rows

    def scan(given: Given, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        passed = forward(model, target.walked_from(given), model.held.values(given[0]))
        prediction = facts.selection.of(model.read(passed.values, passed.held))
        if facts.rows_of == "vectors":
            vectors = some(given[1], first, setting.outputs_per_call)
            block = _summed_steps(passed, vectors, facts) if model.is_sequence else _last_step(passed, facts, vectors)
        elif model.is_sequence:
            block = _every_step(passed, first, rows, facts)
        else:
            block = _last_step(passed, facts, (first, rows))
        shape = (setting.windows_per_call, rows, -1, *facts.source.shape[1:])
        return tf.reshape(prediction, (-1, *facts.target_shape)), tf.reshape(block, shape)

    return scan


def _last_step(passed: Passed, facts: CallFacts, wanted: tuple[tf.Tensor, int] | tf.Tensor) -> tf.Tensor:
    """A head after the last step: all rows begin there. (B, R, lags, features)

    wanted: the number of the first row, and that of rows; or vectors (B, R, *target) that outputs are summed by.
    """
    last, oldest = passed.steps - 1, passed.steps - facts.lags
    rows = wanted[1] if isinstance(wanted, tuple) else wanted.shape[1]

    def of_rows(outputs: tf.Tensor) -> tf.Tensor:
        every = tf.reshape(facts.selection.of(outputs), (passed.batch, -1))
        if not isinstance(wanted, tuple):
            return contracted(every, wanted)
        return every if rows == facts.target_size else tf.gather(every, wanted[0] + tf.range(rows), axis=1)

    at_last = {value: passed.values[value][:, -1:] for value in passed.model.read_from}
    seeds = _derivatives(passed, at_last, of_rows)
    adjoints, by_step = pulled_back(passed, tf.constant(last), seeds, no_adjoints(passed, rows))
    emitted = emission(passed, rows, facts.lags).write(last - oldest, by_step)
    _, emitted = walked(lambda s, there: pulled_back(passed, s, {}, there), last - 1, oldest, adjoints, emitted, oldest)
    return tf.transpose(emitted.stack(), (1, 2, 0, 3))


def _every_step(passed: Passed, first: tf.Tensor, rows: int, facts: CallFacts) -> tf.Tensor:
    """Outputs of every step, or of some: `rows` from output `first` on, by all steps, (B, R, T, features), or by the
    last ones up to each output's own, (B, steps, O, lags, features).
    """
    walk, outputs = facts.walk(rows), facts.target_size // len(facts.output_at)
    at = tf.constant(list(facts.output_at))
    some = tf.slice(at, [first // outputs], [rows // outputs])
    seeds = functools.partial(_seeds, passed, facts)
    if facts.by_output_step:
        return _last_lags(passed, seeds, some, facts, rows)
    if walk.kind == "blocks":
        return blocks.all_lags(passed, seeds, walk.length, walk.count, facts.output_at)
    if rows == facts.target_size:
        _, emitted = climbed_down(passed, seeds(at[None]), facts.output_at, no_adjoints(passed, 0))
    else:
        _, emitted = climbed_down(passed, seeds(some[None]), some, no_adjoints(passed, 0))
    return tf.transpose(emitted.stack(), (1, 2, 0, 3))


def _summed_steps(passed: Passed, vectors: tf.Tensor, facts: CallFacts) -> tf.Tensor:
    """Sums of outputs of every step, weighted by vectors (B, R, *target): rows that begin at the last step, and take up
    each step's own part as the walk comes to it. (B, R, lags, features)
    """
    batch, rows = vectors.shape[:2]
    at, oldest = tf.constant(list(facts.output_at)), passed.steps - facts.lags
    by_step = tf.reshape(vectors, (batch, rows, at.shape[0], -1))
    by_step = tf.reshape(tf.transpose(by_step, (2, 0, 1, 3)), (at.shape[0] * batch, rows, -1))
    seeds = _seeds(passed, facts, at[None], by_step)

    def back(s: tf.Tensor, adjoints: Adjoints) -> tuple[Adjoints, tf.Tensor]:
        number = tf.minimum(tf.reduce_sum(tf.cast(at < s, "int32")), at.shape[0] - 1)
        nothing = tf.zeros((), passed.dtype)
        entering = {value: tf.where(at[number] == s, seed[number], nothing) for value, seed in seeds.items()}
        return pulled_back(passed, s, entering, adjoints)

    emitted = emission(passed, rows, facts.lags)
    _, emitted = walked(back, passed.steps - 1, oldest, no_adjoints(passed, rows), emitted, oldest)
    return tf.transpose(emitted.stack(), (1, 2, 0, 3))


def _last_lags(passed: Passed, seeds: blocks.Seeds, at: tf.Tensor, facts: CallFacts, rows: int) -> tf.Tensor:
    """The outputs of the steps `at` (n) by the last steps up to each: (B, n, O, lags, features)"""
    walk, count, lags = facts.walk(rows), at.shape[0], facts.lags
    if walk.kind == "spans":
        firsts = at if walk.length == 1 else at[0] + walk.length * tf.range(walk.count)
        by_lag = blocks.last_lags_by_spans(passed, seeds, firsts, walk.length, lags)[:, :count]
    else:
        begin = at[0] - walk.before
        by_lag = blocks.last_lags_by_blocks(passed, seeds, begin, walk.length, walk.count, lags)
        by_lag = by_lag[:, walk.before : walk.before + count]
    inside = tf.range(lags)[::-1] <= at[:, None]  # oldest first; others are before the window
    return tf.where(inside[:, None, :, None], by_lag, tf.zeros((), passed.dtype))


def _seeds(
    passed: Passed, facts: CallFacts, steps: tf.Tensor, vectors: tf.Tensor | None = None
) -> dict[int, tf.Tensor]:
    """∂y_t by the sources at t, of the steps (N, n): (n, N·B, O, width) by value.

    vectors: (n·N·B, R, O), by which outputs are summed to R rows.
    """
    spans, length = steps.shape
    order = tf.reshape(tf.transpose(passed.inside(steps)), [-1])
    found = {value: tf.gather(passed.values[value], order, axis=1) for value in passed.model.read_from}
    time_first = {value: tf.transpose(part, (1, 0, *range(2, len(part.shape)))) for value, part in found.items()}
    alone = {value: tf.reshape(part, (-1, 1, *part.shape[2:])) for value, part in time_first.items()}
    has_channels = len(facts.target_shape) == 2
    channels = facts.selection.channels_of if has_channels else tf.identity
    chosen = channels if vectors is None else lambda outputs: contracted(channels(outputs), vectors)
    derived = _derivatives(passed, alone, chosen)
    return {v: tf.reshape(seed, (length, spans * passed.batch, *seed.shape[1:])) for v, seed in derived.items()}


def _derivatives(
    passed: Passed, sequences: dict[int, tf.Tensor], chosen: Callable[[tf.Tensor], tf.Tensor]
) -> dict[int, tf.Tensor]:
    """∂ outputs / ∂ sources, of the outputs that are `chosen`: (N, outputs, width)

    sequences: that outputs are read from (N, 1, …), each sample alone.
    """
    sources = {value: sequences[value] for value in passed.model.sources}
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(sources)
        outputs = chosen(passed.model.read(sequences, passed.held))
        outputs = tf.reshape(outputs, (outputs.shape[0], -1))
    zero = tf.UnconnectedGradients.ZERO
    found = {v: tape.batch_jacobian(outputs, source, unconnected_gradients=zero) for v, source in sources.items()}
    return {value: tf.reshape(seed, (*outputs.shape, -1)) for value, seed in found.items()}
