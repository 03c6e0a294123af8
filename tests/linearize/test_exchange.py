"""Plans in the formats of other tools, and back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import softgap
from softgap.attention import resolve
from softgap.errors import SoftgapError
from softgap.linearize import Mixture, Plan, Substitute, apply, export_plan, import_pattern, swap
from softgap.models.fingerprint import model_fingerprint
from support.model_examples import byte_tokenizer, tiny_llama

HEADS = ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3))
GROUPS = ((0, 0), (1, 0), (1, 1))


def plan_of(model: Any, name: str = "window:w=5,sinks=2", heads: Any = HEADS, groups: Any = GROUPS) -> Plan:
    layers = (1,) if heads == HEADS else ()
    return Plan("tiny", model_fingerprint(model), heads, groups, layers, Substitute(resolve(name)))


def test_a_pattern_returns_as_the_same_plan(tmp_path: Path) -> None:
    model = tiny_llama()
    export = export_plan(model, plan_of(model), tmp_path / "pattern")
    assert export.files == ("config.json", "full_attention_heads.tsv")
    assert export.lost == ""
    rows = (tmp_path / "pattern/full_attention_heads.tsv").read_text().splitlines()
    assert rows == ["0.0\t1.0", "0.0\t0.0"]
    assert json.loads((tmp_path / "pattern/config.json").read_text()) == {"sink_size": 2, "recent_size": 5}
    plan = import_pattern(model, tmp_path / "pattern")
    assert (plan.heads, plan.groups, plan.layers) == (HEADS, GROUPS, (1,))
    assert plan.substitute.name == "window:w=5,sinks=2"
    assert not plan.expected
    ids = torch.arange(3, 23)[None]
    with torch.no_grad(), apply(model, plan):
        logits = model(ids).logits
    with torch.no_grad(), swap(model, HEADS, "window:w=5,sinks=2"):
        assert torch.equal(model(ids).logits, logits)


def test_an_export_says_what_it_loses(tmp_path: Path) -> None:
    model = tiny_llama()
    hybrid = export_plan(model, plan_of(model, "elu1+window:w=7,sinks=3"), tmp_path / "hybrid")
    assert "they stream with 3 sinks and 7 recent keys, the most common window of the plan" in hybrid.lost
    linear = export_plan(model, plan_of(model, "elu1"), tmp_path / "linear")
    assert "the window of equal memory" in linear.lost
    partial = plan_of(model, heads=((0, 0), (0, 1), (1, 0)), groups=((0, 0),))
    assert (
        "1 swapped head whose KV group keeps softmax in another head"
        in export_plan(model, partial, tmp_path / "partial").lost
    )
    mixture = Mixture([(((0, 0), (0, 1)), resolve("window:w=5,sinks=2")), (((1, 0), (1, 1)), resolve("zero"))])
    mixed = Plan("tiny", model_fingerprint(model), mixture.heads, ((0, 0), (1, 0)), (), mixture)
    assert "zero" in export_plan(model, mixed, tmp_path / "mixed").lost


def test_a_list_of_layers_names_those_that_keep_a_head(tmp_path: Path) -> None:
    model = tiny_llama()
    export = export_plan(model, plan_of(model), tmp_path / "layers", format="layers")
    document = json.loads((tmp_path / "layers/full_attention_layers.json").read_text())
    assert (document["full_attention_layers"], document["swapped_layers"]) == ([0], [1])
    assert "the swapped heads of 1 layer that keeps softmax in another head" in export.lost


def test_a_folder_is_the_original_for_transformers_and_the_plan_for_softgap(tmp_path: Path) -> None:
    model: Any = tiny_llama()
    folder = tmp_path / "folder"
    plan = plan_of(model, "elu1+window:w=5,sinks=2")
    export = export_plan(model, plan, folder, format="folder", tokenizer=byte_tokenizer())
    assert {"config.json", "model.safetensors", "softgap_plan.json", "tokenizer.json"} <= set(export.files)
    assert export.lost == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        original = model(ids).logits
        with apply(model, plan) as applied:
            planned = model(ids).logits
            written = model.generate(ids, max_new_tokens=6, do_sample=False, past_key_values=applied.cache())
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, original)
        loaded: Any
        loaded, _ = softgap.load_model(folder, progress=False)
        assert torch.equal(loaded(ids).logits, planned)
        assert torch.equal(loaded.generate(ids, max_new_tokens=6, do_sample=False), written)
        assert torch.equal(softgap.models.load_model(folder, progress=False)[0](ids).logits, original)
    with pytest.raises(SoftgapError, match="plan"):
        softgap.load_model(folder, dtype="bfloat16", progress=False)
    # Weights of another model beside the plan are noticed.
    tiny_llama(seed=1).save_pretrained(folder)
    with pytest.raises(SoftgapError, match="plan"):
        softgap.load_model(folder, progress=False)


def test_a_folder_without_a_tokenizer_says_so_and_is_replaced_whole(tmp_path: Path) -> None:
    model, folder = tiny_llama(), tmp_path / "folder"
    assert "no tokenizer" in export_plan(model, plan_of(model), folder, format="folder").lost
    export_plan(model, plan_of(model), folder, overwrite=True)
    names = ["config.json", "full_attention_heads.tsv", "softgap_export.json"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_an_export_goes_into_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    model = tiny_llama()
    export_plan(model, plan_of(model), ".")
    assert sorted(path.name for path in Path().iterdir())[-1] == "softgap_export.json"
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_an_export_replaces_only_an_export(tmp_path: Path) -> None:
    model, folder = tiny_llama(), tmp_path / "pattern"
    export_plan(model, plan_of(model), folder)
    sentence = f"'{folder}' is not empty; choose another folder, or overwrite an earlier export"
    with pytest.raises(SoftgapError, match=rf"^{re.escape(sentence)}$"):
        export_plan(model, plan_of(model), folder)
    export_plan(model, plan_of(model), folder, format="layers", overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["full_attention_layers.json", "softgap_export.json"]
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(SoftgapError, match=r"holds 'mine\.txt', which no export of softgap wrote"):
        export_plan(model, plan_of(model), folder, overwrite=True)
    assert (folder / "full_attention_layers.json").exists()
    with pytest.raises(SoftgapError, match="is a file, and an export is a folder"):
        export_plan(model, plan_of(model), folder / "mine.txt", overwrite=True)


def test_bad_patterns_are_refused_in_one_sentence(tmp_path: Path) -> None:
    model, folder = tiny_llama(), tmp_path / "pattern"
    with pytest.raises(SoftgapError, match="cannot read a pattern from"):
        import_pattern(model, folder)
    export_plan(model, plan_of(model), folder)
    table, sizes = folder / "full_attention_heads.tsv", folder / "config.json"
    for text, message in (
        ("0\t1\n", "is for 1 layers of 2 KV heads, and this model has 2 of 2"),
        ("0\tone\n1\t1\n", "holds no pattern of DuoAttention"),
        ("0\tnan\n1\t1\n", "must hold finite numbers"),
        ("1\t1\n1\t1\n", "no KV head of the pattern in .* is below the threshold 0.5, the smallest value is 1"),
    ):
        table.write_text(text)
        with pytest.raises(SoftgapError, match=message):
            import_pattern(model, folder)
    table.write_text("0\t1\n1\t1\n")
    for document, message in (
        ('{"sink_size": 4}', "holds no pattern of DuoAttention"),
        ('{"sink_size": -1, "recent_size": 5}', "sink_size in .* must be a whole number from 0"),
        ('{"sink_size": 4, "recent_size": 2.5}', "recent_size in .* must be a whole number from 1"),
    ):
        sizes.write_text(document)
        with pytest.raises(SoftgapError, match=message):
            import_pattern(model, folder)
    with pytest.raises(SoftgapError, match="threshold must be above 0 and at most 1, got 2"):
        import_pattern(model, folder, threshold=2)
    with pytest.raises(SoftgapError, match="format must be one of duo, layers, folder, got 'gguf'"):
        export_plan(model, plan_of(model), tmp_path / "x", format="gguf")  # type: ignore[arg-type]
    alone = plan_of(model, heads=((0, 0),), groups=())
    with pytest.raises(SoftgapError, match="the plan swaps none whole"):
        export_plan(model, alone, tmp_path / "x")
