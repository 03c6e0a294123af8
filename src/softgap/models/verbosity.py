"""Silence transformers and the hub while softgap loads or runs a model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import huggingface_hub.utils
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging

__all__ = ["quiet_transformers"]

_QUIET = threading.RLock()


@contextlib.contextmanager
def quiet_transformers(*, downloads: bool) -> Iterator[None]:
    """Silence the warnings and bars of transformers and the hub, then restore them; `downloads` keeps download bars.

    What those warnings tell (missing weights, unknown types) is checked by the caller and raised instead. The lock
    keeps two threads from restoring each other's settings.
    """
    with _QUIET:
        level = logging.get_verbosity()
        hub_level = hub_logging.get_verbosity()
        bars = logging.is_progress_bar_enabled()
        hub_bars = not huggingface_hub.utils.are_progress_bars_disabled()
        logging.set_verbosity_error()
        hub_logging.set_verbosity(hub_logging.ERROR)
        logging.disable_progress_bar()
        if downloads and hub_bars:
            huggingface_hub.utils.enable_progress_bars()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            hub_logging.set_verbosity(hub_level)
            if bars:
                logging.enable_progress_bar()
            if hub_bars:
                huggingface_hub.utils.enable_progress_bars()
            else:
                huggingface_hub.utils.disable_progress_bars()
