"""Trial by fire of what explains and acts: report, serve, analyze, compare, linearize, models and mechanisms."""

from __future__ import annotations

from support.fire_examples import NINES, Table

# Everything that a study is not.
NO_STUDY = {
    "nothing": ("''", "''", "the path of a study must be a folder or a URI, got ''; give"),
    "a text": ("fox.txt", "fox.txt", "a study is a folder, but 'fox.txt' is a file; give the folder that holds"),
    "a plan": ("plans/plan.json", "plans/plan.json", "a study is a folder, but 'plans/plan.json' is a file; give"),
    "a model": ("tiny", "'tiny'", "'tiny' is not a study: it has no manifest.json; give a folder that softgap has"),
    "nowhere": ("none", "'none'", "there is no study at 'none'; check the path"),
}

STUDIES: Table = {
    f"{command}: {name}": (f"{command} {given}", wrong, sentence)
    for command in ("report", "analyze", "compare")
    for name, (given, wrong, sentence) in NO_STUDY.items()
    if (command, name) != ("report", "a plan")
}

REPORTS: Table = {
    "a plan": (
        "report plans/plan.json",
        "plans/plan.json",
        r"'plans/plan.json' holds no evaluation \(.+\); give a file that",
    ),
    "a long name": ("report LONG", "xxx", "the system refused 'xxx.*…x*.*': File name too long; check the path"),
    "a page of another": (
        "report s --out report.html",
        "report.html",
        "'report.html' exists and is not a softgap report",
    ),
    "an empty --out": ("report s --out ''", "'.'", "--out must name a file, but '.' is a folder; add"),
    "a folder as --out": ("report s --out plans", "'plans'", "--out must name a file, but 'plans' is a folder; add"),
    "below a file": ("report s --out fox.txt/x.html", "fox.txt", "files are written to a folder, but 'fox.txt' is"),
    "a locked place": ("report s --out /sys/x.html", "/sys", "cannot write to '/sys': .*; choose a folder"),
    "a long --out": ("report s --out LONG", "xxx", "cannot write 'xxx.*…x*': File name too long; choose"),
    "an unknown sample": ("report s --sample s99", "s99", "unknown sample 's99'; did you mean 's9'"),
    "no quantities": (
        "report s --heads none.csv",
        "none.csv",
        "cannot read 'none.csv' as a CSV file of heads .*; give",
    ),
    "a folder of quantities": (
        "report s --heads plans",
        "plans",
        "cannot read 'plans' as a CSV file of heads .*; give",
    ),
    "weights as quantities": (
        "report s --heads c.safetensors",
        "c.safetensors",
        "cannot read 'c.safetensors' as a CSV",
    ),
    "lines as quantities": ("report s --heads many.jsonl", "many.jsonl", "'many.jsonl' must have the columns layer,"),
    "heads without quantities": (
        "report s --heads heads.csv",
        "layer, head",
        "'heads.csv' must have the columns layer",
    ),
    "words for heads": (
        "report s --heads words.csv",
        "zero",
        "'words.csv', line 2: .*'zero'; layer and head are whole",
    ),
    "another model's heads": (
        "report s --heads others.csv",
        "others.csv",
        "'x' from 'others.csv' has no value for any of",
    ),
    "no calibration": ("report s --calibration none", "'none'", "there is no calibration at 'none'; make one"),
    "a text as calibration": ("report s --calibration fox.txt", "fox.txt", "'fox.txt' is no whole safetensors file"),
    "another's calibration": ("report s --calibration c.safetensors", "12 heads", "'gap closed by the calib.*; give"),
    "samples of a lab": ("report lab --sample 1", "'lab'", "samples, heads and calibration need a study, but 'lab'"),
    "heads of findings": ("report found --heads none.csv", "'found'", "samples, heads and calibration need a study"),
    "serve: a file": ("serve --studies fox.txt", "fox.txt", "runs are written to a folder, but 'fox.txt' is a file;"),
    "serve: a study": ("serve --studies s", "'s'", "--studies must be a folder of studies, but 's' is a study; give"),
    "serve: no address": ("serve --studies new --port 70000", "70000", "invalid value for '--port'"),
    "models: an argument": ("models extra", "extra", r"got unexpected extra argument\(s\) \(extra\); given"),
    "mechanisms: a word as seed": ("mechanisms --seed x", "--seed x", "invalid value for '--seed'"),
    "no command": ("fox", "'fox'", "no such command 'fox'; the commands are: analyze, calibrate, "),
}

