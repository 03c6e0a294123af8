"""lm_eval: the harness scores the model as it is, and under a plan what a forward under that plan gives."""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softgap.attention import resolve
from softgap.errors import UnknownNameError, UnsupportedError, ValueInputError
from softgap.evaluation import lm_eval
from softgap.intervals import interval_of
from softgap.linearize import Plan, Substitute, apply
from softgap.models import model_fingerprint
from support.model_examples import attending_llama, byte_tokenizer

WORDS = ("amber", "birch", "coral", "dune", "ember", "fjord")
HEADS = tuple((layer, head) for layer in range(2) for head in range(4))


def documents() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    lists = [rng.choice(WORDS, 12).tolist() for _ in range(24)]
    return [{"prompt": " ".join(words[2:]), "words": words[:2], "right": i % 2} for i, words in enumerate(lists)]


def random_states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002


@pytest.fixture(scope="module")
def model() -> Any:
    return attending_llama(max_position_embeddings=512)


@pytest.fixture(scope="module")
def plan(model: Any) -> Plan:
    window = Substitute(resolve("window:w=4,sinks=1"))
    return Plan("tiny", model_fingerprint(model), HEADS, (), (), window)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one task and its data; the harness and its libraries may not use the network."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'softgap[lm-eval]'")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "words.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents()), encoding="utf-8")
    common: dict[str, Any] = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test",
        "doc_to_text": "{{prompt}}", "metadata": {"version": 3},
    }  # fmt: skip
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{words}}", "doc_to_target": "{{right}}"}
    score = {"output_type": "loglikelihood", "doc_to_target": " {{words[right]}}"}
    for name, task in (("choose", choice), ("score", score)):
        # JSON is YAML.
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}), encoding="utf-8")
    return tmp_path


def log_likelihoods(model: Any) -> list[list[float]]:
    """Of each document's words after its prompt, from one plain forward per word."""
    tokenizer = byte_tokenizer()
    found = []
    for document in documents():
        totals = []
        for word in document["words"]:
            start = len(tokenizer(document["prompt"])["input_ids"])
            ids = torch.tensor([tokenizer(f"{document['prompt']} {word}")["input_ids"]])
            with torch.inference_mode():
                scores = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
            totals.append(sum(float(scores[t - 1, ids[0, t]]) for t in range(start, ids.shape[1])))
        found.append(totals)
    return found


def by_hand(model: Any) -> tuple[list[float], float]:
    """Which documents' right words are the likelier ones, and the perplexity of the right words."""
    totals, rights = log_likelihoods(model), [document["right"] for document in documents()]
    acc = [float(np.argmax(each) == right) for each, right in zip(totals, rights, strict=True)]
    return acc, math.exp(-np.mean([each[right] for each, right in zip(totals, rights, strict=True)]))


def test_the_model_alone_scores_what_a_plain_forward_gives(model: Any, folder: Path) -> None:
    tokenizer = byte_tokenizer()
    before = random_states()
    special = tokenizer.special_tokens_map
    found = lm_eval(model, tokenizer, ["choose", "score"], include_path=folder)
    acc, perplexity = by_hand(model)
    (row,) = found.select(task="choose", metric="acc,none")
    assert (row.samples, row.original.value, row.changed, row.change) == (24, float(np.mean(acc)), None, None)
    assert row.original.low < row.original.value < row.original.high
    (row,) = found.select(task="score", metric="perplexity,none")
    assert row.original.value == pytest.approx(perplexity, rel=1e-5)
    assert math.isnan(row.original.low)  # it is no mean over documents
    assert found.original["choose"]["acc,none"] == np.mean(acc)
    assert (found.label, found.changed) == ("", None)
    assert found.fingerprint == model_fingerprint(model)
    assert found.provenance["task_versions"] == {"choose": 3, "score": 3}
    assert found.provenance["threads"] == torch.get_num_threads()
    assert {"lm_eval", "torch", "transformers", "softgap"} <= set(found.provenance)
    assert random_states() == before
    assert tokenizer.special_tokens_map == special


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_plan_acts_inside_the_harness(model: Any, plan: Plan, folder: Path, batch_size: int) -> None:
    found = lm_eval(
        model, byte_tokenizer(), ["choose", "score"], under=lambda: apply(model, plan), label="window",
        include_path=folder, batch_size=batch_size,
    )  # fmt: skip
    first, before = by_hand(model)
    with apply(model, plan):
        second, after = by_hand(model)
    assert abs(after - before) > 1e-3 * before
    (row,) = found.select(task="score", metric="perplexity,none")
    assert row.changed is not None
    assert (row.original.value, row.changed.value) == pytest.approx((before, after), rel=1e-5)
    assert row.change is None
    (row,) = found.select(task="choose", metric="acc,none")
    assert first != second
    assert row.change is not None
    assert row.changed is not None
    assert (row.original.value, row.changed.value) == (float(np.mean(first)), float(np.mean(second)))
    differences = np.array(second) - np.array(first)
    assert row.change == interval_of(differences, rng=np.random.default_rng(0))
    assert found.label == "window"
    assert by_hand(model) == (first, before)


