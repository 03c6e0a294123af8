"""The dynamics of trajectories: ordinal patterns, entropies, transforms, surrogates and known dynamical systems.

Works on numpy arrays whose last axis is time and imports without torch.
"""

from softgap.signal.batch import TIES, Options
from softgap.signal.bootstrap import Interval, entropy_interval
from softgap.signal.complexity import (
    ComplexityBounds,
    complexity_bounds,
    complexity_entropy,
    fisher_shannon,
    missing_fraction,
    missing_patterns,
    renyi_complexity,
    statistical_complexity,
)
from softgap.signal.correction import Rarefied, bias_factor, corrected_entropy, rarefied_entropy
from softgap.signal.eligibility import ELIGIBILITY, LEAST_WINDOWS, Spread, noise_spread
from softgap.signal.entropy import (
    multiscale_entropy,
    permutation_entropy,
    renyi_entropy,
    tsallis_entropy,
    weighted_permutation_entropy,
)
from softgap.signal.nulls import MEASURES, NoiseNull, ZScores, noise_null, z_scores
from softgap.signal.patterns import ordinal_patterns, pattern_counts, pattern_ranks
from softgap.signal.results import (
    ComplexityEntropy,
    Entropy,
    FisherShannon,
    MissingPatterns,
    PatternCounts,
    Patterns,
    RenyiComplexity,
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
    "TIES",
    "ComplexityBounds",
    "ComplexityEntropy",
    "Entropy",
    "FisherShannon",
    "Interval",
    "MissingPatterns",
    "Network",
    "NoiseNull",
    "Options",
    "PatternCounts",
    "Patterns",
    "Rarefied",
    "RenyiComplexity",
    "Spread",
    "TransitionEntropy",
    "ZScores",
    "bias_factor",
    "complexity_bounds",
    "complexity_entropy",
    "corrected_entropy",
    "entropy_interval",
    "fisher_shannon",
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
    "statistical_complexity",
    "transition_entropy",
    "tsallis_entropy",
    "weighted_permutation_entropy",
    "z_scores",
]
