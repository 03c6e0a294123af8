"""Report the progress of loading, and silence the output of transformers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import huggingface_hub.utils
from huggingface_hub.utils import logging as hub_logging
from rich.console import Console
from rich.progress import Progress as Bar
from transformers.utils import logging

__all__ = ["Report", "quiet_transformers", "reporter"]

Report = Callable[[str, float], None]
"""Called with the stage in words and the fraction of the whole that is done, from 0 to 1."""

_QUIET = threading.RLock()


@contextlib.contextmanager
def reporter(progress: Report | bool) -> Iterator[Report]:
    """The given callback; for True a bar on standard error if that is a terminal; for False nothing."""
    if callable(progress):
        yield progress
        return
    console = Console(stderr=True)
    if not (progress and console.is_terminal):
        yield _silent
        return
    with contextlib.ExitStack() as stack:
        bar = Bar(console=console, transient=True)
        task = bar.add_task("")

        def draw(stage: str, fraction: float) -> None:
            # Started by the first report, so that a load with nothing slow in it draws nothing.
            if not bar.live.is_started:
                stack.enter_context(bar)
            bar.update(task, description=stage, completed=100.0 * fraction)

        yield draw


def _silent(stage: str, fraction: float) -> None:
    """Report nothing."""


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
