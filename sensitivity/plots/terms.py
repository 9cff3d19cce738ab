"""Headings of pictures, and the words for a product's own dims; what its entries are called is in `query.terms`."""

from __future__ import annotations

import xarray as xr

from ..query.roles import roles_of
from ..query.terms import TERMS, Terms, terms, terms_of

__all__ = ["TERMS", "Terms", "heading", "target_words", "terms", "terms_of"]

# Of a picture: its title for derivatives by the input, and for all else.
HEADINGS = {
    "profile": ("How far back {output} listens", "{Nouns} of {output}{by_lag}"),
    "band": (
        "How much {output} listens, and how much that varies",
        "{Nouns} of {output}{by_lag}, and how much they vary",
    ),
    "heatmap": ("What {output} listens to, and how far back", "{Nouns} of {output} by {item} and {lag}"),
    "groups": ("How far back {output} listens, by {group}", "{Nouns} of {output} by {group}"),
    "steps": ("How far back each step of {output} listens", "{Nouns} of each step of {output}{by_lag}"),
    "times": ("How far back {output} listens, over time", "{Nouns} of {output} over time"),
    "importance": ("What {output} depends on", "How large {nouns} of {output} are"),
    "distribution": (
        "How derivatives of {output} are distributed over windows and lags",
        "How {nouns} of {output} are distributed",
    ),
    "comparison": ("{pair}: what the output depends on", "{pair}: {nouns} of the output"),
}


def heading(found: xr.Dataset, kind: str, **named: str) -> str:
    own = terms_of(found)
    said = {"Nouns": f"{own.noun[0].upper()}{own.noun[1:]}s", "nouns": own.nouns, "item": own.item, "lag": own.lag}
    return HEADINGS[kind][not own.plain].format(**said, by_lag=own.by_lag, **named)


def target_words(found: xr.Dataset, dim: str) -> str:
    """What several targets are: outputs, vectors, pairs of an output and a direction."""
    own = roles_of(found).of(dim) or (dim,)
    return f"{'-'.join(own)}{' pair' * (len(own) > 1)}s".replace("_", " ")
