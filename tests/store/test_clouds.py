from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from resilient.clock import SYSTEM_CLOCK
from resilient.errors import ErrorKind, NotFoundError, ResilientError, StoreError, UsageError
from resilient.store import object_store, s3
from resilient.store.base import Store
from resilient.store.clouds import open_with_fsspec
from resilient.store.fork_safe import ForkSafe
from resilient.store.object_store import ObjectStore
from resilient.store.open import open_store, recipe
from resilient.store.probe import probe
from resilient.store.s3 import S3Store
from resilient.testing.proxy import FaultProxy, HttpFault, HttpRule
from tests.s3_server import BUCKET, S3Server

CLIENTS = ("obstore", "fsspec")


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def through(place: str, **options: Any) -> object:
    """Return the store that does the work for a URL."""
    store = open_store(place, storage_options=options).inner
    return store.inner if isinstance(store, ForkSafe) else store


@pytest.mark.parametrize(
    ("place", "url", "options"),
    [
        ("s3://bucket/runs/gpt/", "s3://bucket/runs/gpt", {}),
        ("s3a://bucket", "s3://bucket", {"key": "a", "secret": "b", "client_kwargs": {"region_name": "eu-west-1"}}),
        ("S3://bucket/x", "s3://bucket/x", {"profile": "training"}),
        ("gs://bucket/x", "gs://bucket/x", {"token": "anon", "project": "p"}),
        ("gcs://bucket/x", "gs://bucket/x", {}),
        ("az://container/x", "az://container/x", {"account_name": "a", "sas_token": "sv=1&sig=2"}),
        ("abfss://container@account.dfs.core.windows.net/x", "az://container/x", {"account_key": "YQ=="}),
    ],
)
def test_the_clouds_are_reached_through_obstore(place: str, url: str, options: dict[str, Any]) -> None:
    store = through(place, **options)
    assert isinstance(store, ObjectStore)
    assert store.url == url


@pytest.mark.parametrize(
    ("named", "options"),
    [("config_kwargs", {"config_kwargs": {}}), ("aws_account_id", {"client_kwargs": {"aws_account_id": "1"}})],
)
def test_options_that_only_fsspec_understands_choose_it_and_say_so(named: str, options: dict[str, Any]) -> None:
    keys = {"key": "a", "secret": "b"}
    with pytest.warns(UserWarning, match=f"s3://bucket goes through fsspec.*{named}"):
        store = through("s3://bucket/x", **keys, **options)
    assert isinstance(store, S3Store)
    with pytest.raises(UsageError, match="unknown to obstore") as caught:
        through("s3://bucket/x", client="obstore", **keys, **options)
    assert "fsspec" in str(caught.value.hint)


def test_who_asks_for_fsspec_gets_it_without_a_word() -> None:
    assert isinstance(through("s3://bucket/x", client="fsspec", key="a", secret="b"), S3Store)
    with pytest.raises(UsageError, match="'obstore' or 'fsspec', not 'boto3'"):
        through("s3://bucket/x", client="boto3")
    with pytest.raises(UsageError) as caught:
        through("gs://bucket/x", client="fsspec")
    assert caught.value.kind is ErrorKind.MISSING_EXTRA


def test_a_cloud_that_gives_no_token_is_about_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    for place, options in {"gs://bucket/x": {}, "az://container/x": {"account_name": "a"}}.items():
        with pytest.raises(StoreError) as caught:
            open_store(place, storage_options=options).within(1.0).get("key")
        assert caught.value.kind is ErrorKind.BAD_CREDENTIALS, caught.value
        assert "GOOGLE_APPLICATION_CREDENTIALS" in str(caught.value.hint)


@pytest.mark.s3
def test_address_and_credentials_come_from_the_environment(s3_url: str, client: str) -> None:
    store = open_store(s3_url, storage_options={"client": client})
    probe(store)
    assert list(store.list("")) == []


@pytest.mark.s3
def test_another_process_opens_the_same_place_by_its_recipe(s3_server: S3Server, client: str) -> None:
    mine = open_store(s3_server.fresh_url(), storage_options={**s3_server.options(), "client": client})
    mine.put("key", [b"x"])
    found = recipe(mine)
    assert found is not None
    code = (
        "import json, sys; from resilient.store.open import open_store\n"
        "url, options = json.loads(sys.argv[1])\nprint(open_store(url, storage_options=options).get('key'))"
    )
    command = [sys.executable, "-c", code, json.dumps([found.url, found.options])]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == "b'x'"


