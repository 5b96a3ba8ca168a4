"""How a container of Azure Blob Storage is reached through obstore, given the options of adlfs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from obstore.store import AzureStore

from resilient.store.obstore_clients import Clients, clients, network, unknown_option

if TYPE_CHECKING:
    from obstore.store import AzureConfig

_NAMES: Final[Mapping[str, str]] = {
    "account_name": "account_name",
    "account_key": "account_key",
    "sas_token": "sas_key",
    "tenant_id": "tenant_id",
    "client_id": "client_id",
    "client_secret": "client_secret",
    "anon": "skip_signature",
}
"""The options of adlfs, and what obstore calls them."""


def connect(container: str, prefix: str, options: Mapping[str, Any]) -> Callable[[], Clients]:
    """Return what makes the clients; raise `UsageError` for an option that obstore has no like of."""
    if unknown := options.keys() - _NAMES:
        raise unknown_option(min(unknown))
    config = cast("AzureConfig", {_NAMES[name]: value for name, value in options.items() if value is not None})
    return lambda: clients(
        lambda retry: AzureStore(
            container, prefix=prefix or None, config=config, client_options=network(), retry_config=retry
        )
    )
