"""The one error a user's request can meet before work starts."""

from __future__ import annotations

import re

_SHOWN = 1000  # characters of what was given: one screen


class Refused(ValueError):
    """A request that cannot be served: what it concerns, what was given, what is allowed, what to do.

    `key` is a job-file key (`windows.length`), a command-line argument or an argument's name.
    """

    def __init__(self, key: str, *, given: object, allowed: str, remedy: str) -> None:
        self.key, self.given, self.allowed, self.remedy = key, given, allowed, remedy
        super().__init__(
            f"{key} is refused\n"
            f"  given    {_indented(_shortened(str(given), _SHOWN))}\n"
            f"  allowed  {_indented(allowed)}\n"
            f"  do       {_indented(remedy)}"
        )

    def __reduce__(self):
        """Keyword arguments do not survive exceptions' default pickling, and Ray pickles."""
        return _rebuild, (self.key, self.given, self.allowed, self.remedy)


class RefusedTogether(Refused):
    """Several refusals found in one reading, so that a user mends them in one go."""

    def __init__(self, refusals: list[Refused]) -> None:
        self.refusals = refusals
        ValueError.__init__(self, "\n".join(str(refusal) for refusal in refusals))

    def __reduce__(self):
        return RefusedTogether, (self.refusals,)


def _rebuild(key: str, given: object, allowed: str, remedy: str) -> Refused:
    return Refused(key, given=given, allowed=allowed, remedy=remedy)


_ASIDES = re.compile(
    "|".join(
        (
            r"\x1b\[\d*m",
            r"^Graph execution error:$",
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


def gist(error: BaseException) -> str:
    """An error's kind and what it says, on one line, without the places and settings that TensorFlow and Keras add."""
    said = " ".join(_ASIDES.sub("", str(error)).split())
    return f"{type(error).__name__}: {said[:300] or 'no message'}"


def _shortened(text: str, most: int) -> str:
    """The beginning, and the end, where the reason stands."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def _indented(text: str) -> str:
    """What a terminal would not show, or would obey, is written out."""
    shown = "".join(mark if mark.isprintable() or mark == "\n" else ascii(mark)[1:-1] for mark in text)
    return shown.replace("\n", "\n" + " " * 11)
