"""The recurrent layers of a run: of its own model, on windows of its own series."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import Refused
from ..integrity import require_series
from ..layers import keras
from ..patience import patiently
from ..places import Place
from ..plots import Picture, look
from ..series import open_series
from ..store import SAVED, Run, load_run_model
from ..windows import joined, spans_of
from .canvas import alarm_of
from .curves import draw_decay
from .decay import Decay
from .gates import draw_histograms, draw_matrices
from .halves import layers, named
from .jacobians import jacobian_decay
from .parts import Part, weights
from .paths import draw_heatmap, draw_lines, draw_points
from .stored import WINDOWS as MOST
from .stored import stored

if TYPE_CHECKING:
    import xarray as xr

WINDOWS = 32
DRAWN_BYTES = 64 << 20  # of gradients, of which pictures are means and a few lines


COLUMNS = ("layer", "direction", "windows", "rate", "half_life", "verdict", "alarms")


@dataclass(frozen=True, eq=False)
class RunLayer:
    """A recurrent layer of a run's model.

    decays: of each pass over time, forward before backward, as `jacobian_decay` gives them; none where it refuses the
    layer, and `untold` says why. parts: its weights. bidirectional: what it gives has the units of a forward pass, then
    those of a backward one.
    """

    name: str
    decays: tuple[Decay, ...]
    parts: tuple[Part, ...]
    bidirectional: bool
    untold: str = ""

    @property
    def rows(self) -> list[dict[str, object]]:
        """One a pass: layer, direction, windows; rate, what the norm is multiplied by from one step to the next
        further back; half_life in steps; verdict; alarms, what is not finite, or why a layer is not told of. None
        where there is none.
        """
        alone = dict.fromkeys(COLUMNS) | {"layer": self.name, "alarms": f"not told: {self.untold}"}
        return [self._row(decay) for decay in self.decays] if self.decays else [alone]

    def _row(self, decay: Decay) -> dict[str, object]:
        rate, half_life = (decay.fit.rate, decay.fit.half_life) if decay.fit else (None, math.inf)
        own = [part for part in self.parts if part.direction == decay.direction]
        return {
            "layer": self.name,
            "direction": decay.direction,
            "windows": len(decay.log_norms),
            "rate": rate,
            "half_life": half_life if math.isfinite(half_life) else None,
            "verdict": decay.verdict,
            "alarms": "; ".join(filter(None, [decay.alarm, _alarm(own)])) or None,
        }

    def pictures(self) -> Iterator[tuple[str, Picture]]:
        """By what they show: norms by lag, and the weights of each gate as histograms and as matrices."""
        if self.decays:
            yield "decay", draw_decay(self.decays)
        yield "histograms", draw_histograms(self.parts)
        yield "matrices", draw_matrices(self.parts)


def of_run(run: Run | Place | Path | str, names: Sequence[str] = (), *, windows: int = WINDOWS) -> tuple[RunLayer, ...]:
    """How far back the recurrent layers of a run's model remember, and what is not finite in their weights.

    names: of layers; none: all, in the model's order. windows: how many of the run's windows are looked at, evenly
    chosen among those without a missing value, and read as its workers read them. No shard need be committed.

    Raises `Refused` for a model without such layers or without any, a name that none has, a series that is no longer
    the run's or has no whole window, and for what `jacobian_decay` refuses: of layers that are not named, all.
    """
    if windows < 1:
        raise Refused("windows", given=windows, allowed="1 or more", remedy="give more, or leave it out")
    opened = Run.open(run)
    model = _model(opened)
    chosen = named(model, names)
    source = _windows(opened, windows)
    found, refusals = [], []
    for layer in chosen:
        decays: tuple[Decay, ...] = ()
        try:
            decays = jacobian_decay(model, source, layer, most_windows=len(source))
        except Refused as refused:
            refusals.append(refused)
        both = isinstance(layer, keras.layers.Bidirectional) and layer.merge_mode == "concat"
        untold = "" if decays else str(refusals[-1].given)
        found.append(RunLayer(layer.name, decays, weights(model, layer), both, untold))
    if refusals and (names or len(refusals) == len(found)):
        raise refusals[0]
    return tuple(found)


def draw_run_gradients(dataset: xr.Dataset, layer: RunLayer) -> Iterator[tuple[str, Picture]]:
    """Gradients that a run by the layer has stored, of its first output, at its last step where it has several.

    By what they show, and of which output: lines and a heatmap over the window's steps; points where the layer gives
    its last step alone. dataset: as for `stored`, which says what is refused.
    """
    output, steps = str(np.atleast_1d(dataset["output"].values)[0]), np.atleast_1d(dataset["output_step"].values)
    window = math.prod(dataset.sizes[dim] for dim in ("source_step", "unit")) * dataset["jacobian"].dtype.itemsize
    gradients = stored(dataset, output, steps[-1].item(), most_windows=min(MOST, max(1, DRAWN_BYTES // window)))
    of = output if len(steps) == 1 else f"{output}, step {steps[-1]}"
    name, both, unit = layer.name, layer.bidirectional, f"∂ {look.plain(of)} / ∂ unit"
    if gradients.ndim == 2:
        yield f"points of {of}", draw_points(gradients, bidirectional=both, layer=name, unit=unit)
        return
    yield f"lines of {of}", draw_lines(gradients, layer=name, unit=unit)
    yield f"heatmap of {of}", draw_heatmap(gradients, bidirectional=both, layer=name, unit=unit)


def _alarm(parts: Sequence[Part]) -> str:
    found = alarm_of(np.concatenate([part.values.ravel() for part in parts]))
    gates = dict.fromkeys(part.gate for part in parts if part.alarm)
    return f"{found}, weights of gate {', '.join(gates)}" if found else ""


def _model(run: Run) -> keras.Model:
    """The run's model, which takes windows as `_windows` gives them. Raises `Refused` where it has no such layers."""
    if run.content["model_file"] == SAVED:
        raise Refused(
            "run directory",
            given=f"{run.place}, whose model is a SavedModel: it has no layers",
            allowed="a run of a .keras file, or of a function's model",
            remedy='save the Keras model with model.save("model.keras"), and run the job with that',
        )
    packing, model = run.facts.packing, load_run_model(run)
    model = replace(packing, loss=None).wrapped(model) if packing else model
    if not layers(model):
        raise Refused(
            "run directory",
            given=f"{run.place}, whose model has no recurrent layer",
            allowed="a run of a model with an LSTM, GRU or SimpleRNN layer, or a Bidirectional of these",
            remedy="query RUN effective-memory, which is of any model",
        )
    return model


def _windows(run: Run, most: int) -> np.ndarray:
    """`(window, *input)` in the run's dtype, scaled, without what a loss takes beside them."""
    facts, geometry = run.facts, run.windows
    whole = geometry.whole(facts.missing(run.survey), most)
    if not len(whole):
        raise Refused(
            "run directory",
            given=f"{run.place}, of whose {geometry.count:,} windows none is without a missing value",
            allowed="one whole window or more",
            remedy="fill the gaps, or leave out the feature that has them, and run that job",
        )
    require_series(run)
    series = open_series(run.series, facts.dtype)
    spans = spans_of(whole.tolist())
    read = [patiently(run.series.path, series.windows, geometry, first, last + 1)[0] for first, last in spans]
    return joined(read).reshape(len(whole), *(facts.labels.window if facts.labels else facts.input_shape))
