"""A kernel with its knobs, and why it was chosen: data that plans, commit records and reports print."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Setting:
    """A kernel and its knobs, as tuned for one worker.

    outputs_per_call: rows of the Jacobian that one call computes; None: all. parallel_iterations: rows that are
    vectorised at a time within a call; None: all of the call's. use_cudnn: let Keras take cuDNN's recurrent kernels.
    lost: what was wished for and could not be had, and why; it goes into every commit record.
    """

    kernel: str
    windows_per_call: int
    experimental_use_pfor: bool = True
    parallel_iterations: int | None = None
    xla: bool = False
    lost: tuple[str, ...] = ()
    outputs_per_call: int | None = None
    use_cudnn: bool = False

    @property
    def over_rows(self) -> bool:
        """Whether outputs (or inputs) are vectorised by pfor or looped over: a gradient has one, a scan takes all."""
        return self.kernel not in ("gradient", "scan")

    @functools.cached_property
    def bare(self) -> Setting:
        """The kernel and its knobs alone: two settings run alike where these are equal."""
        return replace(self, lost=())

    @property
    def extent(self) -> str:
        """How much of the work one call does."""
        outputs = f", {self.outputs_per_call:,} outputs" if self.outputs_per_call else ""
        return f"{self.windows_per_call:,} windows{outputs} a call"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "lost": list(self.lost)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Setting:
        return cls(**{**content, "lost": tuple(content["lost"])})

    def __str__(self) -> str:
        knobs = []
        if self.over_rows:
            over = "inputs" if self.kernel == "forward" else "outputs"
            at_once = self.parallel_iterations or "all"
            knobs.append(f"pfor over {at_once} {over}" if self.experimental_use_pfor else f"loop over {over}")
        if self.outputs_per_call:
            knobs.append(f"{self.outputs_per_call:,} outputs a call")
        knobs.append("XLA" if self.xla else "no XLA")
        if self.use_cudnn:
            knobs.append("cuDNN")
        return ", ".join([self.kernel, f"{self.windows_per_call:,} windows a call", *knobs])


@dataclass(frozen=True)
class Trial:
    """A setting that was considered: its speed and the bytes of one call; the note says why it was not taken.

    projected: bytes of a call as projected before it ran. measured: what it took, None where that cannot be known.
    """

    setting: Setting
    projected: int
    windows_per_second: float | None = None
    measured: int | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.windows_per_second is None:
            return f"not taken: {self.setting}: {self.note}"
        took = "" if self.measured is None else f", {self.measured / 1e6:.3g} MB a call"
        note = f" (not taken: {self.note})" if self.note else ""
        return f"{self.windows_per_second:,.0f} windows/s: {self.setting}{took}{note}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "setting": self.setting.to_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Trial:
        return cls(**{**content, "setting": Setting.from_json(content["setting"])})


@dataclass(frozen=True)
class Choice:
    """The setting for a worker, and why.

    by: "given" (by the user), "rule" (from the model's shapes), or "timed". call_bytes: projected for one call.
    kind: of the device it was chosen for. asked: the user's knobs, "auto" or given, that any choice must keep.
    """

    setting: Setting
    by: str
    call_bytes: int
    trials: tuple[Trial, ...] = ()
    kind: str = ""
    asked: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def windows_per_second(self) -> float | None:
        """Of the chosen setting, on one worker, where it was timed."""
        rates = [t.windows_per_second for t in self.trials if t.setting.bare == self.setting.bare]
        return max((rate for rate in rates if rate), default=None)

    @property
    def on_gpu(self) -> bool:
        """Whether calls take a GPU's memory, and none of the host's."""
        return self.kind.startswith("gpu")

    @property
    def tried_bytes(self) -> int:
        """The most that any call took: the chosen one's, or a trial's."""
        took = [max(trial.projected, trial.measured or 0) for trial in self.trials if trial.windows_per_second]
        return max([self.call_bytes, *took])

    @property
    def why(self) -> str:
        if self.by == "given":
            return "as given"
        if self.by == "rule":
            return "by rule, not timed"
        rate = self.windows_per_second
        if rate is None:
            return "timed, and then changed"
        timed = [trial for trial in self.trials if trial.windows_per_second and not trial.note]
        return f"{rate:,.0f} windows/s, the best of {len(timed)} timed" if len(timed) > 1 else f"{rate:,.0f} windows/s"

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting.to_json(),
            "by": self.by,
            "call_bytes": self.call_bytes,
            "kind": self.kind,
            "asked": self.asked,
            "trials": [trial.to_json() for trial in self.trials],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Choice:
        return cls(
            Setting.from_json(content["setting"]),
            content["by"],
            content["call_bytes"],
            tuple(map(Trial.from_json, content["trials"])),
            content["kind"],
            content["asked"],
        )
