"""Numbers that are not finite are counted, and the count is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from softgap.trajectories import Manifest, NonFinite, Trajectories
from support.trajectory_examples import example_fields, example_run

BAD = (np.nan, np.inf, -np.inf)


def damaged(run: Trajectories, places: set[int], scores: set[int], value: float = np.nan) -> Trajectories:
    """The run with numbers replaced, by their index among those of real heads and among the steps."""
    divergence = run.quantities["divergence"].copy()
    real = np.flatnonzero(np.broadcast_to((run.kv_group >= 0)[None, :, :, None], divergence.shape))
    divergence.flat[real[sorted(place % len(real) for place in places)]] = value
    entropy = run.entropy.copy()
    entropy[sorted(scores)] = value
    return replace(run, quantities={**run.quantities, "divergence": divergence}, entropy=entropy)


@given(st.sets(st.integers(0, 10**6), max_size=9), st.sets(st.integers(0, 3), max_size=3), st.sampled_from(BAD))
def test_counts_are_those_of_a_loop(places: set[int], scores: set[int], value: float) -> None:
    run = damaged(example_run(heads_per_layer=(4, 2, 4), missing=0), places, scores, value)
    divergences = total = 0
    for mechanism, layer, head, step in np.ndindex(run.quantities["divergence"].shape):
        if head < run.heads_per_layer[layer]:
            total += 1
            divergences += not np.isfinite(run.quantities["divergence"][mechanism, layer, head, step])
    assert run.non_finite == NonFinite(divergences, total, len(scores), run.n_steps)
    assert bool(run.non_finite) == (divergences + len(scores) > 0)
    assert ("not all numbers are finite" in repr(run)) == bool(run.non_finite)


def test_the_steps_of_the_prompt_count_too() -> None:
    run = example_run(prompt_steps=3, missing=0)
    assert run.prompt is not None
    hurt = replace(run, prompt=damaged(run.prompt, {0}, {1}))
    assert hurt.non_finite == run.non_finite + NonFinite(divergences=1, scores=1)


def test_scores_that_nobody_took_are_not_missing() -> None:
    fields = example_fields(missing=0)
    nothing = np.full_like(fields["entropy"], np.nan)
    run = Trajectories(**{**fields, "entropy": nothing, "logprob": nothing})
    assert run.non_finite.of_scores == 0
    measured = replace(run, manifest=Manifest(options={"mode": "live"}))
    assert measured.non_finite == NonFinite(0, run.non_finite.of_divergences, run.n_steps, run.n_steps)


def test_a_token_that_the_model_rules_out_is_an_answer() -> None:
    run = example_run(missing=0)
    ruled_out = np.where(np.arange(run.n_steps) == 1, -np.inf, run.logprob).astype(np.float32)
    assert not replace(run, logprob=ruled_out).non_finite
    unknown = np.where(np.arange(run.n_steps) == 1, np.nan, run.logprob).astype(np.float32)
    assert replace(run, logprob=unknown).non_finite.scores == (run.token_ids[1] >= 0)


def test_the_sentence_counts() -> None:
    assert NonFinite(0, 50, 0, 4).sentence == ""
    assert NonFinite(1, 50_000, 23, 25).sentence == (
        "Not a sound measurement: 1 of 50,000 divergences (below 0.1 %) and 23 of 25 log-probabilities (92 %) are not "
        "finite numbers, and every mean below leaves them out. Check the model with softgap doctor, or load it in "
        "float32."
    )
    assert "3 of 400 divergences (0.8 %) are" in NonFinite(3, 400, 0, 25).sentence
