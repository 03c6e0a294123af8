"""Bad input to the ordinal measures: one sentence each, with the value that was given."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from softgap import signal
from softgap.errors import ShapeError, SoftgapError, UnknownNameError, ValueInputError

x = np.random.default_rng(0).standard_normal((2, 100))
spoilt = x.copy()
spoilt[1, 7] = np.nan
infinite = x.astype(np.float32)
infinite[0, 99] = np.inf
rng = np.random.default_rng(0)

CASES: dict[str, tuple[Callable[[], object], type[SoftgapError], str]] = {
    "order 1": (
        lambda: signal.permutation_entropy(x, 1),
        ValueInputError,
        "order must be between 2 and 8, got 1; use a longer pattern",
    ),
    "order 9": (
        lambda: signal.permutation_entropy(x, 9),
        ValueInputError,
        "order must be between 2 and 8, got 9; use a shorter pattern",
    ),
    "order of another type": (
        lambda: signal.ordinal_patterns(x, 3.0),  # type: ignore[arg-type]
        ValueInputError,
        "order must be between 2 and 8, got 3.0",
    ),
    "order of a table": (lambda: signal.pattern_ranks(9), ValueInputError, "order must be between 2 and 8, got 9"),
    "order of the bounds": (lambda: signal.complexity_bounds(9), ValueInputError, "got 9; use a shorter pattern"),
    "delay 0": (
        lambda: signal.permutation_entropy(x, 3, 0),
        ValueInputError,
        "delay must be a whole number from 1, got 0",
    ),
    "empty series": (
        lambda: signal.permutation_entropy([]),
        ShapeError,
        "a series must hold one window, 3 steps at order 3 and delay 1, got an empty series",
    ),
    "shorter than a window": (
        lambda: signal.permutation_entropy(x[:, :8], 5, 2),
        ShapeError,
        "a series must hold one window, 9 steps at order 5 and delay 2, got 8 steps",
    ),
    "a number": (lambda: signal.permutation_entropy(3.5), ShapeError, "got the single number 3.5"),
    "text": (
        lambda: signal.permutation_entropy(["a", "b", "c"]),
        ValueInputError,
        "a series must hold real numbers, got an array of <U1",
    ),
    "truth values": (lambda: signal.permutation_entropy(x > 0), ValueInputError, "got an array of bool"),
    "complex numbers": (lambda: signal.permutation_entropy(x + 1j), ValueInputError, "got an array of complex128"),
    "lists of several lengths": (
        lambda: signal.permutation_entropy([[1, 2, 3], [1, 2]]),
        ShapeError,
        "series must have one length in memory, got list of several; pad them and give lengths",
    ),
    "NaN": (
        lambda: signal.permutation_entropy(spoilt),
        ValueInputError,
        "a series must be finite, got nan at step 7 of series (1,)",
    ),
    "infinity": (
        lambda: signal.weighted_permutation_entropy(infinite),
        ValueInputError,
        "a series must be finite, got inf at step 99 of series (0,)",
    ),
    "NaN under a transform": (
        lambda: signal.z_scores(spoilt.reshape(2, 2, 50), transform="diff"),
        ValueInputError,
        "got nan at step 7 of series (1, 0)",
    ),
    "NaN in the only series": (
        lambda: signal.ordinal_patterns(spoilt[1]),
        ValueInputError,
        "got nan at step 7 of the series",
    ),
    "unknown policy": (
        lambda: signal.permutation_entropy(x, ties="exlude"),
        UnknownNameError,
        "unknown ties policy 'exlude'; did you mean 'exclude'?",
    ),
    "a keyword nobody knows": (
        lambda: signal.permutation_entropy(x, tie="stable"),  # type: ignore[call-arg]
        UnknownNameError,
        "unknown option 'tie'; did you mean 'ties'?",
    ),
    "another spelling": (
        lambda: signal.renyi_entropy(x, 2.0, normalized=False),  # type: ignore[call-arg]
        UnknownNameError,
        "unknown option 'normalized'; choose one of: eligibility, lengths, rng, ties",
    ),
    "a keyword of another measure": (
        lambda: signal.z_scores(x, normalised=False),  # type: ignore[call-arg]
        UnknownNameError,
        "unknown option 'normalised'",
    ),
    "jitter without rng": (
        lambda: signal.permutation_entropy(x, ties="jitter"),
        ValueInputError,
        "ties='jitter' needs a numpy Generator, got rng=None",
    ),
    "ties refused": (
        lambda: signal.permutation_entropy(np.round(x[:, :10], 0), ties="raise"),
        ValueInputError,
        "windows with them in series (0,); choose another policy: exclude, stable, jitter",
    ),
    "unknown rule": (
        lambda: signal.permutation_entropy(x, eligibility="2*order"),
        UnknownNameError,
        "unknown eligibility rule '2*order'; did you mean '2*order!'?",
    ),
    "no windows wanted": (
        lambda: signal.permutation_entropy(x, eligibility=0),
        ValueInputError,
        "eligibility must be 'spread' or '2*order!' or a number of windows from 1, got 0",
    ),
    "lengths of another shape": (
        lambda: signal.permutation_entropy(x, lengths=[1, 2, 3]),
        ShapeError,
        "lengths must have one entry per series, shape [2], got [3]",
    ),
    "lengths beyond the end": (
        lambda: signal.permutation_entropy(x, lengths=[100, 101]),
        ValueInputError,
        "lengths must be from 0 to the 100 steps of the time axis, got 101",
    ),
    "negative lengths": (lambda: signal.permutation_entropy(x, lengths=-1), ValueInputError, "got -1"),
    "lengths that are not whole": (
        lambda: signal.permutation_entropy(x, lengths=[50.0, 60.0]),
        ValueInputError,
        "lengths must be whole numbers, got an array of float64",
    ),
    "negative q": (lambda: signal.renyi_entropy(x, [1, -2]), ValueInputError, "q must be between 0 and 500, got -2"),
    "q that is NaN": (lambda: signal.renyi_entropy(x, np.nan), ValueInputError, "got nan"),
    "no q": (
        lambda: signal.renyi_complexity(x, []),
        ValueInputError,
        "q must be a number or a list of numbers, got []",
    ),
    "no scales": (
        lambda: signal.multiscale_entropy(x, []),
        ValueInputError,
        "scales must be one or more whole numbers",
    ),
    "scale 0": (
        lambda: signal.multiscale_entropy(x, [1, 0]),
        ValueInputError,
        "a scale must be a whole number from 1, got 0",
    ),
    "alpha": (
        lambda: signal.missing_patterns(x, alpha=1),
        ValueInputError,
        "alpha must be between 0 and 1, both excluded, got 1; 0.01 is usual",
    ),
    "level": (
        lambda: signal.entropy_interval(x, rng=rng, level=95),
        ValueInputError,
        "level must be between 0 and 1, both excluded, got 95; 0.95 is usual",
    ),
    "level of another type": (
        lambda: signal.entropy_interval(x, rng=rng, level="0.9"),  # type: ignore[arg-type]
        ValueInputError,
        "level must be between 0 and 1, both excluded, got '0.9'",
    ),
    "interval without rng": (
        lambda: signal.entropy_interval(x),
        ValueInputError,
        "rng must be a numpy Generator, got None",
    ),
    "block 0": (
        lambda: signal.entropy_interval(x, rng=rng, block=0),
        ValueInputError,
        "block must be a whole number from 1, got 0",
    ),
    "unknown measure": (
        lambda: signal.z_scores(x, measure="entropy"),
        UnknownNameError,
        "unknown measure 'entropy'",
    ),
    "unknown transform": (
        lambda: signal.z_scores(x, transform="dif"),
        UnknownNameError,
        "unknown transform 'dif'; did you mean 'diff'?",
    ),
    "a transform that sums over time": (
        lambda: signal.z_scores(x, transform=lambda rows: rows.sum(axis=-1)),
        ShapeError,
        "a transform must keep the leading axes and never lengthen the last, got [2] from [2, 100]",
    ),
    "a null with no window": (
        lambda: signal.noise_null(3, 4),
        ShapeError,
        "a series must hold one window, 4 steps at order 4 and delay 1, got 3 steps",
    ),
    "one sample": (
        lambda: signal.noise_null(100, samples=1),
        ValueInputError,
        "samples must be a whole number from 2, got 1",
    ),
    "order of the spread": (
        lambda: signal.noise_spread(9, 100, rng=rng),
        ValueInputError,
        "order must be between 2 and 8, got 9",
    ),
    "no windows to spread": (
        lambda: signal.noise_spread(3, 0, rng=rng),
        ValueInputError,
        "windows must be a whole number from 1, got 0",
    ),
    "delay of the bias": (
        lambda: signal.bias_factor(3, 100, 0),
        ValueInputError,
        "delay must be a whole number from 1, got 0",
    ),
    "seed of the bias": (
        lambda: signal.corrected_entropy(x, seed=-1),
        ValueInputError,
        "a seed must be a whole number from 0, got -1",
    ),
    "a transform that forgets time": (
        lambda: signal.z_scores(x[0], transform=lambda rows: rows.sum(axis=-1)),
        ShapeError,
        "a transform must keep the leading axes and never lengthen the last, got [] from [100]",
    ),
    "no windows to rarefy to": (
        lambda: signal.rarefied_entropy(x, windows=0),
        ValueInputError,
        "windows must be a whole number from 1, got 0",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_sentence_with_the_value(name: str) -> None:
    call, kind, message = CASES[name]
    with pytest.raises(kind, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_values_past_the_end_of_a_series_are_never_read() -> None:
    found = signal.permutation_entropy(spoilt, lengths=[100, 7], eligibility=1)
    assert np.isfinite(found.value).all()