@pytest.mark.s3
@pytest.mark.parametrize(
    ("kind", "says", "options"),
    [
        (ErrorKind.UNREACHABLE, "127.0.0.1:9", {"endpoint_url": "http://127.0.0.1:9"}),
        (ErrorKind.BAD_CREDENTIALS, "SignatureDoesNotMatch", {"secret": "wrong"}),
        (ErrorKind.BAD_CREDENTIALS, "InvalidAccessKeyId", {"key": "unknown"}),
        (ErrorKind.ACCESS_DENIED, "list of ''", {"key": "blind-key", "secret": "blind-secret"}),
        (ErrorKind.ACCESS_DENIED, "create of 'control/probe-", {"key": "reader-key", "secret": "reader-secret"}),
    ],
    ids=["unreachable", "wrong secret", "unknown key", "denied listing", "read only"],
)
def test_a_probe_tells_in_seconds_what_is_wrong(
    s3_server: S3Server, client: str, kind: ErrorKind, says: str, options: dict[str, Any]
) -> None:
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        probe(open_store(s3_server.fresh_url(), storage_options={**s3_server.options(), "client": client, **options}))
    assert time.monotonic() - started < 15
    assert caught.value.kind is kind
    assert says in str(caught.value)
    assert f"s3://{BUCKET}/" in str(caught.value)
    assert caught.value.hint


@pytest.mark.field_report("BR-033", "BR-145")
@pytest.mark.s3
def test_a_missing_bucket_is_told_and_not_made(s3_server: S3Server, client: str) -> None:
    store = open_store("s3://no-such-bucket/run", storage_options={**s3_server.options(), "client": client})
    for call in (lambda: probe(store), lambda: store.get("run.json"), lambda: list(store.list(""))):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.kind is ErrorKind.NO_SUCH_BUCKET
        assert "no-such-bucket" in str(caught.value)


