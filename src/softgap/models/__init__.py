"""Models: loading, fingerprints, supported types, and files of tensors fitted to a model."""

from __future__ import annotations

from softgap.models.catalogue import ModelInfo, available_models
from softgap.models.fingerprint import model_fingerprint
from softgap.models.loading import load_model

__all__ = ["ModelInfo", "available_models", "load_model", "model_fingerprint"]
