"""Models: loading, fingerprints, supported types, and files of tensors fitted to a model.

Importing this package loads neither torch nor transformers: each name is fetched from its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from softgap.models.catalogue import ModelInfo, available_models
    from softgap.models.fingerprint import model_fingerprint
    from softgap.models.loading import load_model

__all__ = ["ModelInfo", "available_models", "load_model", "model_fingerprint"]

_MODULE_OF = {
    "ModelInfo": "catalogue",
    "available_models": "catalogue",
    "load_model": "loading",
    "model_fingerprint": "fingerprint",
}

# Hidden from the type checker, which would otherwise accept any attribute.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the module that holds a public name, once (PEP 562)."""
        from importlib import import_module

        if name not in _MODULE_OF:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
