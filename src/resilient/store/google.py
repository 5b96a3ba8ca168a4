"""How a bucket of Google Cloud Storage is reached through obstore, given the options of gcsfs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from obstore.store import GCSStore

from resilient.store.obstore_clients import Clients, clients, network, unknown_option

if TYPE_CHECKING:
    from obstore.store import GCSConfig


def connect(bucket: str, prefix: str, options: Mapping[str, Any]) -> Callable[[], Clients]:
    """Return what makes the clients; raise `UsageError` for an option that obstore has no like of."""
    config = _config(options)
    return lambda: clients(
        lambda retry: GCSStore(
            bucket, prefix=prefix or None, config=config, client_options=network(), retry_config=retry
        )
    )


def _config(options: Mapping[str, Any]) -> GCSConfig:
    config: GCSConfig = {}
    for option in options.items():
        match option:
            case ("project", _) | ("token", None | "google_default"):
                pass  # a project matters where buckets are made; such a token is what obstore looks for by itself
            case "token", "anon":
                config["skip_signature"] = True
            case "token", str(path) if path.endswith(".json"):
                config["service_account"] = path
            case "token", {"private_key": _}:
                config["service_account_key"] = json.dumps(option[1])
            case "endpoint_url", str(url):
                config["base_url"] = url
            case name, _:
                raise unknown_option(name)
    return config