FINDINGS: Table = {
    "analyze: an empty --out": (
        "analyze run --out ''",
        "''",
        "--out must end in .pdf, .png, .svg, .json, .csv, .parquet,",
    ),
    "analyze: a locked place": ("analyze run --out /sys/x.svg", "/sys", "cannot write to '/sys': .*; choose a folder"),
    "analyze: one of two": ("analyze run --out x.csv --out fox.txt/x.json", "fox.txt", "files are written to a folder"),
    "analyze: a negative delay": ("analyze run --delay -1", "-1", "delay must be a whole number from 1, got -1; 1"),
    "analyze: a huge delay": (f"analyze run --delay {NINES}", NINES, "no sample holds one window of order 3 and delay"),
    "analyze: a huge order": (f"analyze run --order {NINES}", NINES, "order must be between 2 and 8, got 9*; use"),
    "analyze: negative windows": ("analyze run --eligibility -5", "-5", "unknown eligibility rule '-5'; choose one of"),
    "analyze: a raised digit": ("analyze run --eligibility ²", "²", "unknown eligibility rule '²'; choose one of"),
    "analyze: no alpha": ("analyze run --alpha nan", "nan", "alpha must be between 0 and 1, both excluded, got nan;"),
    "analyze: no transform": ("analyze run --transform ''", "''", "unknown transform ''; choose one of: control, diff"),
    "compare: no labels": ("compare run", "'label'", "two groups are compared, got none in 'label'"),
    "compare: no plan": ("compare s --plan none.toml", "none.toml", "cannot read 'none.toml': No such file or dir"),
    "compare: a folder as plan": ("compare s --plan s", "'s'", "cannot read 's': Is a directory; give a text file"),
    "compare: weights as plan": ("compare s --plan c.safetensors", "c.safetensors", "'c.safetensors' must be UTF-8"),
    "compare: a plan of heads": (
        "compare s --plan plans/plan.json",
        "plan.json",
        "the preregistration 'plans/plan.json' is not",
    ),
    "compare: an unknown key": (
        "compare s --plan key.toml",
        "'marign'",
        "unknown key of the preregistration 'key.toml' 'marign'",
    ),
    "compare: a deep plan": ("compare s --plan deep.toml", "deep.toml", "the preregistration 'deep.toml' is not TOML"),
    "compare: half a number": (
        "compare s --plan number.toml",
        "1000.0",
        "permutations in the preregistration 'number.toml' must",
    ),
    "compare: endless work": (
        "compare s --plan huge.toml",
        "99999999999999",
        "permutations must be a whole number from",
    ),
    "compare: an unknown field": ("compare s --by nothing", "'nothing'", "no sample has a field 'nothing', they have"),
    "compare: three groups": ("compare s --by hard", "'hard'", "two groups are compared, got 3 values of 'hard'"),
    "compare: one group": ("compare s --between right", "['right']", r"between must name two groups, got \['right'\];"),
    "compare: an absent group": ("compare s --between right --between left", "'right'", "two groups are compared, got"),
    "compare: no such first": ("compare s --first left", "'left'", "the first group must be one of right, wrong, got"),
    "compare: a mechanism": ("compare s --mechanism elu2", "'elu2'", "unknown mechanism of this study 'elu2'; did you"),
    "compare: unrecorded": ("compare s --feature sparsity", "--focus", "a comparison needs at least one feature, got"),
    "compare: no prompt steps": (
        "compare s --part prompt",
        "'s0'",
        "part 'prompt' needs the steps of the prompts, got",
    ),
    "compare: an unknown match": (
        "compare s --match nothing",
        "'nothing'",
        "no sample has a field 'nothing', they have",
    ),
    "compare: an unknown stratum": (
        "compare s --stratum nothing",
        "'nothing'",
        "no sample has a field 'nothing', they",
    ),
    "compare: no margin": ("compare s --margin nan", "nan", "margin must be a positive number of .*, got nan; 0.5 is"),
    "compare: an endless margin": ("compare s --margin inf", "inf", "margin must be a positive number of .*, got inf;"),
    "compare: all locked": (
        "compare s --confirm 2",
        "2.0",
        "confirm must be between 0 and 1, both excluded, got 2.0; 0.3 is usual",
    ),
    "compare: no share": (
        "compare s --confirm nan",
        "nan",
        "confirm must be between 0 and 1, both excluded, got nan; 0.3 is usual",
    ),
    "compare: nothing locked": ("compare s --open-confirmation", "locked", "no samples of this study are locked for"),
    "compare: no second labels": ("compare s --second none.csv", "none.csv", "cannot read 'none.csv': No such file"),
    "compare: few permutations": ("compare s --permutations 1", "1", "invalid value for '--permutations': .* greater"),
    "compare: endless refits": (
        f"compare s --refits {NINES}",
        NINES,
        "refits must be a whole number from 19 to 100000",
    ),
    "compare: a file as --out": ("compare s --out fox.txt", "fox.txt", "a comparison is written to a folder, but 'fox"),
    "compare: a locked place": ("compare s --out /sys/x", "/sys/x", "cannot write to '/sys/x': .*; choose a folder"),
}

