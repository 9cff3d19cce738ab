"""Which setting runs fastest on this worker, within its memory: by trials on real windows, few and cheap.

The plain compiled tape, which is what people write, is the first trial, whatever that takes. Where a scan that XLA
compiles serves recurrent layers, the scan is, and the tape follows where time is left. The fastest trial is taken.
Its trial tells what tracing and compiling takes on this machine, and so what each other family (kernel, pfor or loop,
XLA or not) would: one is tried where that is less than what is left of the time for trials, which is a fifth of the
work's, or a few seconds where the work takes as long. The best are then tried with more and with fewer windows a call,
since what limits them differs: a loop without XLA lives on large batches, pfor on small ones. Nothing projected over
the memory is run: XLA's compiler states the bytes of a family's first call where that comes near it, each trial
measures those of its own, which corrects what is projected for the next. A trial whose numbers are not the model's is
passed over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from . import machine, meter
from .candidates import choose, compiles_long, effort, even, families, first_size, halved, in_order, samples
from .engine import Tuned
from .errors import Refused
from .job import SensitivitySection
from .model import Target
from .plan import (
    MiB,
    call_memory,
    human_bytes,
    kernel_memory,
    result_bytes,
    summing_memory,
)
from .probes import TOLERANCE, Probe, require_agreement
from .room import Room
from .setting import Choice, Setting, Trial

BUILD_BYTES = 160 * MiB  # tracing a kernel and compiling it by XLA, the first of a process included
PFOR_BYTES = 100 * MiB  # tracing pfor over a recurrent layer: it writes every operation of the loop anew
LEAST_SECONDS, MOST_SECONDS, SHARE = 3.0, 25.0, 0.2
SURE = 32  # times what the rule projects: a call of such a room is tried without asking the compiler, at half the price
TRIAL_SECONDS, COMPILING_SECONDS = 0.15, 15.0  # the second: expected of XLA for a graph of many operations
CALLS = 4  # that a trial makes, about
CHECKED = 4  # windows whose vector-Jacobian product is checked
AGAIN, SCALED = 1.1, 1.3  # margins over what was measured, for the same call again and for one of another size
LEAST_BYTES = 2 * MiB  # below this, measuring is noise
CONTENDER, PLATEAU, RIVAL, EQUAL = 0.4, 0.9, 0.85, 0.93  # of the best rate: worth more trials, going on, a second look
RIVALS, ROUNDS = 4, 5
FEW = 64  # windows to prove a job's model and to time its kernels on


def is_given(wanted: SensitivitySection) -> bool:
    """Whether the user leaves nothing to time."""
    pfor = wanted.experimental_use_pfor != "auto" or wanted.kernel in ("gradient", "scan")
    return wanted.kernel != "auto" and wanted.windows_per_call != "auto" and pfor


def by_rule(wanted: SensitivitySection, target: Target, room: Room, windows: int, key: str) -> Choice:
    """What to take where nothing is timed, for `windows` windows; `Refused`, in the name of `key`, where none fits."""
    setting = choose(wanted, target.facts, room.call, samples(windows, target.facts), key=key, gpu=room.gpu)
    by = "given" if is_given(wanted) else "rule"
    return Choice(setting, by, call_memory(target.facts, setting), kind=room.kind, asked=wanted.knobs)


def tune(
    wanted: SensitivitySection,
    target: Target,
    windows: np.ndarray,
    room: Room,
    most: int,
    total: int,
    *,
    key: str = "run.memory_per_worker",
) -> tuple[Choice, Tuned]:
    """The fastest setting found, and its kernel, compiled.

    windows: a few real ones `(n, *input_shape)`, n ≥ 1. most: windows that are ever there at once. total: windows that
    this worker has to do, of each of which all points are. Trials beyond the first take no more than a fifth of the
    time that the work needs, or all of it up to 3 seconds, and 25 at most, which is under 5 % of ten minutes.
    Raises `Refused`, in the name of `key` where no single window fits.
    """
    rule = by_rule(wanted, target, room, most, key)
    facts = target.facts
    search = _Search(wanted, target, windows, room, samples(most, facts), total * facts.points)
    if rule.by != "given":
        search.run()
    best = search.best()
    if best is None:
        rule = search.fitted(rule)
        _require_fits(rule, room, key)
        engine = Tuned(target, rule.setting, limit=room.resident)
        search.require_right(engine)
        return replace(rule, trials=tuple(search.trials)), engine
    call_bytes = search.projected(best.setting)
    engine = search.engines[best.setting.bare]
    engine.call_bytes = call_bytes
    engine.limit_to(room.resident)
    choice = replace(rule, setting=best.setting, by="timed", call_bytes=call_bytes, trials=tuple(search.trials))
    return choice, engine


def _require_fits(choice: Choice, room: Room, key: str) -> None:
    if choice.call_bytes > room.call:
        raise Refused(
            key,
            given=f"{human_bytes(room.call)} for one call",
            allowed=f"{human_bytes(choice.call_bytes)} or more, projected for {choice.setting}",
            remedy="give more memory, lower windows_per_call or parallel_iterations, or leave them out",
        )


@dataclass
class _Search:
    wanted: SensitivitySection
    target: Target
    windows: np.ndarray
    room: Room
    most: int
    total: int
    trials: list[Trial] = field(default_factory=list)
    engines: dict[Setting, Tuned] = field(default_factory=dict)  # those that may yet be the best
    _built: dict[Setting, float] = field(default_factory=dict)  # seconds that a family took beside its calls
    _probe: Probe | None = None
    _began: float = field(default_factory=time.perf_counter)

    def run(self) -> None:
        able = families(self.wanted, self.target.facts, gpu=self.room.gpu)
        for family in in_order(able, self.target.facts):
            self._begin(family)
        best = self.best()
        if best is None or self.wanted.windows_per_call != "auto":
            return
        fast = [trial for trial in self._timed() if _rate(trial) >= CONTENDER * _rate(best)]
        for trial in sorted(fast, key=_rate, reverse=True):
            self._climb(trial)
        for factor in (2, 0.5):
            self._step(self.best() or best, factor)
        self._time_rivals_again()

    def best(self) -> Trial | None:
        """The fastest that fits; of those as good as equal, the one that takes least memory.

        Trials run alone: beside other workers, with whom caches are shared, large calls lose up to a fifth.
        """
        able = self._able()
        top = max(map(_rate, able), default=0.0)
        equal = [trial for trial in able if _rate(trial) >= EQUAL * top]
        return min(equal, key=lambda trial: self.projected(trial.setting), default=None)

    def projected(self, setting: Setting) -> int:
        """Bytes of a call: as it, or else its family, was last measured, in the rule's proportion; else by the rule."""
        return self._of_kernel(setting) + summing_memory(self.target.facts, setting)

    def _of_kernel(self, setting: Setting) -> int:
        rule, last = kernel_memory(self.target.facts, setting), self._last(setting)
        if last is None or last.measured is None:
            return rule
        same = last.setting.bare == setting.bare
        scale = 1.0 if same else rule / kernel_memory(self.target.facts, last.setting)
        if last.measured <= LEAST_BYTES:
            return min(rule, int(LEAST_BYTES * max(1.0, scale)))
        return int((AGAIN if same else SCALED) * last.measured * scale)

    def require_right(self, engine: Tuned) -> None:
        """Refuse a kernel that was not timed, and whose numbers are not the model's.

        A gradient that TensorFlow cannot differentiate once more, such as Python's, is zero in forward mode.
        """
        _, jacobian = engine(self.windows[:CHECKED])
        require_agreement(f"{engine.setting}, a kernel", self._error(self.windows[:CHECKED], jacobian))

    def fitted(self, choice: Choice) -> Choice:
        """An untimed choice with its bytes as they are projected by now, in smaller calls where those are too many."""
        setting: Setting | None = choice.setting
        is_ours = choice.by == "rule" and self.wanted.windows_per_call == "auto"
        while is_ours and setting is not None and self.projected(setting) > self.room.call:
            setting = halved(setting, self.target.facts)
        setting = setting or replace(choice.setting, windows_per_call=1)  # not even the smallest
        return replace(choice, setting=setting, call_bytes=self.projected(setting))

    def _timed(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.windows_per_second]

    def _able(self) -> list[Trial]:
        """Those that fit, and whose kernels are at hand."""
        return [trial for trial in self._timed() if trial.setting.bare in self.engines and self._fits(trial)]

    # ---- which trials --------------------------------------------------------------------------------

    def _begin(self, family: Setting) -> None:
        if self.wanted.windows_per_call == "auto":
            sized = first_size(family, self.target.facts, self.room.call, self.most)
        else:
            sized = replace(family, windows_per_call=min(self.wanted.windows_per_call, self.most))
        if sized is None and self._compiler_tells(family):
            sized = family
        if sized is None:
            needed = call_memory(self.target.facts, family)
            self.trials.append(Trial(family, needed, note=self._too_large(needed)))
            return
        trial, size = self._try(sized), sized.windows_per_call
        while trial is not None and not self._fits(trial) and size > 1 and self.wanted.windows_per_call == "auto":
            size //= 2
            trial = self._step(trial, size / trial.setting.windows_per_call) or trial

    def _fits(self, trial: Trial) -> bool:
        return self.projected(trial.setting) <= self.room.call

    def _climb(self, trial: Trial) -> None:
        """More windows a call while that does not harm; fewer, if more did not help."""
        for factor in (4, 0.25):
            here, top = trial, _rate(trial)
            while (there := self._step(here, factor)) is not None and _rate(there) >= PLATEAU * top:
                here, top = there, max(top, _rate(there))
            if top > _rate(trial):
                return

    def _time_rivals_again(self) -> None:
        """In turns: short trials differ by a machine's moods more than by their settings. Long ones level them out."""
        rivals = [t for t in self._able() if t.setting.windows_per_call < TRIAL_SECONDS * _rate(t)]
        rates: dict[Setting, list[float]] = {trial.setting: [] for trial in rivals}
        for _ in range(ROUNDS if len(rivals) > 1 else 0):
            for setting, found in rates.items():
                if self._left() > 2 * TRIAL_SECONDS:
                    found.append(_time(self.engines[setting.bare], self._sized(setting), TRIAL_SECONDS))
        again = {setting: float(np.median(found)) for setting, found in rates.items() if len(found) == ROUNDS}
        if len(again) == len(rivals):
            self.trials = [
                replace(trial, windows_per_second=again.get(trial.setting, trial.windows_per_second))
                for trial in self.trials
            ]

    def _step(self, trial: Trial, factor: float) -> Trial | None:
        size = even(max(1, int(trial.setting.windows_per_call * factor)), self.most)
        setting = replace(trial.setting, windows_per_call=size)
        if any(t.setting == setting for t in self.trials):
            return None
        return self._try(setting, worth_telling=False)

    def _left(self) -> float:
        """Seconds for further trials: those of the first are not counted."""
        best = self.best()
        work = self._work(_rate(best)) if best else 0.0
        return min(MOST_SECONDS, max(min(LEAST_SECONDS, work), SHARE * work)) - (time.perf_counter() - self._began)

    def _work(self, rate: float) -> float:
        """Seconds for all windows."""
        return self.total / rate if rate else 0.0

    def _expected(self, setting: Setting) -> float:
        """Seconds of a trial: as its family took, or else the first one, by what both have to trace and to compile."""
        family, best = _family(setting), self.best()
        calls = CALLS * setting.windows_per_call / _rate(best) if best else 0.0
        if family in self._built:
            return self._built[family] + calls
        known, seconds = next(iter(self._built.items()), (family, 0.0))
        facts = self.target.facts
        return seconds * effort(family, facts) / effort(known, facts) + calls

    def _why_not(self, setting: Setting, projected: int) -> str:
        if projected > self.room.call and not self._compiler_tells(setting):
            return self._too_large(projected)
        best = self.best()
        if best is None:
            return ""
        slow = compiles_long(setting, self.target.facts) and _family(setting) not in self._built
        if self._left() <= max(self._expected(setting), COMPILING_SECONDS if slow else 0.0):
            return "no time left to try it"
        taken = machine.resident_memory() - meter.reusable()
        if self.room.resident is not None and taken + projected + self._building(setting) > self.room.resident:
            return "no memory left to try it"
        return ""

    def _too_large(self, projected: int) -> str:
        return f"projected to take {human_bytes(projected)} of {human_bytes(self.room.call)}"

    def _compiler_tells(self, setting: Setting) -> bool:
        """Whether XLA is asked what a call takes: the first of a family, where that does not mean minutes more."""
        return setting.xla and not compiles_long(setting, self.target.facts) and not self._last(setting)

    def _last(self, setting: Setting) -> Trial | None:
        """The last trial of this setting, else of its family, that was run."""
        ran = [trial for trial in reversed(self._timed()) if _family(trial.setting) == _family(setting)]
        return next((trial for trial in ran if trial.setting.bare == setting.bare), next(iter(ran), None))

    def _building(self, setting: Setting) -> int:
        pfor = setting.over_rows and setting.experimental_use_pfor
        return BUILD_BYTES + (PFOR_BYTES * len(self.target.facts.recurrent) if pfor else 0)

    # ---- one trial -----------------------------------------------------------------------------------

    def _try(self, setting: Setting, *, worth_telling: bool = True) -> Trial | None:
        projected = self.projected(setting)
        note = self._why_not(setting, projected)
        if note:
            if worth_telling:
                self.trials.append(Trial(setting, projected, note=note))
            return None
        is_first = self.best() is None
        engine, began = Tuned(self.target, setting), time.perf_counter()
        trial = self._run(engine, projected)
        if is_first:
            self._began = time.perf_counter()
        elif trial.windows_per_second is None:
            self._built[_family(setting)] = time.perf_counter() - began
        if trial.windows_per_second is None:
            self.trials.append(trial)
            return self._try_what_fits(trial)
        self.trials.append(trial)
        if not self._fits(trial):
            self.trials[-1] = replace(trial, note=self._too_large(self.projected(setting)))
        self._keep(trial, engine)
        return trial

    def _try_what_fits(self, refused: Trial) -> Trial | None:
        """As many windows as the compiler's account leaves room for, where that is what a trial was refused for."""
        setting = refused.setting
        fitting = setting.windows_per_call * self.room.call // max(refused.projected, 1)
        if not 1 <= fitting < setting.windows_per_call or self.wanted.windows_per_call != "auto":
            return None
        return self._try(replace(setting, windows_per_call=fitting))

    def _run(self, engine: Tuned, projected: int) -> Trial:
        setting = engine.setting
        windows = self._sized(setting)
        try:
            asked = projected > self.room.call / SURE and self._compiler_tells(setting)
            stated = engine.stated_bytes() if asked else None
            projected = projected if stated is None else stated + self._on_host(setting)
            if projected > self.room.call:
                return Trial(setting, projected, note=self._too_large(projected))
            began = time.perf_counter()
            _, jacobian = engine(windows)
            built = time.perf_counter() - began
            with meter.measured(gpu=self.room.gpu) as reading:
                rate = _rate_of_a_call(engine, windows)
            self._built[_family(setting)] = max(0.0, built - len(windows) / rate)
            seconds = min(TRIAL_SECONDS, SHARE * self._work(rate))
            if len(windows) / rate < seconds:
                rate = _time(engine, windows, seconds)
        except Exception as error:  # whatever a kernel raises on this model is a reason not to take it
            return Trial(setting, projected, note=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        trial = Trial(engine.setting, projected, rate, reading.peak)
        off = self._error(windows, jacobian)
        if not off <= TOLERANCE:
            return replace(trial, windows_per_second=None, note=f"its numbers are off by {off:.1e}")
        return trial

    def _sized(self, setting: Setting) -> np.ndarray:
        """Real windows for one call, repeated where there are fewer."""
        repeats = -(-setting.windows_per_call // len(self.windows))
        return np.concatenate([self.windows] * repeats)[: setting.windows_per_call]

    def _on_host(self, setting: Setting) -> int:
        """Bytes of a call's windows and of two copies of its results, which are the host's own."""
        facts = self.target.facts
        window = facts.input_size * facts.itemsize + 2 * result_bytes(facts)
        return 0 if self.room.gpu else setting.windows_per_call * window + summing_memory(facts, setting)

    def _keep(self, trial: Trial, engine: Tuned) -> None:
        """Hold on to the few kernels that may yet be the best: the others' memory is free again."""
        self.engines[trial.setting.bare] = engine
        able = sorted(self._able(), key=_rate, reverse=True)
        kept = {t.setting.bare for t in able[:RIVALS] if _rate(t) >= RIVAL * _rate(able[0])}
        if (best := self.best()) is not None:
            kept.add(best.setting.bare)
        self.engines = {setting: self.engines[setting] for setting in kept}

    def _error(self, windows: np.ndarray, jacobian: np.ndarray) -> float:
        """Of the Jacobian of a few windows, against plain reverse mode."""
        if self._probe is None:
            self._probe = Probe.of(self.target, np.concatenate([self.windows] * CHECKED)[:CHECKED])
        return self._probe.error(jacobian[: min(CHECKED, len(windows))])


def _family(setting: Setting) -> Setting:
    return replace(setting, windows_per_call=1, outputs_per_call=None, lost=())


def _rate(trial: Trial) -> float:
    return trial.windows_per_second or 0.0


def _time(engine: Tuned, windows: np.ndarray, seconds: float) -> float:
    """Windows a second: the median of two calls or more. The fastest would favour small calls, which are more."""
    began = time.perf_counter()
    rates: list[float] = []
    while len(rates) < 2 or time.perf_counter() - began < seconds:
        rates.append(_rate_of_a_call(engine, windows))
    return float(np.median(rates))


def _rate_of_a_call(engine: Tuned, windows: np.ndarray) -> float:
    start = time.perf_counter()
    engine(windows)
    return len(windows) / (time.perf_counter() - start)
