from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from softgap.errors import ShapeError, SoftgapError, UnknownNameError, ValueInputError
from softgap.trajectories import FOCUS, QUANTITIES, Manifest, Trajectories
from support.trajectory_examples import MANIFEST, example_fields, example_run


def test_views_are_the_first_mechanism() -> None:
    fields = example_fields()
    run = Trajectories(**fields)
    for name in QUANTITIES:
        view = getattr(run, name)
        assert view.dtype == np.float32
        assert view.shape == (3, 4, 5)
        np.testing.assert_array_equal(view, fields["quantities"][name][0])


def test_sizes_leave_padding_out() -> None:
    run = example_run(heads_per_layer=(4, 2, 4))
    assert (run.n_steps, run.n_heads) == (5, 10)


def test_select_shows_another_mechanism_in_the_prompt_too() -> None:
    run = example_run(prompt_steps=3)
    assert run.prompt is not None
    other = run.select("uniform")
    assert other.mechanisms == ("uniform",)
    assert other.prompt is not None
    for name in QUANTITIES:
        np.testing.assert_array_equal(getattr(other, name), run.quantities[name][1])
        np.testing.assert_array_equal(getattr(other.prompt, name), run.prompt.quantities[name][1])
        assert np.shares_memory(getattr(other, name), run.quantities[name])
    assert other.focus.keys() == set(FOCUS)
    assert list(other.manifest.mechanisms) == ["uniform"]
    assert other.select("uniform").equals(other)


def test_select_names_the_nearest_mechanism() -> None:
    with pytest.raises(UnknownNameError, match=r"^unknown mechanism of this run 'uniforn'; did you mean 'uniform'\?$"):
        example_run().select("uniforn")


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_head_means_match_a_loop(quantity: str) -> None:
    run = example_run(steps=4, missing=0.5)
    means = run.head_means(quantity)
    values = run.quantities[quantity][0]
    assert means.shape == values.shape[:2]
    for index in np.ndindex(*means.shape):
        numbers = [float(value) for value in values[index] if not np.isnan(value)]
        expected = sum(numbers) / len(numbers) if numbers else np.nan
        np.testing.assert_allclose(means[index], expected, rtol=1e-14)
    assert np.isnan(means[1, 2:]).all()


def test_head_means_of_no_steps_are_nan() -> None:
    assert np.isnan(example_run(steps=0).head_means()).all()


def test_head_means_of_an_unknown_quantity() -> None:
    with pytest.raises(UnknownNameError, match="unknown quantity 'divergenc'; did you mean 'divergence'"):
        example_run().head_means("divergenc")


def test_values_are_frozen() -> None:
    run = example_run()
    with pytest.raises(FrozenInstanceError):
        run.label = "other"  # type: ignore[misc]
    arrays = [run.divergence, run.kv_group, run.positions, run.token_ids, run.logprob, run.entropy]
    for array in [*arrays, *run.focus.values(), *run.quantities.values()]:
        assert not array.flags.writeable


def test_arrays_of_the_right_type_are_not_copied_and_stay_writable_for_their_owner() -> None:
    fields = example_fields()
    run = Trajectories(**fields)
    assert np.shares_memory(run.divergence, fields["quantities"]["divergence"])
    assert fields["quantities"]["divergence"].flags.writeable


def test_lists_and_wider_types_are_converted() -> None:
    fields = example_fields()
    wide = fields | {
        "positions": fields["positions"].tolist(),
        "token_ids": fields["token_ids"].astype(np.int64),
        "logprob": fields["logprob"].astype(np.float64),
        "tokens": list(fields["tokens"]),
        "layers": np.array(fields["layers"]),
    }
    assert Trajectories(**wide).equals(Trajectories(**fields))
    assert Trajectories(**wide).token_ids.dtype == np.int32


def test_heads_per_layer_defaults_to_all_heads() -> None:
    fields = example_fields(heads_per_layer=(2, 2, 2))
    del fields["heads_per_layer"]
    assert Trajectories(**fields).heads_per_layer == (2, 2, 2)


def test_a_prompt_takes_over_the_sample_of_its_run() -> None:
    prompt = example_run(part="prompt", sample_id="else", label=None, n_prompt=1, manifest=Manifest())
    run = example_run(prompt=prompt)
    assert run.prompt is not None
    assert (run.prompt.sample_id, run.prompt.label, run.prompt.n_prompt) == ("fox", "animal", 4)
    assert run.prompt.manifest == MANIFEST
    assert replace(run, label="x").prompt.label == "x"  # type: ignore[union-attr]


