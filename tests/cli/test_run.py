"""`softgap run`: what it measures is what it saves and shows, and whatever is refused leaves nothing behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import softgap
from softgap import probe
from softgap.attention import resolve
from softgap.cli import main
from softgap.cli.options import default_out
from softgap.kinds import NOT_CALIBRATED
from softgap.linearize import Substitute, export_plan, load_plan
from softgap.linearize.plan import plan_of
from softgap.probe import Interrupted
from softgap.trajectories import Trajectories, load, open_study
from support.cli_examples import (
    CONTEXT,
    Terminal,
    contents,
    failure,
    loads_once,
    script,
    tiny_folder,
    type_in,
    without_progress,
)
from support.disk_examples import largest_file
from support.kind_examples import LABELS, MAP, calibrated_folder
from support.model_examples import config_folder

PROMPT = "The fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def module_patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def all_loads(module_patch: pytest.MonkeyPatch) -> list[str | None]:
    return loads_once(module_patch)


@pytest.fixture
def loads(all_loads: list[str | None]) -> list[str | None]:
    """Names of the models that this test loads."""
    all_loads.clear()
    return all_loads


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def tiny_run(folder: Path, *options: str, out: str = "runs/fox") -> Trajectories:
    """A short run of the tiny model, as it was saved."""
    assert main(["run", PROMPT, "--model", str(folder), "--max-new-tokens", "5", "--out", out, *options]) == 0
    return load(out)


def test_the_embedded_model_through_the_console_script(here: Path) -> None:
    shown = script(
        "run", "Name a colour.", "--max-new-tokens", "4", "--mechanism", "elu1", "--json", "--out", "a", cwd=here
    )
    assert (shown.returncode, without_progress(shown.stderr)) == (0, "")
    document = json.loads(shown.stdout)
    run = load("a")
    assert (document["model"], document["out"]) == ("smollm2-135m", "a")
    assert document["completion"] == run.completion_text
    assert [step["token"] for step in document["steps"]] == list(run.tokens)
    assert [step["token_id"] for step in document["steps"]] == run.token_ids.tolist()
    assert run.mechanisms == ("elu1", "uniform")
    for index, name in enumerate(run.mechanisms):
        values = run.quantities["divergence"][index].astype(np.float64)
        assert document["means"][name]["divergence"] == pytest.approx(values.mean(), rel=1e-12)
        for step in range(run.n_steps):
            measured = document["steps"][step]["divergence"][name]
            assert measured == pytest.approx(values[..., step].mean(), rel=1e-12)
    assert len(document["heads"]) == 30 * 9
    first = max(document["heads"], key=lambda row: row["divergence"]["elu1"])
    assert document["most_softmax_hungry"][0] == {
        "layer": first["layer"],
        "head": first["head"],
        "divergence": first["divergence"]["elu1"],
        "uniform": first["divergence"]["uniform"],
        "share_left": None,
    }
    study = open_study("a")
    assert study.state == "finished"
    assert study.manifest.command.endswith(
        "softgap run 'Name a colour.' --max-new-tokens 4 --mechanism elu1 --json --out a"
    )


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], {}),
        (["--seed", "3"], {"seed": 3}),
        (["--temperature", "0.7"], {"seed": 0, "temperature": 0.7}),
        (["--temperature", "0.7", "--seed", "5"], {"seed": 5, "temperature": 0.7}),
        (["--focus", "--drop-sinks", "2", "--raw"], {"focus": True, "drop_sinks": 2, "chat": False}),
        (
            ["--mechanism", "taylor2", "--mechanism", "cosformer"],
            {"mechanisms": ["taylor2", "cosformer", "uniform"]},
        ),
    ],
)
def test_a_saved_run_is_that_of_the_python_surface(
    folder: Path, loads: list[str | None], options: list[str], settings: dict[str, Any]
) -> None:
    saved = tiny_run(folder, *options)
    model, tokenizer = softgap.load_model(folder)
    expected = softgap.generate(model, tokenizer, PROMPT, 5, **settings)
    assert saved.manifest.differences(expected.manifest) == []
    assert saved.mechanisms == expected.mechanisms
    np.testing.assert_array_equal(saved.divergence, expected.divergence)
    assert saved.focus.keys() == expected.focus.keys()
    assert (saved.tokens, saved.prompt_text) == (expected.tokens, PROMPT)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a model that has a calibration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTGAP_CALIBRATIONS", str(tmp_path_factory.mktemp("calibrations")))
        yield calibrated_folder(tmp_path_factory.mktemp("models") / "calibrated")


KIND_TITLE = "The cheapest substitute that suffices, by head (rows) and layer (columns)"
GAP_TITLE = "share of the gap that the fitted map leaves, by head (rows) and layer (columns)"


def test_a_calibrated_model_shows_the_map_by_kind_under_its_sentence(
    calibrated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run(calibrated)
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    at = lines.index(KIND_TITLE)
    assert lines[at + 1 : at + 6] == MAP
    assert lines[at + 6].strip() == "c constant, p profile, w window, f fitted, h hybrid, S softmax"
    assert shown.index("Of 8 heads, 1 need only a constant") < shown.index(KIND_TITLE)
    assert shown.index(KIND_TITLE) < shown.index("On this text a fitted linear attention")
    assert GAP_TITLE not in shown
    assert run.manifest.extra["held_out"]["kinds"] == {"0": "wSfh", "1": "cpww"}


def test_the_map_can_be_chosen(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for choice, titles in {
        "kinds": (True, False),
        "divergence": (False, True),
        "both": (True, True),
    }.items():
        tiny_run(calibrated, "--map", choice, out=f"runs/{choice}")
        shown = capsys.readouterr().out
        assert (KIND_TITLE in shown, GAP_TITLE in shown) == titles
        assert "Of 8 heads, 1 need only a constant" in shown


def test_json_names_the_kind_of_each_head(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_run(calibrated, "--json")
    heads = json.loads(capsys.readouterr().out)["heads"]
    assert [(row["layer"], row["head"], row["kind"]) for row in heads] == [
        (layer, head, kind) for layer, row in enumerate(LABELS) for head, kind in enumerate(row)
    ]


def test_without_a_calibration_the_map_is_that_of_divergences(
    folder: Path, loads: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run(folder)
    shown = capsys.readouterr().out
    assert KIND_TITLE not in shown
    assert "divergence from elu1 by head (rows) and layer (columns)" in " ".join(shown.split())
    assert f" {NOT_CALIBRATED} " in " ".join(shown.split())


def test_the_summary_ends_with_the_place(
    folder: Path, loads: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run(folder)
    captured = capsys.readouterr()
    assert without_progress(captured.err) == ""
    assert captured.out.endswith("\nruns/fox\n")
    assert f"{folder} · float32 · sdpa · {run.n_prompt} prompt tokens · 5 steps · greedy\n" in captured.out
    means = {name: run.select(name).divergence.mean() for name in run.mechanisms}
    for name, value in means.items():
        assert re.search(rf"^{name} +{value:.3f} ", captured.out, flags=re.MULTILINE)
    distance = np.abs(run.select("elu1").divergence - run.select("uniform").divergence).mean()
    assert f"it differs by {distance:.4f} from that of uniform" in " ".join(captured.out.split())
    assert "It is a measurement, not a diagnosis." in " ".join(captured.out.split())
    assert f"log-probability {run.logprob.mean():.3f}, entropy {run.entropy.mean():.3f} nats" in captured.out


def test_a_long_place_is_not_wrapped(folder: Path, loads: list[str | None], capsys: pytest.CaptureFixture[str]) -> None:
    out = f"runs/{'x' * 200}"
    tiny_run(folder, out=out)
    assert capsys.readouterr().out.endswith(f"\n{out}\n")


def test_the_prompt_may_come_from_standard_input(
    folder: Path, loads: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, b"The f\xc3\xb6x\r\n")
    assert main(["run", "-", "--model", str(folder), "--max-new-tokens", "1", "--out", "a"]) == 0
    assert load("a").prompt_text == "The föx"


def test_runs_are_named_by_their_words_and_the_time(folder: Path, loads: list[str | None], here: Path) -> None:
    assert main(["run", "A fox: is it red?", "--model", str(folder), "--max-new-tokens", "1"]) == 0
    (name,) = (path.name for path in (here / "runs").iterdir())
    assert re.fullmatch(r"a-fox-is-it-red-\d{8}-\d{6}", name)


def test_two_runs_in_one_second_have_two_names(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noon(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Noon:
            return cls(2026, 1, 2, 12, 0, 0, tzinfo=tz)

    monkeypatch.setattr("softgap.trajectories.folder.datetime", Noon)
    names = []
    for _ in range(3):
        names.append(default_out("fox"))
        Path(names[-1]).mkdir(parents=True)
    assert names == [f"runs/fox-20260102-120000{end}" for end in ("", "-2", "-3")]


def test_a_terminal_shows_a_spinner_and_standard_output_stays_clean(
    folder: Path, loads: list[str | None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    tiny_run(folder, "--json")
    assert "generating and measuring" in terminal.getvalue()
    assert json.loads(capsys.readouterr().out)["n_steps"] == 5


# What is refused without a model: arguments after `run`, the sentence.
WITHOUT_MODEL = {
    "an empty prompt": ([""], r"the prompt must hold some text, got ''; .*"),
    "a blank prompt": ([" \n"], r"the prompt must hold some text, got ' \\n'; .*"),
    "no new tokens": (
        [PROMPT, "--max-new-tokens", "0"],
        r"invalid value for '--max-new-tokens': .* greater than or equal to 1; given .* --max-new-tokens 0', see .*",
    ),
    "a cold temperature": (
        [PROMPT, "--temperature", "0"],
        r"--temperature must be a number from 0.001, got 0; .*",
    ),
    "no temperature": ([PROMPT, "--temperature", "nan"], r"--temperature must be a number from 0.001, got nan; .*"),
    "a wrong dtype": ([PROMPT, "--dtype", "int8"], r"invalid value for '--dtype': 'int8' is not one of 'auto', .*"),
    "an unknown mechanism": ([PROMPT, "--mechanism", "elu_1"], r"unknown mechanism 'elu_1'; did you mean 'elu1'\?"),
    "a mechanism's wrong option": (
        [PROMPT, "--mechanism", "taylor2:gamma=x"],
        r"an option of mechanism 'taylor2' is written option=number, got 'gamma=x'; .*",
    ),
    "a file": ([PROMPT, "--out", "file"], r"a study is written to a folder, but 'file' is a file; choose another path"),
    "other files": (
        [PROMPT, "--out", "full"],
        r"a study is written to a new or empty folder, but 'full' holds other files \(notes\); choose another folder",
    ),
    "an unwritable folder": (
        [PROMPT, "--out", "/sys/softgap"],
        r"cannot write to '/sys/softgap': .*; choose a folder you may write to",
    ),
    "a folder below a file": ([PROMPT, "--out", "file/a"], r"cannot (write to|look at) 'file/a': Not a directory; .*"),
}

# What is refused with a model at hand: arguments after `run`, the sentence.
WITH_MODEL = {
    "an unknown model": (
        [PROMPT, "--model", "smollm-135m"],
        r"unknown model 'smollm-135m'; allowed are .*; did you mean 'smollm2-135m'\?",
    ),
    "a folder that is no model": (
        [PROMPT, "--model", "full"],
        r"the folder 'full' is no model: it has no config.json; .*",
    ),
    "a hub id offline": (
        [PROMPT, "--model", "nobody/nothing"],
        r"the model 'nobody/nothing' is not in the local hub cache, and the hub is off .*",
    ),
    "a model that is not causal": (
        [PROMPT, "--model", "bert"],
        r"cannot use 'bert': model type 'bert' is an encoder .*; choose a causal language model .*",
    ),
    "an absent device": ([PROMPT, "--device", "tpu"], r"device must be one of those here \(cpu.*\), got 'tpu'; .*"),
    "a prompt longer than the context": (
        ["long " * 9000],
        r"the model's context is 8192 tokens, got \d+ tokens and 128 new ones; shorten the text",
    ),
    "a mechanism to be calibrated": (
        [PROMPT, "--mechanism", "profile"],
        r"mechanism 'profile' needs the parameters .*, and there is no calibration for this model; .*",
    ),
    "a mechanism named twice": (
        [PROMPT, "--mechanism", "elu1", "--mechanism", "elu1"],
        r"each mechanism may be named once, got elu1, elu1, uniform; name 'elu1' only once",
    ),
    "no step left": (
        [PROMPT, "--drop-sinks", "999", "--max-new-tokens", "1"],
        r"drop_sinks must leave some text, got 999 of .*; drop fewer",
    ),
}


@pytest.fixture
def furnished(here: Path) -> Path:
    """A working folder that holds a file, a folder with a file, and an encoder."""
    (here / "file").touch()
    (here / "full").mkdir()
    (here / "full" / "notes").touch()
    config_folder(here / "bert", model_type="bert", architectures=["BertForMaskedLM"])
    return here


@pytest.mark.parametrize("case", WITHOUT_MODEL)
def test_bad_input_is_refused_before_a_model_is_loaded(
    furnished: Path, loads: list[str | None], capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, sentence = WITHOUT_MODEL[case]
    before = contents(furnished)
    assert re.fullmatch(sentence, failure(["run", *arguments], capsys))
    assert loads == []
    assert contents(furnished) == before


@pytest.mark.parametrize("case", WITH_MODEL)
def test_bad_input_leaves_nothing(
    furnished: Path, loads: list[str | None], capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, sentence = WITH_MODEL[case]
    before = contents(furnished)
    assert re.fullmatch(sentence, failure(["run", *arguments], capsys))
    assert contents(furnished) == before


@pytest.mark.slow
@pytest.mark.parametrize("case", [*WITHOUT_MODEL, *WITH_MODEL])
def test_bad_input_through_the_console_script(furnished: Path, case: str) -> None:
    arguments, sentence = {**WITHOUT_MODEL, **WITH_MODEL}[case]
    before = contents(furnished)
    shown = script("run", *arguments, cwd=furnished)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert re.fullmatch(f"softgap: {sentence}\n", without_progress(shown.stderr))
    assert contents(furnished) == before


def test_bytes_that_are_no_text_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, b"fox\xff")
    assert failure(["run", "-"], capsys) == (
        "standard input must be UTF-8 text, got the byte 0xff at 3; convert it first"
    )
    assert failure(["run", "fox\udcff"], capsys) == "the prompt must be valid UTF-8, got '\\udcff'; correct it"


def test_the_prompt_fills_the_context_with_its_answer(
    folder: Path, loads: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    fits = ["run", "x" * (CONTEXT - 2), "--model", str(folder), "--max-new-tokens", "2", "--out", "a"]
    assert main(fits) == 0
    capsys.readouterr()
    sentence = failure(["run", "x" * (CONTEXT - 1), *fits[2:-1], "b"], capsys)
    assert sentence == f"the model's context is {CONTEXT} tokens, got 63 tokens and 2 new ones; shorten the text"
    assert not Path("b").exists()


def test_a_study_is_replaced_only_by_the_same_question(
    folder: Path, loads: list[str | None], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run(folder)
    capsys.readouterr()
    before = contents(here)
    again = ["run", PROMPT, "--model", str(folder), "--max-new-tokens", "5", "--out", "runs/fox"]
    loads.clear()
    assert failure(again, capsys) == (
        "'runs/fox' already holds this study; choose another folder, or set overwrite to replace it"
    )
    for change in (["--seed", "1"], ["--drop-sinks", "1"], ["--mechanism", "taylor2"]):
        sentence = failure([*again, "--overwrite", *change], capsys)
        assert sentence.startswith("'runs/fox' already holds a different study (its ")
    other = failure(["run", "Another prompt", *again[2:], "--overwrite"], capsys)
    assert other.startswith("'runs/fox' already holds a different study (its inputs is ")
    assert loads == []
    # What only the model can tell is refused before it runs.
    assert "(its options is " in failure([*again, "--overwrite", "--max-new-tokens", "4"], capsys)
    assert "(its dtype is 'float32'" in failure([*again, "--overwrite", "--dtype", "bfloat16"], capsys)
    assert contents(here) == before
    assert main([*again, "--overwrite"]) == 0
    assert contents(here)["runs/fox/trajectories/part-00000.parquet"] is not None
    assert load("runs/fox").n_steps == 5


@pytest.mark.parametrize("size", [0, 70_000])
def test_a_full_disk_leaves_nothing(
    folder: Path, loads: list[str | None], here: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    """Full from the start: refused without a model. Full when the run is saved: nothing of it remains."""
    arguments = ["run", PROMPT, "--max-new-tokens", "24", "--out", "runs/fox"]
    capsys.readouterr()
    with largest_file(size):
        sentence = failure(arguments, capsys)
    assert sentence == "cannot write to 'runs/fox': File too large; free some space or choose another disk"
    assert loads == ([] if size == 0 else [None])
    assert contents(here) == {}


def test_a_full_disk_keeps_the_study_that_would_be_replaced(
    folder: Path, loads: list[str | None], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run(folder)
    capsys.readouterr()
    loads.clear()
    before = contents(here)
    with largest_file(0):
        sentence = failure(["run", PROMPT, "--out", "runs/fox", "--overwrite"], capsys)
    assert sentence == "cannot write to 'runs/fox': File too large; free some space or choose another disk"
    assert loads == []
    assert contents(here) == before


def test_ctrl_c_leaves_nothing(
    folder: Path,
    loads: list[str | None],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        assert contents(here)  # the folder is taken before the model runs
        raise KeyboardInterrupt

    monkeypatch.setattr("softgap.probe.generate", interrupted)
    arguments = ["run", PROMPT, "--model", str(folder), "--max-new-tokens", "5", "--out", "runs/fox"]
    assert failure(arguments, capsys, code=130) == "interrupted"
    assert contents(here) == {}


def test_ctrl_c_keeps_the_tokens_so_far(
    folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = probe.generate

    def interrupted(*args: Any, **settings: Any) -> None:
        raise Interrupted(real(*args, **settings))

    monkeypatch.setattr("softgap.probe.generate", interrupted)
    arguments = ["run", PROMPT, "--model", str(folder), "--max-new-tokens", "5", "--out", "runs/fox"]
    assert failure(arguments, capsys, code=130) == "interrupted; the first 5 tokens are saved in 'runs/fox'"
    assert load("runs/fox").n_steps == 5


WINDOWS = ["window:w=4,sinks=2", "window:w=2,sinks=1", "razor:w=4,sinks=2", "elu1+window:w=4,sinks=2,f=0.5"]


def test_windows_and_hybrids_are_told_apart_from_the_run_to_the_report(
    folder: Path, loads: list[str | None], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [word for name in WINDOWS for word in ("--mechanism", name)]
    assert main(["run", PROMPT, "--model", str(folder), *named, "--max-new-tokens", "8", "--out", "windows"]) == 0
    shown = capsys.readouterr().out
    run = load("windows")
    assert run.mechanisms == (*WINDOWS, "uniform")
    assert all(name in shown for name in WINDOWS)
    assert run.manifest.mechanisms[WINDOWS[1]] == {"w": 2.0, "sinks": 1.0, "far": 0.0}
    first, second = (run.select(name).divergence for name in WINDOWS[:2])
    assert not np.array_equal(first, second)
    # A stored name makes the same mechanism again.
    again = probe.read_ids(softgap.load_model(str(folder))[0], [[5, 6, 7]], mechanisms=list(run.mechanisms))[0]
    assert again.mechanisms == run.mechanisms
    assert main(["analyze", "windows", "--mechanism", WINDOWS[1], "--json"]) == 0
    assert WINDOWS[1] in json.dumps(json.loads(capsys.readouterr().out))
    assert main(["report", "windows"]) == 0
    page = Path("windows/report.html").read_text(encoding="utf-8")
    assert all(name in page for name in WINDOWS)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("window:w=0", "a window's w must be a whole number of keys from 1 on, got 0"),
        ("window:w=4,sinks=-1", "a window's sinks must be a whole number of keys from 0 on, got -1"),
        ("identity+window:w=4", "a hybrid shares weights that are not negative, and mechanism 'identity' has others"),
        ("elu1+windw:w=4", "a hybrid is written TAIL+window:w=60,sinks=4, got 'elu1+windw:w=4'"),
        ("elu1+window:w=4,f=2", "a hybrid's f must be from 0 to 1, got 2"),
    ],
)
def test_windows_that_are_none_are_refused(
    folder: Path, here: Path, name: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in failure(["run", PROMPT, "--model", str(folder), "--mechanism", name], capsys)


@pytest.fixture(scope="module")
def plan_files(folder: Path) -> Path:
    """A folder with plans of the tiny model, one that cannot stream, and an export of the first."""
    model, tokenizer = softgap.load_model(folder)
    place = folder.parent / "plans"
    heads = ((0, 0), (0, 1), (1, 2), (1, 3))
    for name, mechanism in (("plan", "window:w=3,sinks=1"), ("keeps", "relu2_scores")):
        plan_of(model, heads, Substitute(resolve(mechanism))).save(place / f"{name}.json")
    export_plan(model, load_plan(place / "plan.json"), place / "planned", format="folder", tokenizer=tokenizer)
    return place


def test_under_a_plan_the_text_and_what_it_saved_are_shown(
    folder: Path, plan_files: Path, loads: list[str | None], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(plan_files / "plan.json")
    command = ["run", PROMPT, "--model", str(folder), "--plan", plan, "--max-new-tokens", "20"]
    assert main(command) == 0
    captured = capsys.readouterr()
    model, tokenizer = softgap.load_model(folder)
    made = softgap.linearize.generate(model, tokenizer, load_plan(plan), PROMPT, 20)
    text, rest = captured.out.split("\n\n")
    assert text == made.text
    saved = f"{made.cache_bytes / 1e3:.1f} kB under the plan and {made.original_bytes / 1e3:.1f} kB without it"
    assert rest.startswith(f"The cache holds {saved} ({made.cache_bytes / made.original_bytes:.0%}); the model wrote ")
    assert rest.endswith(" tokens per second.\n")
    assert without_progress(captured.err) == ""
    assert contents(here) == {}
    assert main([*command, "--json", "--temperature", "0.8", "--seed", "4"]) == 0
    document = json.loads(capsys.readouterr().out)
    sampled = softgap.linearize.generate(model, tokenizer, load_plan(plan), PROMPT, 20, seed=4, temperature=0.8)
    assert document["continuations"][0]["token_ids"] == list(sampled.token_ids[0])
    assert (document["cache_bytes"], document["original_cache_bytes"]) == (made.cache_bytes, made.original_bytes)
    assert document["plan"] == plan


def test_a_folder_stands_for_the_plan_and_its_model(plan_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = str(plan_files / "planned")
    texts = []
    for given in (["--plan", planned], ["--plan", planned, "--model", planned]):
        assert main(["run", PROMPT, *given, "--max-new-tokens", "6", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["continuations"])
    assert texts[0] == texts[1]


def test_a_plan_that_cannot_stream_says_so(
    folder: Path, plan_files: Path, loads: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    keeps = str(plan_files / "keeps.json")
    assert main(["run", PROMPT, "--model", str(folder), "--plan", keeps, "--max-new-tokens", "4"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "as the original's, because mechanism 'relu2_scores' has no state of constant size;" in last


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (["--focus"], "--focus; leave it out"),
        (["--map", "kinds", "--mechanism", "elu1"], "--mechanism, --map; leave them out"),
        (["--out", "a", "--overwrite"], "--out, --overwrite; leave them out"),
        (["--drop-sinks", "0"], "--drop-sinks; leave it out"),
    ],
)
def test_nothing_is_measured_under_a_plan(
    plan_files: Path, loads: list[str | None], capsys: pytest.CaptureFixture[str], options: list[str], given: str
) -> None:
    sentence = failure(["run", PROMPT, "--plan", str(plan_files / "plan.json"), *options], capsys)
    assert sentence.startswith("--plan only generates text, because a plan's cache keeps no keys to measure heads with")
    assert given in sentence
    assert loads == []


def test_what_was_written_before_ctrl_c_stays(
    folder: Path,
    plan_files: Path,
    loads: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = softgap.linearize.generate
    heard: list[Any] = []

    def interrupted(*arguments: Any, listener: Any, **settings: Any) -> Any:
        def hear(step: Any) -> None:
            listener(step)
            heard.append(step)
            if len(heard) == 3:
                raise KeyboardInterrupt

        return own(*arguments, listener=hear, **settings)

    monkeypatch.setattr("softgap.linearize.generate", interrupted)
    plan = str(plan_files / "plan.json")
    assert main(["run", PROMPT, "--model", str(folder), "--plan", plan, "--max-new-tokens", "9"]) == 130
    captured = capsys.readouterr()
    assert len(captured.out) == 4
    assert captured.out.endswith("\n")
    assert without_progress(captured.err) == "softgap: interrupted\n"
