"""Notices of three clouds, against a server that answers as theirs do."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from resilient.clock import SYSTEM_CLOCK
from resilient.detect import metadata
from resilient.detect.metadata import cloud_source
from resilient.detect.notice import Source
from resilient.detect.polling import Poller
from tests.detect.clouds import FakeCloud


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud() as found:
        yield found


def source(cloud: FakeCloud, name: str) -> Source:
    return cloud_source(name, cloud.url, SYSTEM_CLOCK)


@pytest.mark.parametrize("name", ["aws", "gcp", "azure"])
def test_a_preemption_is_noticed_with_the_time_that_is_left(cloud: FakeCloud, name: str) -> None:
    asked = source(cloud, name)
    assert asked.poll() is None
    cloud.preempt(name, within_s=100)
    notice = asked.poll()
    assert notice is not None
    assert (notice.kind, notice.early) == ("stop", False)
    assert notice.within_s is not None
    assert 20 <= notice.within_s <= 100
    assert name.upper() in notice.why.upper()
    assert not [why for why in cloud.refused if "token" not in why]


def test_azure_takes_a_notice_back(cloud: FakeCloud) -> None:
    asked = source(cloud, "azure")
    cloud.preempt("azure", within_s=300)
    assert asked.poll() is not None
    cloud.withdraw()
    assert asked.poll() is None


def test_the_machines_of_a_scale_set_do_not_take_the_notices_of_others(cloud: FakeCloud) -> None:
    asked = source(cloud, "azure")
    cloud.preempt("azure", within_s=30, resources=("another-machine",))
    assert asked.poll() is None
    cloud.preempt("azure", within_s=30, resources=("another-machine", "this-machine"))
    assert asked.poll() is not None


def test_other_events_of_azure_are_no_stop(cloud: FakeCloud) -> None:
    events = [{"EventType": kind, "Resources": ["this-machine"]} for kind in ("Freeze", "Reboot", "Terminate")]
    cloud.answers["/metadata/scheduledevents"] = json.dumps({"Events": events})
    assert source(cloud, "azure").poll() is None


def test_a_rebalance_recommendation_is_an_early_hint(cloud: FakeCloud) -> None:
    asked = source(cloud, "aws")
    cloud.answers["/latest/meta-data/events/recommendations/rebalance"] = '{"noticeTime": "2026-01-01T00:00:00Z"}'
    notice = asked.poll()
    assert notice is not None
    assert notice.early


def test_a_token_that_has_expired_is_renewed(cloud: FakeCloud) -> None:
    asked = source(cloud, "aws")
    assert asked.poll() is None
    cloud.token = "another"
    cloud.preempt("aws", within_s=60)
    assert asked.poll() is not None
    assert cloud.refused == ["no token"]


def test_version_1_of_the_service_of_aws_has_no_tokens() -> None:
    with FakeCloud(tokens=False) as cloud:
        cloud.preempt("aws", within_s=60)
        assert source(cloud, "aws").poll() is not None


@pytest.mark.parametrize("name", ["aws", "gcp", "azure"])
def test_a_service_that_fails_is_told_once_and_nothing_stops(cloud: FakeCloud, name: str) -> None:
    told: list[str] = []
    poller = Poller(source(cloud, name), 1.0, notice=told.append)
    cloud.broken = True
    poller.ask()
    poller.ask()
    found = [poller.newest]
    assert len(told) == 1
    cloud.broken = False
    cloud.preempt(name, within_s=60)
    poller.ask()
    found.append(poller.newest)
    cloud.broken = True  # what it has said holds until it says something else
    poller.ask()
    found.append(poller.newest)
    assert [notice is not None for notice in found] == [False, True, True]
    assert len(told) == 2


@pytest.mark.parametrize("answer", ["no JSON", "[]", '{"action": "terminate"}', '{"time": "soon"}'])
def test_an_answer_that_makes_no_sense_stops_nothing(cloud: FakeCloud, answer: str) -> None:
    told: list[str] = []
    cloud.answers["/latest/meta-data/spot/instance-action"] = answer
    poller = Poller(source(cloud, "aws"), 1.0, notice=told.append)
    poller.ask()
    assert poller.newest is None
    assert len(told) == 1


def test_nobody_there_is_an_error_within_seconds() -> None:
    with FakeCloud() as cloud:
        asked = source(cloud, "gcp")
    with pytest.raises(OSError, match="refused"):
        asked.poll()


def test_azure_may_say_null_for_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "_ask", lambda *_: b'{"DocumentIncarnation": 1, "Events": null}')
    assert cloud_source("azure", None, SYSTEM_CLOCK).poll() is None
