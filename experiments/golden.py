"""Record what the commands answer, and compare two recordings: a restructuring must not move a number.

    python experiments/golden.py record OUT
    python experiments/golden.py compare A B

``record`` makes two tiny models and seeded texts, runs every measuring command of ``python -m softgap`` on them and on
the embedded model, each as a process of its own with one thread, and writes one JSON file and one array file per
command. It needs nothing of softgap but the command line and its file formats, so the same script records a tree
before and after its modules have moved. About five minutes on one core.

``compare`` lists every difference and ends with exit code 1 if there is one. Strings, integers and structure are
compared exactly, floating-point numbers to a relative error (``--rtol``, 1e-6 unless given) or to two units in the last
place of a float32 near 1: shares of a gap are differences of such numbers, and one run in many rounds one of them the
other way. Sentences (strings of at least four words) may be rewritten: they are listed apart and count only with
``--strict``. OUT/kept holds a study, a calibration and a plan, to be read by later versions.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from safetensors import safe_open
from safetensors.numpy import load_file

# Keys whose values depend on the moment or the machine, wherever they occur: what was typed, when and how long it took,
# and versions. Paths are relative to the recording's own folder, so they are compared.
LEFT_OUT = {"command", "finished", "seconds", "softgap", "started", "time", "versions"}

# Keys and one-word values that were renamed on purpose, old -> new. Both recordings are translated before they are
# compared.
RENAMED_KEYS: dict[str, str] = {}
RENAMED_WORDS: dict[str, str] = {}

# Moments inside of sentences are left out too.
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")

ROUNDING = 2.0**-22
PLACE = "<place>"
EMBEDDED = "smollm2-135m"
NOUNS = [
    "river",
    "boat",
    "miller",
    "bridge",
    "winter",
    "garden",
    "engine",
    "letter",
    "market",
    "window",
    "harbour",
    "teacher",
    "lantern",
    "orchard",
    "valley",
]
VERBS = [
    "crossed",
    "repaired",
    "counted",
    "painted",
    "carried",
    "followed",
    "measured",
    "opened",
    "borrowed",
    "answered",
]
ADJECTIVES = ["old", "quiet", "northern", "broken", "heavy", "narrow", "bright", "early", "distant", "silver"]


# Models and texts.


def words(count: int, seed: int) -> str:
    """Sentences of seeded words, about ``count`` words long."""
    rng = np.random.default_rng(seed)

    def pick(options: Sequence[str]) -> str:
        return options[int(rng.integers(len(options)))]

    sentences = []
    while count > 0:
        sentence = (
            f"The {pick(ADJECTIVES)} {pick(NOUNS)} {pick(VERBS)} the {pick(NOUNS)} {int(rng.integers(2, 90))} times."
        )
        sentences.append(sentence)
        count -= len(sentence.split())
    return " ".join(sentences)


def make_models(folder: Path) -> dict[str, Path]:
    """Two tiny random models with a byte tokenizer: a plain one with KV groups, and one with sliding windows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = ["<unk>", "<s>", "</s>", *letters]
    shared: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    gemma = Gemma3TextConfig(
        **shared,
        num_hidden_layers=3,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=16,
    )
    by_name = {
        "llama": LlamaForCausalLM(LlamaConfig(**shared, num_hidden_layers=2)),
        "gemma3": Gemma3ForCausalLM(gemma),
    }
    for seed, (name, model) in enumerate(by_name.items()):
        _fill(model, seed)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder / name)
        backend = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
        )
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in by_name}


