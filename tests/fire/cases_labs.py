"""Trial by fire of the labs: sizes that are none, sizes that no machine holds, texts and places."""

from __future__ import annotations

from support.fire_examples import NINES, Table

WITHOUT_MODEL: Table = {
    "no lab": (
        "lab",
        "lab",
        "missing command; the commands are: focus, injectivity, locality, position, separation; given",
    ),
    "an unknown lab": ("lab foci", "'foci'", "no such command 'foci'; the commands are: focus, injectivity, "),
    **{
        f"{lab}: a file as --out": (f"lab {lab} --out fox.txt", "fox.txt", "the result of a lab is written to a folder")
        for lab in ("focus", "injectivity", "locality", "position", "separation")
    },
    "a locked place": ("lab position --out /sys/x", "/sys/x", "cannot write to '/sys/x': .*; choose a folder"),
    "an empty --out": ("lab focus --out ''", "''", "the path of a study must be a folder or a URI, got ''; give"),
    "a figure without a place": ("lab focus --format pdf", "pdf", "--format pdf saves the figure beside .* give --out"),
    "a figure of another kind": (
        "lab focus --format png",
        "'png'",
        "invalid value for '--format': 'png' is not",
    ),
    "focus: negative keys": ("lab focus --keys -1", "-1", "the focus lab needs n from 64, d from 2 .*, got -1, 64"),
    "focus: endless keys": (f"lab focus --keys {NINES}", NINES, "invalid value for '--keys': .* less than or equal"),
    "focus: no dimension": ("lab focus --dim 0", "0", "the focus lab needs n from 64, d from 2 .*, got 512, 0 and"),
    "focus: endless draws": (f"lab focus --draws {NINES}", NINES, "invalid value for '--draws': .* less than or"),
    "focus: a model as text": ("lab focus --text tiny.gguf", "tiny.gguf", "'tiny.gguf' must be UTF-8 text, got"),
    "focus: no tokens": ("lab focus --model tiny --tokens 0", "0", "invalid value for '--tokens': .* greater than"),
    "injectivity: one dimension": ("lab injectivity --dim 1", "1", "dim must be at least 2 and keys at least dim"),
    "injectivity: endless queries": (f"lab injectivity --queries {NINES}", NINES, "invalid value for '--queries'"),
    "injectivity: no starts": (
        "lab injectivity --starts 0",
        "0",
        "queries and starts must be at least 1, got 2 and 0;",
    ),
    "locality: no texts": ("lab locality --texts 0", "0", "invalid value for '--texts': .* greater than"),
    "locality: one text": ("lab locality --texts 1", "1", "planted heads need heads from 1, .* texts from 2 and 16"),
    "locality: endless tokens": (f"lab locality --tokens {NINES}", NINES, "invalid value for '--tokens': .* less"),
    "locality: endless steps": (f"lab locality --train --steps {NINES}", NINES, "invalid value for '--steps': .* less"),
    "locality: an unknown task": ("lab locality --train --task sums", "'sums'", "unknown task 'sums'; choose one of"),
    "locality: a missing text": ("lab locality --text none.txt", "none.txt", "cannot read 'none.txt': No such file"),
    "position: endless tokens": (f"lab position --tokens {NINES}", NINES, "invalid value for '--tokens': .* less"),
    "position: endless heads": (f"lab position --heads {NINES}", NINES, "invalid value for '--heads': .* less"),
    "position: a late start": ("lab position --start 9999", "9999", "a text must have at least 10015 tokens to show"),
    "position: a missing text": ("lab position --text none.txt", "none.txt", "cannot read 'none.txt': No such file"),
    "separation: no rows": ("lab separation --n 0", "d = 2", "the construction needs d >= 5 and t >= 1, got d = 2"),
    "separation: endless rows": (f"lab separation --n {NINES}", NINES, "invalid value for '--n': .* less than or"),
    "separation: no signs": ("lab separation --m 0", "0", "m must be a whole number from 1, got 0; leave it out for"),
    "separation: no level": ("lab separation --a0 nan", "nan", "a0 must be between 0 and 10, got nan; the paper"),
    "separation: an endless level": ("lab separation --a1 inf", "inf", "a1 must be between 0 and 10, got inf; the"),
    "separation: endless draws": (f"lab separation --draws {NINES}", NINES, "invalid value for '--draws': .* less"),
    "separation: no map": ("lab separation --map ''", "''", "a map has two axes, written like d,b or .*, got ''"),
    "separation: an axis twice": ("lab separation --map d,d", "d twice", "the two axes of a map must differ, got d"),
    "separation: a word on an axis": ("lab separation --map d=x,b", "'x'", "the values of axis d are numbers with /"),
    "separation: an unknown axis": ("lab separation --map d,zz", "'zz'", "unknown axis of a map 'zz'; choose one of"),
    "separation: no pairs": ("lab separation --train --task recall-0", "0", "recall takes 2 to 128 pairs, got 0; for"),
    "separation: endless counting": (
        f"lab separation --train --task counting-{NINES}",
        NINES,
        "counting takes .* got 9*; for example counting-",
    ),
    "separation: no models": ("lab separation --train --seeds 0", "0", "invalid value for '--seeds': .* greater than"),
}
