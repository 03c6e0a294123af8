"""Studies through the real entry point: fixed batches, resume after kill -9, failures, labels, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from softgap.cli import main
from softgap.cli.study import _cut_off
from softgap.study import StudySettings, run_study
from softgap.study.batches import plan_batches, read_failures
from softgap.tasks import Prompt, generate_prompts
from softgap.tasks.sources import TRUTHFULQA, layout_of
from softgap.trajectories import Study, open_study
from softgap.trajectories.folder import Folder
from support.cli_examples import SCRIPT, contents, failure, loads_once, tiny_folder
from support.model_examples import save_folder, tiny_llama
from support.source_tree import imported, modules

OPTIONS = ["--raw", "--max-new-tokens", "5", "--batch-size", "3", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def all_loads() -> Iterator[list[str | None]]:
    with pytest.MonkeyPatch.context() as patch:
        yield loads_once(patch)


def prompts_file(count: int = 8, **fields: Any) -> list[dict[str, Any]]:
    rows = [{"prompt": "x" * (1 + (5 * i) % 23), "reference": "a", **fields} for i in range(count)]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def differences(a: Study, b: Study) -> list[str]:
    """What two studies do not hold alike, times and command lines aside."""
    found = [*a.manifest.differences(b.manifest)]
    found += ["ids"] * (a.ids != b.ids) + ["state"] * (a.state != b.state)
    for one, other in zip(a, b, strict=True):
        texts = ("sample_id", "label", "completion_text", "tokens")
        found += [f"{one.sample_id}: {k}" for k in texts if str(getattr(one, k)) != str(getattr(other, k))]
        for q, mine in one.quantities.items():
            if not np.array_equal(mine, other.quantities[q]):
                found.append(f"{one.sample_id}: {q} by {np.abs(mine - other.quantities[q]).max():g}")
    return found


def test_one_module_builds_manifests_and_writes_studies() -> None:
    """A run, a reading, a study and a run of the live server are measured by the same function."""
    wanted = ("softgap.trajectories.StudyWriter", "softgap.models.fingerprint.manifest_of")
    found = {
        module.name
        for module in modules(Path(__file__).parents[2] / "src")
        if module.package in ("cli", "study", "report") and not set(wanted).isdisjoint(imported(module))
    }
    # The live server compares a study's mechanisms with its own; a difference is a study of what was measured before.
    assert found - {"softgap.report.live.writer", "softgap.report.pair"} == {"softgap.study.measurement"}
    using = {x.name: imported(x) for x in modules(Path(__file__).parents[2] / "src")}
    assert wanted[0] not in using["softgap.report.live.writer"]
    assert wanted[1] not in using["softgap.report.pair"]


def test_batches_are_a_pure_function_of_lengths() -> None:
    lengths, replay = [5, 9, 9, 2, 7, 1], [False, False, True, False, False, False]
    batches = plan_batches(lengths, replay, 2, 3)
    assert [batch.indices for batch in batches] == [(1, 4), (0, 3), (5,), (2,)]
    assert [batch.replay for batch in batches] == [False, False, False, True]
    assert len({batch.seed for batch in batches}) == 4
    assert plan_batches(lengths, replay, 2, 3) == batches
    assert plan_batches(lengths, replay, 2, 4) != batches


def test_a_task_is_run_judged_and_found_finished_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["study", "task", "arithmetic", "--n", "7", "--model", str(folder), "--out", "a", *OPTIONS, "--json"]
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["samples"], first["measured"], first["resumed"], first["failures"]) == (7, 7, 0, [])
    study = open_study("a")
    assert (study.state, set(study.ids)) == ("finished", {f"arithmetic-{i:05d}" for i in range(7)})
    assert set(study.samples()["label"]) <= {"right", "wrong"}
    before = contents(Path("a"))
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["resumed"] == 7
    after = contents(Path("a"))
    assert {name for name in before if before[name] != after[name]} <= {"manifest.json"}


def test_a_killed_study_goes_on_and_equals_an_unbroken_one(folder: Path, here: Path) -> None:
    rows = prompts_file(30)
    (here / "slow.py").write_text(
        "import time\ndef judge(answer, fields):\n    time.sleep(0.05)\n    return len(answer) % 2 == 0\n"
    )
    command = [str(SCRIPT), "study", "run", "p.jsonl", "--model", str(folder), *OPTIONS, "--score", "slow:judge"]
    command += ["--seed", "3", "--out"]
    started = subprocess.Popen([*command, "killed"], cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    samples = here / "killed" / "samples"
    for _ in range(6000):
        if samples.is_dir() and len(list(samples.glob("part-*.parquet"))) >= 2:
            break
        time.sleep(0.05)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    done = open_study(here / "killed")
    assert done.state == "running"
    assert 0 < len(done) < len(rows)
    kept = contents(samples)
    for out in ("killed", "whole"):  # processes of their own: what other tests leave in this one is not the question
        subprocess.run([*command, out], cwd=here, check=True, capture_output=True)
    killed, whole = open_study("killed"), open_study("whole")
    assert len(whole) == len(rows)
    assert differences(killed, whole) == []
    for name, content in kept.items():
        if name.startswith("part-"):
            assert (samples / name).read_bytes() == content
    assert (here / "killed" / "prompts.jsonl").read_bytes() == (here / "whole" / "prompts.jsonl").read_bytes()
    assert set(killed.samples()["label"]) == {"right", "wrong"}


def test_a_failed_sample_is_recorded_and_the_rest_is_measured(folder: Path) -> None:
    prompts = [Prompt(str(i), "x" * n) for i, n in enumerate((3, 90, 5))]
    Path("odd.py").write_text("def judge(answer, fields):\n    return {'0': True}[fields['id']]\n")
    settings = StudySettings(model=str(folder), chat=False, max_new_tokens=4, threads=1, scoring="odd:judge")
    result = run_study(prompts, "a", settings)
    assert (result.measured, result.samples) == (2, 3)
    assert [(f.sample_id, f.stage) for f in result.failures] == [("2", "scoring"), ("1", "measuring")]
    assert result.failures[0].reason == "KeyError: '2'"
    assert (
        result.failures[1].reason == "the model's context is 64 tokens, got 90 tokens and 4 new ones; shorten the text"
    )
    assert read_failures(Folder.at("a")) == list(result.failures)
    labels = open_study("a").samples().set_index("sample_id")["label"]
    assert (labels["0"], labels.isna()["2"]) == ("right", True)


def test_completions_are_read_and_groups_and_fields_are_kept(folder: Path) -> None:
    Path("p.csv").write_text(
        'prompt,completion,label,group,source\nabc,def,yes,g1,book\nab,"c,d",no,g1,talk\nabcd,,,g2,\n'
    )
    assert main(["study", "run", "p.csv", "--model", str(folder), "--out", "a", *OPTIONS]) == 0
    samples = open_study("a").samples().set_index("sample_id")
    assert (samples["completion"]["0"], samples["completion"]["1"]) == ("def", "c,d")
    assert (samples["label"]["0"], samples["label"]["1"], samples["label"].isna()["2"]) == ("yes", "no", True)
    assert len(samples["token_ids"]["2"]) == 5
    lines = [json.loads(line) for line in Path("a/prompts.jsonl").read_text().splitlines()]
    assert [(line.get("group"), line.get("source")) for line in lines] == [("g1", "book"), ("g1", "talk"), ("g2", None)]


def test_a_study_says_how_it_read_the_file_and_how_many_answers_were_cut_off(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("p.csv").write_text("prompt,completion\nabc,\nab,def\nabcd,\n")
    assert main(["study", "run", "p.csv", "--model", str(folder), "--out", "a", *OPTIONS]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("p.csv: a table with the columns prompt, completion: 3 prompts\n")
    samples = open_study("a").samples().set_index("sample_id")
    most = max(map(len, samples["tokens"]))
    cut = [
        samples["completion"][name].endswith(samples["tokens"][name][-1])
        for name in ("0", "2")
        if len(samples["tokens"][name]) == most
    ]
    assert (f"{sum(cut)} of 2 answers were cut off at {most} tokens" in shown) == any(cut)
    assert main(["study", "run", "p.csv", "--model", str(folder), "--out", "b", *OPTIONS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cut_off"] == sum(cut)
    assert [_cut_off("a fox", ("a", " fox"), n) for n in (2, 3)] == [True, False]
    assert not _cut_off("a", ("a", "<|im_end|>"), 2)


def test_the_layout_of_a_file_is_said_in_words(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text(",".join(TRUTHFULQA) + "\n" + ",".join("abcde") + "\n")
    assert layout_of(str(table)).startswith("TruthfulQA's layout, each question with its best answer")
    assert layout_of(str(table), renamed={"prompt": "Question"}).startswith("a table with the columns Question, Best")
    assert layout_of("p.jsonl") == "JSON lines"
    assert layout_of("org/name") == "a dataset"


def test_fields_limits_and_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.csv").write_text("question,completion\nabc,def\nabc,xyz\nab,c\nabcd,e\n")
    base = ["study", "run", "p.csv", "--field", "prompt=question", "--model", str(folder), *OPTIONS, "--json"]
    for more, texts in (
        (["--limit", "3", "--out", "read"], [("0", "abc", 3), ("1", "abc", 3), ("2", "ab", 1)]),
        (["--limit", "3", "--answer", "--out", "answered"], [("0", "abc", 5), ("2", "ab", 5)]),
    ):
        assert main([*base, *more]) == 0
        assert json.loads(capsys.readouterr().out)["measured"] == len(texts)
        samples = open_study(more[-1]).samples().sort_values("sample_id")
        found = zip(samples["sample_id"], samples["prompt"], map(len, samples["token_ids"]), strict=True)
        assert list(found) == texts


def test_labels_are_replaced_without_running_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts_file(5)
    assert main(["study", "run", "p.jsonl", "--model", str(folder), "--out", "a", *OPTIONS]) == 0
    measured = contents(Path("a/trajectories"))
    Path("l.csv").write_text("id,label\n0,good\n3,bad\n")
    capsys.readouterr()
    assert main(["study", "label", "a", "l.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"study": "a", "given": 2, "changed": 2, "without": 3}
    labels = {run.sample_id: run.label for run in open_study("a")}
    assert labels == {"0": "good", "1": None, "2": None, "3": "bad", "4": None}
    assert contents(Path("a/trajectories")) == measured
    Path("m.jsonl").write_text('{"id": 0, "label": null}\n{"id": "9", "label": "x"}\n')
    assert failure(["study", "label", "a", "m.jsonl"], capsys).startswith(
        "labels must be for samples of 'a', got '9' (1 such ids); its samples are "
    )
    assert {run.sample_id: run.label for run in open_study("a")} == labels


def test_a_dry_run_writes_nothing_and_estimates(folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts_file(5)
    before = contents(here)
    assert main(["study", "run", "p.jsonl", "--model", str(folder), "--out", "a", *OPTIONS, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    counts = found["counts"]
    assert (counts["samples"], counts["batches"], counts["new_tokens"]) == (5, 2, 25)
    assert counts["prompt_tokens"] == sum(1 + (5 * i) % 23 for i in range(5))
    assert found["seconds"] > 0
    assert contents(here) == before


BAD = {
    "no file": (["run", "none.jsonl"], "cannot read 'none.jsonl': No such file or directory; give a text file"),
    "an unknown ending": (
        ["run", "p.txt"],
        "prompts are read from .jsonl and .csv files .* got 'p.txt'; rename the file",
    ),
    "a bad line": (
        ["run", "bad.jsonl"],
        r"'bad.jsonl', line 2: not JSON \(.*\); write one object per line, such as .*",
    ),
    "two of an id": (
        ["run", "twice.jsonl"],
        "'twice.jsonl', line 2: every id must be different, got 'a' again after line 1; .*",
    ),
    "a ragged row": (
        ["run", "bad.csv"],
        "'bad.csv', line 3: must have 2 cells as the header has, got 3; put quotes .*",
    ),
    "no prompt column": (
        ["run", "other.csv"],
        "'other.csv' must have a column 'prompt', it has question, x; name it with .*",
    ),
    "an unknown scoring": (["run", "p.jsonl", "--score", "exat"], r"unknown scoring 'exat'; did you mean 'exact'\?"),
    "a scoring nowhere": (
        ["run", "p.jsonl", "--score", "no:way"],
        "cannot import the scoring 'no:way' .*; give module:function .*",
    ),
    "no reference": (
        ["run", "bare.jsonl", "--score", "exact"],
        "'bare.jsonl', line 1: sample '0' has no reference, .*",
    ),
    "an unknown task": (["task", "recal"], r"unknown task 'recal'; did you mean 'recall'\?"),
    "too hard": (
        ["task", "statements", "--difficulty", "2"],
        "the difficulty of 'statements' is always 1, from 1 to 1, got 2; .*",
    ),
    "a bad place": (["task", "recall", "--out", "p.txt/x"], "cannot (write to|look at) 'p.txt/x': Not a directory; .*"),
    "a bad uri": (
        ["task", "recall", "--out", "nope://x/y"],
        r"cannot open 'nope://x/y' \(.*\); give a local folder or a URI .*",
    ),
    "no dataset": (["run", "no/such_set"], r"cannot load the dataset 'no/such_set' \(.*\); check its name, .*"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    import re

    prompts_file(2)
    for name, text in {
        "p.txt": "x",
        "bad.jsonl": '{"prompt": "a"}\n{"prompt"\n',
        "twice.jsonl": '{"prompt": "a", "id": "a"}\n{"prompt": "b", "id": "a"}\n',
        "bad.csv": "prompt,x\na,b\na,b,c\n",
        "other.csv": "question,x\na,b\n",
        "bare.jsonl": '{"prompt": "a"}\n',
    }.items():
        Path(name).write_text(text)
    before = contents(here)
    arguments, sentence = BAD[case]
    assert re.fullmatch(sentence, failure(["study", *arguments], capsys))
    assert contents(here) == before


def test_a_different_study_is_not_continued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "task", "arithmetic", "--n", "3", "--model", str(folder), "--out", "a", *OPTIONS]) == 0
    capsys.readouterr()
    arguments = ["study", "task", "arithmetic", "--n", "4", "--model", str(folder), "--out", "a", *OPTIONS]
    assert failure(arguments, capsys).startswith("'a' already holds a different study (its inputs is ")


def test_memory_is_that_of_a_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run outlives its batch."""
    import gc
    import weakref

    from softgap.trajectories import StudyWriter, Trajectories

    alive: list[weakref.ref[Any]] = []
    most = 0
    original = StudyWriter.append

    def append(writer: StudyWriter, runs: Sequence[Trajectories], **options: Any) -> int:
        nonlocal most
        alive.extend(weakref.ref(run) for run in runs)
        gc.collect()
        most = max(most, sum(ref() is not None for ref in alive))
        return original(writer, runs, **options)

    monkeypatch.setattr(StudyWriter, "append", append)
    settings = StudySettings(model=str(folder), chat=False, max_new_tokens=3, batch_size=2, threads=1)
    run_study([Prompt(str(i), "abc") for i in range(12)], "a", settings)
    assert len(alive) == 12
    assert most <= 4


