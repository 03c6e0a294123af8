"""Attention mathematics on tensors: mechanisms, their quadratic, chunked and streaming forms, and divergences."""

from typing import TYPE_CHECKING

from softgap.attention.attend import (
    attend,
    attend_hybrid,
    attention_weights,
    choose_form,
    has_state,
    new_state,
    split_states,
    stacked_states,
)
from softgap.attention.exact_set import ExactSet, ScoreRule
from softgap.attention.hybrid import HybridState
from softgap.attention.mechanism import Mechanism, Site
from softgap.attention.outputs import (
    Attention,
    OutputComparison,
    compare_heads,
    compare_outputs,
    divergence,
    norm_ratio,
    relative_l2,
)
from softgap.attention.registry import add_window, mechanisms, register_mechanism, resolve
from softgap.attention.streaming import LinearState
from softgap.attention.visible import Visible
from softgap.deprecation import deprecated_names as _deprecated_names

__all__ = [
    "Attention",
    "ExactSet",
    "HybridState",
    "LinearState",
    "Mechanism",
    "OutputComparison",
    "ScoreRule",
    "Site",
    "Visible",
    "add_window",
    "attend",
    "attend_hybrid",
    "attention_weights",
    "choose_form",
    "compare_heads",
    "compare_outputs",
    "divergence",
    "has_state",
    "mechanisms",
    "new_state",
    "norm_ratio",
    "register_mechanism",
    "relative_l2",
    "resolve",
    "split_states",
    "stacked_states",
]

if not TYPE_CHECKING:
    __getattr__ = _deprecated_names(__name__, {"Comparison": "OutputComparison"})
