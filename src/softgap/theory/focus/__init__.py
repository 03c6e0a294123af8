"""Focus: how sparse the weights of each kind of attention can be, in closed form and inside a real model."""

from softgap.attention.rank import BlockSpectra, block_spectra, capacity_exponent
from softgap.theory.focus.closed_forms import (
    FUNCTIONS,
    GaussianTable,
    Simulated,
    decay_sparsity,
    finite_sparsity,
    iid_sparsity,
    linear_sparsity,
    log_sparsity,
    norm_ratio_bounds,
    simulate_sparsity,
    sparsity,
)
from softgap.theory.focus.model import ModelFocus, focus_in_model
from softgap.theory.focus.synthetic import FocusFindings, focus_lab

__all__ = [
    "FUNCTIONS",
    "BlockSpectra",
    "FocusFindings",
    "GaussianTable",
    "ModelFocus",
    "Simulated",
    "block_spectra",
    "capacity_exponent",
    "decay_sparsity",
    "finite_sparsity",
    "focus_in_model",
    "focus_lab",
    "iid_sparsity",
    "linear_sparsity",
    "log_sparsity",
    "norm_ratio_bounds",
    "simulate_sparsity",
    "sparsity",
]
