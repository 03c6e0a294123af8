"""The focus lab on synthetic data: the article's curves, and each of its statements put to the test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from softgap.attention import Visible, attention_weights
from softgap.attention.rank import block_spectra, numerical_rank
from softgap.deprecation import DeprecatedAttribute
from softgap.errors import ValueInputError
from softgap.progress import Progress, silent
from softgap.theory.focus import synthetic_claims
from softgap.theory.focus.closed_forms import (
    FUNCTIONS,
    decay_sparsity,
    finite_sparsity,
    linear_sparsity,
    norm_ratio_bounds,
    simulate_sparsity,
    sparsity,
)
from softgap.theory.focus.concentration import FamilyPoint, measure_feature_families, row_sparsity, with_weights
from softgap.theory.focus.reference import quadrature_sparsity, sample_mean
from softgap.theory.lab import Claim
from softgap.trajectories.run import Displayed

__all__ = ["Check", "FiniteValue", "FocusFindings", "Ranks", "SeparationFocus", "focus_lab"]

BETAS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
DECAYS = (0.5, 0.9, 0.99, 0.999)
_CHECKED = 2**14
# The verdicts on rank compare these two.
_ALWAYS = ("softmax", "elu1")


@dataclass(frozen=True)
class Check:
    """A closed form at one point, beside quadrature and simulation.

    Attributes
    ----------
    expected
        Mean of S over samples of 16,384 keys, by quadrature; it tends to the closed form.
    simulated, error
        That mean simulated, and its standard error.
    """

    function: str
    beta: float
    gamma: float
    closed: float
    quadrature: float
    expected: float
    simulated: float
    error: float


@dataclass(frozen=True)
class FiniteValue:
    """Softmax over n Gaussian scores: the limit, the finite-n value and the simulated mean with its standard error."""

    gamma: float
    n: int
    limit: float
    finite: float
    simulated: float
    error: float


@dataclass(frozen=True)
class Ranks:
    """The weights of one random head under one mask.

    Attributes
    ----------
    sparsity
        Mean S of its rows.
    whole
        Of the n x n matrix.
    block
        Of the largest off-diagonal block (n / 2 square).
    energy
        Smallest rank that holds 99 % of that block's energy.
    """

    mechanism: str
    mask: str
    n: int
    d: int
    sparsity: float
    whole: int
    block: int
    energy: int


@dataclass(frozen=True)
class SeparationFocus:
    """S of the row that carries the signal in the separation data D1 (Deng, Song and Zhou 2023), in closed form."""

    n: int
    softmax: float
    linear: float
    softmax_other: float


@dataclass(frozen=True, eq=False, repr=False)
class FocusFindings(Displayed):
    """What the synthetic focus lab found."""

    claims: tuple[Claim, ...]
    gammas: NDArray[np.float64]
    curves: Mapping[str, NDArray[np.float64]]
    checks: tuple[Check, ...]
    finite: tuple[FiniteValue, ...]
    decays: Mapping[float, NDArray[np.float64]]
    lengths: NDArray[np.int64]
    feature_families: tuple[FamilyPoint, ...]
    ranks: tuple[Ranks, ...]
    separation: tuple[SeparationFocus, ...]
    settings: Mapping[str, Any]
    road = DeprecatedAttribute("feature_families")

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "lab": "focus",
            "settings": dict(self.settings),
            "claims": [claim.to_json() for claim in self.claims],
            "betas": list(BETAS),
            "gammas": self.gammas.tolist(),
            "curves": {name: curve.tolist() for name, curve in self.curves.items()},
            "checks": [asdict(row) for row in self.checks],
            "finite": [asdict(row) for row in self.finite],
            "decay": {
                "lengths": self.lengths.tolist(),
                "sparsity": {str(decay): curve.tolist() for decay, curve in self.decays.items()},
            },
            "road": [asdict(point) for point in self.feature_families],
            "ranks": [asdict(row) for row in self.ranks],
            "separation": [asdict(row) for row in self.separation],
        }


def focus_lab(
    *,
    n: int = 512,
    d: int = 64,
    draws: int = 400,
    mechanisms: Sequence[str] | None = None,
    rng: np.random.Generator,
    progress: Progress = silent,
) -> FocusFindings:
    """Check the closed forms, and put the article's statements to the test on Gaussian keys.

    Parameters
    ----------
    n, d
        Number of keys and dimension of the random heads.
    draws
        Simulated rows per check.
    mechanisms
        Whose sparsity and ranks are compared, beside softmax and elu1; every one that has weights and waits for no
        parameters by default.
    rng
        The generator of keys and queries.
    progress
        Called with a stage and the share of the whole that is done.

    Returns
    -------
    FocusFindings
        A verdict for each claim, and the curves behind it.

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.theory import focus_lab
    >>> lab = focus_lab(n=64, d=16, draws=20, mechanisms=["elu1"], rng=np.random.default_rng(0))
    >>> lab.claims[0].name, lab.claims[0].verdict
    ('closed forms', 'holds')
    """
    if n < 64 or d < 2 or draws < 10:
        raise ValueInputError(
            f"the focus lab needs n from 64, d from 2 and draws from 10, got {n}, {d} and {draws}; use more"
        )
    names = tuple(mechanism.label for mechanism in with_weights(mechanisms, _ALWAYS))
    gammas = np.geomspace(0.05, 10, 121)
    curves = {name: np.stack([sparsity(name, beta=beta, gamma=gammas) for beta in BETAS]) for name in FUNCTIONS}
    progress("closed forms against quadrature and simulation", 0.05)
    checks = _checks(draws, rng)
    progress("finite numbers of keys", 0.4)
    finite = _finite(n, draws, rng)
    progress("feature families", 0.6)
    family_points = _feature_families(n, d, rng)
    progress("ranks", 0.8)
    ranks = _ranks(min(n, 256), d, names, rng)
    lengths = np.unique(np.geomspace(1, 1e5, 60).astype(np.int64))
    decays = {decay: decay_sparsity(decay, lengths) for decay in DECAYS}
    separation = tuple(_separation(count) for count in (512, 2048, 8192))
    claims = (
        synthetic_claims.closed_forms(checks),
        synthetic_claims.exp_focuses(finite),
        synthetic_claims.relu2_needs_negative_bias(BETAS, gammas, curves["relu2"]),
        synthetic_claims.identity_bound(curves["identity"]),
        synthetic_claims.relu_constant(BETAS, curves["relu"]),
        synthetic_claims.general_formula(_general_error(n, d, rng)),
        synthetic_claims.norm_ratio(*_norm_ratios(d, rng), norm_ratio_bounds(d)),
        synthetic_claims.features_close_gap(family_points),
        synthetic_claims.decay_focuses(lengths, decays),
        synthetic_claims.rank_argument(ranks),
        synthetic_claims.separation_is_focus(separation),
    )
    settings = {"n": n, "d": d, "draws": draws, "mechanisms": list(names)}
    progress("done", 1.0)
    return FocusFindings(
        claims, gammas, curves, checks, finite, decays, lengths, family_points, ranks, separation, settings
    )


def _checks(draws: int, rng: np.random.Generator) -> tuple[Check, ...]:
    rows = []
    for function in FUNCTIONS:
        for beta, gamma in ((0.0, 1.0), (1.0, 1.0), (-1.0, 1.0), (-2.0, 1.0), (0.5, 0.4)):
            seen = simulate_sparsity(function, beta=beta, gamma=gamma, n=_CHECKED, draws=draws, rng=rng)
            closed = float(sparsity(function, beta=beta, gamma=gamma))
            expected = sample_mean(function, beta, gamma, _CHECKED)
            exact = quadrature_sparsity(function, beta, gamma)
            rows.append(Check(function, beta, gamma, closed, exact, expected, seen.value, seen.error))
    return tuple(rows)


def _finite(n: int, draws: int, rng: np.random.Generator) -> tuple[FiniteValue, ...]:
    rows = []
    for gamma in (0.5, 1.0, 2.0, 3.0, 4.0):
        for count in (n, 8 * n):
            seen = simulate_sparsity("exp", gamma=gamma, n=count, draws=draws, rng=rng)
            limit = float(sparsity("exp", gamma=gamma))
            rows.append(FiniteValue(gamma, count, limit, finite_sparsity(gamma, count), seen.value, seen.error))
    return tuple(rows)


def _gaussian(heads: int, n: int, d: int, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((heads, n, d)).astype(np.float32))


def _feature_families(n: int, d: int, rng: np.random.Generator) -> tuple[FamilyPoint, ...]:
    # Scores of standard deviation 2: focused enough for many features to be needed, S = exp(-2) in the limit.
    query, key, value = (
        math.sqrt(2) * _gaussian(4, n, d, rng),
        math.sqrt(2) * _gaussian(4, n, d, rng),
        _gaussian(4, n, d, rng),
    )
    return tuple(measure_feature_families(query[:, -64:], key, value, scale=d**-0.5))


def _ranks(n: int, d: int, names: Sequence[str], rng: np.random.Generator) -> tuple[Ranks, ...]:
    small = min(d, n // 4)
    query, key = (_gaussian(1, n, small, rng).double()[None] for _ in range(2))
    rows = []
    for mask in ("causal", "bidirectional"):
        seen = torch.ones(n, n, dtype=torch.bool)
        visible = Visible(mask=(seen.tril() if mask == "causal" else seen)[None, None])
        count = (seen.tril() if mask == "causal" else seen).sum(dim=-1).double()
        for name in names:
            a = attention_weights(name, query, key, visible=visible, dtype=torch.float64)[0]
            block = a[:, n // 2 :, : n // 2]
            s = row_sparsity(a, count).nanmean().item()
            ranks = int(numerical_rank(a)[0]), int(numerical_rank(block)[0])
            energy = int(block_spectra(a, n // 2).energy_rank(n // 2, 0.01)[0]) if ranks[1] else 0
            rows.append(Ranks(name, mask, n, small, s, *ranks, energy))
    return tuple(rows)


def _general_error(n: int, d: int, rng: np.random.Generator) -> float:
    """Largest relative difference of the general formula and S itself, for elu1 and relu features of random keys."""
    worst = 0.0
    for shift in (1.0, 0.0):
        q, k = (_feature(rng.standard_normal(shape), shift) for shape in ((32, d), (n, d)))
        weights = q @ k.T
        measured = weights.sum(axis=1) / np.sqrt(n * np.square(weights).sum(axis=1))
        predicted = linear_sparsity(q, k.mean(axis=0), np.cov(k.T, bias=True))
        worst = max(worst, float(np.abs(predicted / measured - 1).max()))
    return worst


def _feature(x: NDArray[np.float64], shift: float) -> NDArray[np.float64]:
    """elu(x) + 1 for a shift of 1, relu(x) for 0."""
    return np.asarray(np.maximum(x, 0) + shift * np.exp(np.minimum(x, 0)))


def _norm_ratios(d: int, rng: np.random.Generator) -> tuple[float, float]:
    """Smallest and largest |q|_2 / |q|_1 over random, constant and one-hot vectors."""
    q = np.concatenate([np.abs(rng.standard_normal((1000, d))) ** 4, np.ones((1, d)), np.eye(d)[:1]])
    ratio = np.linalg.norm(q, axis=1) / q.sum(axis=1)
    return float(ratio.min()), float(ratio.max())


def _separation(n: int, a: float = 1.0, b: float = 0.5, c: float = 0.5) -> SeparationFocus:
    """S of the special row and of any other row of D1 with t = 1: own score (a^2 + b^2 + c^2) L^2, else c^2 L^2."""
    log_n = math.log(n)

    def s(own_weight: float, other_weight: float) -> float:
        return (own_weight + (n - 1) * other_weight) / math.sqrt(n * (own_weight**2 + (n - 1) * other_weight**2))

    special, base = (a**2 + b**2 + c**2) * log_n, c**2 * log_n
    return SeparationFocus(n, s(math.exp(special - base), 1.0), s(special, base), s(math.exp(b**2 * log_n), 1.0))