def test_a_plan_acts_on_what_the_harness_lets_the_model_write(folder: Path) -> None:
    tokenizer: Any = byte_tokenizer()
    model: Any = attending_llama(max_position_embeddings=512)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 50  # what it writes hangs on attention, not on the last token alone
    plan = Plan("tiny", model_fingerprint(model), HEADS, (), (), Substitute(resolve("window:w=1,sinks=0")))
    prompts = [document["prompt"] for document in documents()]

    def written() -> list[str]:
        found = []
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            found.append(tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True).split("\n")[0])
        return found

    first = written()
    with apply(model, plan):
        second = written()
    rows = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, second, strict=True)]
    (folder / "written.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": "write", "dataset_path": "json", "test_split": "test", "output_type": "generate_until",
        "dataset_kwargs": {"data_files": {"test": str(folder / "written.jsonl")}}, "doc_to_text": "{{prompt}}",
        "doc_to_target": "text", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    (folder / "write.yaml").write_text(json.dumps(task), encoding="utf-8")
    found = lm_eval(model, tokenizer, ["write"], under=lambda: apply(model, plan), include_path=folder)
    (row,) = found.select(task="write", metric="exact_match,none")
    assert row.changed is not None
    same = float(np.mean([a == b for a, b in zip(first, second, strict=True)]))
    assert same < 1
    assert (row.original.value, row.changed.value) == (same, 1.0)


def test_provenance_tells_plans_apart(model: Any, plan: Plan, folder: Path) -> None:
    other = replace(plan, substitute=Substitute(resolve("window:w=5,sinks=1")))

    def digest_of(used: Plan) -> str:
        under = partial(apply, model, used)
        found = lm_eval(model, byte_tokenizer(), ["choose"], under=under, include_path=folder, limit=1)
        return str(found.provenance["plan"])

    digests = [digest_of(used) for used in (plan, plan, other)]
    assert digests[0] == digests[1] != digests[2]
    assert "plan" not in lm_eval(model, byte_tokenizer(), ["choose"], include_path=folder, limit=1).provenance


def test_a_result_is_saved_as_json(model: Any, folder: Path) -> None:
    found = lm_eval(model, byte_tokenizer(), "score", include_path=folder, limit=2)
    data = json.loads(found.save(folder / "found.json").read_text(encoding="utf-8"))
    (row,) = (row for row in data["rows"] if row["metric"] == "perplexity,none")
    assert row["samples"] == 2
    assert row["original"] == {
        "value": found.select(metric="perplexity,none")[0].original.value,
        "low": None,
        "high": None,
    }
    assert data["provenance"]["limit"] == 2


def test_wrong_input_is_refused_in_a_sentence(model: Any, folder: Path) -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueInputError, match=r"include_path must be a folder with task files, got 'nowhere'"):
        lm_eval(model, tokenizer, ["choose"], include_path="nowhere")
    with pytest.raises(ValueInputError, match="no task was given"):
        lm_eval(model, tokenizer, [])
    with pytest.raises(UnsupportedError, match="tokenizer has no chat template; leave chat out"):
        lm_eval(model, tokenizer, ["choose"], include_path=folder, chat=True)


@pytest.mark.slow  # the harness reads thousands of task files
def test_an_unknown_task_is_refused_with_the_nearest_name(model: Any, folder: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown task of lm-evaluation-harness 'chose'; did you mean 'choose'"):
        lm_eval(model, byte_tokenizer(), ["chose"], include_path=folder)


def test_without_the_harness_the_error_names_the_command(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'softgap\[lm-eval\]'"):
        lm_eval(model, byte_tokenizer(), ["choose"])
