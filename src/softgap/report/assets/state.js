'use strict';
// What the reader has chosen. Every part of the page listens, and draws itself anew when something it shows changes.

const STATE = {
  sample: Math.max(0, PAYLOAD.samples.findIndex((sample) => sample.data)),
  mechanism: (PAYLOAD.opening || {}).mechanism || PAYLOAD.mechanisms[0],
  shade: 'divergence',
  shadeOf: 'all',
  quantity: (PAYLOAD.opening || {}).quantity || 'divergence',
  scope: (PAYLOAD.opening || {}).scope || 'sample',
  view: 'raw',
  zoom: 'heads',
  heads: [],
  range: null,
  cursor: null,
  // Of anatomy: the head, the token that a click holds, what to list, whose weights shade the text, the shade before.
  anatomy: null,
  pinned: null,
  direction: 'sources',
  attention: 'softmax',
  before: '',
  theme: '',
  arrived: 0,
};

const listeners = [];
let changed = null;

/** Call `draw` whenever one of these parts of the state has changed. */
function listen(names, draw) {
  listeners.push({ names: new Set(names), draw });
}

/** Change the state; drawing happens once, before the next frame. */
function update(change) {
  const different = Object.keys(change).filter((name) => !same(STATE[name], change[name]));
  if (!different.length) return;
  Object.assign(STATE, change);
  if (!changed) {
    changed = new Set();
    requestAnimationFrame(flush);
  }
  different.forEach((name) => changed.add(name));
}

function flush() {
  const names = changed;
  changed = null;
  for (const { names: wanted, draw } of listeners) {
    if ([...names].some((name) => wanted.has(name))) draw(names);
  }
}

function same(a, b) {
  if (Array.isArray(a) && Array.isArray(b)) return a.length === b.length && a.every((x, i) => x === b[i]);
  return a === b;
}

/** The carried data of the chosen sample. */
function current() {
  return PAYLOAD.samples[STATE.sample].data;
}

function stepCount() {
  return current().positions.length;
}

/** An array of the chosen sample, or null while it is being unpacked or if the page does not carry it. */
function values(key) {
  return arrayAt(current().arrays[key], () => update({ arrived: STATE.arrived + 1 }));
}

function carries(key) {
  return current().arrays[key] !== undefined;
}

function divergenceKey(mechanism = STATE.mechanism) {
  return `divergence/${mechanism}`;
}

/** What a function gives for another sample, with the chosen range at the same place of its completion. */
function onSample(index, compute) {
  const { sample, range } = STATE;
  const shift = PAYLOAD.samples[index].data.promptSteps - current().promptSteps;
  STATE.sample = index;
  if (range) STATE.range = range.map((step) => Math.min(stepCount(), Math.max(0, step + shift)));
  try {
    return compute();
  } finally {
    Object.assign(STATE, { sample, range });
  }
}

/** Of a page on two studies whether their difference is shown. */
function showsDifference() {
  return Boolean(PAYLOAD.compare) && STATE.scope === 'difference';
}

/** The steps that are shown: what was chosen, else the completion. */
function span() {
  return STATE.range || [current().promptSteps, stepCount()];
}

/** A range is one of this sample, so the map shows the sample too; a difference is one of the same place in both. */
function sampleScope() {
  return showsDifference() ? {} : { scope: 'sample' };
}

/** Choose the steps from `first` to `last`, both included, in either order. */
function chooseRange(first, last) {
  const end = stepCount() - 1;
  const a = Math.max(0, Math.min(first, last, end));
  const b = Math.min(end, Math.max(first, last, 0)) + 1;
  update({ range: [a, b], ...sampleScope(), cursor: Math.min(end, Math.max(0, last)) });
}

/** Choose a head alone, or with `more` add it to the others or take it away. */
function chooseHead(row, more) {
  if (!more) return update({ heads: STATE.heads.length === 1 && STATE.heads[0] === row ? [] : [row] });
  if (STATE.heads.includes(row)) return update({ heads: STATE.heads.filter((head) => head !== row) });
  return update({ heads: [...STATE.heads.slice(STATE.heads.length >= MOST_CHOSEN ? 1 : 0), row] });
}

function tokenName(step) {
  const token = current().tokens[step];
  return token === '' ? 'nothing' : quoted(token);
}

function quoted(text) {
  return `“${text.replace(/\n/g, '⏎').replace(/\t/g, '⇥')}”`;
}

function plural(count, word) {
  return `${count.toLocaleString('en')} ${word}${count === 1 ? '' : 's'}`;
}
