"""Faults that the commands survive: kills at random times, full disks, a file of 100,000 lines, and long servers.

`python experiments/reliability.py kills|disk|lines|long|server|study|all` makes each fault on a tiny random model and
writes its section of `docs/reliability.md`. Kills and full disks are made in forks of one process, so that softgap is
imported once. The full disk is a tmpfs, which only root can mount. At most two processes run at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import psutil
import torch

from harness import RELIABILITY, machine, write_section
from softgap.cli import main as softgap
from support.explorer_examples import save_study, story
from support.live_examples import served
from support.model_examples import attending_llama, save_folder, tiny_llama
from support.stats_cases import planted
from support.study_examples import named, simulated_study

STUDY = "study run {place}/p.jsonl --model {place}/tiny --raw --max-new-tokens 12 --batch-size 2 --threads 1 --out a"
CALIBRATE = "calibrate {place}/attending --text {place}/boats.txt --features 4 --steps 2 --positions 128 --no-mix "
CALIBRATE += "--no-stability --out c.safetensors"
LINEARIZE = "linearize {place}/attending --text {place}/boats.txt --length 64 --tokens 1024 --budget 9 --no-baselines "
LINEARIZE += "--score gradient --mechanism elu1 --no-recall-budget --out plan.json"
COMMANDS = {
    "run": "run fox --model {place}/tiny --max-new-tokens 12 --out a --overwrite",
    "read": "read {place}/fox.txt --model {place}/tiny --out a --overwrite",
    "study": STUDY,
    "calibrate": CALIBRATE,
    "linearize": LINEARIZE,
    "report": "report {place}/run --out r.html --overwrite",
    "compare": "compare s --by label --permutations 99 --out f",
    "evaluate": "evaluate {place}/attending --tasks recall --lengths 448 --contexts 2 --no-generation --out e.json",
}
"""Every kind of command that writes files, on models small enough that imports are most of the work."""
LOG = "log.jsonl"
"""Where a study notes each look at its labels: a look that was killed is one too."""
# What tells when or how a result came about, and not what it is.
_TIMES = re.compile(rb'"(started|finished|hash|time|seconds|command)": ?("[^"]*"|null|[\d.e-]+),?|log has \d+ entr\w+')


def prepare(place: Path) -> None:
    """Models, texts, prompts and studies for the commands."""
    save_folder(place / "tiny", tiny_llama(max_position_embeddings=64))
    save_folder(place / "attending", attending_llama(max_position_embeddings=512))
    (place / "boats.txt").write_text(" ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(90)))
    (place / "fox.txt").write_text("A fox went out at night.")
    rows = [{"id": f"p{i}", "prompt": "x" * (1 + i % 9)} for i in range(16)]
    (place / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    x, labels = planted(2, 60, 12, {7: 2.5})
    simulated_study(place / "s", x, named(labels))
    save_study(place / "run", [story(steps=30, prompt_steps=3)])


def start(line: str, place: Path, folder: Path) -> int:
    """Run a command in a fork of this process, in a folder; the process."""
    if line.startswith("compare s ") and not (folder / "s").exists():
        shutil.copytree(place / "s", folder / "s")
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.chdir(folder)
        with (folder.parent / f"{folder.name}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            code = softgap(line.format(place=place).split())
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a process; its exit code, below 0 for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def results(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, without what says when it was made."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LOG)
    return {str(path.relative_to(folder)): _TIMES.sub(b"", _without_looks(path)) for path in files}


def _without_looks(path: Path) -> bytes:
    """A file's content; of a comparison's result without the earlier looks at the labels that it lists."""
    if path.name != "result.json":
        return path.read_bytes()
    document = json.loads(path.read_text(encoding="utf-8"))
    return json.dumps({name: value for name, value in document.items() if name != "tried"}).encode()


def kills(count: int, seed: int) -> str:
    """Kill commands at random times, run them again, and compare with what an unbroken one wrote."""
    rng = random.Random(seed)
    counts = {name: [0, 0, 0, 0] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        prepare(place)
        lasted: dict[str, float] = {}
        for name, line in COMMANDS.items():
            (place / f"whole-{name}").mkdir()
            begin = time.monotonic()
            if ended(start(line, place, place / f"whole-{name}")) != 0:
                raise SystemExit((place / f"whole-{name}.log").read_text())
            lasted[name] = time.monotonic() - begin
        for number in range(count):
            name = list(COMMANDS)[number % len(COMMANDS)]
            folder = place / f"killed-{number}"
            folder.mkdir()
            child = start(COMMANDS[name], place, folder)
            time.sleep(rng.uniform(0, lasted[name]))
            os.kill(child, signal.SIGKILL)
            killed = ended(child) == -signal.SIGKILL
            code = ended(start(COMMANDS[name], place, folder))
            # A file that is whole already is refused without --overwrite: there is nothing left to do.
            whole = code == 0 or (code == 2 and not killed) or "already exists" in log_of(folder)
            same = results(folder) == results(place / f"whole-{name}")
            for i, value in enumerate((True, killed, whole, same)):
                counts[name][i] += value
            print(f"{number + 1} of {count}: {name}, killed {killed}, resumed {whole}, equal {same}", flush=True)
            if not (whole and same):
                expected = results(place / f"whole-{name}").items()
                differing = sorted({path for path, _ in results(folder).items() ^ expected})
                print(f"different: {', '.join(differing)}\n{log_of(folder)}", file=sys.stderr)
            shutil.rmtree(folder)
    rows = [f"| `softgap {name}` | {a} | {b} | {c} | {d} |" for name, (a, b, c, d) in counts.items()]
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    rows.append("| **all** | " + " | ".join(map(str, total)) + " |")
    return (
        "Each command is killed (`kill -9`) at a random time between its start and the time that it takes, then run "
        "again. *Killed* counts those that had not ended before. *Equal* compares every file with that of an unbroken "
        "command; times, command lines and the list of looks at the labels, where both looks stand, are aside.\n\n"
        "| command | started | killed | resumed | equal |\n|---|---|---|---|---|\n" + "\n".join(rows)
    )


def log_of(folder: Path) -> str:
    """What the last command in a folder said."""
    return (folder.parent / f"{folder.name}.log").read_text()


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """A disk of so many kilobytes at a folder; only root can mount it."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "softgap", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def disk(count: int, seed: int) -> str:
    """Let every command that writes run out of disk, at several sizes, then run it again with room."""
    del count, seed
    lines = [
        "| command | sizes in KB | ended with one sentence | later, with room: finished and equal |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        prepare(place)
        for name, given in COMMANDS.items():
            # The study that is compared lies on a disk with room.
            line = given.replace("compare s ", "compare {place}/s ")
            whole = place / f"whole-{name}"
            whole.mkdir()
            if ended(start(line, place, whole)) != 0:
                raise SystemExit(log_of(whole))
            size = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()) // 1024
            sizes = sorted({4, max(8, size // 3), max(12, 3 * size // 4)})
            sentences = finished = 0
            for kilobytes in sizes:
                folder = place / f"full-{name}-{kilobytes}"
                folder.mkdir()
                with small_disk(folder, kilobytes):
                    code = ended(start(line, place, folder))
                    said = [text for text in log_of(folder).splitlines() if text.startswith("softgap: ")]
                    sentences += code == 2 and len(said) == 1 and "no space left" in said[0].lower()
                    if code != 2:
                        print(f"{name} with {kilobytes} KB ended with {code}: {said}", file=sys.stderr)
                    subprocess.run(["mount", "-o", "remount,size=100m", str(folder)], check=True)
                    code = ended(start(line, place, folder))
                    finished += code == 0 and results(folder) == results(whole)
            tried = ", ".join(map(str, sizes))
            of = f"of {len(sizes)}"
            lines.append(f"| `softgap {name}` | {tried} | {sentences} {of} | {finished} {of} |")
            print(lines[-1], flush=True)
    return (
        "The folder lies on a tmpfs of the given sizes; then the same disk gets room, and the same command runs again."
        "\n\n" + "\n".join(lines)
    )


def lines(count: int, seed: int) -> str:
    """Read a file of 100,000 prompts, and measure a few of them."""
    del count, seed
    from softgap.tasks import read_prompts

    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        prepare(place)
        rows = (
            {"id": f"p{i}", "prompt": f"Count to {i}.", "reference": str(i), "group": i % 9} for i in range(100_000)
        )
        (place / "big.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        before, begin = resident(), time.process_time()
        prompts = read_prompts(str(place / "big.jsonl"))
        seconds, grown = time.process_time() - begin, resident() - before
        line = "study run {place}/big.jsonl --model {place}/tiny --raw --max-new-tokens 2 --limit 8 --threads 1 --out a"
        begin, code = time.monotonic(), ended(start(line, place, place))
        with (place / "big.jsonl").open("a") as file:
            file.write('{"prompt": "a", "id": "p7"}\n')
        refused = ended(start(line.replace("--limit 8", "--limit 100001"), place, place))
        said = next(text for text in log_of(place).splitlines() if text.startswith("softgap: "))
    return (
        f"{len(prompts):,} prompts are read in {seconds:.1f} seconds of processor time and "
        f"{grown / 2**20:.0f} MB. A study of the first 8 ends with code {code}. With one more line whose id is known "
        f"it ends with code {refused}: "
        f"`{said.removeprefix('softgap: ').replace(str(place), '...')}`."
    )


def long(count: int, seed: int, model: str | None = None) -> str:
    """Read a text of many tokens, and watch the memory of the process."""
    del seed
    from softgap.models import load_model

    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        if model is None:
            save_folder(place / "model", tiny_llama(max_position_embeddings=count))
        loaded, tokenizer = load_model(str(place / "model") if model is None else model)
        words = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(count // 4))
        text = str(tokenizer.decode(tokenizer(words)["input_ids"][: count - 2], skip_special_tokens=True))
        tokens = len(tokenizer(text)["input_ids"])
        (place / "long.txt").write_text(str(text))
        parameters = sum(x.numel() for x in loaded.parameters())
        if model is not None:
            loaded.config.max_position_embeddings = count
            loaded.save_pretrained(place / "model")
            tokenizer.save_pretrained(place / "model")
        del loaded, tokenizer
        begin = resident()
        child = start("read {place}/long.txt --model {place}/model --out a", place, place)
        _, status, used = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code:
            print(log_of(place), file=sys.stderr)
        size = sum(path.stat().st_size for path in (place / "a").rglob("*.parquet")) / 2**20
    which = "the tiny model" if model is None else f"'{model}', whose positions were extended to {count:,}"
    return (
        f"`softgap read` of {tokens:,} tokens by {which} ({parameters:,} parameters) ends with code {code} after "
        f"{used.ru_utime + used.ru_stime:.0f} seconds of processor time. Resident memory "
        f"peaks at {used.ru_maxrss / 1024:,.0f} MB; before the command it is {begin / 2**20:,.0f} MB. The study takes "
        f"{size:.1f} MB on disk."
    )


def resident() -> int:
    """Bytes of memory that this process has now."""
    return int(psutil.Process().memory_info().rss)


def flat(sizes: list[int]) -> tuple[float, float]:
    """Memory after a quarter of the way and at the end, in MB; the median of some of the last sizes each."""
    quarter = len(sizes) // 4
    middle = sorted(sizes[quarter - quarter // 4 : quarter + 1])
    late = sorted(sizes[-max(1, quarter // 4) :])
    return middle[len(middle) // 2] / 2**20, late[len(late) // 2] / 2**20


def server(count: int, seed: int) -> str:
    """Ask the live server for many generations and watch its memory."""
    del seed
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        prepare(place)
        with served(place, "--model", str(place / "tiny")) as live:
            process, sizes = psutil.Process(live.process.pid), []
            token = live.token()
            headers = {"Content-Type": "application/json", "X-Softgap-Token": token}
            for number in range(count):
                body = json.dumps({"prompts": [f"fox {number}"], "max_new_tokens": 4}).encode()
                status, _, answer = live.request("POST", "/runs", body, headers)
                if status != 202:
                    raise SystemExit(f"the server refused generation {number}: {status} {answer!r}")
                run = json.loads(answer)["runs"][0]
                end = next(data for kind, _, data in live.events(run) if kind == "end")
                if end["state"] != "finished":
                    raise SystemExit(f"generation {number} ended as {end}")
                sizes.append(int(process.memory_info().rss))
                if number % 50 == 0:
                    print(f"{number} of {count}: {sizes[-1] / 2**20:.0f} MB", flush=True)
        saved = sum((path / "manifest.json").is_file() for path in (place / "runs").iterdir())
    early, late = flat(sizes)
    return (
        f"{count} generations one after the other, each saved: {saved} studies are there. Resident memory is "
        f"{early:.0f} MB after a quarter of them and {late:.0f} MB at the end ({100 * (late / early - 1):+.1f} %)."
    )


def study(count: int, seed: int) -> str:
    """A study of many samples, and its comparison and report, in forks whose memory is watched."""
    del seed
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        prepare(place)
        rows = [{"id": f"p{i}", "prompt": "x" * (1 + i % 9), "label": "ab"[i % 2]} for i in range(count)]
        (place / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        line = "study run {place}/many.jsonl --model {place}/tiny --raw --max-new-tokens 8 --threads 1 --out a"
        child, sizes = start(line, place, place), []
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            sizes.append(int(psutil.Process(child).memory_info().rss))
            time.sleep(0.2)
        early, late = flat(sizes)
        rest = []
        for line in ("compare a --by label --permutations 99", "report a --out r.html"):
            rest.append(f"`softgap {line.split()[0]}` ends with code {ended(start(line, place, place))}")
        written = len(list((place / "a" / "samples").glob("part-*")))
    return (
        f"{count:,} samples in {written:,} batches: resident memory is {early:.0f} MB after a quarter of the time and "
        f"{late:.0f} MB at the end ({100 * (late / early - 1):+.1f} %). On it {' and '.join(rest)}."
    )


FAULTS: dict[str, tuple[Callable[[int, int], str], int, str]] = {
    "kills": (kills, 50, "Kills at random times"),
    "disk": (disk, 0, "A full disk"),
    "lines": (lines, 0, "A file of 100,000 prompts"),
    "long": (long, 32_768, "A text of 32,768 tokens"),
    "server": (server, 500, "Many generations through the server"),
    "study": (study, 2000, "A study of many samples"),
}


def main() -> None:
    """Make the faults and write their sections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=[*FAULTS, "all"])
    parser.add_argument("--count", type=int, default=None, help="kills, tokens, generations or samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=None, help="for long: a model whose positions are extended")
    given = parser.parse_args()
    torch.set_num_threads(1)
    # A calibration of the user's would join the defaults.
    os.environ["SOFTGAP_CALIBRATIONS"] = tempfile.mkdtemp(prefix="softgap-none-")
    for name in FAULTS if given.fault == "all" else [given.fault]:
        make, count, title = FAULTS[name]
        count = given.count or count
        words = f" --count {count}" if count else ""
        words += f" --model {given.model}" if given.model else ""
        text = long(count, given.seed, given.model) if make is long else make(count, given.seed)
        print(text, flush=True)
        command = f"`python experiments/reliability.py {name}{words} --seed {given.seed}` ({machine()})"
        write_section(name, title, f"{command}.\n\n{text}", page=RELIABILITY)


if __name__ == "__main__":
    main()