def _fill(model: Any, seed: int) -> None:
    """Random matrices with a gain of 1.5, so that attention is far from even."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                scale = 0.25 if "embed" in name else 1.5 / math.sqrt(parameter.shape[1])
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def write_inputs(folder: Path) -> None:
    """Texts, samples of unequal length (so that batches are padded) and a labelled study's prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "long.txt").write_text(words(900, 1), encoding="utf-8")
    (folder / "longer.txt").write_text(words(2400, 5), encoding="utf-8")
    (folder / "page.txt").write_text(words(40, 2), encoding="utf-8")
    samples = [
        {"id": f"s{i}", "prompt": words(3 + 2 * i, 10 + i), "completion": " " + words(4 + 3 * (i % 3), 20 + i)}
        for i in range(5)
    ]
    _write_lines(folder / "samples.jsonl", samples)
    labelled = [
        {
            "id": f"p{i}",
            "prompt": words(4 + i % 4, 100 + i),
            "completion": " " + words(12 + i % 5, 200 + i),
            "label": "short" if i % 2 else "long",
        }
        for i in range(24)
    ]
    _write_lines(folder / "labelled.jsonl", labelled)


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


# The commands.


@dataclass(frozen=True)
class Step:
    """One command, and the files it leaves that are recorded with its answer."""

    name: str
    arguments: Sequence[str]
    files: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def steps() -> Iterator[Step]:
    """Every command that is recorded; paths are relative to the folder of the recording's work."""
    for tiny in ("llama", "gemma3"):
        yield from _tiny_steps(tiny)
    yield from _embedded_steps()
    yield from _labs()


def _tiny_steps(tiny: str) -> Iterator[Step]:
    model = ["--model", f"models/{tiny}"]
    fitted = f"{tiny}.safetensors"
    quick = ["--features", "8", "--steps", "4", "--positions", "128"]
    calibrate = ["calibrate", f"models/{tiny}", "--text", "long.txt", *quick, "--out", fitted]
    yield Step(f"{tiny}-calibrate", calibrate, [fitted])
    mechanisms = ["--mechanism", "elu1", "--mechanism", f"fitted@{fitted}", "--mechanism", "favor"]
    run = ["run", "The old miller", *model, *mechanisms, "--max-new-tokens", "12", "--raw"]
    yield Step(f"{tiny}-run", [*run, "--focus", "--out", f"{tiny}-run"], [f"{tiny}-run"])
    sampled = ["--seed", "3", "--temperature", "0.7", "--drop-sinks", "1", "--attn", "eager", "--mechanism", "relu"]
    generate = ["run", "A quiet river", *model, "--max-new-tokens", "9", "--raw"]
    yield Step(f"{tiny}-run-sampled", [*generate, *sampled, "--out", f"{tiny}-sampled"], [f"{tiny}-sampled"])
    read = ["read", "samples.jsonl", *model, "--mechanism", "elu1", "--mechanism", f"fitted@{fitted}"]
    yield Step(f"{tiny}-read", [*read, "--out", f"{tiny}-read"], [f"{tiny}-read"])
    study = ["study", "run", "labelled.jsonl", *model, "--mechanism", "elu1", "--batch-size", "5", "--raw"]
    yield Step(f"{tiny}-study", [*study, "--threads", "1", "--out", f"{tiny}-study"], [f"{tiny}-study"])
    yield Step(f"{tiny}-analyze", ["analyze", f"{tiny}-study", "--out", f"{tiny}.csv"], [f"{tiny}.csv"])
    compare = ["compare", f"{tiny}-study", "--permutations", "99", "--refits", "19", "--out", f"{tiny}-compared"]
    yield Step(f"{tiny}-compare", compare, [f"{tiny}-compared/result.json"])
    small = ["--length", "64", "--tokens", "1024", "--budget", "9", "--mechanism", f"fitted@{fitted}"]
    window = ["--window", "8"] if tiny == "llama" else ["--by", "heads", "--tune", "2"]
    plan = ["linearize", f"models/{tiny}", "--text", "long.txt", *small, *window, "--out", f"{tiny}-plan.json"]
    yield Step(f"{tiny}-linearize", plan, [f"{tiny}-plan.json", f"{tiny}-plan.safetensors"])
    report = ["report", f"{tiny}-study", "--out", f"{tiny}-study.html"]
    yield Step(f"{tiny}-report", report, [f"{tiny}-study.html"])