START = "linearize tiny --text boats.txt"
PLANS: Table = {
    "no text": ("linearize tiny", "none", "a search needs text, got none; give a file with --text"),
    "a cluster for nobody": (f"{START} --ray-address x:1", "x:1", "--ray-address needs --engine ray,"),
    "an unknown engine": (f"{START} --engine spark", "spark", "invalid value for '--engine': 'spark' is"),
    "no budget": (f"{START} --budget 0", "0", "the budget must be above 0 nats per token and finite, got 0; 0.1 is"),
    "a negative budget": (
        f"{START} --budget -1",
        "-1",
        "the budget must be above 0 nats per token and finite, got -1;",
    ),
    "no number": (f"{START} --budget nan", "nan", "the budget must be above 0 nats per token and finite, got nan; 0.1"),
    "an endless budget": (f"{START} --budget inf", "inf", "the budget must be above 0 .* and finite, got inf; 0.1 is"),
    "much recall": (f"{START} --recall-budget 5", "5", "the recall budget must be between 0 and 1, the largest drop"),
    "a tuning alone": (
        f"{START} --tune 3 --no-repair",
        "3",
        "distillation takes 0 steps or more and needs the output correction",
    ),
    "no length": (f"{START} --length 0", "0", "sequences must have at least 16 tokens, got 0; 512 is usual"),
    "no tokens": (f"{START} --tokens 0", "0", "tokens must be at least 1, got 0; 16384 are usual"),
    "no window": (f"{START} --window 0", "0", "window must be from 1 to 1048576 keys, got 0; leave it out for none"),
    "a huge window": (f"{START} --window {NINES}", NINES, "window must be from 1 to 1048576 keys, got 9*; leave"),
    "an unknown score": (f"{START} --score best", "'best'", "unknown score 'best'; choose one of: "),
    "an unknown unit": (f"{START} --by layers", "'layers'", "invalid value for '--by': 'layers' is not one of"),
    "no mechanism": (f"{START} --mechanism ''", "''", "unknown mechanism ''; choose one of: "),
    "softmax for softmax": (
        f"{START} --mechanism softmax",
        "'softmax'",
        "heads must become something else than softmax",
    ),
    "no calibration": (f"{START} --mechanism fitted@no", "'no'", "there is no calibration at 'no'; make one"),
    "what is there": (
        f"{START} --out plans/plan.json",
        "plans/plan.json",
        "'plans/plan.json' already exists; choose",
    ),
    "no plan": (
        f"{START} --out plan.txt",
        "plan.txt",
        "the file of a plan must end in .json, got 'plan.txt'; choose another",
    ),
    "below a file": (f"{START} --out fox.txt/p.json", "fox.txt", "files are written to a folder, but 'fox.txt' is a"),
    "a locked place": (f"{START} --out /sys/p.json", "/sys", "cannot write to '/sys': .*; choose a folder"),
    "a strange picture": (
        f"{START} --picture p.gif",
        "p.gif",
        "the file of a figure must end in .pdf, .png or .svg, got 'p.gif';",
    ),
    "a picture nowhere": (
        f"{START} --picture fox.txt/p.svg",
        "fox.txt",
        "files are written to a folder, but 'fox.txt'",
    ),
    "a missing text": (f"{START} --text none.txt", "none.txt", "cannot read 'none.txt': No such file or directory;"),
    "an empty text": ("linearize tiny --text empty", "'empty'", "'empty' must hold some text, got ''; write"),
}
WITH_MODEL: Table = {
    "long passages": (START, "512", "sequences can have at most the model's context of 64 tokens, got 512; shorten"),
    "a short text": (
        "linearize tiny --text fox.txt --length 64",
        "12",
        "the text must have at least 256 tokens .*; give",
    ),
    "not calibrated": (
        f"{START} --mechanism fitted",
        "'fitted'",
        "mechanism 'fitted' needs the parameters .*; make one",
    ),
}
WITHOUT_MODEL: Table = {
    **STUDIES,
    **{f"look: {name}": case for name, case in REPORTS.items()},
    **FINDINGS,
    **{f"linearize: {name}": case for name, case in PLANS.items()},
}
