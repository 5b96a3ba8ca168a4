"""Elements as text: what is not made here is escaped; what is made is sound and can be read aloud."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.report.html import Html, el, joined
from resilient.report.page import render
from tests.report import ledgers

VOID = {"meta", "link", "br", "hr", "input"}


class Reader(HTMLParser):
    """Reads a page; fails at what is opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


@settings(deadline=None)
@given(st.text(), st.text())
def test_any_text_stays_text(inside: str, value: str) -> None:
    reader = read(el("p", inside, title=value))
    assert [tag for tag, _ in reader.elements] == ["p"]
    assert set(reader.elements[0][1]) == {"title"}


def test_elements_are_put_together() -> None:
    assert el("br") == "<br>"
    assert el("a", 1, None, ["<", el("b", "x")], href="#y", hidden=True, class_="z", aria_label='"', off=False) == (
        '<a href="#y" hidden class="z" aria-label="&quot;">1&lt;<b>x</b></a>'
    )
    assert joined("&", Html("&amp;")) == "&amp;&amp;"


@pytest.mark.parametrize("kind", ["rich", "empty", "calm", "running", "hostile", "large"])
def test_a_page_is_sound_and_says_what_its_pictures_show(kind: str) -> None:
    page = render(getattr(ledgers, kind)())
    reader = read(page)
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] or "" for tag, attributes in reader.elements if tag in {"a", "link"}]
    assert {link for link in links if link != "data:,"} <= {f"#{each}" for each in ids}
    headings = [int(tag[1]) for tag, _ in reader.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(headings))
    for tag, attributes in reader.elements:
        assert "src" not in attributes
        assert not {name for name in attributes if name.startswith("on")}
        if tag == "svg" and attributes.get("role") == "img":
            assert len(attributes["aria-label"] or "") > 10
    assert "url(" not in page
    assert "@import" not in page


def test_what_cannot_be_seen_is_written_out() -> None:
    text = "".join(read(render(ledgers.hostile())).texts)
    assert "\\u001b[31m\\u202e" in text
    assert not set(text) & {"\x1b", "\x00", "\u202e"}


def test_of_very_many_ranks_and_nodes_the_ones_to_look_at_are_shown() -> None:
    text = "".join(read(render(ledgers.large())).texts)
    assert "16 of 512 ranks: the 8 that wait least for the others, and most" in text
    assert "mean of 64 nodes" in text
    assert "the first 16 of 64" in text
