"""Whether torch writes the records of a logger, because ``TORCH_LOGS`` names it."""

from __future__ import annotations

import logging
from typing import Final

_TORCH: Final = "torch._logging"


def leave_to_torch(logger: logging.Logger) -> bool:
    """Keep the records of ``logger`` from the root logger if torch writes them; say whether it does.

    torch gives its handler to every logger that ``TORCH_LOGS`` names, at import. Its own loggers then hand nothing to
    the root logger; to those of other packages it forgets to say so at the first time (torch 2.13), and with any
    ``logging.basicConfig`` each line would come twice.
    """
    theirs = any(type(handler.formatter).__module__.startswith(_TORCH) for handler in logger.handlers)
    if theirs:
        logger.propagate = False
    return theirs
