"""How a bucket of S3 is reached through obstore, given the options of s3fs.

What they leave open is found where every AWS tool looks: botocore reads the environment, ``~/.aws`` and the machine's
role. The client of S3 that it makes for what it has found sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import NoCredentialsError
from obstore.store import S3Store

from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.store.obstore_clients import Clients, clients, network, unknown_option

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config, S3Credential

_OPTIONS: Final = frozenset(
    {"anon", "endpoint_url", "key", "secret", "token", "username", "password", "profile", "use_ssl"}
    | {"requester_pays", "client_kwargs"}
)
_CLIENT_OPTIONS: Final = frozenset({"endpoint_url", "region_name", "use_ssl", "verify"})

_GOOD_FOR: Final = timedelta(minutes=10)
"""How long obstore may take a credential to be valid; it asks anew five minutes before that, and botocore renews what
ends within ten: no request starts with less than five minutes left."""


def connect(bucket: str, prefix: str, options: Mapping[str, Any]) -> Callable[[], Clients]:
    """Return what makes the clients; raise `UsageError` for an option that obstore has no like of."""
    nested = options.get("client_kwargs", {})
    if unknown := [*(options.keys() - _OPTIONS), *(nested.keys() - _CLIENT_OPTIONS)]:
        raise unknown_option(min(unknown))
    return lambda: _connect(bucket, prefix, options)


class Credentials:
    """Keys as obstore asks for them, renewed by botocore."""

    def __init__(self, found: Any, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._found = found
        self._clock = clock

    def __call__(self) -> S3Credential:
        keys = self._found.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": self._clock.now() + _GOOD_FOR,
        }


def _connect(bucket: str, prefix: str, options: Mapping[str, Any]) -> Clients:
    session = botocore.session.Session(profile=options.get("profile"))
    arguments = {"use_ssl": options.get("use_ssl", True), **options.get("client_kwargs", {})}
    if endpoint := options.get("endpoint_url"):
        arguments["endpoint_url"] = endpoint
    credentials = None if options.get("anon") else _credentials(session, options)
    # Unsigned, so that it does not look for credentials by itself: it is not what sends.
    found = session.create_client("s3", config=Config(signature_version=UNSIGNED), **arguments).meta
    config: S3Config = {
        "endpoint": found.endpoint_url,
        "region": found.region_name,
        # The checksum is what finds a flipped bit; a signature of each body besides costs more than the upload.
        "checksum_algorithm": "CRC64NVME",
        "unsigned_payload": True,
        "virtual_hosted_style_request": False,
        "disable_bulk_delete": True,  # one object at a time is what is asked for, and what every server can
        "skip_signature": credentials is None,
        "request_payer": bool(options.get("requester_pays")),
    }
    trust = _network(verify=arguments.get("verify", session.get_config_variable("ca_bundle")))
    return clients(
        lambda retry: S3Store(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options=trust,
            retry_config=retry,
            credential_provider=credentials,
        )
    )


def _network(*, verify: bool | str | None) -> ClientConfig:
    options = network()
    if verify is False:
        options["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        options["root_certificate"] = Path(verify).read_bytes()
    return options


def _credentials(session: botocore.session.Session, options: Mapping[str, Any]) -> Credentials:
    if key := options.get("key") or options.get("username"):
        session.set_credentials(key, options.get("secret") or options.get("password"), options.get("token"))
    found = session.get_credentials()
    if found is None:
        raise NoCredentialsError
    return Credentials(found)
