"""What a report carries, before any browser sees it: packing, groups, choice of samples, policy, escaping."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import t as student

from softgap.errors import UnknownNameError
from softgap.report import explorer
from softgap.report.page import render
from softgap.report.payload import Payload, payload
from softgap.report.samples import Groups, array_keys, head_means, pack, select_samples, unpack
from softgap.trajectories import Study, Trajectories, open_study
from support.explorer_examples import HOSTILE, labelled_runs, save_study, story

FLOATS = st.floats(-1e6, 1e6, width=32) | st.just(math.nan)


def study_of(folder: Path, *runs: Trajectories) -> Study:
    return open_study(save_study(folder / "study", list(runs)))


def parts_of(page: str) -> dict[str, Any]:
    """The policy, the style, the scripts that run and the document of a page, as a browser would cut it."""
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    style = re.search(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    document = re.search(r'id="payload">(.*?)</script>', page, flags=re.DOTALL)
    assert policy is not None
    assert style is not None
    assert document is not None
    return {
        "policy": html.unescape(policy[1]),
        "style": style[1],
        "scripts": re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL),
        "document": document[1],
    }


@given(arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(0, 9)), elements=FLOATS))
def test_packing_loses_at_most_half_a_step(values: np.ndarray) -> None:
    packed = pack(values)
    found = unpack(packed)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(values))
    for row, back in zip(values, found, strict=True):
        known = row[~np.isnan(row)]
        if len(known):
            # Half a step, and the rounding of the row's own scale to float32.
            allowed = np.ptp(known) / 131068 + 1.2e-7 * np.abs(known).max() + 1e-6 * np.ptp(known) + 1e-37
            assert np.abs(back[~np.isnan(row)] - known).max() <= allowed


def test_packing_takes_what_is_not_finite_for_unknown() -> None:
    found = unpack(pack(np.array([[1.0, np.inf, -np.inf, np.nan, 3.0], [np.nan] * 5])))
    np.testing.assert_allclose(found, [[1, np.nan, np.nan, np.nan, 3], [np.nan] * 5], rtol=1e-5)


def test_group_means_and_intervals_are_those_of_a_loop() -> None:
    runs = labelled_runs(7)
    groups = Groups()
    for run in runs:
        groups.add(run, head_means(run))
    everyone, calm, wild = groups.result()
    assert (everyone.label, calm.label, wild.label) == (None, "calm", "wild")
    assert (everyone.samples, calm.samples, wild.samples) == (7, 4, 3)
    values = [
        float(run.quantities["divergence"][1, 2, 3].mean(dtype=np.float64)) for run in runs if run.label == "wild"
    ]
    head = 2 * 6 + 3
    mean = sum(values) / 3
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / 2)
    sums = wild.heads["divergence/uniform"]
    assert sums.mean()[head] == pytest.approx(mean, abs=1e-12)
    assert sums.half_width()[head] == pytest.approx(student.ppf(0.975, 2) * deviation / math.sqrt(3), abs=1e-9)
    steps = calm.steps["divergence/elu1"]
    # The longest sample of a group stands alone at its end: a mean without an interval.
    assert list(steps.count[0][[0, 40, 59]]) == [4, 2, 1]
    assert np.isnan(steps.half_width()[0, 59])
    last = runs[6].divergence[:, :, 59].mean(dtype=np.float64)
    assert steps.mean()[0, 59] == pytest.approx(last, abs=1e-7)
    assert steps.mean()[3, 59] == pytest.approx(runs[6].divergence[2, :, 59].mean(dtype=np.float64), abs=1e-7)


def test_too_many_labels_are_no_groups() -> None:
    groups = Groups()
    for i in range(14):
        run = story(label=str(i), steps=2, prompt_steps=0)
        groups.add(run, head_means(run))
    assert [group.label for group in groups.result()] == [None]
    assert groups.result()[0].samples == 14


def test_a_small_run_is_carried_whole(tmp_path: Path) -> None:
    study = study_of(tmp_path, story())
    chosen = select_samples(study, next(iter(study)), ())
    assert chosen.samples == {"fox"}
    assert chosen.keys == array_keys(story())
    assert chosen.keys[:3] == ("divergence/elu1", "divergence/uniform", "sparsity")


def test_what_does_not_fit_stays_out(tmp_path: Path) -> None:
    runs = labelled_runs(6)
    study = study_of(tmp_path, *runs)
    heads, mechanisms = 24, 2
    steps = [run.n_steps + 11 for run in runs]
    room = heads * mechanisms * (steps[0] + steps[1] + steps[2])
    chosen = select_samples(study, runs[0], (), values=room)
    assert chosen.samples == {"s0", "s1", "s2"}
    assert chosen.keys == ("divergence/elu1", "divergence/uniform")
    assert select_samples(study, runs[0], (), values=1).samples == {"s0"}
    assert select_samples(study, runs[0], ("s5", "s4"), values=1).samples == {"s4", "s5"}
    with pytest.raises(UnknownNameError, match="unknown sample 's9'"):
        select_samples(study, runs[0], ("s9",))


def test_samples_of_every_label_take_turns(tmp_path: Path) -> None:
    runs = [story(sample_id=f"{label}{i}", label=label, steps=5) for label in ("a", "b") for i in range(3)]
    study = study_of(tmp_path, *runs)
    assert select_samples(study, runs[0], (), values=24 * 2 * 16 * 2).samples == {"a0", "b0"}


def test_texts_fall_into_pieces_with_their_steps(tmp_path: Path) -> None:
    # A chat template's tokens are not in the prompt's text, the end of a turn not in the completion's.
    run = replace(story(steps=3, prompt_steps=3, words=("<|im|>", "Hi", "\n")), prompt_text="Hi", completion_text="Hi")
    pieces = payload(study_of(tmp_path, run)).document["samples"][0]["data"]["pieces"]
    assert pieces["prompt"] == [["<|im|>", 0, 1, False], ["Hi", 1, 1, True], ["\n", 2, 1, False]]
    assert pieces["completion"] == [["<|im|>", 3, 1, False], ["Hi", 4, 1, True], ["\n", 5, 1, False]]


def test_a_prompt_that_was_not_measured_is_shown_all_the_same(tmp_path: Path) -> None:
    run = replace(story(steps=3, prompt_steps=0), prompt_text="Go on")
    pieces = payload(study_of(tmp_path, run)).document["samples"][0]["data"]["pieces"]
    assert pieces["prompt"] == [["Go on", -1, 0, True]]
    assert [piece[:2] for piece in pieces["completion"]] == [["The", 0], [" quick", 1], [" brown", 2]]


def test_the_document_points_to_its_arrays(tmp_path: Path) -> None:
    run = story()
    data = payload(study_of(tmp_path, run))
    sample = data.document["samples"][0]
    assert run.prompt is not None
    for key in data.document["keys"]:
        quantity, _, mechanism = key.partition("/")
        both = [
            part.quantities[quantity][part.mechanisms.index(mechanism)] if mechanism else part.focus[quantity]
            for part in (run.prompt, run)
        ]
        expected = np.concatenate(both, axis=-1).reshape(24, 101)
        index = sample["data"]["arrays"][key]
        assert data.document["shapes"][index] == [24, 101]
        np.testing.assert_allclose(unpack(data.arrays[index]), expected, atol=2e-5)


def test_what_is_not_carried_token_by_token_has_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = story()
    study = study_of(tmp_path, run)
    monkeypatch.setattr("softgap.report.payload.select_samples", lambda *given, **_: select_samples(*given, values=1))
    sample = payload(study).document["samples"][0]["data"]
    assert set(sample["arrays"]) == {"divergence/elu1", "divergence/uniform"}
    expected = run.relative_l2.mean(axis=-1, dtype=np.float64).ravel()
    np.testing.assert_allclose(sample["means"]["relative_l2/elu1"], expected, rtol=1e-5)


def test_a_run_too_short_for_patterns_says_so(tmp_path: Path) -> None:
    document = payload(study_of(tmp_path, story(steps=2))).document
    assert "no sample holds one window of order 3" in document["dynamics"]["reason"]


def test_the_policy_allows_exactly_the_scripts_of_the_page(tmp_path: Path) -> None:
    parts = parts_of(explorer(study_of(tmp_path, story())))

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    directives = dict(line.strip().split(" ", 1) for line in parts["policy"].split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"].split() == [digest(script) for script in parts["scripts"]]
    assert directives["style-src"] == digest(parts["style"])
    assert len(parts["scripts"]) == 2
    assert not re.search("unsafe|https?:|\\*", parts["policy"])


def test_hostile_texts_stay_inside_their_element(tmp_path: Path) -> None:
    run = story(words=HOSTILE, sample_id=HOSTILE[0], label=HOSTILE[0])
    page = explorer(study_of(tmp_path, run))
    parts = parts_of(page)
    document = parts["document"]
    assert not re.search("[<>&\u2028\u2029]", document)
    tokens = json.loads(document)["samples"][0]["data"]["tokens"]
    assert tokens == [HOSTILE[i % len(HOSTILE)] for i in range(101)]
    for script in parts["scripts"]:
        page = page.replace(script, "")
    assert page.count("onerror") == document.count("onerror")


def test_a_title_is_text(tmp_path: Path) -> None:
    study = study_of(tmp_path, story())
    data = payload(study)
    page = render(Payload({**data.document, "title": "<script>alert(1)</script>"}, data.arrays))
    assert "<title>&lt;script&gt;alert(1)&lt;/script&gt; · softgap explorer</title>" in page


def test_the_page_names_no_place_on_the_network(tmp_path: Path) -> None:
    page = explorer(study_of(tmp_path, story()))
    scripts = parts_of(page)["scripts"]
    rest = page.replace(scripts[0], "")
    # Names of formats, never fetched; D3 has its own.
    assert set(re.findall(r"https?://[^\s'\"`)]+", rest)) <= {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"\b(?:src|href)=[\"']?(?!data:|#)[^\s>\"']", rest.replace("src=x", ""))
