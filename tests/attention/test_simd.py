"""Vectors in compiled code compute what numpy computes, number by number."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softgap.attention import simd
from softgap.attention.decode_kernel import decode_position
from softgap.attention.simd import LANES, compiled, fill, larger, largest, load, multiply_add, spread, store, total


@compiled
def _mapped(name: int, source: Any, target: Any) -> None:
    for i in range(0, source.size, LANES):
        store(target, i, simd.exp(load(source, i)) if name == 0 else simd.elu1(load(source, i)))


@compiled
def _reduced(source: Any, target: Any) -> None:
    a, b = load(source, 0), load(source, LANES + 1)
    store(target, 0, multiply_add(a, b, fill(source[0])))
    store(target, LANES, larger(a, b))
    target[2 * LANES], target[2 * LANES + 1] = total(a), largest(a)
    store(target, 3 * LANES, spread(source, LANES + 1))


def applied(name: int, values: np.ndarray) -> np.ndarray:
    """A map over any number of values."""
    padded = np.zeros((values.size + LANES - 1) // LANES * LANES, np.float32)
    padded[: values.size] = values
    target = np.empty_like(padded)
    _mapped(name, padded, target)
    return target[: values.size]


def test_exp_has_all_digits_but_one() -> None:
    x = -np.concatenate([np.logspace(-8, np.log10(104), 50_001), np.linspace(0, 104, 50_001)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    found = applied(0, x)
    normal = exact >= np.finfo(np.float32).tiny
    assert np.abs(found - exact)[normal].max() > 0
    assert (np.abs(found - exact) / exact)[normal].max() < 1e-7
    assert np.abs(found - exact)[~normal].max() <= np.finfo(np.float32).smallest_subnormal


def test_exp_at_the_ends() -> None:
    found = applied(0, np.array([0.0, -0.0, -200.0, -np.inf, np.nan], np.float32))
    np.testing.assert_array_equal(found, [1, 1, 0, 0, np.nan])


def test_elu1_is_its_formula() -> None:
    x = np.concatenate([np.linspace(-110, 110, 10_007), [0.0, -0.0, 3e38, -np.inf, np.inf, np.nan]]).astype(np.float32)
    exact = np.where(x > 0, x.astype(np.float64) + 1, np.exp(np.minimum(x, 0).astype(np.float64)))
    np.testing.assert_allclose(applied(1, x), exact, rtol=1.2e-7, atol=1.5e-45)


@pytest.mark.parametrize("seed", range(3))
def test_products_and_reductions(seed: int) -> None:
    source = np.random.default_rng(seed).normal(size=2 * LANES + 1).astype(np.float32)
    target = np.empty(4 * LANES, np.float32)
    _reduced(source, target)
    a, b = source[:LANES], source[LANES + 1 :]
    np.testing.assert_allclose(target[:LANES], a.astype(float) * b + source[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(target[LANES : 2 * LANES], np.maximum(a, b))
    assert target[2 * LANES] == pytest.approx(a.astype(float).sum(), rel=1e-5, abs=1e-5)
    assert target[2 * LANES + 1] == a.max()
    assert (target[3 * LANES :] == source[LANES + 1]).all()


def test_compiled_code_on_disk_is_of_all_sources(tmp_path: Path) -> None:
    """A change in a function that another file calls makes it anew, too."""
    folders = [tmp_path / name for name in ("before", "changed", "beside")]
    for folder in folders:
        folder.mkdir()
        for name in ("simd.py", "one_kernel.py", "decode_arrays.py", "window.py"):
            (folder / name).write_text(name)
    (folders[1] / "one_kernel.py").write_text("another")
    (folders[2] / "window.py").write_text("another")
    before, changed, beside = (simd.sources(folder) for folder in folders)
    assert before != changed
    assert before == beside
    kept: Any = decode_position
    assert kept._cache._cache_file._source_stamp[1] == simd.sources(Path(simd.__file__).parent)


@pytest.mark.parametrize(("threads", "units"), [(1, 5), (2, 5), (3, 2), (2, 0)])
def test_every_unit_is_computed_once(threads: int, units: int) -> None:
    before = torch.get_num_threads()
    taken: list[int] = []
    torch.set_num_threads(threads)
    try:
        simd.share_out(lambda first, last: taken.extend(range(first, last)), units)
    finally:
        torch.set_num_threads(before)
    assert sorted(taken) == list(range(units))


def test_a_task_that_fails_is_heard_of() -> None:
    def fail(first: int, last: int) -> None:
        raise ValueError("unit")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="unit"):
            simd.share_out(fail, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(simd._openmp_team() is None, reason="torch runs its operations on other threads than OpenMP's")
def test_units_run_on_the_threads_of_torch() -> None:
    """Other threads would share the cores with those of torch, which wait actively after each operation."""
    threads, own = torch.get_num_threads(), set[int]()
    torch.set_num_threads(2)
    try:
        torch.ones(2**20).add(1)
        before = {task.name for task in Path("/proc/self/task").iterdir()}
        simd.share_out(lambda first, last: own.add(threading.get_native_id()), 200)
    finally:
        torch.set_num_threads(threads)
    assert {str(thread) for thread in own} <= before
    assert str(threading.get_native_id()) in {str(thread) for thread in own}


def test_without_openmp_units_run_on_threads_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simd, "_openmp_team", lambda: None)
    simd._team.cache_clear()
    try:
        test_every_unit_is_computed_once(2, 5)
        test_a_task_that_fails_is_heard_of()
        assert simd._team() is simd._python_team
    finally:
        monkeypatch.undo()
        simd._team.cache_clear()
