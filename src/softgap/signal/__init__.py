"""The dynamics of trajectories: ordinal patterns, entropies, transforms, surrogates and known dynamical systems.

Works on numpy arrays whose last axis is time and imports without torch.
"""

__all__: list[str] = []
