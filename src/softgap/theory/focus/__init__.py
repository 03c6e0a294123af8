"""Focus: how sparse the weights of each kind of attention can be, in closed form and inside a real model."""

from softgap.theory.focus.closed_forms import (
    FUNCTIONS,
    decay_sparsity,
    iid_sparsity,
    linear_sparsity,
    log_sparsity,
    norm_ratio_bounds,
    sparsity,
)
from softgap.theory.focus.finite import GaussianTable, Simulated, finite_sparsity, simulate_sparsity
from softgap.theory.focus.synthetic import FocusFindings, focus_lab

__all__ = [
    "FUNCTIONS",
    "FocusFindings",
    "GaussianTable",
    "Simulated",
    "decay_sparsity",
    "finite_sparsity",
    "focus_lab",
    "iid_sparsity",
    "linear_sparsity",
    "log_sparsity",
    "norm_ratio_bounds",
    "simulate_sparsity",
    "sparsity",
]
