from __future__ import annotations

import secrets
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from resilient.errors import ErrorKind, StoreError
from resilient.store import aws
from resilient.store.object_store import ObjectStore
from tests.s3_server import BUCKET, S3Server
from tests.store.test_retrying import HandClock


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return where the AWS configuration is looked for; nothing is there, and nothing is in the environment."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


def at_bucket(**options: str) -> ObjectStore:
    prefix = secrets.token_hex(8)
    return ObjectStore(f"s3://{BUCKET}/{prefix}", aws.connect(BUCKET, prefix, options))


@pytest.mark.s3
def test_a_profile_gives_endpoint_region_and_keys(s3_server: S3Server, bare: Path) -> None:
    (bare / "config").write_text(f"[profile training]\nendpoint_url = {s3_server.endpoint}\nregion = eu-west-1\n")
    (bare / "credentials").write_text(
        "[training]\naws_access_key_id = owner-key\naws_secret_access_key = owner-secret\n"
    )
    store = at_bucket(profile="training")
    store.put("key", [b"x"])
    assert store.get("key") == b"x"


@pytest.mark.s3
def test_keys_that_a_program_hands_out_are_used(s3_server: S3Server, bare: Path) -> None:
    handed = '{"Version": 1, "AccessKeyId": "owner-key", "SecretAccessKey": "owner-secret"}'
    (bare / "keys.json").write_text(handed)
    (bare / "config").write_text(f"[default]\ncredential_process = cat {bare / 'keys.json'}\n")
    store = at_bucket(endpoint_url=s3_server.endpoint)
    store.put("key", [b"x"])
    assert store.get("key") == b"x"


def test_a_profile_that_is_not_there_is_named(bare: Path) -> None:
    with pytest.raises(StoreError, match="no-such-profile") as caught:
        at_bucket(profile="no-such-profile").get("key")
    assert caught.value.kind is ErrorKind.BAD_CREDENTIALS


@pytest.mark.field_report("BR-135")
def test_keys_are_asked_for_anew_before_they_end() -> None:
    class Renewed:
        """As botocore's credentials of a role: others each time."""

        count = 0

        def get_frozen_credentials(self) -> SimpleNamespace:
            self.count += 1
            return SimpleNamespace(access_key=f"key-{self.count}", secret_key="secret", token="token")

    clock = HandClock()
    credentials = aws.Credentials(Renewed(), clock=clock)
    first, second = credentials(), credentials()
    assert (first["access_key_id"], second["access_key_id"]) == ("key-1", "key-2")
    assert first["expires_at"] == clock.now() + timedelta(minutes=10)
