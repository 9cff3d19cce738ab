"""What goes on inside recurrent layers: how far back their state remembers, and their weights and gradients by gate.

For LSTM, GRU, SimpleRNN and Bidirectional layers of a Keras model, inner models' too; in process, on arrays of windows
or on those of a run, as `sensitivity recurrent RUN` does.

    from sensitivity import plots, recurrent

    decays = recurrent.jacobian_decay(model, windows, "lstm")
    print(decays[0])                                    # lstm (forward): vanishing: halves every 4.1 steps …
    plots.save(recurrent.draw_decay(decays), "decay.svg")
    print(recurrent.report(recurrent.weight_gradients(model, windows, "lstm")))
    print(recurrent.of_run("runs/soil")[0].rows)        # of a run's own model and series
    gradients = recurrent.stored(sensitivity.open_run("runs/lstm"))   # of a job with wrt = "lstm"
    plots.save(recurrent.draw_heatmap(gradients), "gradients.png")

Functions that compute return dataclasses of arrays, those named `draw_…` figures of these, which `plots.save` writes.
"""

from __future__ import annotations

from .curves import draw_decay
from .decay import Decay, Fit, gradient_decay
from .gates import draw_histograms, draw_matrices
from .halves import layers
from .jacobians import jacobian_decay
from .of_run import RunLayer, draw_run_gradients, of_run
from .parts import Part, Statistics, alarms, gradients, report, weight_gradients, weights
from .paths import draw_heatmap, draw_lines, draw_points
from .stored import stored

__all__ = [
    "Decay",
    "Fit",
    "Part",
    "RunLayer",
    "Statistics",
    "alarms",
    "draw_decay",
    "draw_heatmap",
    "draw_histograms",
    "draw_lines",
    "draw_matrices",
    "draw_points",
    "draw_run_gradients",
    "gradient_decay",
    "gradients",
    "jacobian_decay",
    "layers",
    "of_run",
    "report",
    "stored",
    "weight_gradients",
    "weights",
]
