"""The same engine in one process, for notebooks: what `api` gives is computed here."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
from pydantic import ValidationError

from . import machine, meter
from .arguments import with_arguments_named
from .audit import few, predicts_in_its_own_way, require_as_predicted, require_independent, require_stateless
from .device import call_budget, has_gpu, kind
from .engine import Tuned
from .errors import Refused
from .facts import CallFacts
from .findings import refusals, unknown_key
from .given import Given
from .job import SensitivitySection
from .kept import Found, Kept, Request, State, TargetKernels, kept_or_made, kept_with, made_of
from .layers import whole_inputs
from .loading import in_full_precision
from .machine import available_memory, recently
from .model import described_call, target_of, wrapped_and_cut
from .packing import Packing, innermost, is_constant
from .plan import MiB, human_bytes, result_bytes
from .products.product import Arrays, Product
from .progress import progress_of_long
from .room import Room
from .saved_models import as_model
from .sections import parse_bytes
from .setting import Choice, Setting
from .sources import INPUT
from .tuning import BUILD_BYTES, tune
from .weights import meant

BESIDE = ("labels", "loss", "sample_weight")  # of what is asked, what is given by window or as an object
ASKED = (
    *("of", "wrt", *BESIDE, "output_steps", "outputs", "max_lag", "kernel", "windows_per_call"),
    *("experimental_use_pfor", "parallel_iterations"),
)
Beside = Callable[[slice], Arrays]
Make = Callable[[CallFacts, np.ndarray], tuple[Product, Beside]]
MOST_AT_ONCE = 4096  # windows a call, at most: larger numbers of windows share their kernel
TIMED_ON = 256


@dataclass(frozen=True)
class Report:
    """How a product was computed: which kernel and setting, why, with how much memory, and what was lost.

    projected, measured: bytes above what the process had, of the whole call with its trials and its result. The first
    is said before the windows are run, from what the trials took; the second is None where the system does not tell.
    reused: the kernel was that of an earlier call. seconds: of it all. beside: other numbers of each window that came
    with it, `prediction` among them.
    """

    setting: Setting
    choice: Choice
    projected: int
    measured: int | None
    windows: int
    seconds: float
    reused: bool
    beside: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def lost(self) -> tuple[str, ...]:
        return self.setting.lost

    def __str__(self) -> str:
        measured = "not known" if self.measured is None else human_bytes(self.measured)
        lines = [
            f"kernel    {self.setting}",
            f"chosen    {self.choice.why}" + (", by an earlier call" if self.reused else ""),
            f"memory    {human_bytes(self.projected)} projected, {measured} measured",
            f"time      {self.windows:,} windows in {self.seconds:.3g} s",
            *(f"lost      {what}" for what in self.lost),
            *(f"trial     {trial}" for trial in self.choice.trials),
        ]
        return "\n".join(lines)


@with_arguments_named
def computed(
    make: Make,
    model: keras.Model,
    windows: Any,
    memory: str | int | None,
    asked: Mapping[str, Any],
    *,
    report: bool = False,
) -> np.ndarray | tuple[np.ndarray, Report]:
    """A product of windows, by a kernel that is kept with the model; see `api`.

    make: the product, from what is known of the model and the windows, and what its calls take beside them, by window.
    """
    started = time.perf_counter()
    given, baseline = _given_bytes(memory), machine.resident_memory()
    with machine.span() if report else contextlib.nullcontext(_not_known) as peak:
        while True:
            request, source = _request_of(as_model(model), windows, asked)
            product, beside = make(request.plain, request.plain.source.of(source))
            own = request.of_product(product)
            budget = _Budget.of(given, baseline, windows, source, own.target.facts)
            reused = _reused(own, source, request.wanted, budget)
            found = reused or _timed(own, source, request.wanted, budget)
            engine = found.engine
            engine.limit_to(budget.limit)
            projected = _projected(engine, budget, peak()) if report else 0
            result, others = _run(engine, product, source, beside, everything=report)
            if reused is None or found.is_right(source):
                break
            del result, others, reused, found, engine, own  # before others take as much memory
            request.store.forget()
        highest = peak()
    if product.name in ("jacobian", "vjp") and result.size and not result.flat[0] and not result.any():
        zero = f"every derivative by {request.wanted.wrt!r} is 0 in these windows"
        warnings.warn(f"{zero}: the model may be saturated there; check their scale", stacklevel=4)
    for unreached in request.plain.unreached:
        warnings.warn(unreached, stacklevel=4)
    if not report:
        return result
    measured = None if highest is None else highest - baseline
    seconds = time.perf_counter() - started
    return result, Report(
        engine.setting, found.choice, projected, measured, len(source), seconds, reused is not None, others
    )


def _not_known() -> None:
    """The peak of a call that nobody asks for a report of."""


def _projected(engine: Tuned, budget: _Budget, peak: int | None) -> int:
    """Bytes above the baseline that the call is projected to take, from the process's peak so far."""
    searched = (peak or budget.baseline) - budget.baseline
    ready = machine.resident_memory() - meter.reusable() - budget.baseline
    needed = ready + (0 if has_gpu() else engine.call_bytes) + budget.result
    return int(1.1 * max(searched, needed)) + 16 * MiB


