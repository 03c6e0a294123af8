"""A run or a study on the terminal, or as one JSON document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from softgap.analysis.headline import FITTED, opening
from softgap.cli.render import output
from softgap.cli.render.kinds import show_kind_map
from softgap.cli.render.output import has_colour, heat_map, mean, ramp, shade_style, strip_control_characters
from softgap.cli.render.summary import HeadMean, Summary, merge_summaries, summarise
from softgap.errors import unknown_name
from softgap.kinds import Labels, stored_kinds
from softgap.trajectories import Manifest, Trajectories
from softgap.trajectories.run import pieces
from softgap.trajectories.validation import BASELINE

__all__ = ["present_run", "present_study", "print_run", "show_run", "show_study"]


_WIDEST = 100


_TOKENS_SHOWN = 400


_ROWS_SHOWN = 40


# Percentiles at the ends of the scale, so that one outlier does not hide the other tokens.
_SCALE = (5, 95)


# Below this mean difference the two divergences carry the same information.
_ALIKE = 0.05


MapOf = Literal["kinds", "divergence", "both"]


def print_run(run: Trajectories, map_of: MapOf = "kinds") -> None:
    """Print a run that may not be saved."""
    if map_of not in get_args(MapOf):
        raise unknown_name("map", map_of, get_args(MapOf))
    show_run(output.console(), run, None, map_of)


def show_run(console: Console, run: Trajectories, out: str | None, map_of: MapOf = "kinds") -> None:
    """Print the headline, the map of heads, the text, the extreme heads, the means and, last, the path."""
    summary = summarise(run)
    _opening(console, summary, run.manifest, "steps", map_of)
    console.print(_text(console, run), width=_width(console))
    console.print()
    _numbers(console, summary, out, "steps")


def show_study(
    console: Console, summaries: Sequence[Summary], manifest: Manifest, out: str, map_of: MapOf = "kinds"
) -> None:
    """Print the same as means over the samples, with one line per sample instead of the text."""
    overall = merge_summaries(summaries)
    over = "steps, then samples"
    _opening(console, overall, manifest, over, map_of, samples=len(summaries))
    console.print(_samples(summaries))
    console.print()
    _numbers(console, overall, out, over)


def _width(console: Console) -> int:
    return min(console.width, _WIDEST)


def _opening(
    console: Console, summary: Summary, manifest: Manifest, over: str, map_of: MapOf, samples: int = 1
) -> None:
    """Print what was measured, then the headline and the map of heads."""
    sampling = manifest.options.get("do_sample")
    facts = [
        manifest.model,
        manifest.dtype,
        manifest.backend,
        f"{samples} samples" if samples > 1 else "",
        f"{summary.n_prompt} prompt tokens" if summary.n_prompt else "",
        f"{summary.n_steps} steps",
        "" if sampling is None else f"sampled, seed {manifest.seed}" if sampling else "greedy",
        f"{manifest.dropped_sinks} sinks dropped" if manifest.dropped_sinks else "",
    ]
    console.print(Text(" · ".join(filter(None, facts)), "bold"))
    console.print()
    labels = None if map_of == "divergence" else _labels(summary, manifest)
    sentences = opening(summary.gap, manifest, summary.layers, caution=summary.non_finite.sentence)
    _paragraph(console, sentences.caution)
    _paragraph(console, sentences.kinds)
    if labels is not None:
        show_kind_map(console, labels, summary.layers)
        console.print()
    _paragraph(console, sentences.gap)
    _paragraph(console, sentences.held_out)
    if labels is None or map_of == "both":
        title, values = _head_map(summary, over)
        cells, meaning = heat_map(values, summary.layers, width=_width(console), colour=has_colour(console))
        console.print(Text(f"{title}; {meaning}" if meaning else title, "bold"), width=_width(console))
        console.print(cells)
        console.print()


def _labels(summary: Summary, manifest: Manifest) -> Labels | None:
    """The kinds of the heads that were measured, where they are known."""
    _, layers, heads = summary.heads.shape
    return stored_kinds(manifest.extra.get("held_out", {}), summary.layers, [heads] * layers)


def _paragraph(console: Console, sentence: str) -> None:
    if sentence:
        console.print(Text(sentence), width=_width(console))
        console.print()


def _head_map(summary: Summary, over: str) -> tuple[str, Float[np.ndarray, "layer head"]]:
    """The title and the values of the map: the share of the gap left by a fitted map, or else the divergence."""
    if summary.headline is not None and summary.gap is not None:
        return (
            "share of the gap that the fitted map leaves, by head (rows) and layer (columns)",
            summary.gap.left,
        )
    name = summary.mechanisms[0]
    return f"divergence from {name} by head (rows) and layer (columns), mean over {over}", summary.heads[0]


def _text(console: Console, run: Trajectories) -> Text:
    """The completion with each token on the colour of its divergence, and the scale."""
    name = FITTED if FITTED in run.mechanisms else run.mechanisms[0]
    values = mean(run.select(name).divergence, axis=(0, 1))
    known = values[~np.isnan(values)]
    low, high = np.percentile(known, _SCALE).tolist() if len(known) else (math.nan, math.nan)
    text = Text(overflow="fold")
    for piece, indices in pieces(run.completion_text, run.tokens):
        if indices and indices[0] >= _TOKENS_SHOWN:
            text.append(f" … {run.n_steps - _TOKENS_SHOWN:,} more tokens", "dim")
            break
        value = float(mean(values[indices]))
        style = None if math.isnan(value) else shade_style((value - low) / (high - low) if high > low else 0.5)
        text.append(strip_control_characters(piece), style)
    text.append(f"\n\ndivergence from {name} by token, mean over heads: ", "dim")
    if has_colour(console):
        return text.append_text(ramp(f"up to {_number(low)}", f"{_number(high)} and more"))
    return text.append(f"{_number(low)} to {_number(high)} for 90 % of the tokens", "dim")


def _numbers(console: Console, summary: Summary, out: str | None, over: str) -> None:
    console.print(_extremes(summary))
    console.print()
    console.print(_means(summary, over))
    for line in _closing(summary):
        console.print()
        console.print(line, width=_width(console))
    if out is None:
        return
    console.print()
    console.print(Text("Saved. Open it with softgap.open_study:", "dim"))
    # Last, alone on its line and never wrapped, so that a program can read it.
    console.print(Text(out), soft_wrap=True)


def _extremes(summary: Summary) -> RenderableType:
    furthest, closest = summary.extremes()
    grid = Table.grid(padding=(0, 4))
    grid.add_row(_heads("furthest from softmax", furthest, summary), _heads("closest to softmax", closest, summary))
    return grid


def _heads(title: str, heads: Sequence[HeadMean], summary: Summary) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    ranking = summary.mechanisms[summary.ranking]
    with_control = BASELINE in summary.mechanisms and ranking != BASELINE
    with_share = any(row.share_left is not None for row in heads)
    headings = ["layer", "head", *(["gap left"] if with_share else []), ranking, *([BASELINE] if with_control else [])]
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in heads:
        share = [_number(row.share_left)] if with_share else []
        control = [_number(row.uniform)] if with_control and row.uniform is not None else []
        table.add_row(str(row.layer), str(row.head), *share, _number(row.divergence), *control)
    return table


def _means(summary: Summary, over: str) -> Table:
    table = Table(title=f"means over heads and {over}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("mechanism")
    for heading in ("divergence", "relative L2", "norm ratio"):
        table.add_column(heading, justify="right")
    for name, values in summary.means.items():
        table.add_row(name, *(_number(values[key]) for key in ("divergence", "relative_l2", "norm_ratio")))
    return table


def _closing(summary: Summary) -> list[Text]:
    scores = f"log-probability {_number(summary.logprob)}, entropy {_number(summary.entropy)} nats per token"
    if summary.focus:
        named = {"sparsity": "S(a)", "attention_entropy": "attention entropy", "largest_weight": "largest weight"}
        scores += "; " + ", ".join(f"{named[key]} {_number(value)}" for key, value in summary.focus.items())
    return [Text(scores), Text(_interpretation(summary))]


def _interpretation(summary: Summary) -> str:
    """One line on what the divergence can tell here."""
    name = summary.mechanisms[0]
    line = f"Divergence is 1 − cos(softmax output, {name} output). It is a measurement, not a diagnosis."
    if summary.distance is None:
        return f"{line} {BASELINE} is the mean of the visible values: its divergence shows how concentrated softmax is."
    if math.isnan(summary.distance):
        return line
    apart = f"On average it differs by {summary.distance:.4f} from that of {BASELINE}, the plain mean of values"
    if summary.distance < _ALIKE:
        return f"{line} {apart}. Here it mostly shows how concentrated softmax is."
    return f"{line} {apart}. Compare the two before you draw conclusions."


def _samples(summaries: Sequence[Summary]) -> RenderableType:
    first = summaries[0]
    labelled = any(summary.label is not None for summary in summaries)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("sample", overflow="fold")
    if labelled:
        table.add_column("label", overflow="fold")
    for heading in ("prompt", "steps", *first.mechanisms, "logprob", "entropy"):
        table.add_column(heading, justify="right")
    for summary in summaries[:_ROWS_SHOWN]:
        divergences = (_number(values["divergence"]) for values in summary.means.values())
        names = [
            strip_control_characters(summary.sample_id),
            *([strip_control_characters(summary.label or "")] if labelled else []),
        ]
        table.add_row(
            *names,
            str(summary.n_prompt),
            str(summary.n_steps),
            *divergences,
            _number(summary.logprob),
            _number(summary.entropy),
        )
    if len(summaries) > _ROWS_SHOWN:
        table.caption = f"… and {len(summaries) - _ROWS_SHOWN:,} more samples"
    return table


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def present_run(run: Trajectories, out: str, *, as_json: bool, map_of: MapOf = "kinds") -> None:
    """Show one run, saved at ``out``."""
    if as_json:
        output.write_json(_run_document(run, out))
        return

    show_run(output.console(), run, out, map_of)


def present_study(
    summaries: Sequence[Summary], manifest: Manifest, out: str, *, as_json: bool, map_of: MapOf = "kinds"
) -> None:
    """Show a study of several samples, saved at ``out``."""
    if as_json:
        output.write_json(_study_document(summaries, manifest, out))
        return

    show_study(output.console(), summaries, manifest, out, map_of)


def _run_document(run: Trajectories, out: str) -> dict[str, Any]:
    from softgap.cli.render.summary import summarise

    summary = summarise(run)
    return {
        **_source(run.manifest, out),
        **summary.row(),
        "prompt": run.prompt_text,
        "completion": run.completion_text,
        **_by_head(summary, run.manifest),
        "steps": _steps(run),
    }


def _study_document(summaries: Sequence[Summary], manifest: Manifest, out: str) -> dict[str, Any]:
    from softgap.cli.render.summary import merge_summaries

    overall = merge_summaries(summaries)
    rows = [summary.row() for summary in summaries]
    return {**_source(manifest, out), "samples": rows, "all": {**overall.row(), **_by_head(overall, manifest)}}


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


def _by_head(summary: Summary, manifest: Manifest) -> dict[str, Any]:
    furthest, closest = summary.extremes()
    labels = _labels(summary, manifest)
    rows = summary.head_rows()
    if labels is not None:
        kinds = dict(zip(summary.layers, labels, strict=True))
        rows = [{**row, "kind": kinds[row["layer"]][row["head"]]} for row in rows]
    return {
        "ranked_by": summary.ranked_by,
        "most_softmax_hungry": [asdict(head) for head in furthest],
        "most_linear": [asdict(head) for head in closest],
        "heads": rows,
    }


def _steps(run: Trajectories) -> list[dict[str, Any]]:
    """Per step the token and its scores, with the mean divergence over all heads by mechanism."""
    from softgap.cli.render.output import mean

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
