'use strict';
// What is computed in the page from the arrays it carries. `a` and `b` are steps, b not included.

/** Mean of one row over steps, NaN left out. */
function meanOver(array, row, a, b) {
  let total = 0;
  let count = 0;
  const base = row * array.columns;
  for (let i = base + a; i < base + b; i += 1) {
    const value = array.values[i];
    if (value === value) {
      total += value;
      count += 1;
    }
  }
  return count ? total / count : NaN;
}

// As in softgap/analysis/headline.py: steps before this position count only where the others are too few, and a head
// whose mean distance to the mean of values is smaller than this has no gap.
const GAP = { first: 64, fewest: 32, none: 0.02 };

/** The steps from a to b that a share of the gap is taken over. */
function gapSteps(positions, a, b) {
  const steps = d3.range(a, b);
  const late = steps.filter((step) => positions[step] >= GAP.first);
  return late.length >= GAP.fewest ? late : steps;
}

/** The share of its gap that a mechanism leaves to a head: its divergence over that of the baseline; NaN without a gap. */
function gapOver(array, baseline, row, steps) {
  let divergence = 0;
  let uniform = 0;
  const base = row * array.columns;
  for (const step of steps) {
    const [a, b] = [array.values[base + step], baseline.values[base + step]];
    if (a === a) divergence += a;
    if (b === b) uniform += b;
  }
  return steps.length && uniform >= GAP.none * steps.length ? divergence / uniform : NaN;
}

/** Mean distance between the same row of two arrays. */
function distanceOver(array, other, row, a, b) {
  let total = 0;
  let count = 0;
  const base = row * array.columns;
  for (let i = base + a; i < base + b; i += 1) {
    const value = Math.abs(array.values[i] - other.values[i]);
    if (value === value) {
      total += value;
      count += 1;
    }
  }
  return count ? total / count : NaN;
}

/** Least squares slope per 100 steps. */
function slopeOver(array, row, a, b) {
  const base = row * array.columns;
  let count = 0;
  let time = 0;
  let total = 0;
  for (let i = a; i < b; i += 1) {
    const value = array.values[base + i];
    if (value === value) {
      count += 1;
      time += i;
      total += value;
    }
  }
  if (count < 2) return NaN;
  time /= count;
  total /= count;
  let products = 0;
  let room = 0;
  for (let i = a; i < b; i += 1) {
    const value = array.values[base + i];
    if (value === value) {
      products += (i - time) * (value - total);
      room += (i - time) ** 2;
    }
  }
  return (100 * products) / room;
}

/** One row as numbers, over steps. */
function seriesOf(array, row, a, b) {
  return array.values.subarray(row * array.columns + a, row * array.columns + b);
}

/** Mean over some rows at every step. */
function meanOfRows(array, rows, a = 0, b = array.columns) {
  const totals = new Float64Array(b - a);
  const counts = new Float64Array(b - a);
  for (const row of rows) {
    const base = row * array.columns + a;
    for (let i = 0; i < b - a; i += 1) {
      const value = array.values[base + i];
      if (value === value) {
        totals[i] += value;
        counts[i] += 1;
      }
    }
  }
  return totals.map((total, i) => (counts[i] ? total / counts[i] : NaN));
}

function differences(series) {
  const steps = new Float64Array(Math.max(0, series.length - 1));
  for (let i = 0; i < steps.length; i += 1) steps[i] = series[i + 1] - series[i];
  return steps;
}

/** Which of the six orders three values are in; -1 where two are equal or one is missing. */
function patternOf(x, y, z) {
  if (!(x !== y && y !== z && x !== z && x === x && y === y && z === z)) return -1;
  return (x < y ? 1 : 0) + (y < z ? 2 : 0) + (x < z ? 4 : 0);
}

// patternOf says one of these; 3 and 4 would contradict themselves.
const PATTERN_CODES = [0, 1, 2, 5, 6, 7];

function entropyOfCounts(counts, total) {
  let entropy = 0;
  for (const code of PATTERN_CODES) {
    const count = counts[code];
    if (count) entropy -= (count / total) * Math.log(count / total);
  }
  return entropy / Math.log(6);
}

/** Normalised permutation entropy of order 3 and delay 1; NaN with fewer windows than `least`. */
function permutationEntropy(series, least) {
  const counts = new Int32Array(8);
  let total = 0;
  for (let i = 0; i + 2 < series.length; i += 1) {
    const pattern = patternOf(series[i], series[i + 1], series[i + 2]);
    if (pattern >= 0) {
      counts[pattern] += 1;
      total += 1;
    }
  }
  return total >= least && total > 0 ? entropyOfCounts(counts, total) : NaN;
}

/** The same in every stretch of `least` windows, at the stretch's middle; [{ at, value }] by steps of the series. */
function windowedEntropy(series, least) {
  const patterns = [];
  for (let i = 0; i + 2 < series.length; i += 1) patterns.push(patternOf(series[i], series[i + 1], series[i + 2]));
  const counts = new Int32Array(8);
  const entropies = [];
  let total = 0;
  const change = (pattern, by) => {
    if (pattern >= 0) {
      counts[pattern] += by;
      total += by;
    }
  };
  patterns.forEach((pattern, i) => {
    change(pattern, 1);
    if (i >= least) change(patterns[i - least], -1);
    // A stretch that lost windows to ties is shown while nine in ten are left.
    if (i + 1 >= least && total >= 0.9 * least) {
      entropies.push({ at: i + 1 - least / 2 + 0.5, value: entropyOfCounts(counts, total) });
    }
  });
  return entropies;
}

/** Quantiles of the numbers in a list. */
function quantiles(values, shares) {
  const sorted = Float64Array.from(values).filter((value) => value === value).sort();
  return shares.map((share) => (sorted.length ? d3.quantile(sorted, share) : NaN));
}
