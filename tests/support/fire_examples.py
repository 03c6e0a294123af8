"""The trial by fire: a small world of sound and broken files, and what every refusal must look like.

A case is one line of a table: the command line as a person types it, what it gets wrong, and how the sentence about it
begins. Each is run through the real entry point.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from softgap.attention import resolve
from softgap.calibration.held_out import HeldOut
from softgap.calibration.rank_floor import Ladders
from softgap.calibration.whole_model import Calibration
from softgap.cli import main
from softgap.intervene.substitute import Substitute
from softgap.linearize.plan import Plan
from softgap.models.tensor_files import digest_of
from softgap.report.documents import Document, save_document
from support.cli_examples import tiny_folder, without_progress
from support.explorer_examples import save_study, story
from support.model_examples import config_folder, tiny_llama, write_gguf
from support.study_examples import named, simulated_study

# The command line; what it gets wrong, as the sentence must name it; how the sentence begins.
Case = tuple[str, str, str]
Table = Mapping[str, Case]

BOATS = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(60))
# More than any machine holds.
NINES = "99999999999999999999"
LONG_NAME = "x" * 5000
LAB = {
    "lab": "position",
    "claims": [{"statement": "a", "source": "b", "verdict": "holds", "condition": "", "numbers": {"x": 1.0}}],
    "settings": {"seed": 0},
}
_NEVER = re.compile(
    r"Traceback|defect of softgap|bug in softgap|\[Errno|\b[A-Z]\w*(Error|Exception|Iteration)\b|0x[0-9a-f]{8}"
)
_LONGEST = 700


@dataclass(frozen=True)
class World:
    """A working folder with one of everything, in a sandbox that also holds home, cache and temporary folder."""

    sandbox: Path
    models_asked: list[str | None]

    @property
    def here(self) -> Path:
        return self.sandbox / "here"

    def state(self) -> dict[str, tuple[int, int] | None]:
        """Every file of the sandbox with size and time, and every folder."""
        return {
            str(path.relative_to(self.sandbox)): None
            if path.is_dir()
            else (path.lstat().st_size, path.lstat().st_mtime_ns)
            for path in self.sandbox.rglob("*")
        }


def build_world(sandbox: Path) -> Path:
    """One of everything that a command reads, and of what is given to it by mistake."""
    here = sandbox / "here"
    for name in ("here", "home", "cache", "tmp"):
        (sandbox / name).mkdir(parents=True)
    tiny_folder(here / "tiny")
    write_gguf(here / "tiny.gguf", tiny_llama())
    _texts(here)
    rng = np.random.default_rng(0)
    means, labels = rng.normal(size=(16, 12)), np.arange(16) % 2 == 0
    simulated_study(here / "s", means, named(labels), fields={"hard": [i % 3 for i in range(16)]})
    save_study(here / "run", [story(steps=30, prompt_steps=3)])
    calibration().save(here / "c.safetensors")
    plan = Plan("tiny", "0" * 32, ((0, 1),), (), (), Substitute(resolve("elu1")))
    plan.save(here / "plans" / "plan.json")
    save_document(Document("Findings", "Nothing was found."), here / "found")
    (here / "lab").mkdir()
    (here / "lab" / "result.json").write_text(json.dumps(LAB), encoding="utf-8")
    _broken_models(here)
    return here


def calibration() -> Calibration:
    """A calibration of another model, small enough to be read in no time."""
    tensors = {"fitted.rate": torch.ones(2, 4), "fitted.query_bias": torch.zeros(2, 4, 3)}
    metadata = {"model": "other", "fingerprint": "f" * 32, "digest": digest_of(tensors)}
    held_out = HeldOut({}, {}, {}, {}, ((None, None), (None, None)), 0.9, 1, 64)
    return Calibration(tensors, metadata, held_out, {}, Ladders((), (), (), 64), {})


def _texts(here: Path) -> None:
    samples = [{"prompt": f"The fox {i}", "completion": " ran", "label": "ab"[i % 2]} for i in range(3)]
    files: dict[str, str | bytes] = {
        "fox.txt": "The fox ran.",
        "boats.txt": BOATS,
        "empty": b"",
        "empty.jsonl": b"\n\n",
        "empty.csv": b"",
        "nul.txt": b"a\0\xff\xfe\0",
        "deep.jsonl": "[" * 100_000,
        "many.jsonl": "".join(json.dumps(sample) + "\n" for sample in samples),
        "list.jsonl": "[1, 2]\n",
        "bare.jsonl": '{"prompt": "a"}\n',
        "half_key.jsonl": '{"prompt": "a", "\\ud800": 1}\n',
        "half_nested.jsonl": '{"prompt": "a", "x": {"y": ["b", "\\ud800"]}}\n',
        "half_reference.jsonl": '{"prompt": "a", "reference": ["b", "\\ud800"]}\n',
        "half_choices.jsonl": '{"prompt": "a", "choices": ["\\udfff"]}\n',
        "half_label.jsonl": '{"id": "s0", "label": "\\ud800"}\n',
        "ids.jsonl": '{"prompt": "a", "id": true}\n',
        "quotes.csv": 'prompt,x\n"a,b\n',
        "columns.csv": "prompt,prompt\na,b\n",
        "heads.csv": "layer,head\n0,0\n",
        "words.csv": "layer,head,x\n0,zero,1\n",
        "others.csv": "layer,head,x\n90,0,1\n",
        "unknown.csv": "id,label\nzzz,a\n",
        "nolabel.csv": "id,lab\ns0,a\n",
        "twice.csv": "id,label\ns0,a\ns0,b\n",
        "key.toml": "marign = 1\n",
        "deep.toml": "a = " + "[" * 100_000,
        "number.toml": "permutations = 1e3\n",
        "huge.toml": "permutations = 99999999999999\n",
        "report.html": "<p>my thesis</p>",
    }
    for name, content in files.items():
        (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def _broken_models(here: Path) -> None:
    whole = here / "tiny"
    config_folder(here / "bert", model_type="bert", architectures=["BertForMaskedLM"])
    for name, file, content in (
        ("cut", "model.safetensors", (whole / "model.safetensors").read_bytes()[:300]),
        ("garbled", "config.json", b"{"),
        ("packed", "config.json", _packed((whole / "config.json").read_text(encoding="utf-8"))),
        ("future", "config.json", b'{"model_type": "llama99", "architectures": ["Llama99ForCausalLM"]}'),
    ):
        folder = here / name
        folder.mkdir()
        for source in whole.iterdir():
            (folder / source.name).write_bytes(source.read_bytes() if source.name != file else content)
    (here / "cut.gguf").write_bytes((here / "tiny.gguf").read_bytes()[:2000])
    (here / "text.gguf").write_text("not a model", encoding="utf-8")


def _packed(config: str) -> bytes:
    """A config.json of weights that no library here unpacks."""
    return json.dumps(json.loads(config) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}).encode()


def arguments_of(line: str) -> list[str]:
    """A command line as the words that a shell makes of it; LONG stands for a name of 5000 letters."""
    return [word.replace("LONG", LONG_NAME) for word in shlex.split(line)]


def check_refused(
    world: World, case: Case, capsys: pytest.CaptureFixture[str], *, model: bool = False, code: int = 2
) -> None:
    """Run a case: its exit code, one clear sentence that names what was wrong, nothing left behind."""
    line, wrong, start = case
    before = world.state()
    world.models_asked.clear()
    capsys.readouterr()
    assert main(arguments_of(line)) == code, capsys.readouterr().err
    captured = capsys.readouterr()
    assert captured.out == ""
    error = without_progress(captured.err)
    assert error.startswith("softgap: ")
    assert error.count("\n") == 1
    sentence = error.removeprefix("softgap: ").rstrip("\n")
    assert re.match(start, sentence), sentence
    assert wrong in sentence
    assert not _NEVER.search(sentence), sentence
    assert re.search(r"[;?]", sentence), f"no remedy: {sentence}"
    assert len(sentence) < _LONGEST
    assert world.state() == before
    # What needs no model is refused before one is loaded, which can take minutes.
    assert model or world.models_asked == []
