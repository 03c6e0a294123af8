'use strict';
// Everything the map and the table can show of a head. `compute` gives one number per head for the steps from a to b, or
// null while an array is on its way. `ranged` ones follow the chosen range of tokens.

function perHead(key, measure) {
  const array = values(key);
  return array && HEADS.map(({ row }) => measure(array, row));
}

/** Mean of an array: token by token where the page carries that, else the mean of the whole completion. */
function meansOf(key, a, b) {
  if (carries(key)) return perHead(key, (array, row) => meanOver(array, row, a, b));
  return (current().means[key] || []).map((value) => (value === null ? NaN : value));
}

function dynamicsColumn(name) {
  const column = PAYLOAD.dynamics.mechanisms && PAYLOAD.dynamics.mechanisms[STATE.mechanism][name];
  return column && column.map((value) => (value === null ? NaN : value));
}

function hasDynamics() {
  return Boolean(PAYLOAD.dynamics.mechanisms);
}

const leastWindows = () => PAYLOAD.dynamics.settings ? PAYLOAD.dynamics.settings.least_windows : 64;

function simpleMean(name, label, unit) {
  return {
    key: name,
    label,
    unit,
    ranged: () => carries(`${name}/${STATE.mechanism}`),
    group: () => `${name}/${STATE.mechanism}`,
    available: () => true,
    compute: (a, b) => meansOf(`${name}/${STATE.mechanism}`, a, b),
  };
}

function focusMean(name, label, unit) {
  return {
    key: name,
    label,
    unit,
    ranged: () => carries(name),
    group: () => name,
    available: () => PAYLOAD.keys.includes(name),
    compute: (a, b) => meansOf(name, a, b),
  };
}

// The kind of each head as its number in PAYLOAD.kinds.names, where a calibration has told it.
const KIND = {
  key: 'kind',
  label: 'kind of substitute',
  unit: 'the cheapest that suffices',
  of: "by the calibration's held-out text",
  ranged: () => false,
  available: () => true,
  compute: () => PAYLOAD.kinds.labels.map((kind) => (kind === null ? NaN : kind)),
};

const QUANTITIES = [
  ...(PAYLOAD.kinds ? [KIND] : []),
  simpleMean('divergence', 'mean divergence', '1 − cos, from 0 to 2'),
  {
    key: 'distance',
    label: 'distance to uniform',
    unit: 'mean of |divergence − divergence from uniform|',
    ranged: () => true,
    available: () => PAYLOAD.mechanisms.includes(BASELINE) && STATE.mechanism !== BASELINE,
    compute: (a, b) => {
      const baseline = values(divergenceKey(BASELINE));
      return baseline && perHead(divergenceKey(), (array, row) => distanceOver(array, baseline, row, a, b));
    },
  },
  {
    key: 'gap',
    label: 'share of the gap left',
    unit: 'divergence / divergence from uniform',
    fixed: [0, 1],
    ranged: () => true,
    group: () => `gap/${STATE.mechanism}`,
    available: () => PAYLOAD.mechanisms.includes(BASELINE) && STATE.mechanism !== BASELINE,
    compute: (a, b) => {
      const baseline = values(divergenceKey(BASELINE));
      const steps = gapSteps(current().positions, a, b);
      return baseline && perHead(divergenceKey(), (array, row) => gapOver(array, baseline, row, steps));
    },
  },
  {
    key: 'slope',
    label: 'slope',
    unit: 'divergence per 100 tokens',
    isDiverging: true,
    ranged: () => true,
    available: () => true,
    compute: (a, b) => perHead(divergenceKey(), (array, row) => slopeOver(array, row, a, b)),
  },
  {
    key: 'entropy',
    label: 'permutation entropy',
    unit: 'of differences, 0 regular to 1 white noise',
    ranged: () => true,
    available: hasDynamics,
    // Exact and pooled over all samples, unless a range asks for part of one sample.
    compute: (a, b) => (STATE.range
      ? perHead(divergenceKey(), (array, row) => permutationEntropy(differences(seriesOf(array, row, a, b)), leastWindows()))
      : dynamicsColumn('entropy')),
  },
  {
    key: 'z',
    label: 'z-score against noise',
    unit: 'standard deviations of white noise',
    isDiverging: true,
    ranged: () => false,
    available: hasDynamics,
    compute: () => dynamicsColumn('z'),
  },
  {
    key: 'complexity',
    label: 'statistical complexity',
    unit: 'Jensen-Shannon complexity',
    ranged: () => false,
    available: hasDynamics,
    compute: () => dynamicsColumn('complexity'),
  },
  simpleMean('relative_l2', 'relative L2 distance', '|linear − softmax| / |softmax|'),
  simpleMean('norm_ratio', 'norm ratio', '|linear| / |softmax|'),
  focusMean('sparsity', 'S(a), focus', 'E|a| / √E a², 1 even to 0 sharp'),
  focusMean('attention_entropy', 'attention entropy', 'nats'),
  focusMean('largest_weight', 'largest weight', 'share of attention, 0 to 1'),
];

