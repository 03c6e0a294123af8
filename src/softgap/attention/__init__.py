"""Attention mathematics on tensors: mechanisms, their quadratic, chunked and streaming forms, and divergences."""

from softgap.attention.attend import attend, attention_weights, choose_form
from softgap.attention.hybrid import HybridState, attend_hybrid
from softgap.attention.mechanism import Mechanism, Site
from softgap.attention.outputs import (
    Attention,
    Comparison,
    compare_heads,
    compare_outputs,
    divergence,
    norm_ratio,
    relative_l2,
)
from softgap.attention.registry import mechanisms, register_mechanism, resolve
from softgap.attention.streaming import LinearState
from softgap.attention.visible import Visible

__all__ = [
    "Attention",
    "Comparison",
    "HybridState",
    "LinearState",
    "Mechanism",
    "Site",
    "Visible",
    "attend",
    "attend_hybrid",
    "attention_weights",
    "choose_form",
    "compare_heads",
    "compare_outputs",
    "divergence",
    "mechanisms",
    "norm_ratio",
    "register_mechanism",
    "relative_l2",
    "resolve",
]
