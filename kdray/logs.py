"""Where the log lines of an endpoint or a rank go."""

from __future__ import annotations

import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def show_logs(level: int = logging.INFO) -> None:
    """kdray's own lines to stderr, which Ray keeps in a file of the process. Idempotent.

    Nothing happens where the process has set up the `kdray` logger by itself.
    """
    logger = logging.getLogger("kdray")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
