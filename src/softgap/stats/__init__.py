"""Honest comparisons: effect sizes, permutation nulls, matching, correction, equivalence and classification.

Works on numpy arrays with scipy and imports without torch.
"""

__all__: list[str] = []
