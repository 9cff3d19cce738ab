"""The one error a user's request can meet before work starts."""

from __future__ import annotations


class Refused(ValueError):
    """A request that cannot be served: what it concerns, what was given, what is allowed, what to do.

    `key` is a job-file key (`windows.length`), a command-line argument or an argument's name.
    """

    def __init__(self, key: str, *, given: object, allowed: str, remedy: str) -> None:
        self.key, self.given, self.allowed, self.remedy = key, given, allowed, remedy
        super().__init__(
            f"{key} is refused\n"
            f"  given    {_indented(str(given))}\n"
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


def _indented(text: str) -> str:
    return text.replace("\n", "\n" + " " * 11)
