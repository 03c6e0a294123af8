"""A command killed at any of its changes of the disk: the same command finishes the work, and nothing is left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from softgap.analysis.preregistration import ComparisonLog
from softgap.cli import main
from softgap.trajectories import open_study
from softgap.trajectories.folder import Folder
from support.cli_examples import contents, loads_once
from support.explorer_examples import save_study, story
from support.model_examples import attending_llama, save_folder, tiny_llama
from support.mortal_process import dies_at
from support.stats_cases import planted
from support.study_examples import named, simulated_study

MOST = 400
BOATS = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(90))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        loads_once(patch)
        save_folder(place / "tiny", tiny_llama(max_position_embeddings=64))
        save_folder(place / "attending", attending_llama(max_position_embeddings=512))
        (place / "boats.txt").write_text(BOATS, encoding="utf-8")
        rows = [{"prompt": "x" * (1 + i % 4), "reference": "a", "batch": i, "id": f"p{i}"} for i in range(5)]
        rows[0]["prompt"] = "y" * 100  # longer than the context: a failure is written
        (place / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (place / "l.csv").write_text("id,label\n" + "".join(f"s{i},{'ab'[i % 2]}\n" for i in range(60)))
        x, labels = planted(2, 60, 12, {7: 2.5})
        simulated_study(place / "s", x, named(labels))
        save_study(place / "run", [story(steps=30, prompt_steps=3)])
        yield place


@pytest.fixture
def here(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOFTGAP_CALIBRATIONS", str(tmp_path / "calibrations"))
    return tmp_path


def leftovers(folder: Path) -> list[str]:
    """Files and folders that are nobody's result: hidden ones, and finished steps of unfinished work."""
    return [name for name in contents(folder) if "/." in f"/{name}" or ".parts" in name]


def killed_everywhere(
    shared: Path,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    same: Callable[[Path, Path], None],
    *,
    given: tuple[str, ...] = (),
    every: int = 1,
) -> int:
    """Kill a command at every so-many-th change and run it again, in a new folder each; how many changes it makes."""
    arguments = [word.replace("SHARED", str(shared)) for word in line.split()]

    def place(name: str) -> Path:
        folder = here / name
        folder.mkdir()
        for other in given:
            shutil.copytree(shared / other, folder / other)
        monkeypatch.chdir(folder)
        return folder

    unbroken = place("unbroken")
    assert main(arguments) == 0
    assert leftovers(unbroken) == []
    for n in range(1, MOST, every):
        folder = place(f"killed-{n}")
        with dies_at(n, folder, monkeypatch) as died:
            assert main(arguments) == 0
        if not died:
            return n - 1
        code = main(arguments)
        # All that is left to do for a file that is whole is to say so.
        assert code == 0 or (code == 2 and "--out" in arguments and Path(arguments[-1]).is_file()), n
        assert leftovers(folder) == [], (n, leftovers(folder))
        same(folder, unbroken)
        shutil.rmtree(folder)
    raise AssertionError(f"a command with more than {MOST} changes")


def same_study(folder: Path, unbroken: Path) -> None:
    found, expected = contents(folder / "a"), contents(unbroken / "a")
    manifests = []
    for files in (found, expected):
        document: dict[str, Any] = json.loads(files.pop("manifest.json") or b"")
        manifests.append({key: x for key, x in document.items() if key not in ("started", "finished", "hash")})
    assert found == expected
    assert manifests[0] == manifests[1]
    assert open_study(folder / "a").state == "finished"


def same_file(name: str) -> Callable[[Path, Path], None]:
    def same(folder: Path, unbroken: Path) -> None:
        assert (folder / name).read_bytes() == (unbroken / name).read_bytes()

    return same


STUDY = "study run SHARED/p.jsonl --model SHARED/tiny --raw --max-new-tokens 2 --batch-size 2 --threads 1 --out a"
CALIBRATE = (
    "calibrate SHARED/attending --text SHARED/boats.txt --features 4 --steps 2 --positions 128 --no-mix --no-stability "
    "--out c.safetensors"
)
LINEARIZE = (
    "linearize SHARED/attending --text SHARED/boats.txt --length 64 --tokens 1024 --budget 9 --no-baselines --score "
    "gradient --mechanism elu1 --no-recall-budget --out plan.json"
)


def test_a_study(shared: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert killed_everywhere(shared, here, monkeypatch, STUDY, same_study) > 30


def test_a_run(shared: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["run", "fox", "--model", str(shared / "tiny"), "--raw", "--max-new-tokens", "2", "--out", "a"]
    for n in range(1, MOST):
        folder = here / f"killed-{n}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        with dies_at(n, folder, monkeypatch) as died:
            assert main(arguments) == 0
        if not died:
            break
        # A run that was measured is whole, and its folder taken; else the same command measures it.
        whole = bool(list(folder.glob("a/samples/part-*.parquet")))
        assert main(arguments) == (2 if whole else 0), n
        assert len(open_study("a")) == 1
    assert n > 10


def test_labels(shared: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def same(folder: Path, unbroken: Path) -> None:
        labels = [open_study(place / "s").samples()["label"].tolist() for place in (folder, unbroken)]
        assert labels[0] == labels[1]

    assert killed_everywhere(shared, here, monkeypatch, "study label s SHARED/l.csv", same, given=("s",)) > 4


def test_a_report(shared: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def same(folder: Path, _: Path) -> None:
        assert (folder / "run" / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")

    assert killed_everywhere(shared, here, monkeypatch, "report run", same, given=("run",)) >= 4


def test_a_comparison(shared: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "compare s --feature mean --permutations 19 --refits 19"

    def same(folder: Path, _: Path) -> None:
        study = folder / "s"
        assert {"result.json", "findings.json"} <= {path.name for path in (study / "comparisons").rglob("*")}
        assert [entry["event"] for entry in ComparisonLog(Folder.at(study)).entries][-1] == "looked"

    assert killed_everywhere(shared, here, monkeypatch, line, same, given=("s",), every=3) > 6


def test_a_calibration(shared: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert killed_everywhere(shared, here, monkeypatch, CALIBRATE, same_file("c.safetensors"), every=17) > 9


def test_a_plan(shared: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert killed_everywhere(shared, here, monkeypatch, LINEARIZE, same_file("plan.json"), every=31) > 9


EVALUATE = (
    "evaluate SHARED/attending --tasks recall --lengths 448 --contexts 2 --pairs 4 --no-generation --out found.json"
)


def test_an_evaluation(shared: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert killed_everywhere(shared, here, monkeypatch, EVALUATE, same_file("found.json")) > 9


@pytest.mark.slow
@pytest.mark.parametrize(("line", "file"), [(CALIBRATE, "c.safetensors"), (LINEARIZE, "plan.json")])
def test_every_change_of_a_long_command(
    shared: Path, here: Path, monkeypatch: pytest.MonkeyPatch, line: str, file: str
) -> None:
    assert killed_everywhere(shared, here, monkeypatch, line, same_file(file)) > 9
