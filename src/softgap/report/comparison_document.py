"""A comparison of groups as findings for people: the verdict, the steps behind it, the largest units, the nulls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from softgap.analysis import ComparisonFindings
from softgap.report.document import Document, Picture, Table

__all__ = ["comparison_document"]


def comparison_document(findings: ComparisonFindings, picture: bytes | None = None) -> Document:
    """The document of a comparison; ``picture`` is its figure as SVG, where it could be drawn."""
    values = findings.to_json()
    (first, second), sizes = values["groups"], values["sizes"]
    return Document(
        title=f"{first} ({sizes[0]:,}) against {second} ({sizes[1]:,})",
        verdict=values["verdict"]["sentence"],
        tables=(_steps(findings), _units(values)),
        pictures=() if picture is None else (Picture("figure.svg", picture, "Effects of all units, and the null."),),
        notes=tuple(_notes(findings, values).items()),
    )


def _steps(findings: ComparisonFindings) -> Table:
    everything = {"all samples": findings.comparison, **findings.controls}
    return Table(
        ("comparison", "convincing", "p, any", "p, max-T", "units", "finds effects from", "no effect above"),
        tuple(
            (
                step.name,
                "yes" if step.convincing else "no",
                step.p,
                everything[step.name].maximum.p,
                len(step.units),
                step.smallest,
                step.bound,
            )
            for step in findings.verdict.steps
        ),
        "Each row is one control; p-values by relabelling, max-T over the whole family that was looked at",
    )


def _units(values: Mapping[str, Any]) -> Table:
    return Table(
        ("layer", "head", "feature", "Hedges' g", "from", "to", "AUROC", "from", "to", "p, max-T", "q"),
        tuple(
            (
                *(row["layer"], row["head"], row["mode"]),
                *(row["g"][end] for end in ("value", "low", "high")),
                *(row["auroc"][end] for end in ("value", "low", "high")),
                *(row["p_max"], row["q"]),
            )
            for row in values["top"]
        ),
        "The largest units, of all samples",
    )


def _notes(findings: ComparisonFindings, values: Mapping[str, Any]) -> dict[str, str]:
    family, beyond = values["family"], values["beyond_baselines"]
    notes = {
        "Planned or exploratory": f"{values['status']}; {len(values['tried'])} lines in the log of what was tried.",
        "The family": f"{family['units']:,} units: {len(family['modes'])} features of {family['heads']:,} heads.",
        "How small": findings.equivalence_sentence,
    }
    if beyond is not None:
        baseline, combined, difference = (beyond[name] for name in ("baseline", "combined", "difference"))
        notes["Beyond free baselines"] = (
            f"AUROC {baseline['value']:.3f} for length, entropy and log-probability alone, {combined['value']:.3f} "
            f"with heads: {difference['value']:+.3f} ({difference['low']:+.3f} to {difference['high']:+.3f}), p = "
            f"{beyond['p']:.2g}."
        )
    for name, reason in values["impossible"].items():
        notes[f"Not possible: {name}"] = reason
    return notes
