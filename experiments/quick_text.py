"""Write the text that quick calibrations are fitted on: the embedded model continues beginnings of many kinds.

The text ships with softgap as ``softgap/calibration/quick.txt``. It is nobody else's: the beginnings are the project's,
the rest is the model's. It is sampled at a temperature below 1, because at 1 this small model loses its thread.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from softgap.models import load_model
from softgap.probe.capture import fixed_seed

TARGET = Path(__file__).parents[1] / "src" / "softgap" / "calibration" / "quick.txt"
NEW_TOKENS, TEMPERATURE, SEED = 230, 0.8, 3

# Somebody read what was written: these wandered off to an address on the web and to invented religion and history.
LEFT_OUT = ("Packing list", "Bees find", "The museum opens")

# Kinds take turns, so that every part of the text holds some of each.
BEGINNINGS = (
    "The lighthouse at the end of the pier was built by a carpenter who",
    "def moving_average(values, width):\n    ",
    "How to repair a bicycle tyre\n\n1. ",
    "Nora: Have you watered the tomatoes?\nPaul:",
    "Light travels more slowly through glass than through air, because",
    "Dear Grandmother,\nthank you for the parcel. The scarf",
    "Bread rises when yeast",
    "import math\n\n\nclass Circle:\n    def __init__(self, radius):\n        self.radius = radius\n\n"
    "    def area(self):",
    "Once there was a clockmaker who lived above",
    "Question: Why does the moon look larger near the horizon?\nAnswer:",
    "The train left the station at seven. Through the window",
    "Packing list\n- two shirts\n- a raincoat\n- ",
    "A prime number is a whole number that",
    "Teacher: What happens when water freezes?\nStudent:",
    "Bees find their way back to the hive by",
    "The museum opens its new hall on Saturday. Visitors",
    "SELECT name, price FROM products\nWHERE",
    "In the north the winters are long, and the fishermen",
)


def continuations(model: Any, tokenizer: Any) -> list[str]:
    """Every beginning with what the model wrote after it."""
    rows = [tokenizer(text)["input_ids"] for text in BEGINNINGS]
    longest, pad = max(map(len, rows)), tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    with torch.inference_mode(), fixed_seed(SEED, model):
        written = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            repetition_penalty=1.1,
            pad_token_id=pad,
        )
    whole = [row[longest - len(begin) :] for row, begin in zip(written, rows, strict=True)]
    texts = tokenizer.batch_decode(whole, skip_special_tokens=True)
    return [text for text in texts if not text.startswith(LEFT_OUT)]


def main() -> None:
    """Write the text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=TARGET)
    out = parser.parse_args().out
    model, tokenizer = load_model("smollm2-135m")
    text = "\n\n".join(text.strip("\n") for text in continuations(model, tokenizer)) + "\n"
    out.write_text(text, encoding="utf-8")
    print(f"{out}: {len(text.encode()):,} bytes, {len(tokenizer(text)['input_ids']):,} tokens")


if __name__ == "__main__":
    main()
