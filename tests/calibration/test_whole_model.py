"""A calibration from texts to file: reproducible, resumable, found by fingerprint, refused where it does not belong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import softgap
from softgap.analysis.headline import held_out_sentence, kind_counts_sentence
from softgap.calibration import (
    Calibration,
    HeldOut,
    Recipe,
    calibrate,
    evaluate_held_out,
    fit_maps,
    gap_closed,
    layers,
    whole_model,
)
from softgap.calibration.fit import Maps, RowPlan
from softgap.calibration.held_out import measure_sequence
from softgap.calibration.texts import Corpus, corpus_of, mix_generated, quick_corpus
from softgap.errors import StoreError, UnsupportedError, ValueInputError
from softgap.intervals import Interval
from softgap.kinds import QUICK_CALIBRATION, numbers_of_counts, stored_kinds
from softgap.models.tensor_files import (
    calibration_path,
    default_mechanisms,
    load_calibration,
    quick_calibration_note,
    save_calibration,
)
from softgap.probe import read_ids
from softgap.report import write_explorer
from softgap.report.columns import study_calibration
from softgap.trajectories import open_study
from support.model_examples import attending_llama, byte_tokenizer, tiny_llama
from support.probe_cases import tiny_with

RECIPE = Recipe(features=4, steps=4)
TOKENIZER = byte_tokenizer()


def model(seed: int = 0) -> LlamaForCausalLM:
    return tiny_llama(seed, max_position_embeddings=1024)


def written(n: int = 400) -> str:
    """Text of our own: sentences with numbers, the same on every machine."""
    return " ".join(f"The {i}th boat left the harbour with {i * i % 97} barrels." for i in range(n))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One layer after the other, so that an interruption comes between two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTGAP_CALIBRATIONS", str(tmp_path / "calibrations"))


def made(path: Path | None = None, **settings: Any) -> Calibration:
    return calibrate(model(), TOKENIZER, [written()], recipe=RECIPE, positions=256, out=path, **settings)


def test_a_calibration_is_saved_and_read_back_whole(tmp_path: Path) -> None:
    found = made(tmp_path / "tiny.safetensors")
    again = Calibration.load(tmp_path / "tiny.safetensors")
    assert again.metadata["fingerprint"] == found.fingerprint
    assert again.held_out == found.held_out
    assert again.sufficiency == found.sufficiency
    assert found.sufficiency is not None
    assert sum(count.value for count in found.sufficiency.counts.values()) == 8
    assert found.metadata["hybrid"] == {"w": 1, "sinks": 0}
    assert found.mechanism("hybrid").options["w"] == 1
    assert all(torch.equal(again.tensors[name], found.tensors[name]) for name in found.tensors)
    assert set(found.held_out.gap_closed) == {"fitted", "elu1", "constant", "profile"}
    assert np.array(found.held_out.by_head, dtype=float).shape == (2, 4)


def test_the_limit_of_what_suffices_is_an_option(tmp_path: Path) -> None:
    strict, loose = (made(tmp_path / f"{limit}.safetensors", limit=limit).sufficiency for limit in (0.0001, 0.9999))
    assert strict is not None
    assert loose is not None
    assert strict.limit == 0.0001
    assert strict.counts["softmax"].value > loose.counts["softmax"].value
    with pytest.raises(ValueInputError, match="limit must be above 0 and below 1, got 0"):
        made(tmp_path / "none.safetensors", limit=0)


def test_stricter_measures_stand_beside_the_share_of_the_gap(tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    sharp = attending_llama(max_position_embeddings=1024)
    found = calibrate(sharp, TOKENIZER, [written()], recipe=RECIPE, positions=256, out=path)
    held_out = found.held_out
    assert set(held_out.explained_by) == {"fitted", "uniform", "elu1", "constant", "profile"}
    assert held_out.explained_by["fitted"] == held_out.explained
    closed, explained = (np.array(x, dtype=float).ravel() for x in (held_out.by_head, held_out.explained_by_head))
    assert np.nanmedian(explained) == pytest.approx(held_out.explained)
    with_gap = ~np.isnan(closed)
    one, other = (np.argsort(np.argsort(x[with_gap])).astype(float) for x in (closed, explained))
    one, other = one - one.mean(), other - other.mean()
    assert held_out.rank_correlation == pytest.approx((one * other).sum() / np.sqrt((one**2).sum() * (other**2).sum()))
    profile = held_out.against["profile"].value
    expected = f"gap closed {held_out.gap_closed['fitted'].value:.2f}, of the gap that profile leaves {profile:.2f}, "
    assert expected in repr(found)
    assert f"rank correlation of the two over heads {held_out.rank_correlation:.2f}" in repr(found)
    assert found.report()["summary"]["against_profile"] == profile
    # A run that is measured with it quotes the same numbers for its reader.
    run = read_ids(sharp, [[1, 2, 3]], mechanisms=[f"fitted@{path}", "uniform"])[0]
    assert found.sufficiency is not None
    kinds = numbers_of_counts(found.sufficiency.counts, found.sufficiency.keys_worth["window"])
    quoted = dict(run.manifest.extra["held_out"])
    letters = quoted.pop("kinds")
    assert quoted == {**found.report()["summary"], **kinds}
    assert list(letters) == [str(layer) for layer in run.layers]
    assert stored_kinds({"kinds": letters}, run.layers, run.heads_per_layer) == found.sufficiency.labels


def test_layers_with_a_sliding_window_are_reported_apart(tmp_path: Path) -> None:
    mixed = tiny_with("gemma3_text", max_position_embeddings=1024, vocab_size=len(TOKENIZER))
    path = tmp_path / "mixed.safetensors"
    found = calibrate(mixed, TOKENIZER, [written()], recipe=RECIPE, positions=256, stability=False, out=path).held_out
    assert list(found.by_window) == ["layers with a sliding window", "layers that see every token"]
    low, high = sorted(closed.value for closed in found.by_window.values())
    assert low < found.gap_closed["fitted"].value < high
    assert Calibration.load(path).held_out == found
    slides = np.array([kind == "sliding_attention" for kind in mixed.config.layer_types])
    texts = corpus_of(mixed, TOKENIZER, [written()], positions=256).held_out
    fitted = Calibration.load(path).mechanism()
    runs = [measure_sequence(mixed, ids, [fitted, "uniform"]) for ids in texts]
    for closed, rows in zip(found.by_window.values(), (slides, ~slides), strict=True):
        left, whole = (
            sum(np.nansum(run.select(name).divergence[rows][..., 64:]) for run in runs)
            for name in ("fitted", "uniform")
        )
        assert closed.value == pytest.approx(1 - left / whole, rel=1e-5)
    assert evaluate_held_out(mixed, texts, [fitted, "uniform"]).by_window == {}


def test_a_calibration_of_an_earlier_version_has_no_energy_by_head(tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    found = made(path)
    report = found.report()
    del report["summary"]
    for name in ("explained_by", "explained_by_head", "rank_correlation", "by_window"):
        del report["held_out"][name]
    save_calibration(path, found.tensors, {**found.metadata, **report})
    old = Calibration.load(path).held_out
    assert (old.explained_by, old.explained_by_head, old.rank_correlation, old.by_window) == ({}, (), None, {})
    assert old.explained == found.held_out.explained
    assert "rank correlation" not in repr(Calibration.load(path))
    assert "rank_correlation" not in load_calibration(path).equip("fitted").held_out


def test_the_report_says_how_it_does_elsewhere(tmp_path: Path) -> None:
    found = made(tmp_path / "tiny.safetensors")
    assert Calibration.load(tmp_path / "tiny.safetensors").report() == found.report()
    passages = ["text of the fit", "held-out text", "after a BOS token", "at random offsets"]
    assert list(found.conditions) == [*passages, "prose", "dialogue", "code", "lists"]
    assert found.memory_ladder is not None
    assert list(found.curve) == [str(rung.fitted.features) for rung in found.memory_ladder.rungs]
    assert list(found.curve) == ["23", "47", "93", "186", "372"]  # features worth 16 to 256 keys of 8 + 8 numbers
    rungs = {rung.mechanism: rung for rung in found.ladders.rungs}
    assert {"uniform", "elu1", "fitted"} < set(rungs)
    assert rungs["fitted"].features == 4
    assert [rung.divergence for rung in found.ladders.rungs] == sorted(
        (rung.divergence for rung in rungs.values()), reverse=True
    )
    # No attention with so many features comes nearer to the softmax weights.
    assert all(0 < rung.floor < rung.weight_error for rung in rungs.values() if rung.floor)
    assert found.ladders.sizes == (16, 32, 64, 128)
    growth = [(each.sink, each.energy) for each in found.ladders.growth]
    assert growth == [(sink, energy) for sink in (False, True) for energy in (0.9, 0.99, 0.999)]


def test_a_report_of_the_first_version_says_that_its_rank_counts_the_sink(tmp_path: Path) -> None:
    found = made(tmp_path / "tiny.safetensors")
    report = found.report()
    old = {key: value for key, value in report["ladders"].items() if key != "growth"}
    old |= {"ranks": [3.0, 3.0, 4.0, 3.0], "exponent": [-0.3, 0.0, 0.8]}
    save_calibration(tmp_path / "old.safetensors", found.tensors, {**found.metadata, **report, "ladders": old})
    (growth,) = Calibration.load(tmp_path / "old.safetensors").ladders.growth
    assert (growth.energy, growth.sink, growth.ranks) == (0.99, True, (3.0, 3.0, 4.0, 3.0))


def test_the_conditions_are_what_they_say(tmp_path: Path) -> None:
    found = made(tmp_path / "tiny.safetensors")
    corpus = corpus_of(model(), TOKENIZER, [written()], positions=256)
    fitted = found.mechanism()
    passages = [ids[:128] for ids in corpus.held_out[:2]]
    runs = [read_ids(model(), [ids], tokenizer=TOKENIZER, mechanisms=[fitted, "uniform"])[0] for ids in passages]
    mine, uniform = (
        sum(run.select(name).divergence[..., 64:].sum(dtype=float) for run in runs) for name in ("fitted", "uniform")
    )
    assert found.conditions["held-out text"].value == pytest.approx(1 - mine / uniform, abs=1e-5)
    # A rotary model does not see where its text begins, and a map of rotated vectors does.
    assert found.conditions["at random offsets"].value != pytest.approx(
        found.conditions["held-out text"].value, abs=1e-6
    )


def test_one_long_text_tells_of_the_positions_that_no_other_reaches(tmp_path: Path) -> None:
    fitted = made(tmp_path / "tiny.safetensors").mechanism()
    ids = TOKENIZER(written())["input_ids"]
    near, far = [ids[:100], ids[100:200]], ids[200:800]
    alone = evaluate_held_out(model(), near, [fitted, "uniform"])
    found = evaluate_held_out(model(), near, [fitted, "uniform"], far=[far])
    assert list(alone.by_position) == ["0-16", "16-64", "64-512"]
    assert list(found.by_position) == ["0-16", "16-64", "64-512", "512-1024"]
    assert found.gap_closed == alone.gap_closed
    run = read_ids(model(), [far], tokenizer=TOKENIZER, mechanisms=[fitted, "uniform"])[0]
    mine, uniform = (run.select(name).divergence[..., 512:].sum(dtype=float) for name in ("fitted", "uniform"))
    assert found.by_position["512-1024"].value == pytest.approx(1 - mine / uniform, abs=1e-5)
    stored = HeldOut.from_json(json.loads(json.dumps(found.to_json(), sort_keys=True)))
    assert list(stored.by_position) == list(found.by_position)


def test_a_corpus_has_a_long_text_to_judge_by_where_it_can() -> None:
    reader = tiny_llama(0, max_position_embeddings=4096)
    long, short = (corpus_of(reader, TOKENIZER, [written(n)], positions=2048) for n in (400, 70))
    whole = TOKENIZER(written(400))["input_ids"]
    assert [len(ids) for ids in long.far] == [2048]
    assert list(long.far[0]) == whole[len(whole) - len(whole) // 4 :][:2048]
    assert short.far == ()
    assert long.digest != corpus_of(reader, TOKENIZER, [written(400)], positions=1024).digest


def test_maps_see_vectors_before_rotary_embedding_where_the_model_has_one(tmp_path: Path) -> None:
    found = made(tmp_path / "tiny.safetensors")
    own = model().model.rotary_emb.inv_freq
    assert found.metadata["vectors"] == "before and after rotary embedding"
    assert found.tensors["fitted.key_weight"].shape == (2, 2, 4, 2 * 8)
    assert found.tensors["fitted.frequency"].shape == (1, 1, 8)  # once, for both layers
    assert torch.equal(found.tensors["fitted.frequency"][0, 0], torch.cat([own, own]))
    assert bool(found.tensors["fitted.key_weight"][..., 8:].any())


def test_models_without_it_are_fitted_to_what_they_have(tmp_path: Path) -> None:
    gpt2 = tiny_with("gpt2", n_positions=1024, vocab_size=len(TOKENIZER))
    found = calibrate(gpt2, TOKENIZER, [written()], recipe=RECIPE, positions=256, out=tmp_path / "tiny.safetensors")
    assert found.metadata["vectors"] == "after rotary embedding or without"
    assert not {"fitted.frequency", "fitted.turn"} & set(found.tensors)
    run = softgap.read(gpt2, TOKENIZER, written(3), mechanisms=[f"fitted@{tmp_path / 'tiny.safetensors'}"])
    assert np.isfinite(run.divergence).all()


def test_a_padded_batch_is_its_rows_under_a_calibration() -> None:
    made()
    texts = [written(3), "A boat."]
    together = softgap.read(model(), TOKENIZER, texts, mechanisms=["fitted"])
    written_on = softgap.generate(model(), TOKENIZER, texts, 8, mechanisms=["fitted"], chat=False)
    for text, read, live in zip(texts, together, written_on, strict=True):
        alone = softgap.read(model(), TOKENIZER, text, mechanisms=["fitted"])
        assert np.allclose(read.divergence, alone.divergence, atol=1e-5)
        alone = softgap.generate(model(), TOKENIZER, text, 8, mechanisms=["fitted"], chat=False)
        assert np.allclose(live.divergence, alone.divergence, atol=1e-5)


def test_a_report_of_another_version_is_refused(tmp_path: Path) -> None:
    found = made(tmp_path / "tiny.safetensors")
    older = {**found.metadata, **found.report()}
    del older["ladders"]
    save_calibration(tmp_path / "older.safetensors", found.tensors, older)
    with pytest.raises(
        StoreError, match="written by another version of softgap: its report lacks or garbles 'ladders'; calibrate"
    ):
        Calibration.load(tmp_path / "older.safetensors")


def test_progress_tells_layers_and_the_gap_closed_so_far(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    made(tmp_path / "tiny.safetensors", progress=lambda stage, share: told.append((stage, share)))
    stages = list(dict.fromkeys(stage for stage, _ in told))
    assert stages[:3] == ["the model writes text of many kinds", "the model reads", "fitted 0 of 2 layers"]
    assert [re.sub(r"-?\d\.\d\d", "X", stage) for stage in stages[3:5]] == [
        f"fitted {n} of 2 layers, X of the gap closed" for n in (1, 2)
    ]
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert told[-1][1] == 1


def test_every_part_finds_it_by_the_fingerprint() -> None:
    assert default_mechanisms(model()) == ("elu1", "uniform")
    made()
    run = softgap.read(model(), TOKENIZER, written(8), mechanisms=["fitted", "profile", "constant", "uniform"])
    assert run.manifest.mechanisms["fitted"] == {
        "calibration": load_calibration(calibration_path(run.manifest.weights)).digest
    }
    assert np.isfinite(run.divergence).all()
    stored = load_calibration(calibration_path(run.manifest.weights))
    sinks = stored.metadata["division"]["sinks"]
    window = default_mechanisms(model())[3]
    assert default_mechanisms(model()) == ("elu1", "uniform", "fitted", window)
    assert window == f"window:w={3 - min(1, sinks)},sinks={min(1, sinks)}"
    assert stored.equip("hybrid").options["sinks"] <= sinks
    run = softgap.read(model(), TOKENIZER, written(8))
    assert run.mechanisms == default_mechanisms(model())


def test_a_quick_calibration_is_marked_and_gives_way_to_a_full_one() -> None:
    quick = calibrate(model(), TOKENIZER, recipe=replace(whole_model.QUICK, features=4, steps=2), quick=True)
    path = calibration_path(quick.fingerprint, quick=True)
    again = Calibration.load(path)
    assert again.quick
    assert again.metadata["text"] == "that comes with softgap"
    assert (again.conditions, again.curve, again.memory_ladder, again.ladders.rungs) == ({}, {}, None, ())
    assert again.sufficiency is not None
    assert (again.sufficiency.texts, again.sufficiency.stability) == (3, {})
    assert again.sufficiency.sentence.endswith(QUICK_CALIBRATION)
    assert again.sufficiency.counts["softmax"].low <= again.sufficiency.counts["softmax"].high
    run = softgap.read(model(), TOKENIZER, written(2))
    held_out = run.manifest.extra["held_out"]
    assert "come from a quick calibration" in quick_calibration_note(model())
    assert "fitted" in run.mechanisms
    assert kind_counts_sentence(held_out).endswith(QUICK_CALIBRATION)
    assert "the quick calibration closes" in held_out_sentence(held_out)
    full = made()
    assert not full.quick
    assert not path.exists()
    assert quick_calibration_note(model()) == ""
    held_out = softgap.read(model(), TOKENIZER, written(2)).manifest.extra["held_out"]
    assert "quick" not in kind_counts_sentence(held_out) + held_out_sentence(held_out)


def test_a_quick_calibration_reads_the_beginning_of_a_given_text() -> None:
    corpus = quick_corpus(model(), TOKENIZER, [written()])
    assert [len(ids) for ids in corpus.fitted] == [1024, 256, 256, 256, 256]
    assert [len(ids) for ids in corpus.held_out] == [512, 512, 512]
    assert corpus.held_out[0][:4] == tuple(TOKENIZER(written())["input_ids"][2048:2052])
    short = quick_corpus(model(), TOKENIZER, [written()[:2100]])
    assert [len(ids) for ids in short.held_out] == [512, 512]
    assert sum(map(len, short.fitted)) <= 1100
    with pytest.raises(ValueInputError, match="a quick calibration needs at least 2048 tokens of text, got 10"):
        quick_corpus(model(), TOKENIZER, ["0123456789"])
    with pytest.raises(ValueInputError, match="a quick calibration has a fixed length"):
        calibrate(model(), TOKENIZER, quick=True, minutes=1)


def test_live_and_read_agree_on_a_fitted_map() -> None:
    made()
    live = softgap.generate(model(), TOKENIZER, written(3), 12, mechanisms=["fitted"], chat=False)
    text = softgap.read(model(), TOKENIZER, live.prompt_text, live.completion_text, mechanisms=["fitted"])
    n = text.divergence.shape[-1]
    assert np.allclose(live.divergence[..., :n], text.divergence, atol=1e-5)


def test_a_file_is_taken_by_its_path(tmp_path: Path) -> None:
    made(tmp_path / "tiny.safetensors")
    run = softgap.read(model(), TOKENIZER, written(8), mechanisms=[f"fitted@{tmp_path / 'tiny.safetensors'}"])
    assert run.mechanisms == ("fitted",)


def test_the_same_settings_give_the_same_bytes_interrupted_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "whole.safetensors")
    calls: list[int] = []

    def interrupted(*args: Any, **kwargs: Any) -> Maps:
        calls.append(kwargs["layer"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fit_maps(*args, **kwargs)

    monkeypatch.setattr(layers, "fit_maps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "resumed.safetensors")
    assert not (tmp_path / "resumed.safetensors").exists()
    made(tmp_path / "resumed.safetensors")
    # The first layer was not fitted again; the tails of hybrids come last.
    assert calls == [0, 1, 1, 0, 1]
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "resumed.safetensors").read_bytes()
    assert not list(tmp_path.glob("*.parts"))


def test_without_a_mix_the_corpus_is_the_given_text_alone(tmp_path: Path) -> None:
    plain = replace(RECIPE, rows=RowPlan(generated=0.0, moved=0.0))
    alone = calibrate(model(), TOKENIZER, [written()], recipe=plain, positions=256, out=tmp_path / "a.safetensors")
    mixed = made(tmp_path / "b.safetensors")
    corpus = corpus_of(model(), TOKENIZER, [written()], positions=256)
    assert alone.metadata["tokens"] == corpus.digest != mixed.metadata["tokens"]
    assert alone.metadata["generated_lengths"] == []
    assert len(mixed.metadata["generated_lengths"]) == 24
    assert mixed.metadata["recipe"]["rows"]["generated"] == RowPlan().generated > 0
    assert mixed.metadata["recipe"]["rows"]["moved"] == RowPlan().moved > 0
    # The baselines come from the given text, mixed or not; the maps do not.
    for name in ("constant.mean", "profile.first", "profile.by_distance"):
        assert torch.equal(alone.tensors[name], mixed.tensors[name])
    assert not torch.equal(alone.tensors["fitted.key_weight"], mixed.tensors["fitted.key_weight"])


def test_an_interrupted_calibration_does_not_write_its_text_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Corpus:
        calls.append(kwargs["seed"])
        return mix_generated(*args, **kwargs)

    def stopped(*args: Any, **kwargs: Any) -> Maps:
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_model, "mix_generated", counted)
    with monkeypatch.context() as context:
        context.setattr(layers, "fit_maps", stopped)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path / "tiny.safetensors")
    made(tmp_path / "tiny.safetensors")
    assert calls == [0]


def test_a_model_that_cannot_generate_is_calibrated_on_the_given_text(tmp_path: Path) -> None:
    mute = model()
    mute.can_generate = lambda: False  # type: ignore[method-assign]
    path = tmp_path / "tiny.safetensors"
    found = calibrate(mute, TOKENIZER, [written()], recipe=RECIPE, positions=256, out=path)
    assert found.metadata["generated_lengths"] == []


def test_a_quick_calibration_leaves_the_stability_of_kinds_out(tmp_path: Path) -> None:
    quick, whole = (made(tmp_path / f"{x}.safetensors", stability=x).sufficiency for x in (False, True))
    assert quick is not None
    assert whole is not None
    assert quick.stability == {}
    assert whole.stability
    assert quick.labels == whole.labels


def test_parts_of_other_settings_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.safetensors"

    def once(*args: Any, **kwargs: Any) -> Maps:
        if kwargs["layer"] == 1:
            raise KeyboardInterrupt
        return fit_maps(*args, **kwargs)

    monkeypatch.setattr(layers, "fit_maps", once)
    with pytest.raises(KeyboardInterrupt):
        made(path)
    numbers: list[int] = []

    def noted(*args: Any, **kwargs: Any) -> Maps:
        numbers.append(kwargs["layer"])
        return fit_maps(*args, **kwargs)

    monkeypatch.setattr(layers, "fit_maps", noted)
    calibrate(model(), TOKENIZER, [written()], recipe=Recipe(features=4, steps=5), positions=256, out=path)
    assert sorted(numbers) == [0, 0, 1, 1]


def test_minutes_choose_the_steps_and_record_them(tmp_path: Path) -> None:
    found = made(tmp_path / "timed.safetensors", minutes=1e-9)
    assert found.metadata["recipe"]["steps"] == 50  # the fewest


def test_without_text_the_model_writes_its_own(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    found = calibrate(model(), TOKENIZER, recipe=RECIPE, positions=128, out=tmp_path / "own.safetensors")
    assert found.metadata["text"] == "written by the model"
    assert found.metadata["generated_lengths"] == []  # nothing to mix it with
    assert torch.equal(state, torch.get_rng_state())


def test_held_out_tokens_are_never_fitted_on() -> None:
    text = written()
    corpus = corpus_of(model(), TOKENIZER, [text], positions=256)
    ids = TOKENIZER(text)["input_ids"]
    reach = sum(len(part) for part in corpus.fitted)
    assert [token for part in corpus.fitted for token in part] == ids[:reach]
    assert reach <= len(ids) - sum(len(part) for part in corpus.held_out)
    first = min(_places(ids, part) for part in corpus.held_out)
    assert first >= reach


def _places(ids: list[int], part: tuple[int, ...]) -> int:
    return next(i for i in range(len(ids)) if tuple(ids[i : i + len(part)]) == part)


def test_gap_closed_by_hand() -> None:
    one, two = np.full((1, 1, 100), 0.25), np.full((1, 1, 100), 0.5)
    found = gap_closed([one], [two], rng=np.random.default_rng(0))
    assert found == Interval(0.5, 0.5, 0.5)
    assert gap_closed([one], [two], range(128, 256), rng=np.random.default_rng(0)) is None


BAD: list[tuple[Callable[[Path], object], type[Exception], str]] = [
    (
        lambda path: calibrate(model(), TOKENIZER, ["too short"], recipe=RECIPE, out=path),
        ValueInputError,
        "a calibration needs at least 2048 tokens of text, got 9; give more text, or none to use text that the model "
        "writes itself",
    ),
    (
        lambda path: calibrate(model(), TOKENIZER, [written(60)], recipe=RECIPE, positions=1024 * 2, out=path),
        ValueInputError,
        "positions must be at most the model's context of 1024, got 2048; ask for fewer",
    ),
    (
        lambda path: calibrate(tiny_llama(max_position_embeddings=8192), TOKENIZER, [written(60)], positions=4096),
        ValueInputError,
        r"calibrating up to position 4096 needs 5462 tokens of text, got \d+; .*",
    ),
    (
        lambda path: calibrate(model(), TOKENIZER, [written(60)], minutes=0.0, out=path),
        ValueInputError,
        "minutes must be a number above 0, got 0; leave it out for a number of steps",
    ),
    (
        lambda path: softgap.read(model(), TOKENIZER, "some text", mechanisms=["fitted"]),
        UnsupportedError,
        "mechanism 'fitted' needs the parameters .*, and there is no calibration for this model; make one with "
        "'softgap calibrate', or name a file as in fitted@FILE",
    ),
    (
        lambda path: softgap.read(model(), TOKENIZER, "some text", mechanisms=[f"fitted@{path}"]),
        StoreError,
        "there is no calibration at '.*'; make one with 'softgap calibrate --out .*'",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD)
def test_bad_input_is_one_sentence(
    call: Callable[[Path], object], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=f"^{message}$"):
        call(tmp_path / "out.safetensors")
    assert not list(tmp_path.glob("out*"))


def test_a_foreign_calibration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    made(path)
    with pytest.raises(UnsupportedError, match=r"the calibration '.*' was fitted to the model \w{32} .*, and this one"):
        softgap.read(model(seed=1), TOKENIZER, "some text", mechanisms=[f"fitted@{path}"])


@pytest.mark.parametrize("damage", ["cut", "flip", "other"])
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    made(path)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[-5] ^= 0xFF
        path.write_bytes(content)
    else:
        from safetensors.torch import save_file

        save_file({"x": torch.zeros(2)}, path)
    expected = {
        "cut": "is no whole safetensors file",
        "flip": "is damaged: its tensors do not match their hash",
        "other": "is a safetensors file but no calibration of softgap",
    }
    with pytest.raises(StoreError, match=expected[damage]):
        Calibration.load(path)


def test_the_report_of_a_study_shows_what_its_own_calibration_closes(tmp_path: Path) -> None:
    sharp = attending_llama(max_position_embeddings=1024)
    found = calibrate(sharp, TOKENIZER, [written()], recipe=RECIPE, positions=256)
    softgap.read(sharp, TOKENIZER, written(8), mechanisms=["fitted", "uniform"]).save(tmp_path / "study")
    path = study_calibration(open_study(tmp_path / "study").manifest)
    assert path == calibration_path(found.fingerprint)
    page = write_explorer(tmp_path / "study", tmp_path / "study.html").path.read_text(encoding="utf-8")
    assert "gap closed by the calibration" in page
    assert "energy explained by the calibration" in page
    # A calibration that cannot be read is no reason to write no report.
    path.write_bytes(b"damaged")
    page = write_explorer(tmp_path / "study", tmp_path / "again.html").path.read_text(encoding="utf-8")
    assert "gap closed by the calibration" not in page


def test_a_model_whose_heads_have_no_gap_has_a_report_too(tmp_path: Path) -> None:
    made()
    softgap.read(model(), TOKENIZER, written(8), mechanisms=["fitted", "uniform"]).save(tmp_path / "study")
    assert write_explorer(tmp_path / "study", tmp_path / "study.html").size > 0
