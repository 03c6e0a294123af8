"""Trial by fire of what measures: run, read, calibrate and doctor."""

from __future__ import annotations

import pytest

from fire_examples import Table, World, check_refused

WITHOUT_MODEL: Table = {
    "run: an empty --out": ("run fox --out ''", "''", "the path of a study must be a folder or a URI, got ''; give"),
    "run: a long --out": ("run fox --out LONG", "xxx", "cannot look at 'xxx.*…xxx.*': File name too long; check"),
    "run: a file as URI": ("run fox --out file:///dev/null", "/dev/null", "a study is written to a folder, but 'file:"),
    "run: a URI of nowhere": ("run fox --out nope://x", "nope://x", r"cannot open 'nope://x' \(.*\); give a local"),
    "run: another study": ("run fox --overwrite --out s", "'s'", "'s' already holds a different study .*; choose"),
    "run: a model as --out": ("run fox --out tiny", "tiny", "a study is written to a new or empty folder, but 'tiny'"),
    "run: no such option": ("run fox --temprature 1", "--temprature", "no such option: --temprature "),
    "run: two prompts": ("run fox bar", "bar", r"got unexpected extra argument\(s\) \(bar\); given"),
    "run: an option alone": ("run fox --model", "--model", "option '--model' requires an argument; given"),
    "run: a flag with a value": ("run fox --json=yes", "--json=yes", "option '--json' does not take a value; given"),
    "run: a negative seed": ("run fox --seed -1", "--seed -1", "invalid value for '--seed': .* greater than or equal"),
    "run: a seed beyond 32 bits": ("run fox --seed 4294967296", "4294967296", "invalid value for '--seed': .* less"),
    "run: half a seed": ("run fox --seed 1.5", "1.5", "invalid value for '--seed': .* valid integer"),
    "run: a negative temperature": ("run fox --temperature -1", "-1", "--temperature must be a number from 0.001, got"),
    "run: an infinite temperature": ("run fox --temperature inf", "inf", "--temperature must be .*, got inf; leave"),
    "run: a frozen temperature": ("run fox --temperature 1e-300", "1e-300", "--temperature must be .*, got 1e-300;"),
    "run: a word as temperature": ("run fox --temperature hot", "hot", "invalid value for '--temperature'"),
    "run: tokens by exponent": ("run fox --max-new-tokens 1e3", "1e3", "invalid value for '--max-new-tokens'"),
    "run: negative sinks": ("run fox --drop-sinks -1", "-1", "invalid value for '--drop-sinks'"),
    "run: an unknown backend": ("run fox --attn flash", "flash", "invalid value for '--attn': 'flash' is not one of"),
    "run: no mechanism": ("run fox --mechanism ''", "''", "unknown mechanism ''; choose one of: cosformer, "),
    "run: options of none": ("run fox --mechanism elu1:g=nan", "g=nan", "mechanism 'elu1' has no options, got g=nan"),
    "run: no calibration": ("run fox --mechanism fitted@no", "'no'", "there is no calibration at 'no'; make one"),
    "run: a text as calibration": (
        "run fox --mechanism fitted@fox.txt",
        "fox.txt",
        "'fox.txt' is no whole safetensors",
    ),
    "run: weights as calibration": (
        "run fox --mechanism fitted@tiny/model.safetensors",
        "tiny/model.safetensors",
        "'tiny/model.safetensors' is a safetensors file but no calibration of softgap; give another file",
    ),
    "read: no file": ("read", "file", "missing argument 'file'; given 'softgap read'"),
    "read: an empty name": ("read ''", "''", "cannot read ''"),
    "read: a long name": ("read LONG", "xxx", "cannot read 'xxx.*…x*': File name too long; give"),
    "read: a study": ("read s", "'s'", "cannot read 's': Is a directory; give a text file, or - for standard input"),
    "read: a model": ("read tiny.gguf", "tiny.gguf", "'tiny.gguf' must be UTF-8 text, got the byte 0x"),
    "read: bytes": ("read nul.txt", "nul.txt", "'nul.txt' must be UTF-8 text, got the byte 0xff at 2; convert"),
    "read: nothing": ("read empty", "empty", "'empty' must hold some text, got ''"),
    "read: a plan as lines": ("read plans/plan.json --jsonl", "plans/plan.json", "'plans/plan.json', line 1: not JSON"),
    "read: a text as lines": ("read fox.txt --jsonl", "fox.txt", "'fox.txt', line 1: not JSON"),
    "read: deep nesting": ("read deep.jsonl", "deep.jsonl", "'deep.jsonl', line 1: not JSON"),
    "read: no completion": ("read bare.jsonl", "completion", "'bare.jsonl', line 1: 'completion' must hold some text"),
    "read: another study": ("read many.jsonl --out run", "'run'", "'run' already holds a different study"),
    "calibrate: two models": ("calibrate tiny tiny", "tiny", r"got unexpected extra argument\(s\) \(tiny\); given"),
    "calibrate: a study as text": ("calibrate tiny --text s", "'s'", "cannot read 's': Is a directory; give"),
    "calibrate: bytes as text": (
        "calibrate tiny --text c.safetensors",
        "c.safetensors",
        "'c.safetensors' must be UTF-8",
    ),
    "calibrate: negative features": ("calibrate tiny --features -4", "-4", "features must be from 2 to 8192, got -4;"),
    "calibrate: too many features": ("calibrate tiny --features 1000000000", "1000000000", "features must be from 2"),
    "calibrate: a folder": ("calibrate tiny --out plans --overwrite", "'plans'", "--out must name a file, but 'plans'"),
    "calibrate: below a file": ("calibrate tiny --out fox.txt/c", "fox.txt", "files are written to a folder, but"),
    "calibrate: a locked place": ("calibrate tiny --out /sys/c", "/sys", "cannot write to '/sys': .*; choose"),
    "calibrate: what is there": ("calibrate tiny --out fox.txt", "fox.txt", "'fox.txt' is there already; choose"),
    "doctor: no gate": ("doctor tiny --gate ''", "''", "unknown gate ''; choose one of: "),
    "doctor: an unknown dtype": ("doctor tiny --dtype x", "'x'", "invalid value for '--dtype': 'x' is not one of"),
}

