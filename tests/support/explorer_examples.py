"""Studies to look at, and a real browser to look at them with."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from softgap.report import write_explorer
from softgap.trajectories import FOCUS, QUANTITIES, Anatomy, Manifest, StudyWriter, Trajectories

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NO_BROWSER = "NO BROWSER: pages were not tested; install one, for example with: apt-get install chromium"
WORDS = ("The", " quick", " brown", " fox", " jumps", " over", " the", " lazy", " dog", ".", "\n", " Then")

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "<b onmouseover=alert(2)>",
    "{{script}}",
    "javascript:alert(3)",
    "\u2028\u2029",
    "&lt;/script&gt;",
    "=HYPERLINK(1)",
    '"\\u003c',
    "\u202eabc\u202c",
)


def story(
    *,
    sample_id: str = "fox",
    label: str | None = None,
    layers: int = 4,
    heads: int = 6,
    steps: int = 90,
    prompt_steps: int = 11,
    mechanisms: tuple[str, ...] = ("elu1", "uniform"),
    focus: bool = True,
    level: float = 0.0,
    seed: int = 0,
    words: tuple[str, ...] = WORDS,
) -> Trajectories:
    """A run whose heads drift and jitter around levels of their own, divergences between 0 and 2."""
    rng = np.random.default_rng(seed)
    total = prompt_steps + steps

    def walk(*leading: int) -> np.ndarray:
        shape = (*leading, layers, heads)
        base = 0.5 + 0.4 * np.arange(layers)[:, None] / layers + 0.3 * np.arange(heads) / heads + level
        noise = 0.04 * rng.standard_normal((*shape, total))
        drift = rng.normal(0, 0.1, shape)[..., None] * np.linspace(0, 1, total)
        return np.clip(base[..., None] + drift + noise, 0, 2).astype(np.float32)

    arrays = {name: walk(len(mechanisms)) for name in QUANTITIES}
    extra = {name: walk() for name in FOCUS} if focus else {}
    tokens = tuple(words[i % len(words)] for i in range(total))
    scores = {"logprob": -rng.exponential(1, total), "entropy": rng.exponential(1, total)}
    shared: dict[str, Any] = {
        "mechanisms": mechanisms,
        "layers": tuple(range(layers)),
        "kv_group": np.tile(np.arange(heads) // 2, (layers, 1)).astype(np.int32),
        "sample_id": sample_id,
        "label": label,
        "prompt_text": "".join(tokens[:prompt_steps]),
        "completion_text": "".join(tokens[prompt_steps:]),
        "n_prompt": prompt_steps + 1 if prompt_steps else 0,
        "manifest": Manifest(
            model="tiny", mechanisms={name: {} for name in mechanisms}, options={"mode": "live"}, dtype="float32"
        ),
    }

    def part(name: Literal["prompt", "completion"], where: slice, **more: Any) -> Trajectories:
        count = len(range(total)[where])
        return Trajectories(
            quantities={key: array[..., where] for key, array in arrays.items()},
            focus={key: array[..., where] for key, array in extra.items()},
            positions=np.arange(total, dtype=np.int32)[where],
            token_ids=np.arange(count, dtype=np.int32),
            tokens=tokens[where],
            logprob=scores["logprob"][where].astype(np.float32),
            entropy=scores["entropy"][where].astype(np.float32),
            part=name,
            **shared,
            **more,
        )

    if not prompt_steps:
        return part("completion", slice(None))
    return part("completion", slice(prompt_steps, None), prompt=part("prompt", slice(0, prompt_steps)))


def save_study(path: Path, runs: list[Trajectories]) -> Path:
    """Write runs as one study."""
    with StudyWriter(path, runs[0].manifest) as writer:
        writer.append(runs)
    return path


def labelled_runs(count: int = 6, **options: Any) -> list[Trajectories]:
    """Samples of two labels and different lengths."""
    labels = itertools.cycle(("calm", "wild"))
    return [
        story(sample_id=f"s{i}", label=next(labels), seed=i, level=0.2 * (i % 2), steps=30 + 5 * i, **options)
        for i in range(count)
    ]


def with_fitted(run: Trajectories, share: Any, held_out: dict[str, Any] | None = None) -> Trajectories:
    """The run with a fitted map whose divergence is a share of that from uniform: a number, or one per head."""
    names: dict[str, dict[str, object]] = {"elu1": {}, "uniform": {}, "fitted": {}}
    shares = np.asarray(share, dtype=np.float32)[..., None]

    def extended(part: Trajectories) -> dict[str, Any]:
        more = {name: np.concatenate([x, shares * x[1:]]) for name, x in part.quantities.items()}
        extra = {} if held_out is None else {"held_out": held_out}
        manifest = replace(part.manifest, mechanisms=names, extra=extra)
        return {"mechanisms": tuple(names), "quantities": more, "manifest": manifest}

    prompt = None if run.prompt is None else replace(run.prompt, **extended(run.prompt))
    return replace(run, **extended(run), prompt=prompt)


def report_of(folder: Path, *runs: Trajectories) -> Path:
    """The report on some runs."""
    return write_explorer(save_study(folder / "study", list(runs))).path


def browser_path() -> str | None:
    """A browser on this machine."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


