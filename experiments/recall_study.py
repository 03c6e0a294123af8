"""A real study: whether divergence tells right from wrong answers of the embedded model in associative recall.

Run: python experiments/recall_study.py [--n 960] [--out runs/recall-study]

recall_preregistration.toml, beside this file, is the preregistration. Its hash goes into the study's log before a
label is read. The samples that it locks are opened once, after the others were compared. Interrupted, the same command
goes on. Run again, it writes the section of docs/findings.md anew from what is kept in the study.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from harness import FINDINGS, machine, write_section
from softgap.analysis import compare_study, read_preregistration
from softgap.cli.render.findings import save_comparison
from softgap.study import StudySettings, run_study
from softgap.tasks import TASKS, Prompt, generate_prompts
from softgap.trajectories import open_study

PLAN = Path(__file__).with_name("recall_preregistration.toml")
# The earlier name of the task "recall": sample ids, and with them the locked samples, stay as published.
TASK = "lookup"
DIFFICULTIES = (4, 5, 6, 8)
# Prompts of seed 0 were looked at when the difficulties were settled (a pilot, and a study of 320), 40 of seed 1 when
# this script was tried, and 480 of seed 2 in the study of 0.1, whose controls were applied one at a time.
SEED, SEEN = 3, ((0, 320), (1, 40), (2, 480))


def main() -> None:
    """Measure, explore, confirm, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=960)
    parser.add_argument("--out", default="runs/recall-study")
    options = parser.parse_args()
    task = TASKS[TASK]
    settings = StudySettings(max_new_tokens=task.max_new_tokens, scoring=task.scoring, threads=1)
    prompts = generate_prompts(TASK, options.n, seed=SEED, difficulties=DIFFICULTIES)
    failed = len(run_study(prompts, options.out, settings, progress=_print_progress).failures)
    explored, confirmed = (_comparison(options.out, opened=opened) for opened in (False, True))
    text = _section(explored, confirmed, prompts, options.out, f"--n {options.n}", failed)
    write_section("recall_study", "Right and wrong answers in associative recall", text, page=FINDINGS)


def _print_progress(stage: str, share: float) -> None:
    print(f"{stage}: {share:.1%}", flush=True)


def _print_stage(stage: str, share: float) -> None:
    if share == 0:
        print(stage, flush=True)


def _comparison(out: str, *, opened: bool) -> dict[str, Any]:
    """The comparison without or with the locked samples: the one that is kept in the study, or a new one."""
    for file in sorted(Path(out, "comparisons").glob("*/result.json")):
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if (
            document["plan_hash"] == read_preregistration(str(PLAN)).hash
            and document["confirmation"]["opened"] == opened
        ):
            return document
    plan = read_preregistration(str(PLAN))
    findings = compare_study(out, plan, preregistration_file=PLAN.name, open_confirmation=opened, progress=_print_stage)
    save_comparison(findings, out, None)
    print("\n".join([findings.verdict.sentence, findings.status]))
    return _comparison(out, opened=opened)


def _right_by_difficulty(out: str, prompts: list[Prompt]) -> str:
    labels = open_study(out).samples().set_index("sample_id")["label"]
    counts: dict[int, tuple[int, int]] = {}
    for prompt in prompts:
        level = int(prompt.fields["difficulty"])
        right, total = counts.get(level, (0, 0))
        counts[level] = (right + int(labels.get(prompt.sample_id) == "right"), total + 1)
    return ", ".join(f"{right} of {total} with {level} pairs" for level, (right, total) in sorted(counts.items()))


