"""The outcome of `run` and `read`: a summary for people, or one JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from softgap.cli import _output

if TYPE_CHECKING:
    from softgap.cli._summary import Summary
    from softgap.trajectories import Manifest, Trajectories

__all__ = ["present_run", "present_study"]


def present_run(run: Trajectories, out: str, *, as_json: bool) -> None:
    """Show one run, saved at ``out``."""
    if as_json:
        _output.write_json(_run_document(run, out))
        return
    from softgap.cli._show import show_run

    show_run(_output.console(), run, out)


def present_study(summaries: Sequence[Summary], manifest: Manifest, out: str, *, as_json: bool) -> None:
    """Show a study of several samples, saved at ``out``."""
    if as_json:
        _output.write_json(_study_document(summaries, manifest, out))
        return
    from softgap.cli._show import show_study

    show_study(_output.console(), summaries, manifest, out)


def _run_document(run: Trajectories, out: str) -> dict[str, Any]:
    from softgap.cli._summary import summarise

    summary = summarise(run)
    return {
        **_source(run.manifest, out),
        **summary.row(),
        "prompt": run.prompt_text,
        "completion": run.completion_text,
        **_by_head(summary),
        "steps": _steps(run),
    }


def _study_document(summaries: Sequence[Summary], manifest: Manifest, out: str) -> dict[str, Any]:
    from softgap.cli._summary import merged

    overall = merged(summaries)
    rows = [summary.row() for summary in summaries]
    return {**_source(manifest, out), "samples": rows, "all": {**overall.row(), **_by_head(overall)}}


def _source(manifest: Manifest, out: str) -> dict[str, Any]:
    return {
        "out": out,
        "model": manifest.model,
        "weights": manifest.weights,
        "dtype": manifest.dtype,
        "backend": manifest.backend,
        "seed": manifest.seed,
        "dropped_sinks": manifest.dropped_sinks,
        "options": dict(manifest.options),
        "held_out": manifest.extra.get("held_out"),
    }


def _by_head(summary: Summary) -> dict[str, Any]:
    hungry, linear = summary.extremes()
    return {
        "ranked_by": summary.ranked_by,
        "most_softmax_hungry": [asdict(head) for head in hungry],
        "most_linear": [asdict(head) for head in linear],
        "heads": summary.head_rows(),
    }


def _steps(run: Trajectories) -> list[dict[str, Any]]:
    """Per step the token and its scores, with the mean divergence over all heads by mechanism."""
    from softgap.cli._means import mean

    divergence = mean(run.quantities["divergence"], axis=(1, 2))
    return [
        {
            "position": int(run.positions[step]),
            "token_id": int(run.token_ids[step]),
            "token": run.tokens[step],
            "logprob": float(run.logprob[step]),
            "entropy": float(run.entropy[step]),
            "divergence": {name: float(divergence[i, step]) for i, name in enumerate(run.mechanisms)},
        }
        for step in range(run.n_steps)
    ]
