"""`softgap read`: texts and JSON lines, read as the Python surface reads them, and refused line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import softgap
from softgap.cli import main
from softgap.trajectories import load, open_study
from support.cli_examples import Terminal, contents, failure, loads_once, tiny_folder, type_in, without_progress
from support.kind_examples import MAP, calibrated_folder

TEXT = "The fox 🦊 ran.\n"
SAMPLES: list[dict[str, Any]] = [
    {"prompt": "The fox", "completion": " ran", "label": "animal"},
    {"prompt": "Two and\u2028two", "completion": " are four", "id": 7, "source": "ignored"},
    {"prompt": "A map", "completion": " of the coast", "id": "map", "label": "place"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", autouse=True)
def all_loads() -> Iterator[list[str | None]]:
    with pytest.MonkeyPatch.context() as patch:
        yield loads_once(patch)


@pytest.fixture
def loads(all_loads: list[str | None]) -> list[str | None]:
    """Names of the models that this test loads."""
    all_loads.clear()
    return all_loads


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds a text and samples."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    (place / "fox.txt").write_text(TEXT, encoding="utf-8")
    # Unescaped, so that the line separator inside a text stands in the file as it is.
    lines = [json.dumps(sample, ensure_ascii=False) for sample in SAMPLES]
    (place / "many.jsonl").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return place


def test_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["read", "many.jsonl", "--json", "--out", "a"]) == 0
    shown = capsys.readouterr()
    assert without_progress(shown.err) == ""
    document = json.loads(shown.out)
    assert (document["model"], document["out"]) == ("smollm2-135m", "a")
    assert [row["id"] for row in document["samples"]] == ["0", "7", "map"]
    study = open_study("a")
    assert (study.ids, study.state) == (("0", "7", "map"), "finished")
    for row, run in zip(document["samples"], study, strict=True):
        values = run.divergence.astype(np.float64)
        assert row["means"]["elu1"]["divergence"] == pytest.approx(values.mean(), rel=1e-12)
        assert row["n_steps"] == run.n_steps
    every = [row["means"]["uniform"]["divergence"] for row in document["samples"]]
    assert document["all"]["means"]["uniform"]["divergence"] == pytest.approx(np.mean(every), rel=1e-12)
    assert len(document["all"]["heads"]) == 30 * 9


@pytest.mark.parametrize("given", ["file", "standard input"])
def test_a_text_is_read_as_it_stands(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    type_in(monkeypatch, TEXT.encode())
    name = "fox.txt" if given == "file" else "-"
    assert main(["read", name, "--model", str(folder), "--out", "a", "--mechanism", "taylor2", "--focus"]) == 0
    captured = capsys.readouterr()
    assert (without_progress(captured.err), captured.out.endswith("\na\n")) == ("", True)
    assert "The fox 🦊 ran.\n" in captured.out
    model, tokenizer = softgap.load_model(folder)
    expected = softgap.read(model, tokenizer, TEXT, mechanisms=["taylor2", "uniform"], focus=True)
    saved = load("a")
    assert saved.manifest.differences(expected.manifest) == []
    assert saved.completion_text == TEXT
    np.testing.assert_array_equal(saved.divergence, expected.divergence)
    assert f"S(a) {expected.focus['sparsity'].mean():.3f}, attention entropy " in captured.out


@pytest.mark.parametrize("given", ["file", "standard input"])
def test_json_lines_become_one_study(
    folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    type_in(monkeypatch, (here / "many.jsonl").read_bytes())
    name = ["many.jsonl"] if given == "file" else ["-", "--jsonl"]
    assert main(["read", *name, "--model", str(folder), "--out", "a"]) == 0
    captured = capsys.readouterr()
    assert (without_progress(captured.err), captured.out.endswith("\na\n")) == ("", True)
    model, tokenizer = softgap.load_model(folder)
    prompts, completions = ([str(sample[key]) for sample in SAMPLES] for key in ("prompt", "completion"))
    together = softgap.read(model, tokenizer, prompts, completions)
    study = open_study("a")
    assert study.manifest.differences(together[0].manifest) == []
    assert sorted(path.name for path in Path("a/samples").iterdir()) == [f"part-0000{i}.parquet" for i in range(3)]
    for run, prompt, completion, sample in zip(study, prompts, completions, SAMPLES, strict=True):
        expected = softgap.read(model, tokenizer, prompt, completion)
        np.testing.assert_array_equal(run.divergence, expected.divergence)
        assert (run.prompt_text, run.completion_text, run.label) == (prompt, completion, sample.get("label"))
        row = rf"^{run.sample_id} +({run.label})? +{run.n_prompt} +{run.n_steps} +{run.divergence.mean():.3f} "
        assert re.search(row, captured.out, flags=re.MULTILINE)


def test_a_calibrated_model_shows_the_map_by_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOFTGAP_CALIBRATIONS", str(tmp_path / "calibrations"))
    model = str(calibrated_folder(tmp_path / "calibrated"))
    for file in ("fox.txt", "many.jsonl"):
        assert main(["read", file, "--model", model, "--out", file.partition(".")[0]]) == 0
        lines = capsys.readouterr().out.splitlines()
        at = lines.index("The cheapest substitute that suffices, by head (rows) and layer (columns)")
        assert lines[at + 1 : at + 6] == MAP
        assert not any(line.startswith("share of the gap that the fitted map leaves") for line in lines)
        assert open_study(file.partition(".")[0]).manifest.extra["held_out"]["kinds"] == {"0": "wSfh", "1": "cpww"}


def test_prompts_may_be_wrapped_in_the_chat_template(folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = softgap.load_model(folder)
    monkeypatch.setattr(tokenizer, "chat_template", "<s>{{ messages[0]['content'] }}</s>")
    monkeypatch.setattr("softgap.models.load_model", lambda *_, **__: (model, tokenizer))
    assert main(["read", "many.jsonl", "--chat", "--out", "a"]) == 0
    expected = softgap.read(model, tokenizer, "The fox", " ran", chat=True)
    saved = next(iter(open_study("a")))
    assert saved.n_prompt == expected.n_prompt == len("The fox") + 2
    assert saved.manifest.options["chat"] is True


def test_many_samples_show_a_bar(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert main(["read", "many.jsonl", "--model", str(folder), "--json"]) == 0
    assert "3/3" in terminal.getvalue()
    out = json.loads(capsys.readouterr().out)["out"]
    assert re.fullmatch(r"runs/many-\d{8}-\d{6}", out)
    assert open_study(out).state == "finished"


def test_ctrl_c_keeps_what_was_finished(
    folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = softgap.probe.read
    read: list[str] = []

    def interrupted(model: Any, tokenizer: Any, text: str, *rest: Any, **options: Any) -> Any:
        if len(read) == stop:
            raise KeyboardInterrupt
        read.append(text)
        return original(model, tokenizer, text, *rest, **options)

    monkeypatch.setattr("softgap.probe.read", interrupted)
    arguments = ["read", "many.jsonl", "--model", str(folder), "--out", "a"]
    stop = 0
    assert failure(arguments, capsys, code=130) == "interrupted"
    assert not Path("a").exists()
    stop = 2
    assert failure(arguments, capsys, code=130) == "interrupted; 2 of 3 samples are saved in 'a'"
    study = open_study("a")
    assert (study.ids, study.state) == (("0", "7"), "running")
    assert [run.completion_text for run in study] == [" ran", " are four"]


BAD_LINES = {
    "no JSON": ('{"prompt": "a"', r"'bad.jsonl', line 3: not JSON \(.*\); write one object per line, such as .*"),
    "no object": ("[1, 2]", r"'bad.jsonl', line 3: must be an object with prompt and completion, got \[1, 2\]; .*"),
    "no prompt": ('{"completion": "b"}', r"'bad.jsonl', line 3: 'prompt' must hold some text, got None; add it"),
    "a number": ('{"prompt": 1, "completion": "b"}', r"'bad.jsonl', line 3: 'prompt' must hold some text, got 1; .*"),
    "a blank prompt": (
        '{"prompt": " ", "completion": "b"}',
        r"'bad.jsonl', line 3: 'prompt' must hold some text, got ' '; .*",
    ),
    "no completion": (
        '{"prompt": "a", "completion": ""}',
        r"'bad.jsonl', line 3: 'completion' must hold some text, got ''; add it",
    ),
    "an id twice": (
        '{"prompt": "a", "completion": "b", "id": 0}',
        r"'bad.jsonl', line 3: every id must be different, got '0' again after line 1; rename one",
    ),
    "a strange id": (
        '{"prompt": "a", "completion": "b", "id": [1]}',
        r"'bad.jsonl', line 3: 'id' must be text or a whole number, got \[1\]; change it",
    ),
    "a strange label": (
        '{"prompt": "a", "completion": "b", "label": 1}',
        r"'bad.jsonl', line 3: 'label' must be text, got 1; write it in quotes",
    ),
    "half a character": (
        '{"prompt": "a", "completion": "\\ud83e"}',
        r"'bad.jsonl', line 3: 'completion' must be valid UTF-8, got '\\ud83e'; .*",
    ),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_before_a_model_is_loaded(
    here: Path, loads: list[str | None], capsys: pytest.CaptureFixture[str], case: str
) -> None:
    line, sentence = BAD_LINES[case]
    (here / "bad.jsonl").write_text(f'{{"prompt": "a", "completion": "b"}}\n\n{line}\n', encoding="utf-8")
    before = contents(here)
    assert re.fullmatch(sentence, failure(["read", "bad.jsonl"], capsys))
    assert loads == []
    assert contents(here) == before


def test_a_line_too_long_for_the_model_is_named_before_the_first_is_read(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps({"prompt": "x" * 60, "completion": "y" * 6})
    (here / "long.jsonl").write_text(f'{{"prompt": "a", "completion": "b"}}\n{line}\n', encoding="utf-8")
    before = contents(here)
    assert failure(["read", "long.jsonl", "--model", str(folder), "--out", "a"], capsys) == (
        "'long.jsonl', line 2: the model's context is 64 tokens, got 65 tokens; shorten the text"
    )
    assert contents(here) == before


# Arguments after `read`, the sentence.
REFUSED = {
    "no file": (["nothing.txt"], r"cannot read 'nothing.txt': No such file or directory; give a text file, or - .*"),
    "a folder": (["."], r"cannot read '\.': Is a directory; .*"),
    "an empty file": (["empty.txt"], r"'empty.txt' must hold some text, got ''; .*"),
    "no lines": (
        ["empty.jsonl"],
        r"'empty.jsonl' must hold at least one JSON line with prompt and completion, got none.*",
    ),
    "bytes": (["bytes.txt"], r"'bytes.txt' must be UTF-8 text, got the byte 0xff at 1; convert it first"),
    "a chat of one": (["fox.txt", "--chat"], r"--chat needs prompts and completions, got a plain text; .*"),
    "an unknown mechanism": (["fox.txt", "--mechanism", "elu_1"], r"unknown mechanism 'elu_1'; did you mean 'elu1'\?"),
    "a file as study": (
        ["fox.txt", "--out", "fox.txt"],
        r"a study is written to a folder, but 'fox.txt' is a file; .*",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_a_model_is_loaded(
    here: Path, loads: list[str | None], capsys: pytest.CaptureFixture[str], case: str
) -> None:
    for name, content in (("empty.txt", b""), ("empty.jsonl", b"\n \n"), ("bytes.txt", b"a\xff")):
        (here / name).write_bytes(content)
    arguments, sentence = REFUSED[case]
    before = contents(here)
    assert re.fullmatch(sentence, failure(["read", *arguments], capsys))
    assert loads == []
    assert contents(here) == before


def test_anatomy_of_named_heads_is_stored_for_every_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(folder), "--mechanism", "elu1", "--anatomy", "1.2,0.3"]
    assert main(["read", "many.jsonl", "--out", "a", *options]) == 0
    study = open_study("a")
    for sample_id in study.ids:
        heads = study.anatomy(sample_id)
        assert [(head.name, head.mechanisms) for head in heads] == [
            ("1.2", ("softmax", "elu1")),
            ("0.3", ("softmax", "elu1")),
        ]
        assert heads[0].keys.shape[1] == int(study.sample(sample_id).positions[-1]) + 1
    # Without it the folder is not there, and what replaces a study has no old one.
    assert main(["read", "many.jsonl", "--out", "a", *options[:-2], "--overwrite"]) == 0
    assert open_study("a").anatomy("7") == ()
    capsys.readouterr()
    refused = failure(["read", "fox.txt", "--out", "b", "--model", str(folder), "--anatomy", "5.1"], capsys)
    assert refused.startswith("head 5.1 must be in a layer with attention, which are 0 to 1 here")
    assert not Path("b").exists()