def _section(
    explored: dict[str, Any], document: dict[str, Any], prompts: list[Prompt], out: str, arguments: str, failed: int
) -> str:
    """The section from two documents: before and after the locked samples were opened."""
    (first, second), sizes = document["groups"], document["sizes"]
    locked = next((v["sizes"] for name, v in document["controls"].items() if name.startswith("confirmation")), None)
    held = f"{locked[0]} {first} and {locked[1]} {second}" if locked else "what could not be compared"
    seen = {p.prompt for seed, n in SEEN for p in generate_prompts(TASK, n, seed=seed, difficulties=DIFFICULTIES)}
    impossible = "".join(f" {name} could not be computed ({why})." for name, why in document["impossible"].items())
    return (
        f"**{_fragility(document)}{document['verdict']['sentence']}** The analysis was {document['status']} "
        f"(`experiments/{PLAN.name}`, {document['plan_hash'][:12]}): {sizes[0]} {first} and {sizes[1]} {second} "
        f"answers were explored, then {held} that had been locked were opened, once. Before that the verdict read: "
        f"{explored['verdict']['sentence']}\n\n"
        f"`python experiments/recall_study.py {arguments}` on the embedded model; {machine()}. Each prompt lists words "
        f"with four-digit codes and asks for one of them; the answer counts as right if it contains the code. Right "
        f"are {_right_by_difficulty(out, prompts)} ({failed} samples failed). "
        f"The preregistration was chosen on prompts of other seeds, of which "
        f"{sum(p.prompt in seen for p in prompts)} are among these. The family is mean and slope of the divergence of "
        f"{_mechanisms(document)} over the answer in {document['family']['heads']} heads: "
        f"{document['family']['units']:,} units. Effects are {first} minus {second}.{impossible}\n\n"
        "| comparison | convincing | p for any difference | units found | finds effects from | none larger than, with "
        "95 % confidence |\n"
        f"|---|---|---|---|---|---|\n{_steps(document)}\n\n"
        "| head | feature | Hedges' g | AUROC | p, max-T | q |\n|---|---|---|---|---|---|\n"
        f"{_units(document)}\n\n{_beyond(document)} {_flipped(document)}"
    )


def _mechanisms(document: dict[str, Any]) -> str:
    return " and ".join(dict.fromkeys(mode["mechanism"] for mode in document["family"]["modes"]))


def _steps(document: dict[str, Any]) -> str:
    return "\n".join(
        f"| {step['name']} | {'yes' if step['convincing'] else 'no'} | {step['p']:.2g} | {len(step['units'])} | "
        f"{_deviations(step['smallest'])} | {_deviations(step['bound'])} |"
        for step in document["verdict"]["steps"]
    )


def _deviations(value: float | None) -> str:
    return "no size" if value is None else f"{value:.2f}"


def _units(document: dict[str, Any]) -> str:
    return "\n".join(
        f"| {row['layer']}.{row['head']} | {row['mode']} | {_between(row['g'], '+.2f')} | "
        f"{_between(row['auroc'], '.3f')} | {row['p_max']:.2g} | {row['q']:.2g} |"
        for row in document["top"][:5]
    )


def _beyond(document: dict[str, Any]) -> str:
    beyond = document["beyond_baselines"]
    if beyond is None:
        return "Beyond the baselines nothing could be computed."
    return (
        f"Free baselines (length, token entropies, perplexity, minimum probability) reach an AUROC of "
        f"{_between(beyond['baseline'], '.3f')} on held-out samples, with heads selected in nested folds "
        f"{_between(beyond['combined'], '.3f')}: a difference of {_between(beyond['difference'], '+.3f')}, "
        f"p = {beyond['p']:.2g} with the selection refitted in every permutation."
    )


def _fragility(document: dict[str, Any]) -> str:
    """Say so where flipping the fewest labels changes the verdict in at least half of the draws."""
    noise = document["reliability"]["noise"]
    if noise is None or noise["outcomes"][document["verdict"]["outcome"]][0] > 0.5:
        return ""
    return f"Fragile, since flipping {noise['rates'][0]:.0%} of the labels usually changes it. "


def _flipped(document: dict[str, Any]) -> str:
    noise, draws = document["reliability"]["noise"], document["plan"]["draws"]
    if noise is None:
        return ""
    words = [
        f"{rate:.0%}: " + ", ".join(f"{share[i]:.0%} {name}" for name, share in noise["outcomes"].items() if share[i])
        for i, rate in enumerate(noise["rates"])
    ]
    return f"The verdict with labels flipped at random, {draws} draws at each rate: {'; '.join(words)}."


def _between(interval: dict[str, Any], form: str) -> str:
    return f"{interval['value']:{form}} ({interval['low']:{form}} to {interval['high']:{form}})"


if __name__ == "__main__":
    main()
