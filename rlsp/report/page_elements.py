"""The page's building blocks: elements that escape what they hold, tables, the document around them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, tostring

Content = Element | str | None
NOTHING = "–"

_STYLE = Path(__file__).with_name("page.css")
# A control character has no place in HTML, a bidirectional one reorders its neighbours.
_UNSEEN = {
    code: f"\\u{code:04x}"
    for code in (*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0x202A, 0x202F),
                 *range(0x2066, 0x206A), 0x200E, 0x200F)
}  # fmt: skip


def node(tag: str, *content: Content, **attributes: object) -> Element:
    """Make an element; text and attribute values are escaped as it is written.

    Args:
        tag: Name of the element.
        content: Texts and elements in order; None is left out.
        attributes: By name, `_` standing for `-` and a trailing one dropped (`class_`); None is left out.
    """
    element = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            element.set(name.rstrip("_").replace("_", "-"), plain(str(value)))
    for part in content:
        if isinstance(part, Element):
            element.append(part)
        elif part is not None:
            _append_text(element, plain(part))
    return element


def plain(text: str) -> str:
    """Write control and bidirectional characters, and what is no Unicode, as escapes."""
    return text.translate(_UNSEEN).encode("utf-8", "backslashreplace").decode("utf-8")


def section(name: str, title: str, *content: Content) -> Element:
    """Make a section of the page under a heading that names it."""
    return node("section", node("h2", title, id=name), *content, aria_labelledby=name)


def table(
    caption: str, head: Sequence[Content], rows: Iterable[Sequence[Content]], *, kind: str | None = None
) -> Element:
    """Make a table that scrolls by itself; the first cell heads its row, and columns need no heading."""
    header = node("thead", node("tr", *(node("th", cell, scope="col") for cell in head))) if head else None
    body = [
        node("tr", node("th", first, scope="row"), *(node("td", cell, class_=_empty(cell)) for cell in rest))
        for first, *rest in rows
    ]
    made = node("table", node("caption", caption), header, node("tbody", *body), class_=kind)
    # Focusable, so that a keyboard can scroll it.
    return node("div", made, class_="scroll", role="region", aria_label=caption, tabindex=0)


def folded(summary: str, *content: Content) -> Element:
    """Make a part that opens on demand."""
    return node("details", node("summary", summary), *content)


def listing(items: Iterable[str]) -> Element:
    """Make a list of plain texts."""
    return node("ul", *(node("li", item) for item in items))


def style() -> str:
    """Return the style sheet."""
    return _STYLE.read_text(encoding="utf-8")


def document(title: str, *body: Content) -> bytes:
    """Write a whole page that may load nothing and run nothing; the same content gives the same bytes."""
    text = style()
    allowed = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{allowed}'; base-uri 'none'; form-action 'none'"
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", http_equiv="Content-Security-Policy", content=policy),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("meta", name="color-scheme", content="light dark"),
        node("meta", name="referrer", content="no-referrer"),
        node("title", title),
    )
    sheet = Element("style")
    sheet.text = text
    head.append(sheet)
    page = node("html", head, node("body", *body), lang="en")
    return b"<!DOCTYPE html>\n" + tostring(page, encoding="unicode", method="html").encode() + b"\n"


def _empty(cell: Content) -> str | None:
    return "none" if cell == NOTHING else None


def _append_text(element: Element, text: str) -> None:
    if len(element):
        last = element[-1]
        last.tail = (last.tail or "") + text
    else:
        element.text = (element.text or "") + text