@dataclass
class Watched:
    """A page, and everything about it that should not happen."""

    page: Page
    problems: list[str] = field(default_factory=list)


@contextmanager
def opened(browser: Browser, path: Path, **context: Any) -> Iterator[Page]:
    """The report at a path, opened from disk and ready; at the end nothing may have gone wrong or to the network."""
    made = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "accept_downloads": True, **context})
    watched = Watched(made.new_page())
    page = watched.page
    page.on("console", lambda message: _note(watched, message.type, message.text))
    page.on("pageerror", lambda error: watched.problems.append(f"error: {error}"))
    page.on("dialog", lambda dialog: dialog.dismiss())
    page.on("dialog", lambda dialog: watched.problems.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: _check_address(watched, request.url))
    page.add_init_script(
        "addEventListener('securitypolicyviolation',"
        " (e) => console.error(`policy: ${e.violatedDirective} ${e.blockedURI} ${e.sample}`));"
    )
    page.goto(path.absolute().as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    settle(page)
    try:
        yield page
        settle(page)
        assert watched.problems == []
    finally:
        made.close()


def settle(page: Page) -> None:
    """Wait until everything that was asked for is drawn."""
    page.wait_for_timeout(120)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")


def choose(page: Page, name: str, *, shift: bool = False) -> None:
    """Click a head of the map of ``story``."""
    layer, head = map(int, name.split("."))
    page.locator(f'#map .cell[data-row="{6 * layer + head}"]').click(modifiers=["Shift"] if shift else [])
    settle(page)


def chosen(page: Page) -> list[str]:
    """Names of the chosen heads."""
    return [chip.replace("head ", "") for chip in page.locator("#chosen span").all_inner_texts()]


def drag_over_chart(page: Page, first: int, last: int) -> None:
    """Draw a range in the chart of trajectories with the mouse."""
    page.locator("#lines").scroll_into_view_if_needed()
    box = page.locator("#lines .overlay").bounding_box()
    assert box is not None
    steps = page.evaluate("stepCount()")
    x0, x1 = (box["x"] + box["width"] * (step + 0.5) / steps for step in (first, last))
    y = box["y"] + box["height"] / 2
    page.mouse.move(x0, y)
    page.mouse.down()
    page.mouse.move((x0 + x1) / 2, y, steps=3)
    page.mouse.move(x1, y, steps=3)
    page.mouse.up()
    settle(page)


def _note(watched: Watched, kind: str, text: str) -> None:
    if kind in ("error", "warning"):
        watched.problems.append(f"{kind}: {text}")


def _check_address(watched: Watched, url: str) -> None:
    if not url.startswith(("file:", "data:", "blob:")):
        watched.problems.append(f"network: {url}")


def violations(page: Page) -> list[str]:
    """What axe calls serious or critical, with the first places."""
    found = Axe().run(page).response["violations"]
    return [
        f"{entry['id']}: {entry['help']} at {[node['target'] for node in entry['nodes'][:3]]}"
        for entry in found
        if entry["impact"] in ("serious", "critical")
    ]


def anatomy_of(run: Trajectories, *heads: tuple[int, int], top: int = 16, seed: int = 0) -> list[Anatomy]:
    """Weights of some heads of a ``story``, drawn at random: softmax sums to 1, the substitute has negative ones."""
    rng = np.random.default_rng(seed)
    n = int(run.positions[-1]) + 1
    entries = []
    for layer, head in heads:
        keys = np.full((2, n, top), -1, np.int32)
        weights = np.zeros((2, n, top), np.float32)
        rest = np.zeros((2, n), np.float32)
        for query in range(n):
            count = min(top, query + 1)
            drawn = rng.gamma(0.3, size=(2, query + 1))
            drawn /= drawn.sum(axis=1, keepdims=True)
            drawn[1, rng.integers(query + 1)] -= 0.2
            for m in range(2):
                order = np.argsort(-np.abs(drawn[m]))
                keys[m, query, :count] = order[:count]
                weights[m, query, :count] = drawn[m, order[:count]]
                rest[m, query] = drawn[m, order[count:]].sum()
        entries.append(Anatomy(layer, head, ("softmax", "elu1"), keys, weights, rest, run.sample_id, "Once"))
    return entries


def report_with_anatomy(folder: Path, run: Trajectories, *heads: tuple[int, int]) -> Path:
    """The report on a run that stores the anatomy of some heads."""
    with StudyWriter(folder / "study", run.manifest) as writer:
        writer.append_anatomy(anatomy_of(run, *heads), batch=writer.append([run]))
    return write_explorer(folder / "study").path
