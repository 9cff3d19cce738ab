"""What the entries of each product are called, in answers, pictures and sentences: one table."""

from __future__ import annotations

from dataclasses import dataclass, replace

import xarray as xr

from .roles import JACOBIAN, Roles, roles_of

SOURCES = {"feature": "input", "unit": "unit", "parameter": "parameter"}


@dataclass(frozen=True)
class Terms:
    """noun: of one entry. letter: what stands for it. symbol: on axes. per: what its unit has after the output's; left:
    the same once it is scaled by what `times` says. leads: what the most important source does to `{outputs}`. is_: the
    entry in a sentence. signed: whether a rise of the source raises the output where it is positive. item: of what
    stands along the feature axis; lag: along the lag axis, "" where nothing does. plain: derivatives by the input.
    """

    noun: str
    letter: str
    symbol: str
    is_: str
    leads: str
    per: str = " per unit of the {source}"
    left: str = ""
    times: str = " × {source}'s std"
    signed: bool = False
    source: str = "input"
    item: str = "feature"
    lag: str = "lag"
    plain: bool = False

    @property
    def nouns(self) -> str:
        return f"{self.noun}s"

    @property
    def scaling(self) -> str:
        """In a sentence."""
        return self.times if "both" in self.times else self.times.replace(" × ", " × the ")

    @property
    def by_lag(self) -> str:
        return f" by {self.lag}" if self.lag else ""


_MOVES, _ATTRIBUTED = "moves {outputs} most", "has the largest attributions of {outputs}"
TERMS = {
    JACOBIAN: Terms(
        *("derivative", "J", "∂output/∂{source}"),
        "the derivative of an output by one {source}: by how much the output moves for one unit more of it",
        _MOVES,
        signed=True,
        plain=True,
    ),
    "smooth_gradients": Terms(
        *("smoothed derivative", "J", "smoothed ∂output/∂{source}"),
        "the derivative of an output by one {source}, its mean over noisy copies of the window",
        _MOVES,
        signed=True,
    ),
    "integrated_gradients": Terms(
        *("attribution", "A", "attribution"),
        "the part of an output's difference from that of the baseline which one {source} accounts for, by integrated "
        "gradients, in units of the output",
        _ATTRIBUTED,
        per="",
        times="",
    ),
    "expected_gradients": Terms(
        *("attribution", "A", "attribution"),
        "the part of an output's difference from its mean over the baselines which one {source} accounts for, by "
        "expected gradients, in units of the output",
        _ATTRIBUTED,
        per="",
        times="",
    ),
    "vjp": Terms(
        *("vector-Jacobian product", "v·J", "∂(vector·output)/∂{source}"),
        "the derivative of a weighted sum of outputs, whose weights are the vector, by one {source}",
        _MOVES,
        per=" × the vector's, per unit of the {source}",
        left=" × the vector's",
        signed=True,
    ),
    "jvp": Terms(
        *("Jacobian-vector product", "J·v", "∂output along the direction"),
        "the derivative of an output along a direction: by how much it moves as all that it is by moves along it",
        _MOVES,
        per=" per unit of the direction",
    ),
    "hessian": Terms(
        *("second derivative", "H", "∂²output/∂{source}²"),
        "the second derivative of an output by one {source} and another: by how much the derivative by the one moves "
        "for one unit more of the other",
        "bends {outputs} most",
        per=" per squared unit of the {source}",
        times=" × both {source}s' std",
    ),
    "hvp": Terms(
        *("Hessian-vector product", "H·v", "∂²output/∂{source}∂direction"),
        "the derivative by one {source} of an output's derivative along a direction",
        "bends {outputs} most",
        per=" per unit of the {source} and of the direction",
        left=" per unit of the direction",
    ),
    "gradient_norm": Terms(
        *("gradient norm", "‖∇‖", "‖gradient of the output‖"),
        "the length of an output's gradient: by how much it moves, at most, for one unit of all that it is by",
        "moves {outputs} most",
        per=" per unit of what it is by",
    ),
    "gram": Terms(
        *("inner product of gradients", "J·Jᵀ", "inner product of gradients"),
        "the inner product of an output's gradient and another's: by how much they move together",
        _MOVES,
        per=" squared per squared unit of what it is by",
    ),
}


def terms_of(found: xr.Dataset) -> Terms:
    return terms(roles_of(found))


def terms(roles: Roles) -> Terms:
    """The words for what has these roles."""
    raw = TERMS[roles.product]
    last = roles.of("feature")
    source = SOURCES.get(last[0], raw.source) if last else raw.source
    texts = {name: getattr(raw, name).replace("{source}", source) for name in ("symbol", "is_", "per", "left", "times")}
    item = last[0] if last else "value"
    return replace(
        raw,
        **texts,
        source=source,
        item=f"{item} pair" if len(last) > 1 else item,
        lag=" ".join(roles.of("lag")).replace("_", " "),
        plain=roles.plain,
    )