def _embedded_steps() -> Iterator[Step]:
    fitted = "embedded.safetensors"
    quick = ["--features", "8", "--steps", "2", "--positions", "128"]
    yield Step("embedded-calibrate", ["calibrate", EMBEDDED, "--text", "longer.txt", *quick, "--out", fitted], [fitted])
    mechanisms = ["--mechanism", "elu1", "--mechanism", f"fitted@{fitted}"]
    run = ["run", "Name three rivers.", *mechanisms, "--max-new-tokens", "40", "--out", "embedded-run"]
    yield Step("embedded-run", run, ["embedded-run"])
    yield Step(
        "embedded-read",
        ["read", "samples.jsonl", "--chat", "--focus", *mechanisms, "--out", "embedded-read"],
        ["embedded-read"],
    )
    task = ["study", "task", "arithmetic", "--n", "6", "--batch-size", "4", "--max-new-tokens", "6", "--threads", "1"]
    yield Step("embedded-task", [*task, "--out", "embedded-task"], ["embedded-task"])
    yield Step("embedded-analyze", ["analyze", "embedded-run", "--out", "embedded.csv"], ["embedded.csv"])
    report = ["report", "embedded-run", "--calibration", fitted, "--out", "embedded-run.html"]
    yield Step("embedded-report", report, ["embedded-run.html"])
    small = ["--length", "64", "--tokens", "384", "--budget", "2", "--no-repair", "--score", "divergence"]
    plan = ["linearize", EMBEDDED, "--text", "long.txt", *small, "--out", "embedded-plan.json"]
    yield Step("embedded-linearize", plan, ["embedded-plan.json"])


def _labs() -> Iterator[Step]:
    model = ["--model", "models/llama", "--text", "page.txt"]
    yield Step("lab-focus", ["lab", "focus", "--keys", "64", "--dim", "16", "--draws", "20"])
    yield Step("lab-focus-model", ["lab", "focus", *model, "--tokens", "72"])
    yield Step("lab-injectivity", ["lab", "injectivity", "--dim", "4", "--keys", "16", "--starts", "2"])
    yield Step("lab-injectivity-model", ["lab", "injectivity", *model, "--tokens", "72", "--queries", "8"])
    yield Step("lab-position", ["lab", "position", "--tokens", "64", "--heads", "8", "--dim", "16"])
    yield Step("lab-position-model", ["lab", "position", *model, "--tokens", "72"])
    axes = "d=18/34,b=0.4/0.5"
    yield Step("lab-separation", ["lab", "separation", "--d", "34", "--draws", "6", "--map-draws", "4", "--map", axes])
    yield Step("mechanisms", ["mechanisms"])