def _request_of(model: keras.Model, windows: Any, asked: Mapping[str, Any]) -> tuple[Request, np.ndarray]:
    """What is asked, and the windows as one array. What was asked of an array of the same shape and dtype before is not
    checked again: that takes as long as a small model's derivatives.
    """
    store, key = kept_with(model), None
    is_plain = type(windows) is np.ndarray and windows.dtype.kind in "fiu"
    if is_plain:
        key = windows.shape[1:], windows.dtype, *((name, type(value), value) for name, value in asked.items())
        with contextlib.suppress(TypeError):  # of what has no hash, such as a list
            if (request := store.by_arguments.get(key)) is not None:
                return request, windows.astype(store.dtype, copy=False)
    request, source = _checked_request(model, store, windows, asked)
    store.made_of = made_of(model)  # which the first call may have built
    is_alike = request.store is store and not request.plain.packing and request.plain.source.kind != "weights"
    if is_plain and len(source) and is_alike and not whole_inputs(model):
        with contextlib.suppress(TypeError):
            store.by_arguments[key] = request
    return request, source


def _checked_request(
    compiled: keras.Model, store: Kept, windows: Any, asked: Mapping[str, Any]
) -> tuple[Request, np.ndarray]:
    if "lead" in asked:
        raise Refused(
            "lead", given=asked["lead"], allowed="in jobs", remedy="give the labels of each window as labels="
        )
    for name in asked:
        if name not in ASKED and name not in SensitivitySection.model_fields:
            raise unknown_key(name, type(asked[name]), (*ASKED, "memory", "report"), instead="leave it out")
    everything = Given(windows, **{key: asked[key] for key in BESIDE if key in asked})
    wanted = _wanted(**{key: value for key, value in asked.items() if key not in BESIDE})
    model = in_full_precision(compiled, store.models)  # a twin, which is not compiled
    if model is not compiled:
        store = kept_with(model)
    source, packing = everything.packed(compiled, wanted.of, store.dtype)
    if packing is not None and not is_constant(packing.loss):
        # What a lambda or an object is may change, and each call may have one of its own: nothing is kept for it.
        store = Kept()
    if packing is not None and packing.loss is not None:
        wanted, packing = _of_selected(model, source, wanted, packing)
    shared = (source.shape[1:], str(source.dtype), wanted.of, meant(model, wanted.wrt), packing)
    key = (*shared, wanted)
    if key in store.requests:
        return store.requests[key], source
    plain = _described(model, source, wanted, packing, store, (*shared, wanted.wrt, *wanted.selection.values()))
    whole = kept_or_made(store.models, (wanted.of, packing), lambda: wrapped_and_cut(model, packing, wanted.of))
    request = Request(store, wanted, plain, whole)
    if len(source):  # without windows nothing is proved
        store.requests[key] = request
    return request, source


def _wanted(**given: Any) -> SensitivitySection:
    try:
        return SensitivitySection(**given)
    except ValidationError as error:
        raise refusals(error, given, SensitivitySection, "") from None


def _of_selected(
    model: keras.Model, source: np.ndarray, wanted: SensitivitySection, packing: Packing
) -> tuple[SensitivitySection, Packing]:
    """The same where outputs are selected before the loss, and not of it."""
    if wanted.output_steps is None and wanted.outputs is None:
        return wanted, packing
    chosen = {"output_steps": wanted.output_steps, "outputs": wanted.outputs}
    inputs = packing.inputs
    found = described_call(
        model,
        source.shape[1:] if packing.window is None else packing.window.shape,
        of="output",
        wrt=next((part.name for part in inputs if part.name not in whole_inputs(model)), INPUT),
        dtype=str(source.dtype),
        packing=Packing(inputs, packing.by_name) if inputs else None,
        **chosen,
    )
    return wanted.model_copy(update=dict.fromkeys(chosen)), replace(packing, selection=found.selection)


def _described(
    model: keras.Model, source: np.ndarray, wanted: SensitivitySection, packing: Packing | None, store: Kept, key: Any
) -> CallFacts:
    """What is known of the model before any product; the first time it is proved to have derivatives of each window."""
    of, wrt = wanted.of, wanted.wrt
    facts = store.facts.get(key)
    if facts is None:
        require_stateless(model)
        facts = described_call(
            model, source.shape[1:], of=of, wrt=wrt, dtype=str(source.dtype), packing=packing, **wanted.selection
        )
        if len(source):
            target = target_of(model, facts, of)
            require_independent(target, few(source))
            if predicts_in_its_own_way(innermost(model), "predict_step"):
                require_as_predicted(target, few(source))
            store.facts[key] = facts
    return facts


