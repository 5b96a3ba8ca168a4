"""What the metadata service of a cloud says about the machine: whether it is about to be taken away.

AWS (instance metadata, version 2 with a token, 1 where there is none), GCP, Azure (scheduled events). Asked without a
proxy, with short timeouts: the service is on the machine's own link.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from resilient.clock import Clock
from resilient.detect.notice import Notice, Source

_TIMEOUT_S: Final = 2.0
_LEAST_S: Final = 10.0
_MOST_S: Final = 600.0
"""The two clocks may differ: whatever is read from a time of day stays between these."""

_GCP_WITHIN_S: Final = 30.0
_AZURE_WITHIN_S: Final = 30.0


class Aws:
    """EC2: an interruption of a spot instance, two minutes ahead; as an early hint, a rebalance recommendation."""

    name = "the AWS metadata service"

    def __init__(self, base: str, clock: Clock) -> None:
        self._base = base
        self._clock = clock
        self._headers: dict[str, str] | None = None

    def poll(self) -> Notice | None:
        action = self._get("spot/instance-action")
        if action is not None:
            found = _document(action, self.name)
            within_s = _until(datetime.fromisoformat(str(found["time"])), self._clock)
            return Notice(why=f"AWS will {found.get('action', 'terminate')} this spot instance", within_s=within_s)
        if self._get("events/recommendations/rebalance") is not None:
            return Notice(why="AWS recommends to leave this instance (rebalance)", early=True)
        return None

    def _get(self, path: str) -> bytes | None:
        for fresh in (False, True):
            if self._headers is None or fresh:
                self._headers = self._token()
            try:
                return _ask(f"{self._base}/latest/meta-data/{path}", self._headers)
            except urllib.error.HTTPError as error:
                if error.code != 401 or fresh:  # the token has expired
                    raise
        raise AssertionError("the second round returns or raises")

    def _token(self) -> dict[str, str]:
        wish = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        try:
            token = _ask(f"{self._base}/latest/api/token", wish, method="PUT")
        except urllib.error.HTTPError:
            token = None  # version 1 of the service has no tokens
        return {} if token is None else {"X-aws-ec2-metadata-token": token.decode().strip()}


class Gcp:
    """Compute Engine: a preemption, half a minute ahead."""

    name = "the GCP metadata service"

    def __init__(self, base: str, clock: Clock) -> None:  # noqa: ARG002 -- the signature of the others
        self._base = base

    def poll(self) -> Notice | None:
        found = _ask(f"{self._base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        if found is None or found.strip().upper() != b"TRUE":
            return None
        return Notice(why="GCP preempts this machine", within_s=_GCP_WITHIN_S)


class Azure:
    """Scheduled events: a preemption, which may be withdrawn. A scale set shows the events of all its machines."""

    name = "the Azure metadata service"

    def __init__(self, base: str, clock: Clock) -> None:
        self._base = base
        self._clock = clock
        self._own: str | None = None

    def poll(self) -> Notice | None:
        found = _ask(f"{self._base}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
        events = [] if found is None else _document(found, self.name).get("Events") or []  # null, if there are none
        preempts = [event for event in events if event.get("EventType") == "Preempt"]
        if not preempts:
            return None
        own = self._machine()
        for event in preempts:
            if not own or own in event.get("Resources", [own]):
                text = str(event.get("NotBefore") or "")
                within_s = _until(parsedate_to_datetime(text), self._clock) if text else _AZURE_WITHIN_S
                return Notice(why="Azure preempts this machine", within_s=within_s)
        return None

    def _machine(self) -> str:
        """Return the name of this machine; "" if that is not said, so that every event is taken for its own."""
        if self._own is None:
            url = f"{self._base}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            try:
                found = _ask(url, {"Metadata": "true"})
            except OSError:
                return ""
            self._own = "" if found is None else found.decode().strip()
        return self._own


_CLOUDS: Final[Mapping[str, tuple[Callable[[str, Clock], Source], str]]] = {
    "aws": (Aws, "http://169.254.169.254"),
    "gcp": (Gcp, "http://metadata.google.internal"),
    "azure": (Azure, "http://169.254.169.254"),
}


def cloud_source(name: str, base: str | None, clock: Clock) -> Source:
    """Return what asks the metadata service of a cloud (``aws``, ``gcp``, ``azure``); ``base``: at another address."""
    make, usual = _CLOUDS[name]
    return make((base or usual).rstrip("/"), clock)


def _ask(url: str, headers: Mapping[str, str], *, method: str = "GET") -> bytes | None:
    """Return what is there; None if nothing is (404)."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 -- the address is ours
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            found: bytes = answer.read()
            return found
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise


def _document(found: bytes, who: str) -> dict[str, Any]:
    document = json.loads(found)  # what it raises is a ValueError
    if not isinstance(document, dict):
        raise ValueError(f"{who} answers {found[:80]!r}")  # noqa: TRY004 -- the answer is bad, not our call
    return document


def _until(moment: datetime, clock: Clock) -> float:
    """Return how long it is until then, within reason."""
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return min(_MOST_S, max(_LEAST_S, (moment - clock.now()).total_seconds()))
