"""Observe a model: tap its attention, record or replay sequences, and get trajectories."""

from softgap.models.catalogue import ModelInfo, available_models
from softgap.models.fingerprint import model_fingerprint
from softgap.models.loading import load_model
from softgap.probe.anatomy import head_anatomy, run_anatomy
from softgap.probe.capture import Interrupted, generate, read, read_ids
from softgap.probe.recording import Recording, Step, record

__all__ = [
    "Interrupted",
    "ModelInfo",
    "Recording",
    "Step",
    "available_models",
    "generate",
    "head_anatomy",
    "load_model",
    "model_fingerprint",
    "read",
    "read_ids",
    "record",
    "run_anatomy",
]
