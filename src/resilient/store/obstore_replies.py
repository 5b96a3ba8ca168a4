"""What an error of obstore says: it carries its meaning as text only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_DETAILS: Final = "\n\nDebug source:\n"
_STATUS: Final = re.compile(r"status code: (\d{3})")
_TRANSPORT: Final = re.compile(r"HttpError \{\s*kind: (\w+)")
_CODE: Final = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]*)</Message>")
_QUOTED: Final = re.compile(r'"([^"\\]+)"')
_REQUEST: Final = re.compile(
    r"Error performing (?P<method>[A-Z]+) (?P<address>[^\s?]+)\S* in \S+ - (Server returned non-2xx status code: )?"
    r"(?P<what>.*)",
    re.DOTALL,
)
_DAMAGED: Final = re.compile(r"invalid [\w ]*response", re.IGNORECASE)
_STORE: Final = re.compile(r"^Generic \w+ error: ")
_MOST_CHARACTERS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The server's code and status (empty and 0 where it did not answer), else what broke on the way.

    ``transport`` is a kind of error of the HTTP client: ``Connect``, ``Timeout``, ``Request``, ``Interrupted``,
    ``Decode``, or empty. ``signing_in`` tells that it was no call of the store, but one for a token.
    """

    code: str
    status: int
    transport: str
    signing_in: bool
    text: str


def reply(error: BaseException) -> Reply | None:
    """Return what ``error`` says; None if it is not obstore's."""
    said, _, details = str(error).partition(_DETAILS)
    if not details and not type(error).__module__.startswith("obstore"):
        return None
    code, status, transport = _CODE.search(said), _STATUS.search(said), _TRANSPORT.search(details)
    kind = transport[1] if transport and not status else ""
    if not kind and not status and _DAMAGED.search(said):
        kind = "Decode"  # the answer came, and was damaged on its way
    return Reply(
        code=code[1] if code else "",
        status=int(status[1]) if status else 0,
        transport=kind,
        signing_in="token request" in said,
        text=_text(said, _reason(kind, details)),
    )


def _text(said: str, reason: str) -> str:
    """Return an error for people: the server's words without their markup, and the request.

    Not its query, which may hold a signature that is as good as a password.
    """
    head, _, document = said.partition("<?xml")
    request = _REQUEST.search(head)
    words = ": ".join(found[1] for pattern in (_CODE, _MESSAGE) if (found := pattern.search(document)))
    what = words or reason or (request["what"] if request else _STORE.sub("", head))
    where = f" ({request['method']} {request['address']})" if request else ""
    return what.strip(" :\n")[:_MOST_CHARACTERS] + where


def _reason(transport: str, details: str) -> str:
    if transport == "Connect":
        quoted = _QUOTED.findall(details)  # outermost first: the last is what the system said
        return str(quoted[-1]) if quoted else ""
    return "no answer in time" if transport == "Timeout" else ""
