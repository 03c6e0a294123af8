from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from softgap.errors import ValueInputError
from softgap.trajectories import Manifest
from support.trajectory_examples import MANIFEST


@pytest.mark.parametrize("manifest", [Manifest(), MANIFEST, Manifest(mechanisms={"b": {"k": 32}, "a": {}})])
def test_json_round_trip_keeps_the_order_of_mechanisms(manifest: Manifest) -> None:
    again = Manifest.from_json(json.loads(json.dumps(manifest.to_json(), sort_keys=True)))
    assert again == manifest
    assert list(again.mechanisms) == list(manifest.mechanisms)


def test_what_json_changes_is_changed_at_once() -> None:
    manifest = Manifest(options=MappingProxyType({"range": (1, 2)}), extra={"inner": MappingProxyType({"a": 1})})
    assert manifest.options == {"range": [1, 2]}
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_unknown_fields_of_a_later_softgap_are_left_aside() -> None:
    assert Manifest.from_json({**MANIFEST.to_json(), "mood": "good"}) == MANIFEST


CHANGES: dict[str, Any] = {
    "model": "other",
    "weights": "sha256:2",
    "mechanisms": {"uniform": {}, "elu1": {}},
    "versions": {"torch": "2.14.0"},
    "dtype": "bfloat16",
    "backend": "eager",
    "threads": 4,
    "seed": 8,
    "dropped_sinks": 1,
    "inputs": "sha256:3",
    "options": {"max_new_tokens": 6},
    "command": "softgap read",
    "started": "2026-01-01T00:00:00+00:00",
    "finished": "2026-01-01T00:00:01+00:00",
    "extra": {},
}
INFORMS = {"command", "started", "finished", "extra"}
MACHINE = {"weights", "versions", "backend", "threads"}


@pytest.mark.parametrize("name", CHANGES)
def test_differences_by_purpose(name: str) -> None:
    other = replace(MANIFEST, **{name: CHANGES[name]})
    assert MANIFEST.differences(other) == ([] if name in INFORMS else [name])
    assert MANIFEST.differences(other, question_only=True) == ([] if name in INFORMS | MACHINE else [name])
    assert MANIFEST.equals(other) == (name in {"started", "finished"})


def test_every_field_has_a_change_above() -> None:
    assert set(CHANGES) == set(MANIFEST.to_json())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"options": {"temperature": float("nan")}},
            "manifest field 'options' must hold what JSON can hold, got .*nan",
        ),
        ({"extra": {"x": object()}}, "manifest field 'extra' must hold what JSON can hold"),
        ({"versions": ["2.13"]}, r"manifest field 'versions' must be a mapping, got \['2.13'\]"),
        ({"mechanisms": {"elu1": 3}}, "the options of mechanism 'elu1' must be a mapping, got 3"),
        ({"model": None}, "manifest field 'model' must be text, got None"),
        ({"seed": "7"}, "manifest field 'seed' must be a whole number, got '7'"),
        ({"threads": True}, "manifest field 'threads' must be a whole number, got True"),
        ({"dropped_sinks": None}, "manifest field 'dropped_sinks' must be a whole number, got None"),
        ({"started": 5}, "manifest field 'started' must be an ISO 8601 time, got 5"),
    ],
)
def test_what_does_not_fit_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueInputError, match=message):
        Manifest(**fields)


@pytest.mark.parametrize("mechanisms", [3, ["elu1"], [{"options": {}}], {"elu1": {}}])
def test_mechanisms_of_another_form_are_refused(mechanisms: Any) -> None:
    with pytest.raises(ValueInputError, match="manifest field 'mechanisms' must be a list of name and options, got"):
        Manifest.from_json({"mechanisms": mechanisms})
