"""Kinds of heads as a manifest stores them: one letter per head, by the number of the layer."""

from __future__ import annotations

from typing import Any

import pytest

from softgap.kinds import KINDS, LETTERS, letters_of_kinds, stored_kinds
from softgap.trajectories import Manifest

LABELS = (("window", "fitted"), ("softmax", "hybrid"), ("constant", "profile"))


def test_letters_stand_for_one_kind_each() -> None:
    assert tuple(LETTERS) == KINDS
    assert len(set(LETTERS.values())) == len(KINDS)
    assert letters_of_kinds(LABELS) == ["wf", "Sh", "cp"]


def test_labels_survive_a_manifest() -> None:
    kinds = {str(layer): row for layer, row in zip((3, 7, 11), letters_of_kinds(LABELS), strict=True)}
    manifest = Manifest.from_json(Manifest(extra={"held_out": {"kinds": kinds}}).to_json())
    assert stored_kinds(manifest.extra["held_out"], (3, 7, 11), (2, 2, 2)) == LABELS


def test_a_run_of_some_layers_and_heads_has_their_kinds() -> None:
    held_out = {"kinds": {"3": "wf", "7": "Sh", "11": "cp"}}
    assert stored_kinds(held_out, (11, 12), (1, 2)) == (("constant",), (None, None))
    assert stored_kinds(held_out, (7,), (4,)) == (("softmax", "hybrid", None, None),)


@pytest.mark.parametrize(
    "held_out",
    [None, {}, "text", {"need_window": 3.0}, {"kinds": None}, {"kinds": ["wf"]}, {"kinds": {"5": "wf"}}],
    ids=str,
)
def test_a_manifest_without_kinds_has_none(held_out: Any) -> None:
    assert stored_kinds(held_out, (0, 1), (2, 2)) is None


def test_a_letter_of_a_later_version_is_unknown() -> None:
    assert stored_kinds({"kinds": {"0": "w!"}}, (0,), (2,)) == (("window", None),)
    assert letters_of_kinds([["window", "something new"]]) == ["w?"]