def changed(array: np.ndarray) -> np.ndarray:
    result = array.copy()
    result.flat[0] = 3
    return result


@pytest.mark.parametrize(
    "change",
    [
        lambda run: {"quantities": {**run.quantities, "norm_ratio": changed(run.quantities["norm_ratio"])}},
        lambda run: {"quantities": {**run.quantities, "divergence": changed(run.quantities["divergence"])}},
        lambda run: {"focus": {**run.focus, "sparsity": changed(run.focus["sparsity"])}},
        lambda run: {"focus": {}, "prompt": replace(run.prompt, focus={})},
        lambda run: {"logprob": changed(run.logprob)},
        lambda run: {"entropy": changed(run.entropy)},
        lambda run: {"positions": changed(run.positions) + 1},
        lambda run: {"token_ids": changed(run.token_ids)},
        lambda run: {"tokens": ("b", *run.tokens[1:])},
        lambda run: {"label": None},
        lambda run: {"sample_id": "x"},
        lambda run: {"prompt_text": "x"},
        lambda run: {"completion_text": "x"},
        lambda run: {"n_prompt": 5},
        lambda run: {"manifest": replace(run.manifest, seed=8)},
        lambda run: {"prompt": None},
        lambda run: {"prompt": replace(run.prompt, logprob=changed(run.prompt.logprob))},
        lambda run: {"layers": (0, 1, 5), "prompt": replace(run.prompt, layers=(0, 1, 5))},
    ],
)
def test_equals_sees_every_difference(change: Callable[[Trajectories], dict[str, Any]]) -> None:
    run = example_run(prompt_steps=3)
    other = replace(run, **change(run))
    assert not run.equals(other)
    assert not other.equals(run)


def test_equals_itself_and_leaves_times_aside() -> None:
    run = example_run(prompt_steps=3)
    assert np.isnan(run.divergence).any()
    assert run.equals(example_run(prompt_steps=3))
    assert run.equals(replace(run, manifest=replace(MANIFEST, started="2026-01-01T00:00:00+00:00")))
    assert not run.equals("run")


def test_copies_and_pickles_are_equal() -> None:
    run = example_run(prompt_steps=3)
    assert pickle.loads(pickle.dumps(run)).equals(run)
    assert copy.deepcopy(run).equals(run)


def test_repr_is_one_line() -> None:
    assert repr(example_run(prompt_steps=3)).endswith("; not all numbers are finite, see non_finite>")
    assert repr(example_run(prompt_steps=3, missing=0.0)) == (
        "<Trajectories 'fox' (completion): elu1, uniform; 3 layers x 4 heads x 5 steps, "
        "prompt of 3 steps, model 'tiny'>"
    )


