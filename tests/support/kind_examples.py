"""Heads of known kinds: a calibrated tiny model, and the labels of a study of ``story``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from softgap.calibration import Recipe, calibrate
from softgap.calibration.sufficiency import Sufficiency
from softgap.intervals import Interval
from softgap.kinds import KINDS
from softgap.models.fingerprint import model_fingerprint
from softgap.models.tensor_files import calibration_path
from support.model_examples import attending_llama, byte_tokenizer, save_folder

TEXT = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(90))
# Of two layers with four heads each.
LABELS = (("window", "softmax", "fitted", "hybrid"), ("constant", "profile", "window", "window"))
MAP = ["  0 wc", "  1 Sp", "  2 fw", "  3 hw", "    0"]


def sufficiency_of(labels: Sequence[Sequence[str]]) -> Sufficiency:
    """The report of a calibration with these labels; what a kind leaves in a head grows with the head."""
    flat = [kind for row in labels for kind in row]
    left = {
        kind: tuple(tuple(0.01 * (i + 1) + 0.1 * head for head in range(len(row))) for row in labels)
        for i, kind in enumerate(KINDS[:-1])
    }
    return Sufficiency(
        labels=tuple(map(tuple, labels)),
        counts={kind: Interval(flat.count(kind), flat.count(kind), flat.count(kind)) for kind in KINDS},
        keys_worth={"constant": 0.0, "profile": None, "window": 67.0, "fitted": 67.0, "hybrid": 67.5},
        gap_closed={},
        gap_left=left,
        energy_left=left,
        stability={},
        limit=0.1,
        texts=2,
        tokens=1024,
    )


def calibrated_folder(folder: Path) -> Path:
    """A model folder, and in ``$SOFTGAP_CALIBRATIONS`` a calibration that gives its heads the kinds of ``LABELS``."""
    model = attending_llama(max_position_embeddings=512)
    found = calibrate(model, byte_tokenizer(), [TEXT], recipe=Recipe(features=4, steps=3), positions=128)
    assert Path(os.environ["SOFTGAP_CALIBRATIONS"]) in calibration_path(model_fingerprint(model)).parents
    assert found.sufficiency is not None
    given = sufficiency_of(LABELS)
    replace(found, sufficiency=replace(found.sufficiency, labels=given.labels, counts=given.counts)).save()
    return save_folder(folder, model)
