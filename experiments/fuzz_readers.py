"""Coverage-guided fuzzing of every reader by atheris: whatever is in a file, there is an answer or a sentence.

`python experiments/fuzz_readers.py [READER ...] --seconds 600` fuzzes each reader for that long, in a process of its
own, and writes its row in the table of `docs/reliability.md`; rows of other readers stay. It needs atheris, which
softgap does not install (`pip install atheris`). An input that breaks a reader is left in `--findings` and named.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from harness import RELIABILITY, write_section

# Of softgap; libraries below are not ours to instrument, and slow when they are.
INSTRUMENTED = ("softgap",)
LONGEST_INPUT = 20_000
SECTION = "fuzzing"


def fuzz(name: str, seconds: int, seed: int, findings: Path) -> None:
    """Fuzz one reader in this process; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from support.fuzz_cases import check_reader
        from support.fuzz_targets import TARGETS

    file, make, read = TARGETS[name]
    with tempfile.TemporaryDirectory() as sound, tempfile.TemporaryDirectory(dir=shared_memory()) as place:
        files = make(Path(sound))
        corpus = Path(sound) / "corpus"
        corpus.mkdir()
        (corpus / "sound").write_bytes(files[file])
        root = Path(place)

        def read_once(data: bytes) -> None:
            check_reader(root, {**files, file: data}, read)

        options = [f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={LONGEST_INPUT}", "-timeout=60"]
        options += [
            f"-artifact_prefix={findings}/{name.replace(' ', '-')}-",
            "-rss_limit_mb=4096",
            "-print_final_stats=1",
        ]
        atheris.Setup([sys.argv[0], *options, str(corpus)], read_once)
        atheris.Fuzz()


def shared_memory() -> str | None:
    """A folder in memory, where there is one: the disk is not what is tested."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def row(name: str, seconds: int, seed: int, findings: Path) -> str:
    """Fuzz one reader in a process of its own; its line of the table."""
    command = [sys.executable, __file__, name, "--seconds", str(seconds), "--seed", str(seed)]
    command += ["--findings", str(findings), "--inside"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=10 * seconds + 600, env=dict(os.environ)
    )
    inputs = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    if inputs is None:
        raise SystemExit(f"the fuzzer of '{name}' did not run:\n{done.stderr[-2000:]}")
    broken = done.returncode != 0
    if broken:
        print(done.stderr[-3000:], file=sys.stderr)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    return (
        f"| {name} | {seconds:,} | {today} | {int(inputs[1]):,} | {covered[-1] if covered else '-'} | "
        f"{'**broken**, see the output' if broken else 'none'} |"
    )


def main() -> None:
    """Fuzz, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*", help="names of readers; all by default")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.findings.mkdir(parents=True, exist_ok=True)
    if given.inside:
        fuzz(given.readers[0], given.seconds, given.seed, given.findings.resolve())
        return
    from support.fuzz_targets import TARGETS

    rows = known_rows()
    for name in given.readers or TARGETS:
        rows[name] = row(name, given.seconds, given.seed, given.findings)
        print(rows[name], flush=True)
        write_table([rows[each] for each in TARGETS if each in rows], len(TARGETS), given.seed)


def known_rows() -> dict[str, str]:
    """The rows of the table that is in the page, by reader."""
    content = RELIABILITY.read_text() if RELIABILITY.exists() else ""
    section = re.search(rf"<!-- {SECTION}: .*?<!-- end of {SECTION} -->", content, re.DOTALL)
    lines = section[0].split("\n") if section else []
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ") and "| reader" not in line}


def write_table(rows: list[str], readers: int, seed: int) -> None:
    """Write the section of the page."""
    write_section(
        SECTION,
        "Damaged files, by coverage-guided fuzzing",
        f"`python experiments/fuzz_readers.py READER --seconds SECONDS --seed {seed}` for {len(rows)} of {readers} "
        "readers, one at a time, each on one thread for the seconds in its row: atheris changes a sound file, keeps "
        "what reaches new branches of softgap's code, and goes on from there. A reader is broken by any exception but "
        "a sentence of softgap, by 20 seconds without an answer, and by a file written outside its folder.\n\n"
        "| reader | seconds | on | inputs tried | edges of our code covered | inputs that broke it |\n"
        "|---|---|---|---|---|---|\n" + "\n".join(rows),
        page=RELIABILITY,
    )


if __name__ == "__main__":
    main()
