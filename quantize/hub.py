"""Whether the Hugging Face hub can be reached at all, found out before its client's long retries.

The client tries a refused connection again for half a minute, on each of several files. Where no
connection can be made, that only keeps a person waiting.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: As long as the client itself waits for a connection: a hub slower than this fails there too.
CONNECT_TIMEOUT_S = 10.0
#: A connection is tried again once, so that one lost packet or a restart is no verdict.
TRIES, PAUSE_S = 2, 1.0
#: Errors of the client's HTTP library (httpx, or requests in older ones) by which no connection
#: came about. A hub that was reached and is slow, busy or refuses an answer is not among them.
_NO_CONNECTION = frozenset({"ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError"})


def why_unreachable() -> str | None:
    """Return why no connection to the hub can be made, None where it can or the hub is off.

    Uses the client's own session, hence its endpoint, proxies and certificates.
    """
    from huggingface_hub import constants, get_session  # noqa: PLC0415  (slow to import)

    if constants.HF_HUB_OFFLINE:
        return None
    reason = None
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            get_session().head(constants.ENDPOINT, timeout=CONNECT_TIMEOUT_S)
        # The library's own errors, and anything a proxy or certificate setting can raise.
        except Exception as error:
            if type(error).__name__ not in _NO_CONNECTION:
                return None
            reason = f"no connection to {constants.ENDPOINT}: {error}"
        else:
            return None
    return reason


@contextmanager
def hub_switched_off() -> Iterator[None]:
    """Make the hub's client and `datasets` use what is on this machine while the block runs."""
    import datasets  # noqa: PLC0415
    from huggingface_hub import constants  # noqa: PLC0415

    settings: tuple[Any, ...] = (constants, datasets.config)
    before = [module.HF_HUB_OFFLINE for module in settings]
    for module in settings:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value
