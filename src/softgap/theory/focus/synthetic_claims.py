"""Verdicts of the synthetic focus lab, each read from the numbers of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from softgap.theory.focus.concentration import FAMILIES, FamilyPoint, closes_gap
from softgap.theory.lab import Claim

if TYPE_CHECKING:
    from softgap.theory.focus.synthetic import Check, FiniteValue, Ranks, SeparationFocus

__all__ = [
    "closed_forms",
    "decay_focuses",
    "exp_focuses",
    "features_close_gap",
    "general_formula",
    "identity_bound",
    "norm_ratio",
    "rank_argument",
    "relu2_needs_negative_bias",
    "relu_constant",
    "separation_is_focus",
]

_ARTICLE = "Su 2023"
Curves = NDArray[np.float64]


def closed_forms(checks: Sequence[Check]) -> Claim:
    """Against quadrature to 1e-10; samples of finitely many keys within four errors of their own mean."""
    exact = max(abs(row.closed / row.quadrature - 1) for row in checks)
    apart = max(abs(row.simulated - row.expected) / row.error for row in checks)
    return Claim(
        "closed forms",
        _ARTICLE,
        "S of exp, relu2, identity and relu weights over Gaussian scores is what its closed forms say.",
        "holds" if exact < 1e-10 and apart < 4 else "does not hold",
        numbers={"worst against quadrature": exact, "worst against simulation in errors": apart, "points": len(checks)},
    )


def exp_focuses(rows: Sequence[FiniteValue]) -> Claim:
    """Whether exp(-gamma^2 / 2) is reached with the keys at hand."""
    good = [row for row in rows if abs(row.simulated / row.limit - 1) < 0.05]
    bad = [row for row in rows if row not in good]
    worst = max(rows, key=lambda row: row.simulated / row.limit)
    fits = max(abs(row.finite / row.simulated - 1) for row in rows)
    condition = ""
    if good and bad:
        reach = max(np.log(row.n) / row.gamma**2 for row in bad)
        condition = f"log n is above about {reach:.1f} gamma^2; below it the finite-n value is the one to use"
    return Claim(
        "exp focuses",
        _ARTICLE,
        "Softmax weights over Gaussian scores have S = exp(-gamma^2 / 2), arbitrarily small.",
        "holds" if not bad else "holds only when" if good else "does not hold",
        condition,
        {
            "gamma": worst.gamma,
            "n": worst.n,
            "limit": worst.limit,
            "simulated": worst.simulated,
            "finite-n value": worst.finite,
            "worst finite-n error": fits,
        },
    )


def relu2_needs_negative_bias(betas: Sequence[float], gammas: Curves, curves: Curves) -> Claim:
    """Lowest S on either side of beta = 0, and where."""
    bias = np.array(betas)
    below, above = curves[bias < 0], curves[bias >= 0]
    row, column = np.unravel_index(int(below.argmin()), below.shape)
    # At beta = 0 it is 1 / sqrt(6), whatever gamma; "focuses" is a tenth of that.
    bound = 1 / np.sqrt(6)
    holds = above.min() >= bound * (1 - 1e-12) and below.min() < 0.1 * bound
    small = below[:, 0].max() < below[:, -1].min()
    return Claim(
        "relu2 and bias",
        _ARTICLE,
        "relu^2 attention focuses only if the scores have a negative mean.",
        "holds" if holds else "does not hold",
        "it focuses where gamma is small against -beta, not where it is large: then S tends to the value at beta = 0"
        if holds and small
        else "",
        {
            "lowest S, beta >= 0": float(above.min()),
            "lowest S, beta < 0": float(below.min()),
            "at beta": float(bias[bias < 0][row]),
            "at gamma": float(gammas[column]),
            "S at the largest gamma": float(below[:, -1].max()),
        },
    )


def identity_bound(curves: Curves) -> Claim:
    """The least S of plain linear attention."""
    bound = float(np.sqrt(2 / np.pi))
    lowest = float(curves.min())
    return Claim(
        "identity bound",
        _ARTICLE,
        "Plain linear attention cannot focus: S never falls below sqrt(2 / pi).",
        "holds" if lowest >= bound - 1e-12 else "does not hold",
        numbers={"lowest": lowest, "bound": bound},
    )


def relu_constant(betas: Sequence[float], curves: Curves) -> Claim:
    """S of relu at beta = 0."""
    row = curves[list(betas).index(0.0)]
    off = float(np.abs(row * np.sqrt(np.pi) - 1).max())
    return Claim(
        "relu at zero bias",
        "softgap",
        "relu weights over scores of zero mean have S = 1 / sqrt(pi), whatever their spread.",
        "holds" if off < 1e-12 else "does not hold",
        numbers={"S": float(row[0]), "largest relative deviation": off},
    )


def general_formula(error: float) -> Claim:
    """The general formula on random features."""
    return Claim(
        "general formula",
        _ARTICLE,
        "S of any non-negative linear attention follows from the mean and covariance of its key features alone.",
        "holds" if error < 1e-10 else "does not hold",
        "it is an identity for the sequence's own moments, not an approximation",
        {"worst relative error": error},
    )


def norm_ratio(lowest: float, highest: float, bounds: tuple[float, float]) -> Claim:
    """The range of |q|_2 / |q|_1; the article says sqrt(d)."""
    inside = bounds[0] * (1 - 1e-12) <= lowest and highest <= bounds[1] * (1 + 1e-12)
    return Claim(
        "norm ratio",
        _ARTICLE,
        "The factor |q|_2 / |q|_1 of the i.i.d. formula grows to sqrt(d), so a larger d lets linear attention focus.",
        "does not hold" if inside else "not decided",
        "it lies between 1 / sqrt(d) and 1; a larger d lowers its least value and leaves its largest alone"
        if inside
        else "",
        {"least": lowest, "largest": highest, "1 / sqrt(d)": bounds[0], "sqrt(d)": 1 / bounds[0]},
    )


def features_close_gap(family_points: Sequence[FamilyPoint]) -> Claim:
    """Which families come nearer to softmax as their features grow."""
    numbers = {}
    for family in FAMILIES:
        points = [point for point in family_points if point.family == family]
        numbers[f"{family} error at {points[0].features:.3g} features"] = points[0].weight_error
        numbers[f"{family} error at {points[-1].features:.3g} features"] = points[-1].weight_error
    closing = [family for family in FAMILIES if closes_gap(family_points, family)]
    others = [family for family in FAMILIES if family not in closing]
    return Claim(
        "more features",
        _ARTICLE,
        "More features close the gap to softmax (the error of the weights at least halves).",
        "holds" if not others else "holds only when" if closing else "does not hold",
        f"the family is {' or '.join(closing)}, not {' or '.join(others)}" if closing and others else "",
        numbers,
    )


def decay_focuses(lengths: NDArray[np.int64], curves: Mapping[float, Curves]) -> Claim:
    """S of decay falls with the number of keys."""
    last = {decay: float(curve[-1]) for decay, curve in curves.items()}
    falling = all((np.diff(curve) < 0).all() for decay, curve in curves.items() if decay < 1)
    # S sqrt(n) tends to sqrt((1 + lambda) / (1 - lambda)), so S falls as n^(-1/2).
    limit = max(
        abs(last[decay] * np.sqrt(lengths[-1] * (1 - decay) / (1 + decay)) - 1) for decay in curves if decay < 1
    )
    return Claim(
        "decay focuses",
        _ARTICLE,
        "Weights that decay with distance become arbitrarily sparse as the sequence grows.",
        "holds" if falling and limit < 0.05 else "does not hold",
        "on the same last tokens for every query",
        {f"S at n = {lengths[-1]:.0e}, lambda = {decay}": value for decay, value in last.items()},
    )


def rank_argument(ranks: Sequence[Ranks]) -> Claim:
    """Whether rank tells softmax from linear attention, by mask."""
    table = {(row.mechanism, row.mask): row for row in ranks}
    encoder = (
        table["elu1", "bidirectional"].whole
        <= table["elu1", "bidirectional"].d
        < table["softmax", "bidirectional"].whole
    )
    decoder = table["elu1", "causal"].whole < table["softmax", "causal"].whole
    blocks = table["elu1", "causal"].block <= table["elu1", "causal"].d < table["softmax", "causal"].block
    condition = "attention is bidirectional; in a decoder both are of full rank, and only off-diagonal blocks differ"
    return Claim(
        "rank bottleneck",
        _ARTICLE,
        "Linear attention falls short because the rank of its matrix is at most the number of its features.",
        "holds" if encoder and decoder else "holds only when" if encoder and blocks else "does not hold",
        condition if encoder and blocks and not decoder else "",
        {
            f"{row.mechanism} {row.mask}{part}": value
            for row in ranks
            if row.mechanism in ("softmax", "elu1")
            for part, value in (("", row.whole), (" block", row.block))
        },
    )


def separation_is_focus(rows: Sequence[SeparationFocus]) -> Claim:
    """S on the data of the separation theorem."""
    focused = all(row.softmax < 0.5 < 0.8 < row.linear for row in rows)
    last = rows[-1]
    return Claim(
        "separation is focus",
        "softgap, on Deng, Song and Zhou 2023",
        "On the separation data softmax focuses on the row with the signal and linear attention does not.",
        "holds" if focused and rows[0].softmax > last.softmax else "does not hold",
        numbers={
            "n": last.n,
            "S softmax, row with the signal": last.softmax,
            "S softmax, any other row": last.softmax_other,
            "S linear, row with the signal": last.linear,
        },
    )