@pytest.mark.s3
def test_missing_credentials_are_told(s3_server: S3Server, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(StoreError) as caught:
        probe(open_store(s3_server.fresh_url(), storage_options={"endpoint_url": s3_server.endpoint, "client": client}))
    assert caught.value.kind is ErrorKind.BAD_CREDENTIALS


@pytest.mark.s3
def test_secrets_are_not_in_errors(s3_server: S3Server, client: str) -> None:
    options = {**s3_server.options(), "secret": "very-secret-value", "client": client}
    with pytest.raises(ResilientError) as caught:
        probe(open_store(s3_server.fresh_url(), storage_options=options))
    assert "very-secret-value" not in f"{caught.value!r} {caught.value} {caught.value.__cause__}"


@pytest.mark.field_report("BR-033")
@pytest.mark.s3
def test_rights_below_one_prefix_are_enough(s3_server: S3Server, client: str) -> None:
    options = {**s3_server.options("guest"), "client": client}
    store = open_store(f"{s3_server.guest_url}/{secrets.token_hex(4)}", storage_options=options)
    probe(store)
    store.put("a/key", [b"x"])
    assert list(store.list("a/")) == ["a/key"]
    with pytest.raises(NotFoundError):
        store.get("a/missing")
    store.delete("a/key")
    assert list(store.list("")) == []
    with pytest.raises(StoreError) as caught:
        probe(open_store(s3_server.fresh_url(), storage_options=options))
    assert caught.value.kind is ErrorKind.ACCESS_DENIED


@pytest.mark.field_report("BR-033")
@pytest.mark.s3
def test_a_missing_object_that_is_answered_like_a_forbidden_one_names_the_right_to_list(
    s3_server: S3Server, client: str
) -> None:
    with FaultProxy(s3_server.endpoint, HttpRule(fault=HttpFault.DENIED, methods=frozenset({"GET", "HEAD"}))) as wire:
        options = {**s3_server.options(), "client": client, "endpoint_url": wire.url}
        store = open_store(s3_server.fresh_url(), storage_options=options)
        for call in (store.get, store.size):
            with pytest.raises(StoreError, match="missing") as caught:
                call("missing")
            assert caught.value.kind is ErrorKind.ACCESS_DENIED
            assert "allow listing the bucket (without that, a missing object is answered like a forbidden one)" in str(
                caught.value.hint
            )


@pytest.mark.field_report("BR-028")
@pytest.mark.s3
def test_bodies_that_arrive_incomplete_are_sent_again(
    s3_server: S3Server, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (object_store, s3):
        monkeypatch.setattr(module, "REQUEST_BYTES", 5 << 20)  # the smallest part that S3 takes
    broken = HttpRule(fault=HttpFault.INCOMPLETE_BODY, methods=frozenset({"PUT"}), path="*partNumber*", every=20)
    with FaultProxy(s3_server.endpoint, broken) as wire:
        options = {**s3_server.options(), "client": client, "endpoint_url": wire.url}
        store = open_store(s3_server.fresh_url(), storage_options=options)
        for number in range(7):
            content = secrets.token_bytes((15 << 20) + number)
            store.put(f"large-{number}", [content])
            assert store.get(f"large-{number}") == content
            store.delete(f"large-{number}")
        assert wire.injected[HttpFault.INCOMPLETE_BODY] >= 2
        sent = sum(request.method == "PUT" and "partNumber" in request.path for request in wire.requests)
        assert client == "obstore" or sent == 4 * 7 - 1 + wire.injected[HttpFault.INCOMPLETE_BODY], "the part alone"


def opened(way: str, url: str, server: S3Server) -> Store:
    """Open a place in one of the ways in which a bucket is reached; ``generic``: as what only fsspec knows."""
    if way == "generic":
        return open_with_fsspec(url, server.options(), SYSTEM_CLOCK)
    return open_store(url, storage_options={**server.options(), "client": way})


@pytest.mark.field_report("BR-015")
@pytest.mark.s3
@pytest.mark.parametrize("theirs", CLIENTS)
@pytest.mark.parametrize("way", [*CLIENTS, "generic"])
def test_what_another_client_writes_is_seen_at_once(s3_server: S3Server, way: str, theirs: str) -> None:
    url = s3_server.fresh_url()
    mine, other = opened(way, url, s3_server), opened(theirs, url, s3_server)
    for turn in range(3):
        assert sorted(mine.list("a/")) == [f"a/{each}" for each in range(turn)]
        with pytest.raises(NotFoundError):
            mine.size(f"a/{turn}")
        other.put(f"a/{turn}", [b"x"])
        assert mine.size(f"a/{turn}") == 1
        assert mine.get(f"a/{turn}") == b"x"


@pytest.mark.field_report("BR-016")
@pytest.mark.s3
@pytest.mark.parametrize("way", [*CLIENTS, "generic"])
def test_answers_do_not_depend_on_what_was_asked_before(s3_server: S3Server, way: str) -> None:
    url, seed = s3_server.fresh_url(), 20261201
    draw = random.Random(seed)
    mine, other = opened(way, url, s3_server), opened("obstore", url, s3_server)
    keys = ["step/1/a", "step/1/b", "step/2/a", "step-1/a", "steps", "step.1"]
    there: dict[str, bytes] = {}
    for turn in range(80):
        key, content = draw.choice(keys), b"%d" % turn
        message = f"turn {turn}, seed {seed}"
        match draw.choice(["put", "delete", "list", "folders", "size", "get"]):
            case "put":
                draw.choice([mine, other]).put(key, [content])
                there[key] = content
            case "delete":
                draw.choice([mine, other]).delete(key)
                there.pop(key, None)
            case "list":
                prefix = draw.choice(["", "step/", "step/1/", "nothing/"])
                assert sorted(mine.list(prefix)) == sorted(key for key in there if key.startswith(prefix)), message
            case "folders":
                below = {name.split("/")[1] for name in there if name.startswith("step/")}
                assert below <= set(mine.folders("step/")), message
                assert not set(mine.folders("nothing/")), message
            case question:
                for asked in (key, "step", "step/1"):
                    ask = mine.size if question == "size" else mine.get
                    if asked in there:
                        assert ask(asked) == (len(there[asked]) if question == "size" else there[asked]), message
                    else:
                        with pytest.raises(NotFoundError):
                            ask(asked)


FORK = """
import os, sys, time
from resilient.store.open import open_store
store = open_store(sys.argv[1], storage_options={"client": sys.argv[2]})
store.put("key", [b"parent"])
children = []
for index in range(3):
    pid = os.fork()
    if pid == 0:
        good = store.get("key") == b"parent" and store.create(f"child/{index}", b"x")
        os._exit(0 if good else 1)
    children.append(pid)
assert store.get("key") == b"parent"
deadline = time.monotonic() + 60
codes = []
for pid in children:
    done, status = 0, 0
    while not done and time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    codes.append(status if done else "hangs")
    if not done:
        os.kill(pid, 9)
print(codes, sorted(store.list("child/")))
"""


@pytest.mark.field_report("BR-174")
@pytest.mark.s3
def test_a_forked_child_uses_the_store_of_its_parent(s3_url: str, client: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", FORK, s3_url, client], capture_output=True, text=True, timeout=120, check=True
    )
    assert said.stdout.strip() == "[0, 0, 0] ['child/0', 'child/1', 'child/2']", said.stderr
