"""Whole studies with known truth, from the store to the verdict: nothing is found that is not there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softgap import stats
from softgap.analysis import ComparisonFindings, Preregistration, compare_study
from softgap.analysis.comparison_data import BASELINES, baseline_table
from softgap.errors import SoftgapError
from softgap.signal import complexity_entropy
from softgap.trajectories import open_study
from support.stats_cases import RNG, confounded, heads, labels_of, length_confound, planted, questions
from support.study_examples import LAYERS, named, simulated_study

QUICK = Preregistration(features=("mean",), permutations=199, refits=19, draws=1)
UNITS = 270


def test_planted_effects_are_found_in_the_right_heads_and_no_others(tmp_path: Path) -> None:
    x, labels = planted(3, 300, UNITS, {5: 1.2, 60: 1.2, 133: -1.2, 200: 1.2, 266: -1.2})
    study = simulated_study(tmp_path / "a", x, named(labels))
    found = compare_study(str(study), replace(QUICK, first="wrong", margin=0.7))
    assert found.verdict.outcome == "separated"
    width = UNITS // LAYERS
    assert {(unit["layer"], unit["head"]) for unit in found.surviving_units()} == {
        divmod(unit, width) for unit in (5, 60, 133, 200, 266)
    }
    assert found.incremental is not None
    assert found.incremental.difference.low > 0
    document = found.to_json()
    assert document["verdict"]["outcome"] == "separated"
    assert document["units"]["t"][133] < 0 < document["units"]["t"][5]


def test_a_pure_length_confound_is_separated_before_matching_and_not_after(tmp_path: Path) -> None:
    x, labels, length = length_confound(4, 500, 30, slope=0.8)
    study = simulated_study(tmp_path / "a", x, named(labels), lengths=[int(n) // 4 + 2 for n in length])
    before = compare_study(str(study), replace(QUICK, match=(), margin=0.6))
    after = compare_study(str(study), replace(QUICK, match=("length",), margin=0.6))
    assert before.verdict.outcome == "separated"
    assert after.verdict.outcome == "not separated"
    assert [step.convincing for step in after.verdict.steps] == [True, False]


def test_repeated_questions_find_nothing_when_kept_together(tmp_path: Path) -> None:
    wrong = alone = 0
    for seed in range(4):
        x, labels, cluster = questions(RNG(seed), 30, 8, 30, mixed=False)
        study = simulated_study(tmp_path / str(seed), x, named(labels), groups=[f"q{c}" for c in cluster])
        together = compare_study(str(study), replace(QUICK, match=()))
        apart = compare_study(str(study), replace(QUICK, match=(), clusters="nothing"))
        assert together.comparison.contrast.kind == "between"
        wrong += together.comparison.omnibus.any.p <= 0.05
        alone += apart.comparison.omnibus.any.p <= 0.05
    assert wrong <= 1
    assert alone >= 3


def test_40_of_a_null_of_400_are_not_enough_data(tmp_path: Path) -> None:
    rng = RNG(7)
    x, labels = heads(rng, 400, UNITS), labels_of(rng, 400, 200)
    for draw in range(3):
        some = rng.choice(400, 40, replace=False)
        study = simulated_study(tmp_path / str(draw), x[some], named(labels[some]))
        assert compare_study(str(study), QUICK).verdict.outcome == "not enough data"
    whole = simulated_study(tmp_path / "whole", x, named(labels))
    assert compare_study(str(whole), replace(QUICK, match=(), margin=0.6)).verdict.outcome == "not separated"


def test_features_are_what_the_signal_room_says_at_equal_window_counts(tmp_path: Path) -> None:
    rng = RNG(1)
    lengths = [20, 31, 47, 25]
    study = simulated_study(
        tmp_path / "a", heads(rng, 4, 30), ["a", "b", "a", "b"], lengths=lengths, fields={"hard": [1, 1, 1, 1]}
    )
    plan = replace(QUICK, features=("mean", "slope", "entropy", "complexity"), orders=(3,), match=(), collapse=True)
    table = compare_study(str(study), plan).table
    assert {mode.windows for mode in table.modes if mode.order} == {20 - 1 - 2}
    single = compare_study(str(study), replace(plan, collapse=False)).table
    for row, run in enumerate(open_study(study)):
        series = run.divergence.reshape(30, -1).astype(np.float64)
        cut = np.diff(series)[:, : 17 + 2]
        expected = complexity_entropy(cut, 3, ties="stable", eligibility=1)
        slope = [100 * np.polyfit(np.arange(series.shape[1]), x, 1)[0] for x in series]
        for mode, values in zip(single.modes, single.values[row], strict=True):
            wanted = {
                "mean": series.mean(axis=1),
                "slope": slope,
                "entropy": expected.entropy,
                "complexity": expected.complexity,
            }[mode.feature]
            np.testing.assert_allclose(values, wanted, rtol=1e-9, atol=1e-12)
    groups = single.values[:, :, :2].mean(axis=2)  # heads 0 and 1 of layer 0 share a KV head
    np.testing.assert_allclose(table.values[:, :, 0], groups, rtol=1e-12)
    assert (table.layer[:4].tolist(), table.head[:4].tolist()) == ([0, 0, 0, 1], [0, 1, 2, 0])


def test_baselines_are_read_off_the_tokens(tmp_path: Path) -> None:
    study = open_study(simulated_study(tmp_path / "a", heads(RNG(0), 3, 30), ["a", "b", "a"], lengths=[2, 5, 9]))
    table = baseline_table(study.samples())
    for row, run in zip(table, study, strict=True):
        entropy, logprob = run.entropy.astype(float), run.logprob.astype(float)
        expected = [
            len(entropy),
            entropy.mean(),
            entropy.max(),
            np.exp(-logprob.mean()),
            np.exp(logprob.min()),
            entropy[0],
        ]
        np.testing.assert_allclose(row, expected, rtol=1e-6)
    assert len(BASELINES) == table.shape[1]


def test_two_confounders_that_drive_two_heads_are_not_separated(tmp_path: Path) -> None:
    """Length drives head 0, difficulty head 1: each control alone leaves the other, and so does a bare confirmation."""
    for seed in range(3):
        x, labels, confounders, hard = confounded(RNG(seed), 800, "two", units=30)
        study = simulated_study(
            tmp_path / str(seed),
            x,
            named(labels),
            lengths=[int(n) // 4 + 2 for n in confounders["length"]],
            fields={"difficulty": hard.tolist(), "measured": confounders["length"].tolist()},
        )
        plan = replace(QUICK, match=("measured",), strata=("difficulty",), confirm=0.4, margin=0.9)
        found = compare_study(str(study), plan, open_confirmation=True)
        assert found.verdict.steps[0].convincing, "the confounders do separate the groups"
        assert [step.name for step in found.verdict.steps[1:]] == [
            "matched on measured within difficulty",
            "confirmation, matched on measured within difficulty",
        ]
        assert found.verdict.outcome == "not separated"


def test_what_was_not_found_is_said_with_its_confidence(tmp_path: Path) -> None:
    x, labels = planted(1, 200, 30, {})
    found = compare_study(str(simulated_study(tmp_path / "a", x, named(labels))), replace(QUICK, match=(), margin=0.8))
    assert re.fullmatch(
        r"Not separated: all samples could have found an effect of 0.8 standard deviations in one unit and did not; "
        r"with 95% confidence no effect there is larger than 0\.\d\d\.",
        found.verdict.sentence,
    )
    assert re.fullmatch(
        r"With 95% confidence no effect is larger than 0\.\d\d standard deviations\. 30 of 30 units lie within 0.8, "
        r"each tested by itself\.",
        found.equivalence_sentence,
    )


def test_an_effect_beyond_two_confounders_is_separated(tmp_path: Path) -> None:
    x, labels, confounders, hard = confounded(RNG(5), 900, "two", units=30)
    x[labels, 12] += 1.5
    fields = {"difficulty": hard.tolist(), "measured": confounders["length"].tolist()}
    study = simulated_study(tmp_path / "a", x, named(labels), fields=fields)
    plan = replace(QUICK, match=("measured",), strata=("difficulty",), confirm=0.4, margin=0.9)
    found = compare_study(str(study), plan, open_confirmation=True)
    assert found.verdict.outcome == "separated"
    assert found.surviving_units() == [{"mode": "elu1 mean", "layer": 2, "head": 2}]


@pytest.mark.parametrize("copies", ["identical", "nearly identical"])
def test_copies_of_samples_change_nothing(tmp_path: Path, copies: str) -> None:
    """Tripled samples would find effects in most null studies: they count once."""
    x, labels = planted(1, 80, 30, {})
    plan = replace(QUICK, match=())
    once = compare_study(str(simulated_study(tmp_path / "once", x, named(labels))), plan)
    noise = 1e-3 * RNG(2).standard_normal((240, 30)) if copies == "nearly identical" else np.zeros((240, 30))
    noise[::3] = 0
    tripled = simulated_study(tmp_path / "thrice", np.repeat(x, 3, axis=0) + noise, named(np.repeat(labels, 3)))
    thrice = compare_study(str(tripled), plan)
    assert thrice.comparison.contrast.sizes == once.comparison.contrast.sizes
    assert thrice.left_out["repeats of another sample"] == 160
    np.testing.assert_allclose(thrice.comparison.contrast.t, once.comparison.contrast.t, atol=0.05)


def test_samples_of_one_prompt_are_kept_together_though_nobody_said_so(tmp_path: Path) -> None:
    x, labels, cluster = questions(RNG(3), 30, 6, 30, mixed=False)
    prompts = [f"What is {c}?" if i % 2 else f"what is  {c}" for i, c in enumerate(cluster)]
    study = simulated_study(tmp_path / "a", x, named(labels), prompts=prompts)
    found = compare_study(str(study), replace(QUICK, match=()))
    assert (found.comparison.contrast.kind, sum(found.comparison.contrast.sizes)) == ("between", 30)
    split = compare_study(
        str(simulated_study(tmp_path / "b", x, named(labels), prompts=prompts)),
        replace(QUICK, match=(), confirm=0.4),
    ).split
    assert split is not None
    assert all(len(set(split.confirmation[cluster == c])) == 1 for c in range(30))


def test_a_later_look_at_other_samples_is_not_planned(tmp_path: Path) -> None:
    x, labels = planted(0, 90, 30, {})
    names: list[str | None] = list(named(labels))
    folder = tmp_path / "a"
    study = str(simulated_study(folder, x, [*names[:60], *[None] * 30]))

    def look(plan: Preregistration, labelled: int) -> ComparisonFindings:
        log = (folder / "comparisons/log.jsonl").read_bytes() if (folder / "comparisons").exists() else None
        shutil.rmtree(folder)
        simulated_study(folder, x, [*names[:labelled], *[None] * (90 - labelled)])
        if log is not None:
            (folder / "comparisons").mkdir()
            (folder / "comparisons/log.jsonl").write_bytes(log)
        return compare_study(study, plan, preregistration_file="plan.toml")

    plan = replace(QUICK, match=())
    assert look(plan, 60).status == "planned"
    assert look(plan, 60).status == "planned", "the same samples again are the same look"
    assert look(plan, 90).status.startswith("exploratory: look 2 with other samples or labels, and the plan allows 1")
    shutil.rmtree(folder / "comparisons")
    several = replace(plan, looks=3, permutations=999)
    assert look(several, 60).status == "planned, look 1 of 3"
    second = look(several, 90)
    assert second.status == "planned, look 2 of 3"
    assert second.comparison.alpha == pytest.approx(0.05 / 3)
    assert [entry["samples"] for entry in second.log_entries if entry["event"] == "looked"] == [60, 90]


def test_a_plan_is_planned_only_before_the_labels_are_read(tmp_path: Path) -> None:
    x, labels = planted(0, 60, 30, {})
    study = str(simulated_study(tmp_path / "a", x, named(labels)))
    first = compare_study(study, QUICK, preregistration_file="plan.toml")
    assert first.status == "planned"
    assert [entry["event"] for entry in first.log_entries] == ["plan", "looked"]
    assert compare_study(study, QUICK, preregistration_file="plan.toml").status == "planned"
    other = compare_study(study, replace(QUICK, margin=0.4), preregistration_file="other.toml")
    assert other.status.startswith("exploratory: the labels were looked at on ")
    assert compare_study(study, QUICK).status.startswith("exploratory: no plan")
    assert len(other.log_entries) == 5


def test_the_confirmation_split_is_locked_and_opened_once(tmp_path: Path) -> None:
    x, labels = planted(2, 400, 30, {7: 1.5})
    study = str(simulated_study(tmp_path / "a", x, named(labels)))
    plan = replace(QUICK, confirm=0.4, match=(), margin=0.6)
    first = compare_study(study, plan)
    assert first.split is not None
    explored = sum(first.comparison.contrast.sizes)
    assert explored == 400 - first.split.confirmation.sum()
    # Without asking, the lock holds all the same.
    assert sum(compare_study(study, replace(plan, confirm=None)).comparison.contrast.sizes) == explored
    with pytest.raises(SoftgapError, match=r"locked once, .* with a share of 0.4, got a share of 0.2; use that share"):
        compare_study(study, replace(plan, confirm=0.2))
    opened = compare_study(study, plan, open_confirmation=True)
    assert sum(opened.controls["confirmation"].contrast.sizes) == 400 - explored
    assert opened.verdict.outcome == "separated"
    with pytest.raises(SoftgapError, match="confirmation samples are opened once, and those of this study were on"):
        compare_study(study, plan, open_confirmation=True)


def test_a_split_cannot_be_locked_after_a_look(tmp_path: Path) -> None:
    x, labels = planted(0, 60, 30, {})
    study = str(simulated_study(tmp_path / "a", x, named(labels)))
    compare_study(study, QUICK)
    with pytest.raises(SoftgapError, match="locked before labels are read, and this study was looked at on"):
        compare_study(study, replace(QUICK, confirm=0.3))


def test_a_second_scorer_and_flipped_labels(tmp_path: Path) -> None:
    x, labels = planted(2, 200, 30, {7: 1.5})
    words = named(labels)
    study = str(simulated_study(tmp_path / "a", x, words))
    second = {f"s{i}": words[i] if i % 10 else {"right": "wrong", "wrong": "right"}[words[i]] for i in range(100)}
    found = compare_study(study, replace(QUICK, match=()), second=second)
    kappa, noise = found.reliability.kappa, found.reliability.noise
    assert kappa is not None
    assert noise is not None
    assert kappa.agreement == pytest.approx(0.9)
    assert noise.p[0].max() <= noise.p[-1].max()


def test_flipped_labels_are_judged_after_the_same_controls_as_the_headline(tmp_path: Path) -> None:
    x, labels, length = length_confound(4, 500, 30, slope=0.8)
    study = str(simulated_study(tmp_path / "a", x, named(labels), lengths=[int(n) // 4 + 2 for n in length]))
    for match, outcome in (((), "separated"), (("length",), "not separated")):
        found = compare_study(study, replace(QUICK, match=match, margin=0.6, draws=3))
        assert found.reliability.noise is not None
        assert found.verdict.outcome == outcome
        assert found.reliability.noise.share(outcome)[0] == 1
        shares = found.to_json()["reliability"]["noise"]["outcomes"]
        assert shares[outcome][0] == 1


def test_flipped_labels_reach_the_opened_samples_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = planted(2, 400, 30, {7: 1.5})
    study = str(simulated_study(tmp_path / "a", x, named(labels)))
    judged: list[str] = []

    def noise(judge: Callable[[np.ndarray], stats.Verdict], labels: np.ndarray, **options: Any) -> stats.LabelNoise:
        wrong = labels == "wrong"
        locked = np.arange(len(labels)) >= 400 - opened_samples
        judged.extend(judge(given).outcome for given in (wrong, wrong ^ locked, ~wrong))
        return stats.label_noise(judge, labels, **options)

    opened_samples = int(stats.confirmation_split([f"s{i}" for i in range(400)], fraction=0.4).confirmation.sum())
    monkeypatch.setattr("softgap.analysis.comparison.label_noise", noise)
    plan = replace(QUICK, confirm=0.4, match=(), margin=0.9, first="wrong")
    assert compare_study(study, plan, open_confirmation=True).verdict.outcome == "separated"
    # All labels turned over are as good as none; those of the locked samples alone contradict the others.
    assert judged == ["separated", "not separated", "separated"]


def test_a_comparison_that_is_refused_opens_nothing(tmp_path: Path) -> None:
    x, labels = planted(2, 400, 30, {7: 1.5})
    study = str(simulated_study(tmp_path / "a", x, named(labels)))
    plan = replace(QUICK, confirm=0.4, match=(), margin=0.6)
    for change, second in (({"by": "lable"}, None), ({}, {"s0": "right"})):
        with pytest.raises(SoftgapError, match=r"no sample has a field 'lable'|must label at least 2 of the samples"):
            compare_study(study, replace(plan, **change), open_confirmation=True, second=second)  # type: ignore[arg-type]
    opened = compare_study(study, plan, open_confirmation=True)
    assert [entry["event"] for entry in opened.log_entries] == ["locked", "opened", "looked"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"by": "lable"}, r"no sample has a field 'lable', they have .*label.*; choose one of them"),
        ({"by": "one"}, r"two groups are compared, got only 'x' in 'one'; add samples of another group or label them"),
        ({"by": "rare"}, r"each group needs at least 2 samples, got 1 in group 'odd'; add samples"),
        ({"by": "many"}, r"two groups are compared, got 3 values of 'many' \(0, 1, 2\); choose two with --between"),
        ({"mechanisms": ("elu2",)}, r"unknown mechanism of this study 'elu2'; did you mean 'elu1'\?"),
        ({"part": "prompt"}, r"part 'prompt' needs the steps of the prompts, got .*"),
        (
            {"features": ("entropy",)},
            r"a comparison needs at least one feature, got none .*3 windows and 12 are needed.*",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path: Path, change: dict[str, object], sentence: str) -> None:
    fields = {
        "one": ["x"] * 12,
        "rare": ["odd", *["even"] * 11],
        "many": [str(i % 3) for i in range(12)],
    }
    study = simulated_study(tmp_path / "a", heads(RNG(0), 12, 30), ["a", "b"] * 6, fields=fields)
    with pytest.raises(SoftgapError, match=f"^{sentence}$"):
        compare_study(str(study), replace(QUICK, **change))  # type: ignore[arg-type]


def test_features_that_never_vary_are_said(tmp_path: Path) -> None:
    study = simulated_study(tmp_path / "a", np.full((12, 30), 0.5), ["a", "b"] * 6, scatter=0)
    with pytest.raises(SoftgapError, match=r"^every feature is the same in all samples, so that there is nothing to"):
        compare_study(str(study), QUICK)
