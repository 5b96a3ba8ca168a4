"""HTML and SVG as text: whatever is not made here is escaped, so that nothing a run has written becomes a tag."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Final

from resilient.report.units import moment, printable, when

_VOID: Final = frozenset({"meta", "link", "br", "input", "hr"})


class Html(str):
    """Text that is HTML already; every other text is escaped where it is put into an element."""

    __slots__ = ()


Child = str | int | None | Iterable["Child"]
Attribute = str | float | bool | None


def el(tag: str, /, *children: Child, **attributes: Attribute) -> Html:
    """Return an element.

    ``children``: `Html` as it is, other text escaped, None left out, sequences one after the other. ``attributes``:
    ``class_`` for ``class``, underscores for hyphens; True without a value; None and False are left out.
    """
    opened = f"<{tag}{''.join(_attribute(name, value) for name, value in attributes.items())}>"
    return Html(opened if tag in _VOID else f"{opened}{''.join(map(_text, children))}</{tag}>")


def joined(*children: Child) -> Html:
    """Return elements one after the other."""
    return Html("".join(map(_text, children)))


def moment_of(unix_s: float) -> Html:
    """Return a time in UTC that a browser shows in local time on hover."""
    return el("time", moment(unix_s), datetime=f"{when(unix_s):%Y-%m-%dT%H:%M:%S}Z")


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str | int):
        return html.escape(printable(str(child)))
    return "".join(map(_text, child))


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    shown = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {shown}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f' {shown}="{html.escape(printable(text))}"'
