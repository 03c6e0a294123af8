"""Bad input to the labs, through the command line: one sentence with the rule, the value given and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cli_examples import failure
from support.model_examples import save_folder, tiny_llama

LABS = ("injectivity", "separation", "focus", "position")
FITTED = "query_weight, query_bias, key_weight, key_bias, rate"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "separation --n 100 --d 34 --t 3",
            "n must be (d - 2) t, got n = 100, d = 34, t = 3 with (d - 2) t = 96; leave one of them out, or allow "
            "sizes outside the construction with --allow-breaks",
        ),
        (
            "separation --b 0.5 --c 0.6",
            "b + c must be 1, got 0.5 + 0.6 = 1.1; leave c out, or allow sizes outside the construction "
            "with --allow-breaks",
        ),
        (
            "separation --b 0.95",
            "b and c must be at least 0.1, got b = 0.95 and c = 0.05; enlarge them, or allow sizes outside "
            "the construction with --allow-breaks",
        ),
        (
            "injectivity --keys 1",
            "a key matrix needs at least 2 rows, got 1; with one key every query has the same weights",
        ),
        (
            "injectivity --dim 8 --keys 9",
            "dim must be at least 2 and keys at least dim + 2, got dim 8 and keys 9; use more keys",
        ),
        (
            "position --heads 3",
            "heads must be at least 8 and dim at least 2, got 3 and 64; use more",
        ),
        (
            "position --tokens 20",
            "a text must have at least 24 tokens to show a trend from position 8 on, got 20; give a longer text",
        ),
        (
            "focus --keys 8",
            "the focus lab needs n from 64, d from 2 and draws from 10, got 8, 64 and 400; use more",
        ),
    ],
)
def test_sizes(arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(["lab", *arguments.split()], capsys) == sentence


@pytest.mark.parametrize("lab", LABS)
def test_a_mechanism_without_its_parameters(lab: str, capsys: pytest.CaptureFixture[str]) -> None:
    remedy = {
        "separation": ", which the separation data do not provide; choose another mechanism, or pass them with "
        "Mechanism.with_parameters"
    }.get(lab, f" and has no {FITTED}; give them with Mechanism.with_parameters or calibrate the model")
    sentence = f"mechanism 'fitted' needs the parameters {FITTED}{remedy}"
    assert failure(["lab", lab, "--mechanism", "fitted"], capsys) == sentence


@pytest.mark.parametrize("lab", ["injectivity", "focus", "position"])
def test_names_are_checked_before_a_model_is_loaded(lab: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["lab", lab, "--model", "nowhere/at-all", "--mechanism", "elu2"]
    assert failure(given, capsys).startswith("unknown mechanism 'elu2'; did you mean 'relu'?")


@pytest.mark.parametrize("lab", ["injectivity", "focus", "position"])
def test_a_model_without_a_calibration(lab: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_folder(tmp_path / "model", tiny_llama())
    capsys.readouterr()  # saving a model shows a bar
    sentence = f"mechanism 'fitted' needs the parameters {FITTED}, and there is no calibration for this model; "
    assert failure(["lab", lab, "--model", str(folder), "--mechanism", "fitted"], capsys).startswith(sentence)


def test_a_text_that_is_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_folder(tmp_path / "model", tiny_llama())
    (tmp_path / "short.txt").write_text("Too short.")
    capsys.readouterr()  # saving a model shows a bar
    sentences = {
        "injectivity": "a text must have at least 20 tokens for heads of dimension 8, got 10; give a longer text",
        "focus": "a text must have at least 64 tokens for this lab, got 10; give a longer one",
        "position": "a text must have at least 24 tokens to show a trend from position 8 on, got 10; give a longer "
        "text",
    }
    for lab, sentence in sentences.items():
        given = ["lab", lab, "--model", str(folder), "--text", str(tmp_path / "short.txt")]
        assert failure(given, capsys) == sentence
    (tmp_path / "empty.txt").write_text(" \n")
    for lab in sentences:
        given = ["lab", lab, "--model", str(folder), "--text", str(tmp_path / "empty.txt")]
        assert failure(given, capsys).startswith(f"'{tmp_path / 'empty.txt'}' must hold some text, got ' \\n'")
