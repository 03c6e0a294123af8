"""Impact by reuse is impact by the loop, and each number is what the definition says."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softgap.attention import resolve
from softgap.errors import SoftgapError, StoreError
from softgap.linearize import Impact, heads_of_layer, impact, swap
from softgap.linearize.impact import impact_on, mean_outputs
from softgap.linearize.sequences import Sequences, recall_sequences, split_sequences
from softgap.models import load_model
from softgap.report.columns import read_columns
from support.linearize_cases import with_random_parameters
from support.model_examples import byte_tokenizer, save_folder, tiny_llama
from support.probe_cases import tiny_with
from support.tiny_models import attention_names

TEXT = "The miller counted his sacks twice, wrote the number on the door, and went to look for the missing one. " * 3
TYPES = "llama mistral gemma2 gpt2 gpt_neox gpt_oss bart qwen3_next jamba deepseek_v3".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def small() -> Any:
    return tiny_llama(num_hidden_layers=3, max_position_embeddings=512).double()


def plain_loop(model: Any, read: Sequences, heads: list[tuple[int, int]], mechanism: Any) -> dict[str, np.ndarray]:
    """The obvious way: a whole forward for every head, logarithms of all probabilities."""
    wanted = read.ids[:, 1:]
    with torch.no_grad():
        base = model(read.ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        found: dict[str, list[np.ndarray]] = {"loss": [], "kl": [], "accuracy": []}
        found |= {} if read.first is None else {"recall": [], "whole_answers": []}
        for head in heads:
            with swap(model, [head], mechanism):
                logs = model(read.ids, use_cache=False).logits[:, :-1].log_softmax(-1)
            rise = (base - logs).gather(-1, wanted[..., None])[..., 0]
            right = (logs.argmax(-1) == wanted).double() - (base.argmax(-1) == wanted).double()
            for name, values in (("loss", rise), ("kl", (base.exp() * (base - logs)).sum(-1)), ("accuracy", right)):
                found[name].append(((values * read.scored).sum(-1) / read.scored.sum(-1)).numpy())
            if read.first is not None:
                shares = [answers_right(logs.argmax(-1) == wanted, read) for logs in (logs, base)]
                found["recall"].append(shares[0][:, 0] - shares[1][:, 0])
                found["whole_answers"].append(shares[0][:, 1] - shares[1][:, 1])
    return {name: np.array(values) for name, values in found.items()}


def answers_right(right: Any, read: Sequences) -> np.ndarray:
    """For every list, the shares of answers whose first token, and of those of which every token is right: loops."""
    shares = []
    assert read.first is not None
    for row, scored, first in zip(right.tolist(), read.scored.tolist(), read.first.tolist(), strict=True):
        answers: list[list[bool]] = []
        for token, counts, begins in zip(row, scored, first, strict=True):
            if begins:
                answers.append([])
            if counts:
                answers[-1].append(token)
        shares.append([np.mean([answer[0] for answer in answers]), np.mean([all(answer) for answer in answers])])
    return np.array(shares)


def test_impact_is_what_the_plain_loop_finds(small: Any) -> None:
    tokenizer = byte_tokenizer()
    found = impact(small, tokenizer, [TEXT], "elu1", length=48, recalls=3)
    read = split_sequences(small, tokenizer, [TEXT], length=48)
    heads = [head for layer in range(3) for head in heads_of_layer(small, layer)]
    assert found.heads == tuple(heads)
    assert found.mechanisms == ("elu1", "constant")
    for place, mechanism in enumerate(("elu1", mean_outputs(small, read))):
        truth = plain_loop(small, read, heads, mechanism)
        for name, values in truth.items():
            np.testing.assert_allclose(found.change[name][place], values, atol=1e-9)
    recall_lists = plain_loop(small, recall_sequences(small, tokenizer, 3), heads, "elu1")
    for name in ("recall", "whole_answers"):
        np.testing.assert_allclose(found.change[name][0], recall_lists[name], atol=1e-9)
    assert np.abs(found.change["loss"]).max() > 1e-3
    assert found.settings["tokens"] == read.ids.numel() - len(read)


@pytest.mark.parametrize("model_type", TYPES)
def test_reuse_equals_the_loop_in_every_family(model_type: str) -> None:
    model = tiny_with(model_type, attn=attention_names(model_type)[-1])
    ids = torch.randint(3, 100, (3, 21), generator=torch.Generator().manual_seed(1))
    read = Sequences(ids, torch.ones(3, 20, dtype=torch.bool))
    both = [impact_on(model, read, None, "elu1", baselines=["zero"], reuse=reuse) for reuse in (True, False)]
    for name in ("loss", "kl", "accuracy"):
        np.testing.assert_allclose(both[0].change[name], both[1].change[name], atol=1e-5)


def test_reuse_computes_no_block_below(small: Any) -> None:
    """Blocks below the swapped layer run once per passage, for the original."""
    heads, ran = heads_of_layer(small, 2), list[int]()  # a model is run once to learn its layout: before it is counted
    hooks = [
        layer.mlp.register_forward_hook(lambda *_, number=number: ran.append(number))
        for number, layer in enumerate(small.model.layers)
    ]
    read = split_sequences(small, byte_tokenizer(), [TEXT], length=48).part(slice(0, 3))
    impact_on(small, read, None, "elu1", baselines=["zero"], heads=heads)
    for hook in hooks:
        hook.remove()
    assert ran.count(0) == ran.count(1) == 1
    assert ran.count(2) == 4  # the original, the check, and once for each of the two mechanisms


def test_heads_are_linearizable_where_they_beat_the_control() -> None:
    rng = np.random.default_rng(0)
    noise = 0.01 * rng.standard_normal((2, 3, 40))
    loss = noise + np.array([[0.0, 0.1, 0.0], [0.1, 0.0, 0.0]])[..., None]
    found = Impact(("elu1", "zero"), ((0, 0), (0, 1), (0, 2)), {}, {"loss": loss}, {})
    np.testing.assert_array_equal(found.linearizable(), [True, False, False])
    interval = found.interval((0, 1))
    assert interval.low < interval.value < interval.high
    assert interval.value == pytest.approx(0.1, abs=0.01)


def test_an_impact_is_saved_and_read_back(small: Any, tmp_path: Path) -> None:
    found = impact(small, byte_tokenizer(), [TEXT], "uniform", baselines=["zero"], length=48, recalls=1)
    again = Impact.load(found.save(tmp_path / "impact.npz"))
    assert (again.mechanisms, again.heads, again.settings) == (found.mechanisms, found.heads, found.settings)
    for name, values in found.change.items():
        np.testing.assert_array_equal(again.change[name], values)


def test_the_map_of_the_report_takes_an_impact(tmp_path: Path) -> None:
    change = np.arange(12.0).reshape(2, 3, 2)
    found = Impact(("elu1", "constant"), ((0, 0), (0, 1), (1, 0)), {}, {"loss": change})
    columns = {column.label: column.values for column in read_columns(found.write_heads(tmp_path / "impact.csv"))}
    assert columns["loss, swapped for elu1"] == {(0, 0): 0.5, (0, 1): 2.5, (1, 0): 4.5}
    assert columns["loss, swapped for constant"][1, 0] == 10.5
    with pytest.raises(StoreError, match="cannot write"):
        found.write_heads(tmp_path / "nowhere" / "impact.csv")


def test_recall_lists_ask_for_what_stands_in_their_context(small: Any) -> None:
    tokenizer = byte_tokenizer()
    recall_lists = recall_sequences(small, tokenizer, 4, pairs=5, seed=3)
    for row, scored in zip(recall_lists.ids, recall_lists.scored, strict=True):
        lines = str(tokenizer.decode(row)).split("\n")[1:11]
        assert sorted(lines[:5]) == sorted(lines[5:10])
        answers = tokenizer.decode(row[1:][scored])
        assert answers == "".join(line.split(":")[1] for line in lines[5:10])
    assert not torch.equal(recall_lists.ids[0], recall_lists.ids[1])


def test_bad_input_is_one_sentence(small: Any, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(SoftgapError, match=r"at least 512 tokens.*got 5; give more text"):
        impact(small, tokenizer, ["short"], "elu1")
    with pytest.raises(SoftgapError, match="heads of layer 1 are 0 to 3, got"):
        impact(small, tokenizer, [TEXT], "elu1", length=48, heads=[(1, 9)])
    with pytest.raises(SoftgapError, match="must differ, got elu1, elu1"):
        impact(small, tokenizer, [TEXT], "elu1", baselines=["elu1"], length=48)
    with pytest.raises(SoftgapError, match="context of 512 tokens, got 4000"):
        impact(small, tokenizer, [TEXT], "elu1", length=4000)
    (tmp_path / "no.npz").write_text("no")
    with pytest.raises(SoftgapError, match="cannot read an impact"):
        Impact.load(tmp_path / "no.npz")
    alone = Impact(("elu1",), ((0, 0),), {}, {"loss": np.zeros((1, 1, 2))})
    with pytest.raises(SoftgapError, match="no baseline to compare with"):
        alone.linearizable()
    whole = alone.save(tmp_path / "cut.npz").read_bytes()
    for length in range(0, len(whole), 97):
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        with pytest.raises(SoftgapError, match="cannot read an impact"):
            Impact.load(tmp_path / "cut.npz")
    for mechanisms, heads, change in (
        ((), ((0, 0),), np.zeros((1, 1, 2))),
        (("elu1",), ((0, 0), (0, 1)), np.zeros((1, 1, 2))),
        (("elu1",), ((0, 0),), np.zeros((1, 1, 2), dtype="S3")),
        (("elu1",), ((0, 0),), np.zeros((1, 2))),
        (("elu1",), ("ab",), np.zeros((1, 1, 2))),
    ):
        Impact(mechanisms, heads, {}, {"loss": change}).save(tmp_path / "wrong.npz")  # type: ignore[arg-type]
        with pytest.raises(SoftgapError, match="cannot read an impact"):
            Impact.load(tmp_path / "wrong.npz")
    mechanism = with_random_parameters("fitted", 2, 4, 2, 8, 8)
    with pytest.raises(SoftgapError, match="must be for 3 layers"):
        impact(small, tokenizer, [TEXT], mechanism, length=48)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("reuse", [True, False])
def test_a_cluster_with_a_worker_that_dies_measures_the_same_impact(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reuse: bool
) -> None:
    folder = save_folder(tmp_path / "tiny", tiny_llama(num_hidden_layers=3, max_position_embeddings=512))
    model, tokenizer = load_model(folder, progress=False)
    marker = Path.cwd() / "marker" / "died"
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.chdir(tmp_path)  # workers do not import from the current folder
    deadly = importlib.import_module("deadly")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        options: dict[str, Any] = {"heads": [(0, 0), (2, 1), (2, 3)], "length": 64, "recalls": 3, "reuse": reuse}
        local = impact(model, tokenizer, [TEXT * 9], "elu1", **options)
        spread = impact(
            model, tokenizer, [TEXT * 9], deadly.Substitute(resolve("elu1")), engine="ray", address=cluster, **options
        )
    finally:
        torch.set_num_threads(threads)
    assert int(marker.read_text()) != os.getpid()
    assert len(local.original["loss"]) > 8
    assert (spread.mechanisms, spread.heads, spread.settings) == (local.mechanisms, local.heads, local.settings)
    for name in local.change:
        assert spread.original[name].tobytes() == local.original[name].tobytes()
        assert spread.change[name].tobytes() == local.change[name].tobytes()
