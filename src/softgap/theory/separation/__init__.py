"""Separation: two classes of sequences that a small network tells apart with softmax, and where else it does."""

from softgap.theory.separation.ablation import Ablation, Probe, normaliser_ablation, probe_outputs
from softgap.theory.separation.classes import Construction, Draw, construct, draw_many, sequences
from softgap.theory.separation.lab import Separation, separation_lab
from softgap.theory.separation.network import Firing, Share, Trial, argument, fire, hoeffding, share, trial, trials
from softgap.theory.separation.phase_map import Axis, PhaseMap, parse_axes, phase_maps, turning_point
from softgap.theory.separation.training import Trained, Training, train_all

__all__ = [
    "Ablation",
    "Axis",
    "Construction",
    "Draw",
    "Firing",
    "PhaseMap",
    "Probe",
    "Separation",
    "Share",
    "Trained",
    "Training",
    "Trial",
    "argument",
    "construct",
    "draw_many",
    "fire",
    "hoeffding",
    "normaliser_ablation",
    "parse_axes",
    "phase_maps",
    "probe_outputs",
    "separation_lab",
    "sequences",
    "share",
    "train_all",
    "trial",
    "trials",
    "turning_point",
]
