"""Trial by fire of the surroundings: Ctrl-C, signals, closed and full streams, full disks, no home, no memory."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from softgap.analysis.preregistration import ComparisonLog
from softgap.cli import main
from softgap.progress import Progress
from softgap.trajectories import open_study
from softgap.trajectories.folder import Folder
from support.cli_examples import SCRIPT, failure, without_progress
from support.disk_examples import largest_file
from support.fire_examples import World, arguments_of

QUICK = "--feature mean --permutations 19 --refits 19"
LAB = "lab position --tokens 64 --heads 8 --dim 8 --mechanism elu1"


def interrupted_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Ctrl-C at the so-many-th thing that a command tells about its progress."""
    told = 0

    @contextmanager
    def waiting(*_: object, **__: object) -> Iterator[Progress]:
        def show(stage: str, share: float) -> None:
            nonlocal told
            told += 1
            if told == count:
                raise KeyboardInterrupt  # not by a signal: a suite started in the background ignores that one

        yield show

    monkeypatch.setattr("softgap.progress.show_progress", waiting)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "line",
    [
        "analyze run --out new/plane.svg",
        "report run --out new/r.html",
        f"compare s {QUICK} --out new",
        f"{LAB} --out new",
    ],
)
def test_ctrl_c_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, count: int
) -> None:
    before = world.state()
    interrupted_at(monkeypatch, count)
    assert failure(arguments_of(line), capsys, code=130) == "interrupted"
    assert world.state() == before


def test_an_interrupted_look_does_not_use_up_the_confirmation(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "s"
    for path in (world.here / "s").rglob("*"):
        if path.is_file():
            target = study / path.relative_to(world.here / "s")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    start = ["compare", str(study), *QUICK.split()]
    assert main([*start, "--confirm", "0.3"]) == 0
    capsys.readouterr()
    wrong = failure([*start, "--open-confirmation", "--match", "nothing"], capsys)
    assert wrong.startswith("no sample has a field 'nothing'")
    with monkeypatch.context() as patch:
        interrupted_at(patch, 1)
        assert failure([*start, "--open-confirmation"], capsys, code=130) == "interrupted"
    assert main([*start, "--open-confirmation"]) == 0
    capsys.readouterr()
    assert failure([*start, "--open-confirmation"], capsys).startswith("confirmation samples are opened once")
    assert [entry["event"] for entry in ComparisonLog(Folder.at(study)).entries].count("opened") == 1


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("analyze run --out new/plane.svg", "new"),
        ("report run --out new/r.html", "new"),
        (f"compare s {QUICK} --out new", "new"),
        (f"{LAB} --out new", "new"),
        ("calibrate tiny --out new/c.safetensors", "new"),
        ("linearize tiny --text boats.txt --out new/plan.json", "new"),
        ("study run many.jsonl --out new/study", "new/study"),
        ("read many.jsonl --out new", "new"),
    ],
)
def test_a_full_disk_is_found_before_the_work(
    world: World, capsys: pytest.CaptureFixture[str], line: str, place: str
) -> None:
    before = world.state()
    world.models_asked.clear()
    with largest_file(0):
        sentence = failure(arguments_of(line), capsys)
    assert sentence.endswith(f"{place}': File too large; free some space or choose another disk")
    assert world.models_asked == []
    assert world.state() == before


def raising(error: Exception) -> Callable[..., NoReturn]:
    def run(*_: object, **__: object) -> NoReturn:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            MemoryError("Unable to allocate 8 EiB"),
            "not enough memory (Unable to allocate 8 EiB); reduce",
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "not enough memory (Default"),
        (OSError(24, "x", "a"), "the system refused 'a': Too many open files; raise the limit on open files"),
        (OSError(5, "x", "a"), "the system refused 'a': Input/output error; check the disk"),
        (OSError(30, "x", "a"), "the system refused 'a': Read-only file system; choose a path that you may write to"),
        (RuntimeError("Could not determine home directory."), "the home folder is unknown (Could not determine home"),
    ],
)
def test_what_the_system_refuses_is_no_defect(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, sentence: str
) -> None:
    monkeypatch.setattr("softgap.attention.mechanisms", raising(error))
    assert failure(["mechanisms"], capsys).startswith(sentence)


def test_a_machine_without_a_home(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SOFTGAP_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", raising(RuntimeError("Could not determine home directory.")))
    assert failure(["models"], capsys) == (
        "the home folder is unknown (Could not determine home directory.); set HOME, or give absolute paths"
    )


def test_a_signal_to_terminate_is_an_interruption(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("softgap.attention.mechanisms", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert failure(["mechanisms"], capsys, code=143) == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("as_json", [False, True])
def test_a_narrow_encoding_takes_every_character(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr("sys.stdout", narrow)
    assert main(["report", "run", "--out", str(tmp_path / "füchse.html"), *(["--json"] if as_json else [])]) == 0
    narrow.flush()
    shown: Any = narrow.buffer
    text = shown.getvalue().decode("ascii")
    if as_json:
        assert json.loads(text)["out"].endswith("/füchse.html")
    else:
        assert text.endswith("/f\\xfcchse.html\n")


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("softgap >&-", 0, ""),
        ("softgap fox 2>&-", 2, ""),
        ("softgap run - <&-", 2, "softgap: standard input is closed; give a file or a pipe"),
        ("softgap >/dev/full", 2, "softgap: the system refused standard output: No space left on device; free some"),
    ],
)
def test_streams_that_are_closed_or_full(world: World, line: str, code: int, error: str) -> None:
    command = line.replace("softgap", str(SCRIPT), 1)
    done = subprocess.run(["sh", "-c", command], cwd=world.here, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1 if error else 0)
    assert done.stderr.startswith(error)


def test_a_study_that_is_told_to_end_keeps_what_is_done(world: World, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": "x" * (1 + i % 9), "reference": "a"}) for i in range(40)]
    (tmp_path / "p.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "slow.py").write_text("import time\ndef judge(a, f):\n    time.sleep(0.05)\n    return True\n")
    options = ["--raw", "--max-new-tokens", "2", "--batch-size", "2", "--threads", "1", "--score", "slow:judge"]
    command = [str(SCRIPT), "study", "run", "p.jsonl", "--model", str(world.here / "tiny"), "--out", "a", *options]
    started = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    samples = tmp_path / "a" / "samples"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (samples.is_dir() and any(samples.glob("part-*.parquet"))):
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    shown, said = started.communicate(timeout=60)
    assert (started.returncode, shown) == (143, "")
    done = open_study(tmp_path / "a")
    assert without_progress(said) == (
        f"softgap: interrupted; {len(done)} of 40 samples are done; run the same command again to resume\n"
    )
    assert done.state == "running"
    assert not list((tmp_path / "a").rglob("*.partial"))
