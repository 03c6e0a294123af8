"""Injectivity: which mechanisms give different queries different distributions, on given keys and inside a model."""

from softgap.theory.injectivity.collision_search import Search, find_collision, outside_proposition
from softgap.theory.injectivity.collisions import (
    Collision,
    affine_collision,
    certify,
    elu1_collision,
    multiples_collision,
    softmax_collision,
)
from softgap.theory.injectivity.confusion import confusion_rate, first_injective
from softgap.theory.injectivity.inversion import (
    KeyCondition,
    inline_query,
    key_condition,
    null_direction,
    softmax_query,
    softmax_weights,
    weight_margin,
)
from softgap.theory.injectivity.model import Correlation, ModelInjectivity, injectivity_in_model
from softgap.theory.injectivity.synthetic import Injectivity, injectivity_lab

__all__ = [
    "Collision",
    "Correlation",
    "Injectivity",
    "KeyCondition",
    "ModelInjectivity",
    "Search",
    "affine_collision",
    "certify",
    "confusion_rate",
    "elu1_collision",
    "find_collision",
    "first_injective",
    "injectivity_in_model",
    "injectivity_lab",
    "inline_query",
    "key_condition",
    "multiples_collision",
    "null_direction",
    "outside_proposition",
    "softmax_collision",
    "softmax_query",
    "softmax_weights",
    "weight_margin",
]