// What was measured elsewhere: by a calibration, by swapping heads.
(PAYLOAD.columns || []).forEach((column, i) => {
  const numbers = column.values.map((value) => (value === null ? NaN : value));
  QUANTITIES.push({
    key: `column-${i}`,
    label: column.label,
    unit: column.unit || column.label,
    of: `from ${column.source}`,
    isDiverging: numbers.some((value) => value < 0),
    ranged: () => false,
    available: () => true,
    compute: () => numbers,
  });
});

function quantity(key = STATE.quantity) {
  return QUANTITIES.find((entry) => entry.key === key);
}

/** The difference between two studies, second minus first, of what does not come from elsewhere. */
function differenceNow(entry) {
  const { names, samples, groups } = PAYLOAD.compare;
  const of = `${names[1]} minus ${names[0]}`;
  const sides = samples
    ? samples.map((sample) => onSample(sample, () => entry.compute(...span())))
    : groups.map((group) => (entry.group && PAYLOAD.groups[group].heads[entry.group()]) || HEADS.map(() => NaN));
  if (sides.some((side) => !side)) return { numbers: null, of };
  const numbers = HEADS.map(({ row }) => (sides[1][row] ?? NaN) - (sides[0][row] ?? NaN));
  if (!samples) return { numbers, of: `${of}, means over their samples${STATE.range ? ' (the range does not apply)' : ''}` };
  if (STATE.range && entry.ranged()) {
    const [a, b] = onSample(samples[0], () => STATE.range);
    return { numbers, of: `${of}, tokens ${a} to ${b - 1} of ${names[0]} and the same place of ${names[1]}` };
  }
  return { numbers, of: `${of}, the whole completion${STATE.range ? ' (the range does not apply)' : ''}` };
}

// Dynamics are those of all samples together, so two sides have one number.
const POOLED = ['z', 'complexity', 'entropy'];

/** One number per head for what is chosen, or null while it is on its way, with the words that say what it is. */
function quantityNow(entry = quantity()) {
  if (showsDifference() && !entry.of) {
    if (POOLED.includes(entry.key)) return { numbers: HEADS.map(() => NaN), of: 'known of both sides together only' };
    return differenceNow(entry);
  }
  if (entry.of) return { numbers: entry.compute(), of: entry.of };
  const [a, b] = span();
  const group = PAYLOAD.groups[Number(STATE.scope)];
  if (STATE.scope !== 'sample' && group) {
    const means = entry.group && group.heads[entry.group()];
    const who = group.label === null ? `all ${group.samples} samples` : `the ${group.samples} samples labelled ${group.label}`;
    const whole = STATE.range ? ' (the range does not apply)' : '';
    const summary = entry.key === 'gap' ? who : `mean of ${who}`;
    if (means) return { numbers: means.map((value) => (value === null ? NaN : value)), of: `${summary}${whole}` };
    if (['z', 'complexity', 'entropy'].includes(entry.key)) return { numbers: dynamicsColumn(entry.key), of: 'all samples together' };
    return { numbers: HEADS.map(() => NaN), of: `${who}: available for single samples only` };
  }
  const numbers = entry.compute(a, b);
  const pooled = PAYLOAD.samples.length > 1 && ['z', 'complexity', 'entropy'].includes(entry.key) && !(STATE.range && entry.ranged());
  if (pooled) return { numbers, of: 'all samples together' };
  if (STATE.range && entry.ranged()) return { numbers, of: `tokens ${a} to ${b - 1}` };
  return { numbers, of: STATE.range ? 'the whole completion (the range does not apply)' : 'the whole completion' };
}
