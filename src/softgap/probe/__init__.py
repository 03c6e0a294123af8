"""The only place that touches transformers: models by name, the tap, live capture and replay, and the gates."""

from softgap.probe.capture import Interrupted, generate, read, read_ids
from softgap.probe.diagnosis import Diagnosis, doctor
from softgap.probe.gates import Gate
from softgap.probe.models import ModelInfo, available_models, load_model, model_fingerprint
from softgap.probe.recording import Recording, Step, record

__all__ = [
    "Diagnosis",
    "Gate",
    "Interrupted",
    "ModelInfo",
    "Recording",
    "Step",
    "available_models",
    "doctor",
    "generate",
    "load_model",
    "model_fingerprint",
    "read",
    "read_ids",
    "record",
]