NAN = np.full((2, 3, 4, 5), np.nan, dtype=np.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mechanisms": ()}, ValueInputError, r"mechanisms must be one or more different names, got \[\]"),
        ({"mechanisms": ("elu1", "elu1")}, ValueInputError, r"different names, got \['elu1', 'elu1'\]"),
        ({"mechanisms": "elu1"}, ValueInputError, r"must be a list of names, got the text 'elu1'; use \['elu1'\]"),
        ({"mechanisms": ("elu1",)}, ShapeError, r"divergence must have shape \[1, 3, 4, 5\], got \[2, 3, 4, 5\]"),
        (
            {"layers": (0, 0, 1)},
            ValueInputError,
            r"layers must be one or more increasing indices from 0, got \(0, 0, 1",
        ),
        ({"layers": (-1, 0, 1)}, ValueInputError, r"increasing indices from 0, got \(-1, 0, 1\)"),
        ({"layers": (0, 1)}, ShapeError, r"kv_group must have shape \[2, any\], got \[3, 4\]"),
        ({"kv_group": np.zeros((3, 4))}, ValueInputError, "kv_group must hold whole numbers, got an array of float64"),
        ({"kv_group": np.zeros((3, 4), int)}, ValueInputError, "kv_group must be the index .* and -1 only for padding"),
        ({"quantities": {"divergence": NAN}}, ValueInputError, "quantities must hold .*, got no relative_l2"),
        (
            {"quantities": {"divergense": NAN}},
            UnknownNameError,
            "unknown entry of quantities 'divergense'; did you mean",
        ),
        (
            {"quantities": dict.fromkeys(QUANTITIES, np.ones((2, 3, 4, 5)))},
            ValueInputError,
            "divergence must be NaN where a layer has no such head, got numbers",
        ),
        (
            {"quantities": dict.fromkeys(QUANTITIES, NAN + 0j)},
            ValueInputError,
            "real numbers, got an array of complex64",
        ),
        ({"focus": {"sparsity": NAN}}, ShapeError, r"sparsity must have shape \[3, 4, 5\], got \[2, 3, 4, 5\]"),
        (
            {"focus": {"entropy": NAN[0]}},
            UnknownNameError,
            "unknown entry of focus 'entropy'; did you mean 'attention_en",
        ),
        ({"positions": [[0]]}, ShapeError, r"positions must have shape \[any\], got \[1, 1\]"),
        ({"positions": [0, 1]}, ShapeError, r"divergence must have shape \[2, 3, 4, 2\], got \[2, 3, 4, 5\]"),
        ({"token_ids": [1, 2]}, ShapeError, r"token_ids must have shape \[5\], got \[2\]"),
        ({"token_ids": [2**31] * 5}, ValueInputError, "token_ids must fit into 32 bits, got 2147483648 to 2147483648"),
        ({"tokens": ("a",)}, ShapeError, "tokens must have one entry per step, 5 as positions has, got 1"),
        ({"tokens": (1, 2, 3, 4, 5)}, ValueInputError, "tokens must be text, got 1"),
        ({"tokens": ("\ud800",) * 5}, ValueInputError, "tokens must be text that UTF-8 can hold, got '.ud800'"),
        ({"logprob": np.zeros(4)}, ShapeError, r"logprob must have shape \[5\], got \[4\]"),
        ({"entropy": ["a"] * 5}, ValueInputError, "entropy must hold real numbers, got an array of <U1"),
        ({"heads_per_layer": (4, 2)}, ShapeError, "heads_per_layer must have one entry for each of 3 layers, got 2"),
        (
            {"heads_per_layer": (3, 2, 3)},
            ShapeError,
            r"number of columns of kv_group, 4, and reach it, got \(3, 2, 3\)",
        ),
        ({"heads_per_layer": (4, 0, 4)}, ShapeError, r"must be from 1 to the number of columns .* got \(4, 0, 4\)"),
        ({"part": "text"}, ValueInputError, "part must be 'prompt' or 'completion', got 'text'"),
        ({"n_prompt": -1}, ValueInputError, "n_prompt must be a whole number from 0, got -1"),
        ({"n_prompt": 1.5}, ValueInputError, "n_prompt must be a whole number from 0, got 1.5"),
        ({"sample_id": ""}, ValueInputError, "sample_id must be a name, got ''"),
        ({"label": 1}, ValueInputError, "label must be text, got 1"),
        ({"manifest": {}}, ValueInputError, "manifest must be a Manifest, got dict"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], error: type[SoftgapError], message: str) -> None:
    with pytest.raises(error, match=message):
        Trajectories(**{**example_fields(), **changes})


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ({"part": "completion"}, ValueInputError, "got a completion with a prompt whose part is 'completion'"),
        (
            {"mechanisms": ("elu1", "taylor2")},
            ShapeError,
            "must have the mechanisms of its run, .*'uniform'.*'taylor2'",
        ),
        ({"layers": (0, 1, 2)}, ShapeError, r"must have the layers of its run, \(0, 1, 4\), got \(0, 1, 2\)"),
        (
            {"heads_per_layer": (4, 4, 4)},
            ShapeError,
            r"must have the heads_per_layer of its run, \(4, 2, 4\), got \(4, 4",
        ),
        ({"focus": ()}, ShapeError, r"must have the focus of its run, .*'sparsity'\], got \[\]"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named(prompt: dict[str, Any], error: type[SoftgapError], message: str) -> None:
    with pytest.raises(error, match=message):
        example_run(prompt=example_run(**{"part": "prompt", **prompt}))


def test_a_prompt_with_other_kv_groups_is_refused() -> None:
    prompt = example_run(part="prompt")
    other = replace(prompt, kv_group=np.where(prompt.kv_group < 0, -1, 0))
    with pytest.raises(ShapeError, match="must have the kv_group of its run"):
        example_run(prompt=other)


def test_a_prompt_has_no_prompt() -> None:
    with pytest.raises(ValueInputError, match="got a prompt with a prompt whose part is 'prompt'"):
        example_run(part="prompt", prompt=example_run(part="prompt"))
