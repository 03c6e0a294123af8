"""Law: what a study is given it gives back, bit for bit, whatever the shape."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from softgap.trajectories import FOCUS, QUANTITIES, Manifest, StudyWriter, Trajectories, load, open_study

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


def floats(*shape: int) -> st.SearchStrategy[np.ndarray]:
    """Any float32: infinities, NaN, subnormals, both zeros."""
    return hnp.arrays(np.float32, shape, elements=st.floats(width=32))


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    mechanisms = tuple(draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)))
    layers = tuple(sorted(draw(st.sets(st.integers(0, 100), min_size=1, max_size=3))))
    heads = tuple(draw(st.integers(1, 3)) for _ in layers)
    padding = np.arange(max(heads)) >= np.array(heads)[:, None]
    groups = draw(hnp.arrays(np.int32, padding.shape, elements=st.integers(0, 5)))
    return {
        "mechanisms": mechanisms,
        "layers": layers,
        "heads_per_layer": heads,
        "kv_group": np.where(padding, -1, groups),
        "focus": draw(st.sets(st.sampled_from(FOCUS))),
    }


@st.composite
def parts(draw: st.DrawFn, /, geometry: dict[str, Any], **fields: Any) -> Trajectories:
    steps = draw(st.integers(0, 4))
    padding = geometry["kv_group"] < 0

    def padded(*leading: int) -> np.ndarray:
        array = draw(floats(*leading, *padding.shape, steps))
        array[..., padding, :] = np.nan
        return array

    return Trajectories(
        **geometry
        | {
            "quantities": {name: padded(len(geometry["mechanisms"])) for name in QUANTITIES},
            "focus": {name: padded() for name in geometry["focus"]},
        },
        positions=draw(hnp.arrays(np.int32, steps)),
        token_ids=draw(hnp.arrays(np.int32, steps)),
        tokens=tuple(draw(st.lists(TEXT, min_size=steps, max_size=steps))),
        logprob=draw(floats(steps)),
        entropy=draw(floats(steps)),
        **fields,
    )


@st.composite
def runs(draw: st.DrawFn, /, manifest: Manifest | None = None, **fields: Any) -> Trajectories:
    geometry = draw(geometries())
    prompt = draw(st.none() | parts(geometry, part="prompt"))
    sample = {
        "sample_id": draw(NAMES),
        "prompt_text": draw(TEXT),
        "completion_text": draw(TEXT),
        "label": draw(st.none() | TEXT),
        "n_prompt": draw(st.integers(0, 2**31 - 1)),
        "manifest": manifest or Manifest(model=draw(TEXT), options=draw(st.dictionaries(TEXT, st.integers() | TEXT))),
    }
    return draw(parts(geometry, prompt=prompt, **sample | fields))


def bits(run: Trajectories | None) -> list[bytes]:
    """Every number of a run as bytes, NaN made one; ``equals`` would take -0.0 for 0.0."""
    if run is None:
        return []
    arrays = [*run.quantities.values(), *run.focus.values(), run.logprob, run.entropy]
    whole = [run.kv_group, run.positions, run.token_ids]
    same_nan = [np.where(np.isnan(array), np.float32(np.nan), array) for array in arrays]
    return [array.tobytes() for array in (*same_nan, *whole)] + bits(run.prompt)


@settings(max_examples=60)
@given(runs())
def test_a_run_is_given_back(run: Trajectories) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run.save(f"{folder}/run")
        again = load(f"{folder}/run")
    assert again.equals(run)
    assert bits(again) == bits(run)


@settings(max_examples=30)
@given(st.lists(runs(manifest=Manifest()), max_size=4, unique_by=lambda run: run.sample_id), st.integers(1, 3))
def test_a_study_gives_all_its_runs_back_in_order(given_runs: list[Trajectories], size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with StudyWriter(f"{folder}/study", Manifest()) as writer:
            for start in range(0, len(given_runs), size):
                writer.append(given_runs[start : start + size])
        study = open_study(f"{folder}/study")
        assert study.ids == tuple(run.sample_id for run in given_runs)
        for run, other in zip(study, given_runs, strict=True):
            assert run.equals(other)
            assert study.sample(run.sample_id).equals(other)
