"""A real study: whether divergence tells right from wrong answers of the embedded model to lookup prompts.

Run: python benchmarks/lookup_study.py [--n 320] [--out runs/lookup-study]

The plan below is written into the study, and its hash into the study's log, before a label is read. Interrupted, the
same command goes on. The section of docs/findings.md is written from what was found, whatever that is.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from harness import FINDINGS, machine, write_section
from softgap.analysis import ComparisonFindings, ComparisonPlan, compare_study
from softgap.cli._compared import save_comparison
from softgap.study import StudySettings, run_study
from softgap.tasks import TASKS, generate_prompts
from softgap.trajectories import open_study

DIFFICULTIES = (4, 5, 6, 8)
# Prompts of one difficulty differ in length by a few tokens, and position moves divergence: both are controlled for.
PLAN = ComparisonPlan(
    first="wrong",
    features=("mean", "slope"),
    match=("length", "prompt_length"),
    strata=("difficulty",),
    margin=0.8,
)

# How this plan came about, which no log of this study knows.
_PILOT = (
    "Difficulties and plan were settled after a pilot of 32 prompts with 4 to 32 pairs had been looked at, 8 of which "
    "are among these; no samples were kept back for confirmation."
)


def main() -> None:
    """Run the study, compare, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=320)
    parser.add_argument("--out", default="runs/lookup-study")
    options = parser.parse_args()
    task = TASKS["lookup"]
    settings = StudySettings(max_new_tokens=task.max_new_tokens, scoring=task.scoring, threads=1)
    prompts = generate_prompts("lookup", options.n, difficulties=DIFFICULTIES)
    result = run_study(prompts, options.out, settings, progress=_told)
    findings = compare_study(options.out, PLAN, planned="benchmarks/lookup_study.py", progress=_step)
    save_comparison(findings, options.out, None)
    print("\n".join([findings.verdict.sentence, findings.status]))
    text = _section(findings, _right_by_difficulty(options.out), f"--n {options.n}", len(result.failures))
    write_section("lookup_study", "Right and wrong answers to lookups", text, page=FINDINGS)


def _told(done: int, total: int, seconds: float) -> None:
    print(f"{done} of {total} samples, {seconds:.0f} s", flush=True)


def _step(what: str, share: float) -> None:
    if share == 0:
        print(what, flush=True)


def _right_by_difficulty(out: str) -> dict[int, tuple[int, int]]:
    samples = open_study(out).samples().set_index("sample_id")["label"]
    found: dict[int, tuple[int, int]] = {}
    for prompt in generate_prompts("lookup", len(samples), difficulties=DIFFICULTIES):
        level = int(prompt.fields["difficulty"])
        right, total = found.get(level, (0, 0))
        found[level] = (right + int(samples.get(prompt.sample_id) == "right"), total + 1)
    return found


def _section(findings: ComparisonFindings, right: dict[int, tuple[int, int]], arguments: str, failed: int) -> str:
    document: dict[str, Any] = findings.to_json()
    sizes, groups = document["sizes"], document["groups"]
    levels = ", ".join(f"{share[0]} of {share[1]} with {level} pairs" for level, share in sorted(right.items()))
    beyond = document["beyond_baselines"]
    steps = "\n".join(
        f"| {step['name']} | {'yes' if step['convincing'] else 'no'} | {step['p']:.2g} | {len(step['units'])} | "
        f"{step['smallest']:.2f} | {step['bound']:.2f} |"
        for step in document["verdict"]["steps"]
    )
    units = "\n".join(
        f"| {row['layer']}.{row['head']} | {row['mode']} | {_between(row['g'], '+.2f')} | "
        f"{_between(row['auroc'], '.3f')} | {row['p_max']:.2g} | {row['q']:.2g} |"
        for row in document["top"][:5]
    )
    added = (
        "Beyond the baselines nothing could be computed."
        if beyond is None
        else f"Free baselines (length, token entropies, perplexity, minimum probability) reach an AUROC of "
        f"{_between(beyond['baseline'], '.3f')} on held-out samples, with heads selected in nested folds "
        f"{_between(beyond['combined'], '.3f')}: a difference of {_between(beyond['difference'], '+.3f')}, "
        f"p = {beyond['p']:.2g} with the selection refitted in every permutation."
    )
    impossible = "".join(f" {name} could not be computed ({why})." for name, why in findings.impossible.items())
    return (
        f"`python benchmarks/lookup_study.py {arguments}` on the embedded model; {machine()}. Each prompt lists words "
        f"with four-digit codes and asks for one of them; the answer counts as right if it holds the code. "
        f"{sizes[1]} answers are {groups[1]} and {sizes[0]} {groups[0]} ({levels}; {failed} samples failed).\n\n"
        f"**{findings.verdict.sentence}** The analysis was {findings.status}. {_PILOT} The family is mean and slope "
        f"of the divergence of elu1 and uniform over the answer in {document['family']['heads']} heads: "
        f"{document['family']['units']:,} units. Effects are {groups[0]} minus {groups[1]}.{impossible}\n\n"
        "| comparison | convincing | p for any difference | units found | finds effects from | none larger than |\n"
        f"|---|---|---|---|---|---|\n{steps}\n\n"
        "| head | feature | Hedges' g | AUROC | p, max-T | q |\n|---|---|---|---|---|---|\n"
        f"{units}\n\n{added}"
    )


def _between(found: dict[str, Any], form: str) -> str:
    return f"{found['value']:{form}} ({found['low']:{form}} to {found['high']:{form}})"


if __name__ == "__main__":
    main()
