"""The two pages of the live explorer: the one a visitor opens, and the explorer of one run inside of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from softgap import __version__
from softgap.report.chosen import keys_of
from softgap.report.live.limits import Limits
from softgap.report.live.runs import LiveRun
from softgap.report.live.writer import Writer
from softgap.report.page import REPORT, Look, policy_of, render
from softgap.report.payload import OPENING, Payload

__all__ = ["PANE", "SHELL", "pane", "policy", "shell"]

SHELL = Look(
    "live/shell.html",
    ("explorer.css", "live/live.css"),
    (
        "data.js",
        "theme.js",
        "live/stream.js",
        "live/panes.js",
        "live/runs.js",
        "live/form.js",
        "live/shell.js",
    ),
    allowed="connect-src 'self'; frame-src 'self'; ",
)
PANE = replace(
    REPORT,
    styles=(*REPORT.styles, "live/live.css"),
    scripts=(*REPORT.scripts[:-1], "live/pane.js", REPORT.scripts[-1]),
)


def policy(look: Look) -> str:
    """The policy of a page for the header, where it can also say who may show it in a frame."""
    who = "'none'" if look is SHELL else "'self'"
    return f"{policy_of(look)}; frame-ancestors {who}"


def shell(writer: Writer, limits: Limits, *, boot: str, token: str) -> str:
    """The page that a visitor opens."""
    document = {
        **_frame(writer),
        "mechanisms": list(writer.mechanisms),
        "chosen": list(writer.chosen),
        "boot": boot,
        "token": token,
        "limits": {"newTokens": limits.new_tokens},
    }
    return render(Payload(document, ()), SHELL)


def pane(writer: Writer, run: LiveRun) -> str:
    """The explorer of a run, empty: its events fill it."""
    keys = keys_of(run.wish.mechanisms)
    unknown = [None] * len(run.wish.mechanisms)
    data: dict[str, Any] = {
        "promptSteps": 0,
        "pieces": {"prompt": [[run.wish.prompt, -1, 0, True]], "completion": []},
        **{name: [] for name in ("tokens", "positions", "logprob", "entropy")},
        "arrays": {key: i for i, key in enumerate(keys)},
        "means": {},
        "empty": "The model has not begun yet.",
    }
    sample = {
        "id": run.run_id,
        "label": None,
        "promptTokens": 0,
        "steps": 0,
        "excerpt": "",
        "divergence": unknown,
        "logprob": None,
        "entropy": None,
        "data": data,
    }
    document = {
        **_frame(writer),
        "mechanisms": list(run.wish.mechanisms),
        "keys": list(keys),
        "about": [
            ["The model", f"{writer.name} is writing; what was measured and how is said here when it has ended."]
        ],
        "samples": [sample],
        "opening": OPENING if {"fitted", "uniform"} <= set(run.wish.mechanisms) else {},
        "groups": [],
        "dynamics": {"reason": "the entropies of a run are computed when it has ended"},
        "shapes": [],
        "live": {"run": run.run_id, "keys": list(keys)},
    }
    return render(Payload(document, ()), PANE)


def _frame(writer: Writer) -> dict[str, Any]:
    layout = writer.layout
    return {
        "softgap": __version__,
        "title": writer.name,
        "model": writer.name,
        "layers": list(layout.layers),
        "headsPerLayer": list(layout.heads_per_layer),
        "kvGroup": layout.kv_group.tolist(),
    }
