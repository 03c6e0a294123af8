"""Locality: how much of a head lies in the keys near the query, and what a local residual gives linear attention."""

from softgap.theory.locality.ablation import Ablation, Arm, Assignment, default_arms, train_ablation
from softgap.theory.locality.dependence import Dependence, planted_heads
from softgap.theory.locality.lab import Locality, ModelLocality, Residual, locality_in_model, locality_lab
from softgap.theory.locality.masks import Mask, local_shares, masked_rows

__all__ = [
    "Ablation",
    "Arm",
    "Assignment",
    "Dependence",
    "Locality",
    "Mask",
    "ModelLocality",
    "Residual",
    "default_arms",
    "local_shares",
    "locality_in_model",
    "locality_lab",
    "masked_rows",
    "planted_heads",
    "train_ablation",
]