@dataclass(frozen=True)
class _Budget:
    """Bytes above the baseline, and what of them a copy of the windows and the result, the `product`, take."""

    bytes: int
    baseline: int
    copied: int
    result: int
    product: str

    @classmethod
    def of(cls, given: int, baseline: int, windows: Any, source: np.ndarray, facts: CallFacts) -> _Budget:
        shared = source is windows or (isinstance(windows, np.ndarray) and np.may_share_memory(source, windows))
        return cls(given, baseline, 0 if shared else source.nbytes, len(source) * result_bytes(facts), facts.product)

    @property
    def compiler(self) -> int:
        return min(BUILD_BYTES, max(0, self.bytes - 2 * BUILD_BYTES))

    @property
    def limit(self) -> int | None:
        """The process's most resident bytes, where what compiles is counted in and it is the host that computes."""
        return self.baseline + self.bytes if self.compiler and not has_gpu() else None

    def call(self, compiler: int) -> int:
        """What is left for a call beside the result, the windows' copy and the compiler."""
        left = self.bytes - self.result - self.copied - compiler
        if left <= 0:
            parts = {f"the {self.product}": self.result, "a copy of the windows": self.copied, "compiling": compiler}
            raise Refused(
                "memory",
                given=human_bytes(self.bytes),
                allowed=f"more than {human_bytes(self.bytes - left)}, taken beside any call: "
                + ", ".join(f"{human_bytes(size)} for {what}" for what, size in parts.items() if size),
                remedy="give more memory or fewer windows at a time, or run a job, which keeps results on disk",
            )
        return min(left, call_budget(left))

    def room(self, compiler: int) -> Room:
        """Where trials run, with that for a call."""
        limit = None if self.limit is None else self.limit - self.result  # which is not there yet
        return Room(self.call(compiler), limit, has_gpu(), kind(recently(machine.cores)))


def _reused(own: TargetKernels, source: np.ndarray, wanted: SensitivitySection, budget: _Budget) -> Found | None:
    """A kernel of an earlier call, if one serves."""
    if not len(source) or not own.kernels:
        return None
    windows = len(source) * own.target.facts.points
    return own.serving(windows, _most_at_once(len(source), wanted), budget.call(0))


def _timed(own: TargetKernels, source: np.ndarray, wanted: SensitivitySection, budget: _Budget) -> Found:
    """The fastest kernel, by trials on these windows; kept for later calls."""
    target = own.target
    if not len(source):
        setting = Setting("batch_jacobian", 1)
        return Found(Choice(setting, "rule", 0), Tuned(target, setting), 0, 0, 0, State(b"", 0.0))
    most, room = _most_at_once(len(source), wanted), budget.room(budget.compiler)
    some = np.ascontiguousarray(source[np.linspace(0, len(source) - 1, min(TIMED_ON, len(source))).astype(int)])
    choice, engine = tune(wanted, target, some, room, most, len(source), key="memory")
    count = len(source) * target.facts.points
    found = own.kernels[most] = Found(choice, engine, count, most, room.call, State.of(engine, source))
    return found


def _most_at_once(windows: int, wanted: SensitivitySection) -> int:
    """Windows a call at most: rounded up by an eighth at most, so that other numbers of windows share the kernel."""
    if wanted.windows_per_call != "auto":
        return min(wanted.windows_per_call, windows)
    unit = max(1, 1 << max(0, windows.bit_length() - 4))
    return min(MOST_AT_ONCE, -(-windows // unit) * unit)


def _run(
    engine: Tuned, product: Product, source: np.ndarray, beside: Beside, *, everything: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The product of all windows, and everything else that comes with it."""
    facts = engine.target.facts
    values: dict[str, np.ndarray] = {}
    one_call = len(source) * facts.points <= engine.setting.windows_per_call
    with contextlib.nullcontext(_not_shown) if one_call else progress_of_long(len(source)) as moved:
        for done, found in product.computed(engine, lambda part: (source[part], *beside(part)), len(source)):
            for name, array in found.items():
                if name != product.name and not everything:
                    continue
                if name not in values:
                    values[name] = np.empty((len(source), *array.shape[1:]), array.dtype)
                values[name][done] = array
            moved(done.stop - done.start)
    if not len(source):
        return product.arranged(np.empty((0, *facts.block_shape), facts.dtype)), values
    return values.pop(product.name), values


def _not_shown(count: int) -> None:
    """The progress of one call."""


def _given_bytes(memory: str | int | None) -> int:
    if memory is None:
        return recently(available_memory) // 2
    if isinstance(memory, str):
        return parse_bytes(memory)
    if memory <= 0:
        raise Refused("memory", given=memory, allowed="a positive number of bytes", remedy='write it as "2GB", say')
    return int(memory)
