"""Matplotlib's figures as SVG that a page takes in: no ids that clash, no styles of its own, nothing from elsewhere.

What is black becomes the colour of the text around it, so that a picture is read on light and dark.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from xml.etree.ElementTree import Element

from matplotlib.figure import Figure

from ..plots import look
from .markup import Markup

DROPPED = {"metadata", "style", "title"}
INK = {"#000000", "#444444", "#666666", "#262626", "black"}
PAPER = {"#ffffff", "white"}
_NO_DATES = {"Date": None, "Creator": None, "Format": None, "Type": None}
_SIZE = re.compile(r"([\d.]+)px")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_FONTS = {"font", "font-family", "font-size"}
_SAME = {"dominant-baseline", "text-anchor", "opacity", "font-style", "font-weight", "image-rendering"}


def svg(picture: Figure, key: str, alt: str) -> Markup:
    """The figure's markup; key: what its ids begin with, alt: what it shows, in words."""
    file = io.BytesIO()
    with look.style():
        picture.savefig(file, format="svg", transparent=True, metadata=_NO_DATES)
    root = ElementTree.fromstring(file.getvalue())
    _clean(root, f"{key}-")
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-label": alt}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _clean(node: Element, key: str) -> None:
    node.tag = _local(node.tag)
    node.attrib = _attributes(node.attrib, key)
    for child in list(node):
        if _local(child.tag) in DROPPED:
            node.remove(child)
        else:
            _clean(child, key)
    node.tail = node.tail if node.tail and node.tail.strip() else None


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _attributes(given: dict[str, str], key: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in ((_local(name), value) for name, value in given.items()):
        if name == "style":
            found |= _presentation(value, key)
        elif name == "id":
            found["id"] = key + value
        elif name == "href":
            found["href"] = f"#{key}{value[1:]}" if value.startswith("#") else value
        elif name != "space":
            found[name] = _value(name, value, key)
    return found


def _presentation(style: str, key: str) -> dict[str, str]:
    """Declarations as attributes: a page that lets no style in but its own draws these."""
    found: dict[str, str] = {}
    for name, colon, value in (part.partition(":") for part in style.split(";")):
        name, value = name.strip(), value.strip()
        if name in _FONTS:
            size = _SIZE.search(value)
            found |= {"font-size": size.group(1)} if size else {}
        elif colon and (name in _SAME or name.startswith(("fill", "stroke"))):
            found[name] = _value(name, value, key)
    return found


def _value(name: str, value: str, key: str) -> str:
    if name == "stroke" and value in INK or name == "fill" and value in INK:
        return "currentColor"
    if name == "fill" and value in PAPER:
        return "none"
    return _REFERENCE.sub(rf"url(#{key}\1)", value)