def record(out: Path, only: str = "") -> None:
    """Run every step whose name holds ``only`` and write what it answered."""
    if out.exists():
        sys.exit(f"'{out}' exists already; give a new folder")
    work = out / "work"
    write_inputs(work)
    make_models(work / "models")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
        # Nothing that this machine has calibrated may change what is measured by default.
        "SOFTGAP_CALIBRATIONS": str(work / "calibrations"),
    }
    for step in steps():
        if only not in step.name:
            continue
        begun = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "softgap", *step.arguments, "--json"],
            cwd=work,
            env={**environment, **step.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        document: dict[str, Any] = {"arguments": list(step.arguments), "exit": done.returncode}
        arrays: dict[str, np.ndarray] = {}
        try:
            document["answer"] = json.loads(done.stdout)
        except ValueError:
            document["answer"] = done.stdout
        if done.returncode:
            document["error"] = done.stderr
        for name in step.files:
            _keep(work / name, name, document, arrays)
        text = json.dumps(document, indent=1).replace(json.dumps(str(work.resolve()))[1:-1], PLACE)
        (out / f"{step.name}.json").write_text(text, encoding="utf-8")
        np.savez_compressed(out / f"{step.name}.npz", **arrays)  # type: ignore[arg-type]
        failed = f"  exit {done.returncode}: {done.stderr.strip()[-300:]}" if done.returncode else ""
        print(f"{time.perf_counter() - begun:6.1f} s  {step.name}{failed}", flush=True)
    _keep_files(work, out / "kept")


def _keep_files(work: Path, folder: Path) -> None:
    """A study, a calibration and a plan as this version writes them."""
    folder.mkdir()
    for name in ("llama-read", "llama.safetensors", "llama-plan.json", "llama-plan.safetensors"):
        if (work / name).is_dir():
            shutil.copytree(work / name, folder / name)
        elif (work / name).exists():
            shutil.copy(work / name, folder / name)


def _keep(path: Path, name: str, document: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Add the content of a file, or of all files of a folder, to a recording."""
    contents = document.setdefault("contents", {})
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file():
                _keep(file, f"{name}/{file.relative_to(path)}", document, arrays)
    elif not path.exists():
        contents[name] = "absent"
    elif path.suffix == ".json":
        contents[name] = json.loads(path.read_text(encoding="utf-8"))
    elif path.suffix == ".jsonl":
        contents[name] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    elif path.suffix == ".parquet":
        _keep_table(path, name, contents, arrays)
    elif path.suffix == ".safetensors":
        arrays.update({f"{name}:{key}": value for key, value in load_file(path).items()})
        with safe_open(path, framework="np") as file:
            blocks = file.metadata() or {}
        contents[name] = {key: json.loads(text) if text.startswith("{") else text for key, text in blocks.items()}
    elif path.suffix == ".html":
        _keep_page(path.read_text(encoding="utf-8"), name, contents, arrays)
    elif path.suffix == ".csv":
        rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
        contents[name] = [[_number(cell) for cell in row] for row in rows]
    else:
        contents[name] = f"{path.suffix} file"


def _number(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def _keep_table(path: Path, name: str, contents: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    table = pq.read_table(path)
    columns: dict[str, Any] = {}
    for key in table.column_names:
        values = table.column(key).combine_chunks()
        columns[key] = str(values.type)
        flat = values
        while hasattr(flat, "flatten") and str(flat.type).startswith(("list", "fixed_size_list", "large_list")):
            columns[key + ":lengths"] = [len(item.values) if item.is_valid else None for item in flat][:50]
            flat = flat.flatten()
        if str(flat.type) in {"float", "double", "halffloat"} or str(flat.type).startswith(("int", "uint")):
            arrays[f"{name}:{key}"] = flat.to_numpy(zero_copy_only=False)
        else:
            columns[key + ":values"] = json.loads(json.dumps(flat.to_pylist(), default=str))
    contents[name] = {"rows": table.num_rows, "columns": columns}


_PAYLOAD = re.compile(r'<script type="application/json"[^>]*>(.*?)</script>', re.DOTALL)
_ARRAY = re.compile(r'<script type="text/plain" id="(array-\d+)">(.*?)</script>', re.DOTALL)


def _keep_page(page: str, name: str, contents: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """The data of a report: its JSON document, and the packed arrays as the bytes they unpack to."""
    documents = [json.loads(text) for text in _PAYLOAD.findall(page)]
    packed = _ARRAY.findall(page)
    for key, text in packed:
        arrays[f"{name}:{key}"] = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    contents[name] = {"payload": documents, "arrays": len(packed)}


# The comparison.


@dataclass
class Differences:
    """What differs between two recordings: numbers and structure, and sentences that read differently."""

    values: list[str] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)


def is_sentence(value: str) -> bool:
    """Whether a string is prose: at least four words of letters."""
    return len(re.findall(r"[A-Za-z]{2,}", value)) >= 4


def compare(first: Path, second: Path, *, rtol: float) -> Differences:
    """Everything that differs between two folders that ``record`` wrote."""
    differences = Differences()
    names = [{path.stem for path in folder.glob("*.json")} for folder in (first, second)]
    for name in sorted(names[0] ^ names[1]):
        where = first if name in names[0] else second
        differences.values.append(f"{name}: only in {where}")
    for name in sorted(names[0] & names[1]):
        documents = [json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for folder in (first, second)]
        for document in documents:
            document.pop("arguments", None)  # options may be renamed
        _compare_values(name, *documents, rtol=rtol, differences=differences)
        with np.load(first / f"{name}.npz") as a, np.load(second / f"{name}.npz") as b:
            _compare_arrays(name, dict(a), dict(b), rtol=rtol, differences=differences)
    return differences


def _renamed(document: Mapping[str, Any]) -> dict[str, Any]:
    return {RENAMED_KEYS.get(key, key): value for key, value in document.items() if key not in LEFT_OUT}


def _compare_values(where: str, a: Any, b: Any, *, rtol: float, differences: Differences) -> None:
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = _renamed(a), _renamed(b)
        for key in sorted(a.keys() ^ b.keys()):
            differences.values.append(f"{where}.{key}: only in the {'first' if key in a else 'second'}")
        for key in a.keys() & b.keys():
            _compare_values(f"{where}.{key}", a[key], b[key], rtol=rtol, differences=differences)
    elif isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            differences.values.append(f"{where}: {len(a)} items and {len(b)}")
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            _compare_values(f"{where}[{i}]", x, y, rtol=rtol, differences=differences)
    elif isinstance(a, str) and isinstance(b, str):
        a, b = (_MOMENT.sub("<moment>", RENAMED_WORDS.get(text, text)) for text in (a, b))
        if a != b:
            prose = is_sentence(a) and is_sentence(b)
            (differences.sentences if prose else differences.values).append(f"{where}: {a!r} and {b!r}")
    elif isinstance(a, float) and isinstance(b, float):
        if not (math.isclose(a, b, rel_tol=rtol, abs_tol=ROUNDING) or (math.isnan(a) and math.isnan(b))):
            differences.values.append(f"{where}: {a!r} and {b!r}")
    elif type(a) is not type(b) or a != b:
        differences.values.append(f"{where}: {a!r} and {b!r}")


def _compare_arrays(
    where: str, a: dict[str, np.ndarray], b: dict[str, np.ndarray], *, rtol: float, differences: Differences
) -> None:
    first, second = ({_renamed_array(key): value for key, value in arrays.items()} for arrays in (a, b))
    for key in sorted(first.keys() ^ second.keys()):
        differences.values.append(f"{where} {key}: only in the {'first' if key in first else 'second'}")
    for key in sorted(first.keys() & second.keys()):
        x, y = first[key], second[key]
        if x.shape != y.shape or x.dtype != y.dtype:
            differences.values.append(f"{where} {key}: {x.dtype} {x.shape} and {y.dtype} {y.shape}")
            continue
        # Relative to the largest value of the array: entries near 0 are differences of larger numbers.
        if np.issubdtype(x.dtype, np.floating):
            scale = float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))
            differ = ~np.isclose(x, y, rtol=rtol, atol=1e-3 * rtol * scale, equal_nan=True)
        else:
            differ = x != y
        if differ.any():
            at = tuple(int(i) for i in np.argwhere(differ)[0])
            differences.values.append(
                f"{where} {key}: {int(differ.sum())} of {x.size} differ, first at {at}: {x[at]} and {y[at]}"
            )


def _renamed_array(key: str) -> str:
    name, _, column = key.rpartition(":")
    return f"{name}:{RENAMED_KEYS.get(column, column)}"


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the commands and write what they answer into a new folder")
    recording.add_argument("out", type=Path)
    recording.add_argument("--only", default="", help="only the commands whose name holds this")
    comparing = commands.add_parser("compare", help="list what differs between two recordings")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    comparing.add_argument("--rtol", type=float, default=1e-6, help="relative error of floating-point numbers")
    comparing.add_argument("--strict", action="store_true", help="sentences that read differently count too")
    options = parser.parse_args()
    if options.command == "record":
        record(options.out, options.only)
        return
    differences = compare(options.first, options.second, rtol=options.rtol)
    for line in differences.values:
        print(line)
    if differences.sentences:
        print(f"\n{len(differences.sentences)} sentences read differently:")
        for line in differences.sentences:
            print(f"  {line}")
    counted = len(differences.values) + (len(differences.sentences) if options.strict else 0)
    print(f"{counted} differences" if counted else "no difference")
    sys.exit(1 if counted else 0)


if __name__ == "__main__":
    main()
