"""A report read as a browser would: its elements, in order, with what they are in."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "hr", "link", "input"}


@dataclass
class Element:
    name: str
    attributes: dict[str, str]
    above: tuple[str, ...]
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def __getitem__(self, key: str) -> str:
        return self.attributes[key]


class Page(HTMLParser):
    """All elements of a page; a tag that is closed by another's end is an error."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(content)
        self.close()
        assert not self._open, [one.name for one in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        made = Element(tag, {name: value or "" for name, value in attrs}, tuple(one.name for one in self._open))
        self.elements.append(made)
        if tag not in VOID:
            self._open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> without its beginning"
        assert self._open.pop().name == tag

    def handle_data(self, data: str) -> None:
        for one in self._open:
            one.texts.append(data)

    def all(self, *names: str) -> list[Element]:
        return [one for one in self.elements if one.name in names]

    def one(self, name: str) -> Element:
        (found,) = self.all(name)
        return found
