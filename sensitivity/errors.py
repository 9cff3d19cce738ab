"""The one error a user's request can meet before work starts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_SHOWN = 1000  # characters of what was given: one screen


class Refused(ValueError):
    """A request that cannot be served: what it concerns, what was given, what is allowed, what to do.

    `key` is a job-file key (`windows.length`), a command-line argument or an argument's name. in_python: the remedy for
    those who call a function, where it is another one than for those who write a job file: see `arguments`.
    """

    def __init__(self, key: str, *, given: object, allowed: str, remedy: str, in_python: str | None = None) -> None:
        self.key, self.given, self.allowed, self.remedy, self.in_python = key, given, allowed, remedy, in_python
        super().__init__(
            f"{key} is refused\n"
            f"  given    {_indented(_shortened(str(given), _SHOWN))}\n"
            f"  allowed  {_indented(allowed)}\n"
            f"  do       {_indented(remedy)}"
        )

    def __reduce__(self):
        """Keyword arguments do not survive exceptions' default pickling, and Ray pickles."""
        return _rebuild, (self.key, self.given, self.allowed, self.remedy, self.in_python)


class RefusedTogether(Refused):
    """Several refusals found in one reading, so that a user mends them in one go."""

    def __init__(self, refusals: list[Refused]) -> None:
        self.refusals = refusals
        ValueError.__init__(self, "\n".join(str(refusal) for refusal in refusals))

    def __reduce__(self):
        return RefusedTogether, (self.refusals,)


def _rebuild(key: str, given: object, allowed: str, remedy: str, in_python: str | None = None) -> Refused:
    return Refused(key, given=given, allowed=allowed, remedy=remedy, in_python=in_python)


def suggested(given: object, known: Iterable[object], otherwise: str) -> str:
    """The remedy for a word, or for several, of which one is not known: the known word most like it.

    otherwise: the remedy where no known word is much like one of those given.
    """
    words = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else []
    names = list(dict.fromkeys(map(str, known)))
    for word in (str(word) for word in words if str(word) not in names):
        by_lower = {name.lower(): name for name in reversed(names)}
        close = difflib.get_close_matches(word.lower(), by_lower, n=1)
        if close:
            return f"did you mean {by_lower[close[0]]!r}?"
    return otherwise


_ASIDES = re.compile(
    "|".join(
        (
            r"\x1b\[\d*m",
            r"^Graph execution error:$",
            r"^in user code:$",
            r"^Detected at node .*$",
            r"^\s*File \".*\", line \d+, in .*$",
            r"\[\[\{\{node .*",
            r"^Exception encountered when calling .*$",
            r"^Arguments received by (?s:.*)",
            r"(?:Please ensure that components|using config=)(?s:.*?)Exception encountered: ",
        )
    ),
    re.MULTILINE,
)


def gist(error: BaseException, *, lines: int | None = None) -> str:
    """An error's kind and what it says, on one line, without the places and settings that TensorFlow and Keras add.

    lines: only as many of what it says; None: all.
    """
    told = [line.strip() for line in _ASIDES.sub("", str(error)).splitlines() if line.strip()]
    said = " ".join(" ".join(told[:lines]).split())
    return f"{type(error).__name__}: {said[:300] or 'no message'}"


def _shortened(text: str, most: int) -> str:
    """The beginning, and the end, where the reason stands."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def _indented(text: str) -> str:
    """What a terminal would not show, or would obey, is written out."""
    shown = "".join(mark if mark.isprintable() or mark == "\n" else ascii(mark)[1:-1] for mark in text)
    return shown.replace("\n", "\n" + " " * 11)