WITH_MODEL: Table = {
    "run: no model": ("run fox --model ''", "''", "unknown model ''; allowed are 'smollm2-135m', a hub id"),
    "run: a text as model": ("run fox --model fox.txt", "fox.txt", "'fox.txt' is a file, and of files only .gguf can"),
    "run: a study as model": ("run fox --model s", "'s'", "the folder 's' is no model: it has no config.json; give"),
    "run: a long model": ("run fox --model LONG", "xxx", "the system refused 'xxx.*…x*': File name too long; check"),
    "run: no file": ("run fox --model ./no.gguf", "./no.gguf", "there is no model at './no.gguf': the path does not"),
    "run: no GGUF file": ("run fox --model text.gguf", "text.gguf", "'text.gguf' is no GGUF file: .*; give another"),
    "run: half a GGUF file": (
        "run fox --model cut.gguf",
        "cut.gguf",
        r"the GGUF file 'cut.gguf' is damaged \(.*\); do",
    ),
    "run: half the weights": ("run fox --model cut", "'cut'", ".*'cut'.*;"),
    "run: a garbled config": ("run fox --model garbled", "garbled", ".*'garbled'.*;"),
    "run: a future architecture": ("run fox --model future", "llama99", "cannot use 'future': model type 'llama99'.*;"),
    "run: an encoder": (
        "run fox --model bert",
        "bert",
        "cannot use 'bert': model type 'bert' is an encoder .*; choose",
    ),
    "run: no device": (
        "run fox --model tiny --device ''",
        "''",
        r"device must be one of those here \(.*\), got ''; use",
    ),
    "run: an eighth card": ("run fox --model tiny --device cuda:7", "cuda:7", "device must be .*, got 'cuda:7'; use"),
    "run: too many tokens": (
        "run fox --model tiny --max-new-tokens 99999999999999999999",
        "99999999999999999999",
        "the model's context is 64 tokens, got 3 tokens and 9* new ones; shorten",
    ),
    "run: sinks beyond the text": (
        "run fox --model tiny --max-new-tokens 4 --drop-sinks 99999999999999999999",
        "99999999999999999999",
        "drop_sinks must leave some text, got 9* of 3 tokens; drop fewer",
    ),
    "run: another model's calibration": (
        "run fox --model tiny --mechanism fitted@c.safetensors",
        "c.safetensors",
        r"the calibration 'c.safetensors' was fitted to the model f* \(other\), and this one is \w+; calibrate",
    ),
    "read: a text that is too long": (
        "read boats.txt --model tiny",
        "64",
        r"the model's context is 64 tokens, got \d+ tokens; shorten",
    ),
    "read: no chat template": (
        "read many.jsonl --chat --model tiny",
        "many.jsonl",
        "'many.jsonl', line 1: this tokenizer has no chat template; leave chat out",
    ),
    "read: no text left": (
        "read fox.txt --model tiny --drop-sinks 12",
        "12",
        "drop_sinks must leave some text, got 12",
    ),
    "calibrate: a short context": (
        "calibrate tiny",
        "64",
        "a calibration needs a context of 128 tokens, the model has 64; use another",
    ),
    "calibrate: endless minutes": ("calibrate tiny --minutes inf", "inf", "minutes must be a number above 0, got inf;"),
    "calibrate: no minutes": (
        "calibrate tiny --minutes nan",
        "nan",
        "minutes must be a number above 0, got nan; leave",
    ),
    "calibrate: a short text": ("calibrate tiny --text fox.txt", "12", "a calibration needs at least 2048 tokens of"),
    "doctor: a study": ("doctor s", "'s'", "the folder 's' is no model: it has no config.json; give"),
}


@pytest.mark.parametrize("case", WITHOUT_MODEL)
def test_refused_before_a_model_is_loaded(world: World, capsys: pytest.CaptureFixture[str], case: str) -> None:
    check_refused(world, WITHOUT_MODEL[case], capsys)


@pytest.mark.parametrize("case", WITH_MODEL)
def test_refused_with_the_model_at_hand(world: World, capsys: pytest.CaptureFixture[str], case: str) -> None:
    check_refused(world, WITH_MODEL[case], capsys, model=True)
