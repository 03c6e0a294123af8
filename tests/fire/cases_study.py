"""Trial by fire of studies: prompts and labels from files, tasks, and the folders they are written to."""

from __future__ import annotations

from support.fire_examples import NINES, Table

WITHOUT_MODEL: Table = {
    "no command": ("study", "study", "missing command; the commands are: label, run, task; given 'softgap study'"),
    "an unknown command": ("study rum", "rum", "no such command 'rum'; the commands are: label, run, task; given"),
    "no prompts": ("study run", "prompts", "missing argument 'prompts'; given 'softgap study run'"),
    "an empty name": ("study run ''", "''", "there is no file ''; give a .jsonl or .csv file, or a dataset"),
    "a study as prompts": ("study run s", "'s'", "prompts are read from a file, but 's' is a study; give"),
    "a model as prompts": ("study run tiny.gguf", "tiny.gguf", "prompts are read from .jsonl and .csv .*; rename"),
    "three names": ("study run a/b/c", "a/b/c", "there is no file 'a/b/c'; give a .jsonl or .csv file, or a dataset"),
    "no lines": ("study run empty.jsonl", "empty.jsonl", "'empty.jsonl' must hold at least one JSON line with prompt"),
    "no columns": ("study run empty.csv", "empty.csv", "'empty.csv', line 1: must name the columns, each once, got"),
    "columns twice": (
        "study run columns.csv",
        "prompt",
        "'columns.csv', line 1: must name the columns, each once, got",
    ),
    "open quotes": ("study run quotes.csv", "quotes.csv", r"'quotes.csv', line \d: not CSV \(.*\); check the quotes"),
    "deep nesting": ("study run deep.jsonl", "deep.jsonl", r"'deep.jsonl', line 1: not JSON \(.*\); write"),
    "a list": ("study run list.jsonl", "[1, 2]", r"'list.jsonl', line 1: must be an object with prompt, got \[1, 2\];"),
    "half a character as a name": (
        "study run half_key.jsonl",
        r"\ud800",
        "'half_key.jsonl', line 1: the name of a field must be valid UTF-8, got",
    ),
    "half a character inside": (
        "study run half_nested.jsonl",
        r"\ud800",
        "'half_nested.jsonl', line 1: 'x' must be valid UTF-8, got",
    ),
    "half a character as reference": (
        "study run half_reference.jsonl",
        r"\ud800",
        "'half_reference.jsonl', line 1: 'reference' must be valid UTF-8, got",
    ),
    "half a character as choice": (
        "study run half_choices.jsonl --score choice",
        r"\udfff",
        "'half_choices.jsonl', line 1: 'choices' must be valid UTF-8, got",
    ),
    "half a character as label": (
        "study label s half_label.jsonl",
        r"\ud800",
        "'half_label.jsonl', line 1: 'label' must be valid UTF-8, got",
    ),
    "a strange id": ("study run ids.jsonl", "True", "'ids.jsonl', line 1: 'id' must be text or a whole number, got"),
    "half a field": ("study run many.jsonl --field prompt", "'prompt'", "--field must have the form ours=theirs, got"),
    "a field of none": ("study run many.jsonl --field =x", "'=x'", "--field must have the form ours=theirs, got '=x';"),
    "a missing field": ("study run many.jsonl --field prompt=q", "prompt", "'many.jsonl', line 1: 'prompt' must hold"),
    "no scoring": ("study run many.jsonl --score ''", "''", "unknown scoring ''; choose one of: "),
    "a scoring without a name": (
        "study run many.jsonl --score :",
        "':'",
        "a scoring of one's own is written module:function",
    ),
    "a limit of none": ("study run many.jsonl --limit 0", "--limit 0", "invalid value for '--limit': .* greater"),
    "a batch of none": ("study run many.jsonl --batch-size 0", "0", "invalid value for '--batch-size': .* greater"),
    "no temperature": ("study run many.jsonl --temperature nan", "nan", "temperature must be a number from 0.001, got"),
    "no threads": ("study run many.jsonl --threads 0", "--threads 0", "invalid value for '--threads': .* greater"),
    "too many threads": (f"study run many.jsonl --threads {NINES}", NINES, "invalid value for '--threads': .* less"),
    "an unknown engine": ("study run many.jsonl --engine spark", "spark", "invalid value for '--engine': 'spark' is"),
    "a cluster for nobody": ("study run many.jsonl --ray-address x:1", "x:1", "--ray-address needs --engine ray,"),
    "an empty --out": ("study run many.jsonl --out ''", "''", "the path of a study must be a folder or a URI, got"),
    "a file as --out": ("study run many.jsonl --out fox.txt", "fox.txt", "a study is written to a folder, but 'fox"),
    "a model as --out": ("study run many.jsonl --out tiny", "tiny", "a study is written to a new or empty folder, but"),
    "a dry run to a file": (
        "study run many.jsonl --dry-run --out fox.txt",
        "fox.txt",
        "a study is written to a folder",
    ),
    "an unknown mechanism": ("study run many.jsonl --mechanism elu2", "elu2", "unknown mechanism 'elu2'; did you mean"),
    "no calibration": ("study run many.jsonl --mechanism fitted@no", "'no'", "there is no calibration at 'no'; make"),
    "no task": ("study task ''", "''", "unknown task ''; choose one of: arithmetic, copying, recall, statements"),
    "no prompts of a task": ("study task recall --n 0", "--n 0", "invalid value for '--n': .* greater than or equal"),
    "too many prompts": (f"study task recall --n {NINES}", NINES, "n must be from 1 to 1000000 prompts, got 9*; 400"),
    "too easy": ("study task recall --difficulty 0", "0", "the difficulty of 'recall' is .*, from 1 to 99, got 0;"),
    "too hard": (f"study task recall --difficulty {NINES}", NINES, "the difficulty of 'recall' is .*, got 9*; choose"),
    "a study to label": ("study label none unknown.csv", "none", "there is no study at 'none'; check the path"),
    "a text as labels": ("study label s fox.txt", "fox.txt", "labels are read from .jsonl and .csv files, got 'fox"),
    "prompts as labels": ("study label s many.jsonl", "None", "'many.jsonl', line 1: 'id' must be text or a whole"),
    "no labels": ("study label s empty.csv", "empty.csv", "'empty.csv', line 1: must name the columns, each once, got"),
    "labels without a label": ("study label s nolabel.csv", "None", "'nolabel.csv', line 2: 'label' must be text, got"),
    "a label twice": ("study label s twice.csv", "'s0'", "'twice.csv', line 3: every id must be different, got 's0'"),
    "labels of others": ("study label s unknown.csv", "'zzz'", "labels must be for samples of 's', got 'zzz'"),
    "a file to label": ("study label fox.txt unknown.csv", "fox.txt", "a study is a folder, but 'fox.txt' is a file;"),
}

WITH_MODEL: Table = {
    "another study": (
        "study run many.jsonl --out s --model tiny",
        "'tiny'",
        "'s' already holds a different study .its model is 'simulated', this one's 'tiny'.; choose another folder",
    ),
    "no prompt fits": (
        "study run many.jsonl --answer --model tiny --out new",
        "64",
        "a study needs a prompt that the model can read, got none; the first one: the model's context is 64 tokens",
    ),
    "a text as model": ("study task recall --model fox.txt", "fox.txt", "'fox.txt' is a file, and of files only"),
}