@pytest.mark.slow
def test_memory_is_flat_over_thousands_of_samples(folder: Path) -> None:
    """As much in use after 2,400 samples as after 400: the runs alone would be 40 MB more."""
    import gc

    import psutil

    used: dict[int, int] = {}

    def follow(stage: str, share: float) -> None:
        done = round(2400 * share)
        if done in (400, 2400):
            gc.collect()
            used[done] = psutil.Process().memory_info().rss

    settings = StudySettings(model=str(folder), chat=False, max_new_tokens=2, batch_size=40, threads=1)
    assert run_study([Prompt(str(i), "x" * 60) for i in range(2400)], "a", settings, progress=follow).measured == 2400
    assert used[2400] - used[400] < 20e6


def test_more_prompts_of_a_task_begin_with_the_same(folder: Path) -> None:
    for name in ("recall", "arithmetic", "copying", "statements"):
        assert generate_prompts(name, 12, seed=1)[:5] == generate_prompts(name, 5, seed=1)
        assert generate_prompts(name, 5, seed=2) != generate_prompts(name, 5, seed=1)


@pytest.mark.parametrize(
    "command",
    [["run", "xyz", "--raw", "--max-new-tokens", "8"], ["read", "p.jsonl"], ["study", "run", "p.jsonl", "--raw"]],
)
def test_a_tokenizer_larger_than_the_vocabulary_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    model = save_folder(tmp_path / "small", tiny_llama(vocab_size=20))
    Path("p.jsonl").write_text('{"prompt": "xyz", "completion": "xyz"}\n')
    capsys.readouterr()  # the bar of save_pretrained
    sentence = failure([*command, "--model", str(model), "--out", "a"], capsys)
    assert "a tokenizer must fit its model, whose vocabulary has 20 tokens, got the token " in sentence
