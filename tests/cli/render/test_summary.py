"""The summary of a run: its numbers against loops, and how it looks in a narrow, wide, plain or colourful terminal."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from softgap.cli.render.output import heat_map, shade, strip_control_characters
from softgap.cli.render.run import show_run, show_study
from softgap.cli.render.summary import merge_summaries, summarise
from softgap.errors import UnknownNameError
from softgap.trajectories import QUANTITIES, Trajectories
from softgap.trajectories.folder import slug
from softgap.trajectories.run import pieces
from support.trajectory_examples import example_run


def numbers(values: np.ndarray) -> list[float]:
    return [float(value) for value in values.ravel() if not math.isnan(value)]


def average(values: np.ndarray) -> float:
    kept = numbers(values)
    return sum(kept) / len(kept) if kept else math.nan


KIND_TITLE = "The cheapest substitute that suffices, by head (rows) and layer (columns)"


def shown(run: Trajectories, *, width: int = 80, colour: bool = False) -> str:
    system = {"force_terminal": True, "color_system": "truecolor", "no_color": False} if colour else {}
    console = Console(
        file=io.StringIO(),
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        **system,  # type: ignore[arg-type]
    )
    show_run(console, run, "runs/fox")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_means_are_those_of_plain_loops() -> None:
    run = example_run(steps=7)
    summary = summarise(run)
    assert summary.mechanisms == ("elu1", "uniform")
    for index, name in enumerate(run.mechanisms):
        for quantity in QUANTITIES:
            expected = average(run.quantities[quantity][index])
            assert summary.means[name][quantity] == pytest.approx(expected, rel=1e-12)
        for layer, head in product(range(3), range(4)):
            expected = average(run.quantities["divergence"][index, layer, head])
            assert summary.heads[index, layer, head] == pytest.approx(expected, rel=1e-12, nan_ok=True)
    first, control = (run.quantities["divergence"][i].astype(np.float64) for i in (0, 1))
    assert summary.distance == pytest.approx(average(np.abs(first - control)), rel=1e-12)
    assert summary.logprob == pytest.approx(average(run.logprob), rel=1e-12)
    assert summary.entropy == pytest.approx(average(run.entropy), rel=1e-12)
    for name, values in run.focus.items():
        assert summary.focus[name] == pytest.approx(average(values), rel=1e-12)


def test_extreme_heads_are_named_by_layer_and_head() -> None:
    run = example_run(missing=0.0)
    means = run.head_means()
    real = [(means[i, head], run.layers[i], head) for i in range(3) for head in range(run.heads_per_layer[i])]
    hungry, linear = summarise(run).extremes()
    assert [(row.layer, row.head) for row in hungry] == [pair[1:] for pair in sorted(real, reverse=True)[:5]]
    assert [(row.layer, row.head) for row in linear] == [pair[1:] for pair in sorted(real)[:5]]
    control = run.select("uniform").head_means()
    for row in (*hungry, *linear):
        assert row.divergence == pytest.approx(means[run.layers.index(row.layer), row.head])
        assert row.uniform == pytest.approx(control[run.layers.index(row.layer), row.head])


def test_heads_are_ranked_by_the_fitted_map_where_there_is_one() -> None:
    run = example_run(mechanisms=("elu1", "fitted"), missing=0.0)
    hungry, _ = summarise(run).extremes()
    means = run.select("fitted").head_means()
    assert hungry[0].divergence == pytest.approx(np.nanmax(means))
    assert summarise(run.select("elu1")).ranking == 0


def test_a_model_with_one_head_has_one_extreme() -> None:
    run = example_run(layers=(0,), heads_per_layer=(1,))
    assert [len(rows) for rows in summarise(run).extremes()] == [1, 1]


def test_the_control_has_no_distance_from_itself() -> None:
    assert summarise(example_run(mechanisms=("uniform", "elu1"))).distance is None
    assert summarise(example_run(mechanisms=("elu1",))).distance is None
    assert "its divergence shows how concentrated softmax is" in " ".join(
        shown(example_run(mechanisms=("uniform",))).split()
    )


def test_samples_count_once_whatever_their_length() -> None:
    short, long = (summarise(example_run(steps=steps, seed=steps, missing=0.0)) for steps in (2, 50))
    both = merge_summaries([short, long])
    assert (both.n_steps, both.n_prompt) == (52, 8)
    for name in both.mechanisms:
        expected = (short.means[name]["divergence"] + long.means[name]["divergence"]) / 2
        assert both.means[name]["divergence"] == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(both.heads, (short.heads + long.heads) / 2, rtol=1e-12)
    assert both.distance == pytest.approx(((short.distance or 0) + (long.distance or 0)) / 2, rel=1e-12)


def test_a_run_without_numbers_is_shown_as_such() -> None:
    nothing = example_run(missing=1.0)
    for colour in (True, False):
        assert "log-probability –, entropy – nats" in shown(nothing, colour=colour)
        assert "nan" not in shown(nothing, colour=colour)


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize(("layers", "heads"), [(30, 9), (45, 9), (126, 128)])
def test_the_summary_fits_80_columns(layers: int, heads: int, colour: bool) -> None:
    run = example_run(layers=tuple(range(layers)), heads_per_layer=(heads,) * layers)
    lines = Text.from_ansi(shown(run, colour=colour)).plain.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "runs/fox"
    top = next(i for i, line in enumerate(lines) if line.startswith("  0 "))
    assert all(line[:4].strip().isdigit() for line in lines[top : top + 9])  # no row of the map is folded


def test_heads_stand_below_each_other_and_layers_side_by_side() -> None:
    values = np.array([[0.0, 0.55], [0.999, 1.0], [math.nan, 0.3]])
    cells, meaning = heat_map(values, (0, 2, 4), width=80, colour=False)
    assert cells.plain.splitlines()[:3] == ["  0 0 9   ", "  1 5 + 3 ", "    0 "]
    assert meaning == ""


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize(
    ("layers", "heads", "width"), [(1, 1, 80), (30, 9, 80), (12, 17, 80), (80, 64, 80), (126, 128, 80), (30, 9, 10)]
)
def test_a_map_of_any_size_fits(layers: int, heads: int, width: int, colour: bool) -> None:
    cells, _ = heat_map(np.zeros((layers, heads)), tuple(range(layers)), width=width, colour=colour)
    lines = cells.plain.splitlines()[:-1]
    assert max(map(len, lines[:-1])) <= width
    assert len(lines) <= 25


@pytest.mark.parametrize("colour", [True, False])
def test_numbers_above_1_are_counted_in_the_legend_and_shown_apart(colour: bool) -> None:
    values = np.array([[0.2, 1.11], [1.05, math.nan], [0.9, 0.5]])
    cells, _ = heat_map(values, (0, 1, 2), width=80, colour=colour)
    *lines, legend = cells.plain.splitlines()
    assert legend.endswith("2 heads, up to 1.11")
    assert "".join(lines[:2]).count("+") == 2
    if colour:
        styles = [span.style for span in cells.spans if cells.plain[span.start] == "+"]
        assert all(not isinstance(style, str) and style.bgcolor not in (None, shade(1.0)) for style in styles)
    none, _ = heat_map(values[[2]], (0,), width=80, colour=colour)
    assert none.plain.splitlines()[-1].endswith("no head")


def test_heads_are_ranked_by_the_share_of_the_gap_where_it_is_known() -> None:
    run = example_run(mechanisms=("elu1", "uniform", "fitted"), missing=0.0)
    summary = summarise(run)
    assert summary.gap is not None
    hungry, linear = summary.extremes()
    shares = summary.gap.left
    assert hungry[0].share_left == np.nanmax(shares)
    assert linear[0].share_left == np.nanmin(shares)
    assert [row.share_left for row in hungry] == sorted((row.share_left or 0 for row in hungry), reverse=True)
    assert summary.headline is not None
    assert (hungry[0].layer, hungry[0].head) == summary.headline.stubborn[0]
    assert summary.ranked_by == "share of the gap that fitted leaves"
    assert summarise(run.select("elu1")).ranked_by == "divergence from elu1"


def test_a_run_quotes_held_out_text_beside_its_share_of_the_gap() -> None:
    run = example_run(mechanisms=("elu1", "uniform", "fitted"), missing=0.0)
    words = "closes 81 % of the gap that the mean of values leaves, and 69 % of the gap that profile"
    held_out = {"gap_closed": 0.81, "against_profile": 0.69, "explained": 0.7}
    quoting = replace(run, manifest=replace(run.manifest, extra={"held_out": held_out}))
    assert words in " ".join(shown(quoting).split())
    assert words not in " ".join(shown(run).split())
    without = replace(quoting.select("elu1"), manifest=quoting.manifest)
    assert words not in " ".join(shown(without).split())


def test_a_run_shows_the_kinds_of_its_own_layers_or_says_how_to_get_them() -> None:
    run = example_run(mechanisms=("elu1", "uniform", "fitted"), missing=0.0)
    old = replace(run, manifest=replace(run.manifest, extra={"held_out": {"gap_closed": 0.81}}))
    assert "the calibration in use does not say. Run `softgap calibrate` again." in " ".join(shown(old).split())
    assert "share of the gap that the fitted map leaves" in shown(old)
    letters = {str(layer): "whfS"[i % 4] * 9 for i, layer in enumerate(run.layers)}
    # Kinds of a layer that the run does not have.
    letters[str(max(run.layers) + 1)] = "c" * 9
    counts = {f"need_{kind}{end}": 9.0 for kind in ("window", "hybrid", "softmax") for end in ("", "_low", "_high")}
    known = shown(replace(run, manifest=replace(run.manifest, extra={"held_out": {"kinds": letters, **counts}})))
    assert "Of 27 heads" in known
    line = known.splitlines()[known.splitlines().index(KIND_TITLE) + 1]
    assert line == "  0 " + "".join("whfS"[i % 4] for i in range(len(run.layers)))
    assert "share of the gap that the fitted map leaves" not in known
    assert "softgap calibrate" not in known


def test_a_map_too_large_is_pooled_and_says_so() -> None:
    values = np.zeros((100, 48))
    values[2:4, :] = [[0.4], [0.6]]
    cells, meaning = heat_map(values, tuple(range(100)), width=64, colour=False)
    assert meaning == "each cell is the mean of 2 layers and 2 heads"
    assert cells.plain.splitlines()[0] == "  0 05" + "0" * 48
    assert cells.plain.splitlines()[1].startswith("  2 ")
    assert cells.plain.splitlines()[24].split() == [str(layer) for layer in range(0, 100, 10)]


def test_many_heads_share_a_line_in_colour() -> None:
    values = np.zeros((1, 17))
    values[0, 1] = 1.0
    cells, _ = heat_map(values, (0,), width=80, colour=True)
    lines = cells.plain.splitlines()
    assert (lines[0], lines[8]) == ("  0 ▀▀", " 16 ▀▀")
    style = next(span.style for span in cells.spans if cells.plain[span.start] == "▀")
    assert not isinstance(style, str)
    assert (style.color, style.bgcolor) == (shade(0.0), shade(1.0))


def test_the_scale_of_colours_grows_dark_and_ends() -> None:
    ends = [shade(value).triplet for value in (-1.0, 0.0, 1.0, 7.0)]
    assert ends[0] == ends[1]
    assert ends[2] == ends[3]
    greens = [shade(step / 20).triplet[1] for step in range(21)]  # type: ignore[index]
    assert greens == sorted(set(greens), reverse=True)


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ("", (), []),
        ("a", ("",), [("a", [])]),
        ("The fox", ("The", " fox"), [("The", [0]), (" fox", [1])]),
        # Read, not generated: nothing predicted the first token, and the last step predicts nothing.
        ("banana", ("ana", ""), [("ban", []), ("ana", [0])]),
        # The end of a turn is not part of the text.
        ("Yes.", ("Yes", ".", "<|im_end|>"), [("Yes", [0]), (".", [1])]),
        # Characters of several tokens.
        ("A 🦊 ran", ("A", " �", "�", "�", " ran"), [("A", [0]), (" 🦊", [1, 2, 3]), (" ran", [4])]),
        ("ran 🦊", ("ran", " �", "�", "�"), [("ran", [0]), (" 🦊", [1, 2, 3])]),
        ("🦊", ("�", "�"), [("🦊", [0, 1])]),
        # A tokenizer that loses the space before a word.
        ("The red fox", ("The", "red", "fox"), [("The ", [0]), ("red ", [1]), ("fox", [2])]),
        # A tokenizer whose decoder rewrites the text.
        ("don't go", ("do", " n't", " go"), [("don't", [0, 1]), (" go", [2])]),
    ],
)
def test_pieces_of_a_text_know_their_tokens(
    text: str, tokens: tuple[str, ...], expected: list[tuple[str, list[int]]]
) -> None:
    assert pieces(text, tokens) == expected
    assert "".join(piece for piece, _ in expected) == text


def test_tokens_are_shaded_by_their_divergence() -> None:
    run = example_run(steps=3, missing=0.0, tokens=("a", "b", "c"), completion_text="abc")
    divergence = np.broadcast_to(np.array([0.2, 0.9, 0.4], dtype=np.float32), run.divergence.shape).copy()
    quantities = {**run.quantities, "divergence": np.stack([divergence, divergence])}
    run = replace(run, quantities=quantities, heads_per_layer=(4, 4, 4), kv_group=np.zeros((3, 4), dtype=np.int32))
    lines = map(Text.from_ansi, shown(run, colour=True).splitlines())
    line = next(line for line in lines if line.plain == "abc")
    low, high = np.percentile([0.2, 0.9, 0.4], (5, 95))
    for index, value in enumerate((0.2, 0.9, 0.4)):
        style = next(span.style for span in line.spans if span.start == index)
        assert not isinstance(style, str)
        assert style.bgcolor == shade((value - low) / (high - low))


def test_tokens_are_shaded_by_the_fitted_map_where_it_was_measured() -> None:
    for mechanisms, name in ((("elu1", "uniform", "fitted"), "fitted"), (("relu", "uniform"), "relu")):
        run = example_run(mechanisms=mechanisms, steps=40, missing=0.0)
        assert f"divergence from {name} by token, mean over heads: " in shown(run, width=200)


def test_python_prints_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    run = example_run(steps=40, missing=0.0)
    run.summary()
    printed = capsys.readouterr().out.splitlines()
    assert printed == shown(run, width=160).splitlines()[:-3]
    run.summary("divergence")
    assert "divergence from elu1 by head" in capsys.readouterr().out
    with pytest.raises(UnknownNameError, match="unknown map 'kind'"):
        run.summary("kind")  # type: ignore[arg-type]


def test_a_long_text_is_cut() -> None:
    run = example_run(steps=450, tokens=("a ",) * 450, completion_text="a " * 450)
    plain = shown(run)
    assert "… 50 more tokens" in plain
    assert plain.count("a ") < 450


def test_a_text_cannot_steer_the_terminal() -> None:
    assert strip_control_characters("a\x1b[2Jb\tc\nd\x9be") == "a�[2Jb\tc\nd�e"
    run = example_run(steps=1, tokens=("\x1b[2J",), completion_text="\x1b[2J")
    assert "\x1b" not in shown(run)


def test_a_large_study_shows_its_first_samples() -> None:
    summaries = [summarise(example_run(sample_id=f"s{number}")) for number in range(45)]
    console = Console(file=io.StringIO(), width=80)
    show_study(console, summaries, example_run().manifest, "runs/many")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "s39 " in text
    assert "s40" not in text
    assert "… and 5 more samples" in text
    assert "45 samples" in text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Tell me a story about a fox.", "tell-me-a-story-about-a-fox"),
        ("Was ist größer, 3 oder 5?", "was-ist-größer-3-oder-5"),
        ("x" * 99, "x" * 32),
        ("one two three four five six seven eight", "one-two-three-four-five-six"),
        ("../../etc", "etc"),
        ("?!", "run"),
    ],
)
def test_folders_are_named_by_the_first_words(text: str, name: str) -> None:
    assert slug(text) == name
