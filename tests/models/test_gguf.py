"""A converted copy is complete or absent, whoever is killed and however many ask at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from softgap.models import gguf
from softgap.models.cache import cache_dir, read_record
from softgap.models.loading import load_model
from support import model_examples as examples

WAITING = "waiting for another process that converts this model"
# Loads the model named on the command line; with "stop" it halts when the weights are written and not yet verified.
LOADER = """
import sys, time
from softgap.models import gguf as gguf_files, loading as models

def stop(*_):
    print("written", flush=True)
    time.sleep(600)

name, mode = sys.argv[1:]
if mode == "stop":
    gguf_files._verify = stop
model, _ = models.load_model(name, progress=lambda stage, _: print(stage, flush=True))
print("sum", model.get_input_embeddings().weight.double().sum().item(), flush=True)
"""


def loader(name: Path | str, cache: Path, *, stop: bool = False) -> subprocess.Popen[str]:
    environment = {**os.environ, "SOFTGAP_CACHE": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", LOADER, str(name), "stop" if stop else "go"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for found in process.stdout:
        if found.strip() == line:
            return
    pytest.fail(f"the process ended before '{line}': {process.communicate()[1]}")


def wait_for(condition: Callable[[], object], seconds: float = 300.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOFTGAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return examples.write_gguf(tmp_path / "tiny.gguf", examples.tiny_llama())


def copies(cache: Path) -> list[str]:
    """Names of finished copies; parts and locks are hidden."""
    return [entry.name for entry in (cache / "models").iterdir() if not entry.name.startswith(".")]


def parts(cache: Path) -> list[Path]:
    return list((cache / "models").glob(".*.part-*"))


def assert_shared(processes: list[subprocess.Popen[str]], cache: Path) -> None:
    """All processes end with the same model, which only one of them converted."""
    outputs = [process.communicate(timeout=300)[0].splitlines() for process in processes]
    assert len({output[-1] for output in outputs}) == 1
    assert outputs[0][-1].startswith("sum ")
    assert sum("dequantising" in output for output in outputs) == 1
    assert len(copies(cache)) == 1
    assert parts(cache) == []


def test_a_killed_conversion_leaves_no_copy_and_the_next_one_succeeds(tiny: Path, cache: Path) -> None:
    process = loader(tiny, cache, stop=True)
    read_until(process, "written")
    assert [list(part.glob("*.safetensors")) != [] for part in parts(cache)] == [True]
    process.kill()
    process.communicate(timeout=60)
    assert copies(cache) == []
    assert len(parts(cache)) == 1
    model, _ = load_model(tiny)
    assert torch.equal(model.lm_head.weight, examples.tiny_llama().lm_head.weight)
    assert len(copies(cache)) == 1
    assert parts(cache) == []


def test_an_interrupted_conversion_cleans_up(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(folder: Path, *_: object) -> None:
        assert (folder / "model.safetensors").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "_verify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_model(tiny)
    assert copies(cache) == []
    assert parts(cache) == []


def test_those_who_wait_for_a_killed_process_convert_once_and_share(tiny: Path, cache: Path) -> None:
    first = loader(tiny, cache, stop=True)
    read_until(first, "written")
    others = [loader(tiny, cache) for _ in range(2)]
    for process in others:
        read_until(process, WAITING)
    assert copies(cache) == []
    first.kill()
    first.communicate()
    assert_shared(others, cache)


def test_a_damaged_copy_is_converted_again(tiny: Path, cache: Path) -> None:
    load_model(tiny)
    folder = cache / "models" / copies(cache)[0]
    record = read_record(folder)
    assert record is not None
    assert record.source == str(tiny)
    assert record.sha256 == gguf.file_hash(tiny)
    assert set(record.files) | {"softgap.json"} == {path.name for path in folder.iterdir()}

    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert read_record(folder) is None
    model, _ = load_model(tiny)
    assert torch.equal(model.lm_head.weight, examples.tiny_llama().lm_head.weight)
    assert read_record(folder) == record

    for damage in ("not json", "[]", json.dumps({"files": {}}), ""):
        (folder / "softgap.json").write_text(damage)
        assert read_record(folder) is None


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_file_says_whether_texts_begin_with_the_first_token(tmp_path: Path, cache: Path, add_bos: bool) -> None:
    path = examples.write_gguf(tmp_path / "tiny.gguf", examples.tiny_llama(), add_bos=add_bos)
    for _ in ("converted", "the copy"):
        _, tokenizer = load_model(path)
        assert tokenizer("ab").input_ids[0] == 1 if add_bos else tokenizer("ab").input_ids[0] != 1
        assert tokenizer("ab", add_special_tokens=False).input_ids[0] != 1


def test_a_copy_that_differs_from_its_source_is_not_published(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = gguf._save

    def save_another(model: torch.nn.Module, *rest: object) -> None:
        with torch.no_grad():
            model.get_parameter("model.norm.weight")[3] += 1e-6
        save(model, *rest)  # type: ignore[arg-type]
        with torch.no_grad():
            model.get_parameter("model.norm.weight")[3] -= 1e-6

    monkeypatch.setattr(gguf, "_save", save_another)
    with pytest.raises(RuntimeError, match=r"the converted weight 'model\.norm\.weight' differs from its source"):
        load_model(tiny)
    assert copies(cache) == []
    assert parts(cache) == []


def test_the_cache_folder_is_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTGAP_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("SOFTGAP_CACHE")
    assert cache_dir() == tmp_path / "shared" / "softgap"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "softgap"


@pytest.mark.slow
def test_the_embedded_model_survives_a_kill_and_a_race(cache: Path) -> None:
    killed = loader("smollm2-135m", cache)
    wait_for(lambda: list(cache.rglob("*.safetensors")) or killed.poll() is not None)
    killed.kill()
    killed.communicate()
    assert copies(cache) == []
    assert_shared([loader("smollm2-135m", cache) for _ in range(2)], cache)
