from __future__ import annotations

import itertools
import json

import numpy as np

from softgap.trajectories import FOCUS, QUANTITIES
from support.trajectory_examples import MANIFEST, example_run


def test_frame_has_one_row_per_mechanism_layer_head_and_step() -> None:
    run = example_run()
    frame = run.to_frame()
    steps = ["position", "token", "logprob", "entropy"]
    assert list(frame.columns) == ["mechanism", "layer", "head", "step", *steps, *QUANTITIES, *FOCUS]
    rows = frame.itertuples()
    for (m, mechanism), (i, layer) in itertools.product(enumerate(run.mechanisms), enumerate(run.layers)):
        for head, step in itertools.product(range(run.heads_per_layer[i]), range(run.n_steps)):
            row = next(rows)
            assert (row.mechanism, row.layer, row.head, row.step) == (mechanism, layer, head, step)
            assert (row.position, row.token) == (run.positions[step], run.tokens[step])
            np.testing.assert_array_equal([row.logprob, row.entropy], [run.logprob[step], run.entropy[step]])
            for name in QUANTITIES:
                np.testing.assert_array_equal(getattr(row, name), run.quantities[name][m, i, head, step])
            for name in FOCUS:
                np.testing.assert_array_equal(getattr(row, name), run.focus[name][i, head, step])
    assert next(rows, None) is None


def test_frame_without_focus_or_steps() -> None:
    frame = example_run(focus=(), steps=0).to_frame()
    assert frame.empty
    assert list(frame.columns)[-3:] == list(QUANTITIES)


def test_dataset_is_labelled() -> None:
    run = example_run()
    dataset = run.to_xarray()
    assert dict(dataset.sizes) == {"mechanism": 2, "layer": 3, "head": 4, "step": 5}
    for name, (m, mechanism) in itertools.product(QUANTITIES, enumerate(run.mechanisms)):
        for i, layer in enumerate(run.layers):
            chosen = dataset[name].sel(mechanism=mechanism, layer=layer)
            assert chosen.dims == ("head", "step")
            np.testing.assert_array_equal(chosen, run.quantities[name][m, i])
    for name in FOCUS:
        assert dataset[name].dims == ("layer", "head", "step")
        np.testing.assert_array_equal(dataset[name], run.focus[name])
    for name, values in {"logprob": run.logprob, "entropy": run.entropy, "position": run.positions}.items():
        assert dataset[name].dims == ("step",)
        np.testing.assert_array_equal(dataset[name], values)
    np.testing.assert_array_equal(dataset["token_id"], run.token_ids)
    np.testing.assert_array_equal(dataset["kv_group"], run.kv_group)
    assert dataset["token"].values.tolist() == list(run.tokens)


def test_dataset_carries_the_sample_and_the_manifest() -> None:
    attributes = example_run().to_xarray().attrs
    assert json.loads(attributes.pop("manifest")) == MANIFEST.to_json()
    assert attributes == {
        "sample_id": "fox",
        "part": "completion",
        "prompt": "The quick\n",
        "completion": " brown fox",
        "n_prompt": 4,
        "label": "animal",
    }
    assert "label" not in example_run(label=None).to_xarray().attrs
