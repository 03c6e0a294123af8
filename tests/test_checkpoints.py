"""Finished steps are found again under the same settings only, and a file has one writer and is whole or absent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from softgap.checkpoints import (
    Checkpoints,
    checkpoint_folder,
    clear_finished,
    last_step,
    one_writer,
    partial_name,
    settings_key,
    write_whole,
    written_whole,
)
from softgap.errors import StoreError

SETTINGS = {"seed": 0, "by": "heads", "budget": 0.02}
STEP = ["set", [[0, 1], [2, 3]]]
WRITTEN_BY_0_1 = "66d3b1654c9c2ab65f8a4310.json"


def refuse() -> dict[str, object]:
    raise AssertionError("the step was made again")


def test_a_step_is_made_once_and_under_the_name_of_earlier_versions(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "parts"
    assert Checkpoints(folder, SETTINGS).find_or_make(STEP, lambda: {"loss": [1.5]}) == {"loss": [1.5]}
    assert [path.name for path in folder.iterdir()] == [WRITTEN_BY_0_1]
    again = Checkpoints(folder, dict(reversed(SETTINGS.items())))
    assert again.find_or_make(STEP, refuse) == {"loss": [1.5]}


def test_what_is_on_disk_is_known_without_reading_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, SETTINGS)
    assert not checkpoints.has(STEP)
    checkpoints.find_or_make(STEP, lambda: {"loss": 1})
    assert checkpoints.has(STEP)
    assert not checkpoints.has("original")
    assert not Checkpoints(tmp_path, {**SETTINGS, "seed": 1}).has(STEP)
    assert not Checkpoints(None, SETTINGS).has(STEP)


def test_other_settings_and_other_steps_are_made_anew(tmp_path: Path) -> None:
    Checkpoints(tmp_path, SETTINGS).find_or_make(STEP, lambda: {"loss": 1})
    assert Checkpoints(tmp_path, {**SETTINGS, "seed": 1}).find_or_make(STEP, lambda: {"loss": 2}) == {"loss": 2}
    assert Checkpoints(tmp_path, SETTINGS).find_or_make("original", lambda: {"loss": 3}) == {"loss": 3}


@pytest.mark.parametrize("damage", ["", '{"loss": ', "[" * 100_000])
def test_a_step_cut_off_by_a_crash_is_made_again(tmp_path: Path, damage: str) -> None:
    (tmp_path / WRITTEN_BY_0_1).write_text(damage)
    assert Checkpoints(tmp_path, SETTINGS).find_or_make(STEP, lambda: {"loss": 4}) == {"loss": 4}
    assert Checkpoints(tmp_path, SETTINGS).find_or_make(STEP, refuse) == {"loss": 4}


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Checkpoints(None, SETTINGS).find_or_make(STEP, lambda: {"loss": 5}) == {"loss": 5}
    assert list(tmp_path.iterdir()) == []


def test_the_key_of_settings_is_that_of_earlier_versions() -> None:
    assert settings_key({"seed": 0, "features": 128, "minutes": None}) == "2874e1677495eb0428a4966e570bbf58"


def test_the_folder_lies_beside_the_target_and_can_be_removed(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "plan.json")
    assert folder == tmp_path / "plan.json.parts"
    write_whole(folder / "a", "text")
    assert [path.name for path in folder.iterdir()] == ["a"]
    with last_step(tmp_path / "plan.json"):
        assert sorted(path.name for path in folder.iterdir()) == ["a", "replaced"]
    with last_step(tmp_path / "plan.json"):
        assert not folder.exists()
    assert list(tmp_path.iterdir()) == []


def killed_before(target: Path) -> None:
    with last_step(target):
        raise KeyboardInterrupt


def killed_after(target: Path, content: str) -> None:
    with last_step(target):
        write_whole(target, content)
        raise KeyboardInterrupt


def test_finished_steps_of_a_whole_file_are_cleared_and_others_stay(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    folder = checkpoint_folder(target)
    for content in ("", "an older plan"):  # the second replaces what is there
        if content:
            write_whole(target, content)
        write_whole(folder / "step", "half of the work")
        clear_finished(target)
        assert folder.is_dir()
        with pytest.raises(KeyboardInterrupt):
            killed_before(target)
        clear_finished(target)
        assert (folder / "step").is_file()
        with pytest.raises(KeyboardInterrupt):
            killed_after(target, content)
        assert folder.is_dir()
        clear_finished(target)
        assert not folder.exists()
        target.unlink()
    folder.mkdir()
    clear_finished(target)
    assert not folder.exists()


def test_a_place_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"^cannot write '.*/file/parts/a': Not a directory; choose another path$"):
        write_whole(tmp_path / "file" / "parts" / "a", "text")


def test_a_file_has_one_writer_at_a_time(tmp_path: Path) -> None:
    target = tmp_path / "new" / "plan.json"
    with one_writer(target):
        with one_writer(target):  # the same work, further inside
            write_whole(target, "first")
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(lambda: one_writer(target).__enter__())
            with pytest.raises(StoreError, match=r"^another process is writing '.*/plan.json'; wait until it ends, or"):
                second.result()
        assert target.read_text() == "first"
    with one_writer(target):
        write_whole(target, "second")
    assert [path.name for path in target.parent.iterdir()] == ["plan.json"]


def test_a_writer_clears_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    left = [partial_name("plan.json"), ".plan.json.partial", ".plan.json.lock"]
    others = [partial_name("other.json"), ".plan.json.original", "plan.json.partial", ".plan.json.12345678"]
    for name in left + others:
        (tmp_path / name).write_text("half")
    with one_writer(tmp_path / "plan.json"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with written_whole(tmp_path / "new" / "a.html") as partial:
            partial.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_a_file_never_mix(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"

    def write(letter: str) -> None:
        with written_whole(target) as partial, partial.open("w") as file:
            for _ in range(100):
                file.write(letter * 50)
                file.flush()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, "abcdefgh"))
    assert len(set(target.read_text())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
