"""Products of a model's windows in one process, for notebooks: `jacobian(model, windows)` and its sisters.

All take `model`, `windows` and `memory`, and what to differentiate and how, as `jacobian` has it. All find the fastest
kernel by timing, keep it with the model, and return a NumPy array `(batch, …)` in the model's dtype; with `report=True`
a `Report` as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import keras
import numpy as np

from .errors import Refused
from .facts import CallFacts
from .inprocess import Beside, Make, Report, computed
from .products.directions import Directed
from .products.expected_gradients import SAMPLES as BASELINES
from .products.expected_gradients import ExpectedGradients, apart
from .products.gradient_norm import GradientNorm
from .products.gram import Gram
from .products.hessian import Hessian
from .products.hvp import Hvp
from .products.integrated_gradients import IntegratedGradients
from .products.jacobian import Jacobian
from .products.jvp import Jvp
from .products.product import Product
from .products.smooth_gradients import NOISE, SAMPLES, SmoothGradients, noise_of
from .products.vjp import RULES, Vjp, by_rule

Auto = Literal["auto"]
Result = np.ndarray | tuple[np.ndarray, Report]


class What(TypedDict, total=False):
    """What to differentiate, and how: see `jacobian`."""

    of: str
    wrt: str
    labels: Any
    loss: Any
    sample_weight: Any
    output_steps: Sequence[int] | str | None
    outputs: Sequence[str | int] | None
    max_lag: int | None
    kernel: str
    windows_per_call: int | Auto
    experimental_use_pfor: bool | Auto
    parallel_iterations: int | Auto


@overload
def jacobian(
    model: keras.Model,
    windows: Any,
    memory: str | int | None = None,
    *,
    report: Literal[False] = False,
    **what: Unpack[What],
) -> np.ndarray: ...


@overload
def jacobian(
    model: keras.Model,
    windows: Any,
    memory: str | int | None = None,
    *,
    report: Literal[True],
    **what: Unpack[What],
) -> tuple[np.ndarray, Report]: ...


def jacobian(
    model: keras.Model, windows: Any, memory: str | int | None = None, *, report: bool = False, **what: Unpack[What]
) -> Result:
    """∂ model(windows) / ∂ windows, window by window: `tape.batch_jacobian` that fits in memory, at its fastest.

    model: a Keras model, or what tf.saved_model.load gives, or a tf.Module that is called with windows. Of half
        precision it is computed in float32, and `Report.lost` says so.
    windows: `(batch, *source)`, usually `(batch, lag, feature)`; anything NumPy takes, in the model's units. Of a model
        of several inputs, one for each, by name or in order.
    memory: bytes to use above what the process has, as a number or "2GB": for a copy of the windows in the model's
        dtype, the result, the compiler and the calls. Of the compiler's 170 MB, what is beyond 340 MB is counted, so
        that from 510 MB on all is. On a GPU it bounds the calls there too. None: half of what is available.
    of: "output", the name of one of several outputs, or of an inner layer; or "loss": of each window's own, the mean
        over its outputs, without the model's regularization.
    wrt: "input"; the name of one of several inputs, or of an inner layer: by what it gives, at all of its steps and
        units; or "weights", by all trainable weights in the model's order, or "weights:" and a layer
        ("weights:lstm") or a pattern of names such as "weights:dense*/kernel". One weight keeps its shape in
        `*source`, several are `(parameter,)`.
    labels: `(batch, …)`, as the loss takes them. sample_weight: `(batch)` or `(batch, output_step)`, of the loss.
    loss: what `keras.losses.get` takes, or a function (labels, outputs) → `(batch, …)`; None: what the model was
        compiled with. For lambdas, closures and objects of your own no kernel is kept.
    output_steps: only of these output steps, rising, negative ones from the end; or a slice of them, such as "10:".
    outputs: only of these of the target's channels, by number or by the names that a job gives them, in their order.
    max_lag: keep only lags 0 to max_lag, counted back from the window's last step; below the number of steps of a
        window. Of a causal recurrent model with an output at every step they count back from each output's own step,
        and entries before the window are zero.
    kernel: "auto", "gradient", "batch_jacobian", "forward" or "scan"; what is left at "auto", as windows_per_call,
        experimental_use_pfor and parallel_iterations, is chosen by timing on these windows, and kept with the model.
        Trials after the first take a fifth of the computing time at most, or 3 seconds of work that takes as long, and
        never more than 25 seconds.
    report: return a `Report` as well.

    Returns `(batch, *target, *source)`, with max_lag `(batch, *target, max_lag + 1, feature)`, in the model's dtype,
    in units of the output per unit of the source; several outputs together are `(batch, output_step, output, *source)`,
    one after another along `output`. The compiled kernel is kept with the model and serves further calls with the same
    shapes, with whatever weights and layers the model then has. Build the model anew after changing an attribute of a
    layer, such as its activation: a kept kernel does not see that, nor does `predict`.

    Warns (UserWarning) where every derivative is 0, and where one of several outputs does not depend on the source.

    Raises `Refused` (a ValueError) for a model whose samples influence each other or that takes no such windows, and
    for a memory that the result or a single window is projected not to fit; MemoryError where one does not after all.
    """
    return computed(_always(Jacobian()), model, windows, memory, what, report=report)


def vjp(
    model: keras.Model,
    windows: Any,
    vectors: Any = "sum",
    memory: str | int | None = None,
    *,
    report: bool = False,
    **what: Unpack[What],
) -> Result:
    """vᵀ · ∂ target / ∂ source for each vector v, at the cost of a gradient each: the Jacobian is never formed.

    vectors: `(vector, *target)`, the same for all windows, or `(batch, vector, *target)`; or "sum", "mean" or "last",
        of all outputs, or of those of the last step. Others as for `jacobian`; max_lag counts from the window's end.

    Returns `(batch, vector, *source)`.
    """

    def make(facts: CallFacts, source: np.ndarray) -> tuple[Product, Beside]:
        if isinstance(vectors, str) and vectors in RULES:
            own = by_rule(vectors, facts.target_shape)[None]
        else:
            own = _shaped("vectors", vectors, "vector", facts.target_shape, len(source))
        return _of_windows(Vjp, own, facts, len(facts.target_shape))

    return computed(make, model, windows, memory, {**what, "product": Vjp.name}, report=report)


def jvp(
    model: keras.Model,
    windows: Any,
    directions: Any,
    memory: str | int | None = None,
    *,
    report: bool = False,
    **what: Unpack[What],
) -> Result:
    """∂ target / ∂ source · d for each direction d: how all outputs answer to one change of the source.

    directions: `(direction, *source)`, the same for all windows, or `(batch, direction, *source)`, in units of the
        source. Others as for `jacobian`.

    Returns `(batch, *target, direction)`.
    """
    return computed(_along(Jvp, directions), model, windows, memory, {**what, "product": Jvp.name}, report=report)


def hessian(
    model: keras.Model, windows: Any, memory: str | int | None = None, *, report: bool = False, **what: Unpack[What]
) -> Result:
    """∂² target / ∂ source²: of each output, as many rows at a time as fit in memory.

    Arguments as for `jacobian`. Returns `(batch, *target, *source, *source)`, in units of the output per unit of the
    source squared, symmetric to rounding.
    """
    return computed(_always(Hessian()), model, windows, memory, {**what, "product": Hessian.name}, report=report)


def hvp(
    model: keras.Model,
    windows: Any,
    directions: Any,
    memory: str | int | None = None,
    *,
    report: bool = False,
    **what: Unpack[What],
) -> Result:
    """∂² target / ∂ source² · d for each direction d: the Hessian is never formed.

    directions: as for `jvp`. Returns `(batch, *target, direction, *source)`.
    """
    return computed(_along(Hvp, directions), model, windows, memory, {**what, "product": Hvp.name}, report=report)


def gradient_norm(
    model: keras.Model, windows: Any, memory: str | int | None = None, *, report: bool = False, **what: Unpack[What]
) -> Result:
    """‖∂ output / ∂ source‖₂ of each output: the quantity of input-gradient regularization.

    Arguments as for `jacobian`. Returns `(batch, *target)`; by weights `(batch, *target, weight)`, a norm for each.
    """

    def make(facts: CallFacts, source: np.ndarray) -> tuple[Product, Beside]:
        return _nothing_beside(GradientNorm.of(facts))

    return computed(make, model, windows, memory, {**what, "product": GradientNorm.name}, report=report)


def gram(
    model: keras.Model, windows: Any, memory: str | int | None = None, *, report: bool = False, **what: Unpack[What]
) -> Result:
    """J·Jᵀ of each window, of outputs by outputs: by weights, the empirical neural tangent kernel within it.

    Arguments as for `jacobian`, without max_lag. Returns `(batch, *target, *target)`, in units of the output squared
    per unit of the source squared.
    """
    return computed(_always(Gram()), model, windows, memory, {**what, "product": Gram.name}, report=report)


def integrated_gradients(
    model: keras.Model,
    windows: Any,
    baseline: Any = "zero",
    memory: str | int | None = None,
    *,
    steps: int | None = None,
    report: bool = False,
    **what: Unpack[What],
) -> Result:
    """What each input adds to f(x) − f(x'), by the mean gradient on the straight path from a baseline x' to x.

    baseline: "zero", "mean" (of these windows, by feature), or a window `(*input)`, in the model's units.
    steps: points on the path; None: as many as it takes for attributions to add up to 1 %, 512 at most.
    Others as for `jacobian`, by the input alone and without max_lag.

    Returns `(batch, *target, *input)` in units of the output. `Report.beside` has `completeness_error` `(batch,
    *target)` and `steps` `(batch)`: see `IntegratedGradients`.
    """

    def make(facts: CallFacts, source: np.ndarray) -> tuple[Product, Beside]:
        return _nothing_beside(IntegratedGradients(_baseline(baseline, source), steps))

    asked = {**what, "product": IntegratedGradients.name, "steps": steps}
    return computed(make, model, windows, memory, asked, report=report)


def smooth_gradients(
    model: keras.Model,
    windows: Any,
    memory: str | int | None = None,
    *,
    noise: float = NOISE,
    samples: int = SAMPLES,
    seed: int = 0,
    report: bool = False,
    **what: Unpack[What],
) -> Result:
    """The mean Jacobian over windows with normal noise, the same for all of them.

    noise: its standard deviation, by that of each feature over these windows. samples: how many.
    Others as for `jacobian`, by the input alone and without max_lag. Returns `(batch, *target, *input)`.
    """

    def make(facts: CallFacts, source: np.ndarray) -> tuple[Product, Beside]:
        every = source if len(source) else np.zeros((1, *source.shape[1:]))
        spread = noise * every.std(axis=tuple(range(source.ndim - 1)), dtype="float64")
        return _nothing_beside(SmoothGradients(noise_of(samples, spread, seed, source.shape[1:])))

    asked = {**what, "product": SmoothGradients.name, "noise": noise, "samples": samples, "seed": seed}
    return computed(make, model, windows, memory, asked, report=report)


def expected_gradients(
    model: keras.Model,
    windows: Any,
    baselines: Any = None,
    memory: str | int | None = None,
    *,
    seed: int = 0,
    report: bool = False,
    **what: Unpack[What],
) -> Result:
    """Integrated gradients on average over baselines: attributions add up, about, to f(x) − the mean of f(x').

    baselines: `(sample, *input)`, in the model's units; None: 64 of these windows, evenly spread.
    Others as for `jacobian`, by the input alone and without max_lag. Returns `(batch, *target, *input)`.
    """

    def make(facts: CallFacts, source: np.ndarray) -> tuple[Product, Beside]:
        if baselines is not None:
            return _nothing_beside(ExpectedGradients(_shaped("baselines", baselines, "sample", source.shape[1:]), seed))
        own = source[np.linspace(0, len(source) - 1, min(BASELINES, len(source))).astype(int)]
        return _nothing_beside(ExpectedGradients(apart(own, "baselines"), seed))

    asked = {**what, "product": ExpectedGradients.name, "seed": seed}
    return computed(make, model, windows, memory, asked, report=report)


def _along(product: type[Directed], directions: Any) -> Make:
    def make(facts: CallFacts, source: np.ndarray) -> tuple[Product, Beside]:
        own = _shaped("directions", directions, "direction", facts.source.shape, len(source))
        return _of_windows(product, own, facts, len(facts.source.shape))

    return make


def _always(product: Product) -> Make:
    return lambda facts, source: _nothing_beside(product)


def _nothing_beside(product: Product) -> tuple[Product, Beside]:
    return product, lambda part: ()


def _of_windows(product: Any, own: np.ndarray, facts: CallFacts, rank: int) -> tuple[Product, Beside]:
    """A product by arrays `(n, *shape)` of `rank` axes after the first, or such of each window."""
    if own.ndim == rank + 1:
        made = product(own)
        return made, lambda part: tuple(each[: part.stop - part.start] for each in made.beside(facts, part.stop))
    return product(own[0]), lambda part: (np.ascontiguousarray(own[part], facts.dtype),)


def _shaped(name: str, given: Any, each: str, shape: tuple[int, ...], windows: int | None = None) -> np.ndarray:
    """`(n, *shape)` or, where windows are counted, `(windows, n, *shape)`."""
    array = np.asarray(given)
    same = array.shape[1:] == shape and len(array) > 0
    own = windows is not None and array.shape[2:] == shape and array.shape[:1] == (windows,) and array.shape[1] > 0
    if not (same or own) or array.dtype.kind not in "fiub":
        inner = ", ".join(map(str, shape))
        by_window = "" if windows is None else f", or ({windows}, {each}, {inner})"
        raise Refused(
            name,
            given=f"an array of shape {array.shape} and {array.dtype}",
            allowed=f"numbers of shape ({each}, {inner}){by_window}",
            remedy=f"give it that shape: a single {each} is {name}[None]",
        )
    return array


def _baseline(given: Any, source: np.ndarray) -> np.ndarray:
    if isinstance(given, str) and given in ("zero", "mean"):
        mean = source.mean(axis=tuple(range(source.ndim - 1)), dtype="float64") if given == "mean" else 0.0
        return np.broadcast_to(mean, source.shape[1:])
    array = np.asarray(given)
    if array.shape != source.shape[1:] or array.dtype.kind not in "fiub":
        what = repr(given) if isinstance(given, str) else f"an array of shape {array.shape}"
        raise Refused(
            "baseline",
            given=what,
            allowed=f'"zero", "mean", or a window of shape {source.shape[1:]}',
            remedy="give one of these",
        )
    return array
