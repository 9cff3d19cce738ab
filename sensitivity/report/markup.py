"""HTML put together of parts: what is not markup already is escaped."""

from __future__ import annotations

import html

LONGEST = 1000  # characters of anything
NAME = 70
SPACES = "\n\u00a0"
VOID = {"meta", "img", "br", "hr"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def shown(value: object, longest: int = LONGEST) -> str:
    """A value as a page may show it: what is not printable is marked, what is too long loses its middle."""
    text = str(value)
    if len(text) > longest:
        text = f"{text[: 2 * longest // 3]} … {text[len(text) - longest // 3 :]}"
    return "".join(mark if mark.isprintable() or mark in SPACES else "\ufffd" for mark in text)


def named(name: object) -> str:
    """A name of the user's, as long as a sentence or a table has room for."""
    return shown(name, NAME)


def markup(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(html.escape(shown(value), quote=True))


def joined(parts: object, between: str = "") -> Markup:
    return Markup(between.join(map(markup, parts)))  # type: ignore[call-overload]


def tag(name: str, /, *inside: object, **attributes: object) -> Markup:
    """An element: attributes that are None or False are left out; `class_` is class, `data_value` data-value. What is
    `Markup` stays as it is, in attributes too.
    """
    kept = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    said = "".join(
        f" {key}" if value is True else f' {key}="{markup(value)}"'
        for key, value in kept.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{said}>" if name in VOID else f"<{name}{said}>{joined(inside)}</{name}>")
