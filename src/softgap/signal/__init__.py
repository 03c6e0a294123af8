"""The dynamics of trajectories: ordinal patterns, entropies, transforms, surrogates and known dynamical systems.

Works on numpy arrays whose last axis is time and imports without torch.
"""

from typing import TYPE_CHECKING

from softgap.deprecation import deprecated_names as _deprecated_names
from softgap.signal.change_points import ChangePoints, change_points
from softgap.signal.complexity import (
    ComplexityBounds,
    complexity_bounds,
    complexity_entropy,
    missing_fraction,
    missing_patterns,
    renyi_complexity,
    statistical_complexity,
)
from softgap.signal.entropy import (
    WindowedEntropy,
    multiscale_entropy,
    permutation_entropy,
    renyi_entropy,
    weighted_permutation_entropy,
    windowed_entropy,
)
from softgap.signal.estimates import (
    EntropyInterval,
    Rarefied,
    bias_factor,
    corrected_entropy,
    entropy_interval,
    rarefied_entropy,
)
from softgap.signal.nulls import MEASURES, NoiseNull, ZScores, noise_null, z_scores
from softgap.signal.patterns import (
    ELIGIBILITY,
    LEAST_WINDOWS,
    TIES,
    Options,
    Spread,
    noise_spread,
    ordinal_patterns,
    pattern_counts,
    pattern_ranks,
)
from softgap.signal.results import (
    ComplexityEntropy,
    Entropy,
    MissingPatterns,
    PatternCounts,
    Patterns,
    RenyiComplexity,
)
from softgap.signal.surrogates import SURROGATES, Convergence, Surrogates, spectrum_error, surrogates
from softgap.signal.systems import System, simulate, systems
from softgap.signal.transforms import (
    SEGMENTS,
    TRANSFORMS,
    Residuals,
    Trend,
    apply_transform,
    residuals,
    segment,
    segment_slice,
    steps_lost,
)
from softgap.signal.transitions import (
    Network,
    TransitionEntropy,
    irreversibility,
    ordinal_network,
    transition_entropy,
)

__all__ = [
    "ELIGIBILITY",
    "LEAST_WINDOWS",
    "MEASURES",
    "SEGMENTS",
    "SURROGATES",
    "TIES",
    "TRANSFORMS",
    "ChangePoints",
    "ComplexityBounds",
    "ComplexityEntropy",
    "Convergence",
    "Entropy",
    "EntropyInterval",
    "MissingPatterns",
    "Network",
    "NoiseNull",
    "Options",
    "PatternCounts",
    "Patterns",
    "Rarefied",
    "RenyiComplexity",
    "Residuals",
    "Spread",
    "Surrogates",
    "System",
    "TransitionEntropy",
    "Trend",
    "WindowedEntropy",
    "ZScores",
    "apply_transform",
    "bias_factor",
    "change_points",
    "complexity_bounds",
    "complexity_entropy",
    "corrected_entropy",
    "entropy_interval",
    "irreversibility",
    "missing_fraction",
    "missing_patterns",
    "multiscale_entropy",
    "noise_null",
    "noise_spread",
    "ordinal_network",
    "ordinal_patterns",
    "pattern_counts",
    "pattern_ranks",
    "permutation_entropy",
    "rarefied_entropy",
    "renyi_complexity",
    "renyi_entropy",
    "residuals",
    "segment",
    "segment_slice",
    "simulate",
    "spectrum_error",
    "statistical_complexity",
    "steps_lost",
    "surrogates",
    "systems",
    "transition_entropy",
    "weighted_permutation_entropy",
    "windowed_entropy",
    "z_scores",
]

# Hidden from the type checker, which would otherwise accept any attribute.
if not TYPE_CHECKING:
    __getattr__ = _deprecated_names(__name__, {"Interval": "EntropyInterval"})
