"""The Trajectories type, which holds the measurements of a sequence, and its Parquet store."""

from softgap.trajectories.anatomy import Anatomy
from softgap.trajectories.manifest import Manifest, inputs_digest
from softgap.trajectories.non_finite import NonFinite
from softgap.trajectories.reader import FORMAT_VERSION, Study, load, open_study
from softgap.trajectories.run import Trajectories
from softgap.trajectories.validation import FOCUS, QUANTITIES
from softgap.trajectories.writer import StudyWriter, save

__all__ = [
    "FOCUS",
    "FORMAT_VERSION",
    "QUANTITIES",
    "Anatomy",
    "Manifest",
    "NonFinite",
    "Study",
    "StudyWriter",
    "Trajectories",
    "inputs_digest",
    "load",
    "open_study",
    "save",
]
