'use strict';
// Head anatomy: the keys that a head attends to when it predicts a token, or the predictions that attend to a token, by
// softmax and beside it by every substitute. What a page does not carry, the page around it may be asked for.

const ANATOMY = { heads: new Map(), host: false, asked: null, refused: '' };
const ANATOMY_ROWS = { wide: 16, narrow: 6 };

/** Keys, weights and the sum of all others of one head; softgap/report/anatomy.py says how they are laid out. */
async function unpackAnatomy({ mechanisms, queries, top, packed }) {
  const text = typeof packed === 'string' ? packed : byId(`array-${packed}`).textContent;
  const plain = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream('deflate'));
  const buffer = await new Response(plain).arrayBuffer();
  const rows = mechanisms.length * queries;
  const size = rows * top;
  const scale = new Float32Array(buffer, 0, rows);
  const bytes = (plane) => new Uint8Array(buffer, 8 * rows + plane * size, size);
  const [keyHigh, keyLow, high, low] = [0, 1, 2, 3].map(bytes);
  const keys = new Int32Array(size);
  const weights = new Float64Array(size);
  for (let i = 0; i < size; i += 1) {
    const key = (keyHigh[i] << 8) | keyLow[i];
    keys[i] = key === 65535 ? -1 : key;
    weights[i] = ((((high[i] << 8) | low[i]) << 16 >> 16) / 32767) * scale[Math.floor(i / top)];
  }
  return { keys, weights, rest: new Float32Array(buffer, 4 * rows, rows) };
}

function anatomyKey(row, sample = STATE.sample) {
  return `${sample}/${row}`;
}

/** Take in what the page or the server says of some heads of a sample. */
function addAnatomy(sample, entries) {
  for (const entry of entries) {
    const head = HEADS.find(({ layer, head: number }) => layer === entry.layer && number === entry.head);
    if (head) ANATOMY.heads.set(anatomyKey(head.row, sample), { ...entry, data: null });
  }
}

/** The anatomy of the head that is looked into, or null while it is unpacked or where there is none. */
function anatomyNow() {
  const entry = ANATOMY.heads.get(anatomyKey(STATE.anatomy));
  if (!entry) return null;
  if (entry.data === null) {
    entry.data = undefined;
    unpackAnatomy(entry).then((data) => {
      entry.data = data;
      update({ arrived: STATE.arrived + 1 });
    }, fail);
  }
  return entry.data ? entry : null;
}

/** The step that is looked at: the one that a click holds, else where the pointer or the focus is. */
function anatomyStep() {
  return STATE.pinned ?? STATE.cursor;
}

/** The step whose shown token stands at a position; the first token of all has none. */
function stepAtPosition(position) {
  const { positions } = current();
  // Positions of the prompt and of the completion follow each other.
  const step = position - 1 - positions[0];
  return positions[step] === position - 1 ? step : undefined;
}

function nameAtPosition(position, entry) {
  const step = stepAtPosition(position);
  if (step !== undefined) return tokenName(step);
  return position === 0 ? `first token ${entry.first ? quoted(entry.first) : ''}`.trim() : `token ${position}`;
}

/** What one mechanism says: [{ position, weight }], the largest first, and the sum of all others or null. */
function anatomyList(entry, mechanism, step) {
  const { keys, weights, rest } = entry.data;
  const { queries, top } = entry;
  const base = mechanism * queries;
  const query = current().positions[step];
  if (STATE.direction === 'sources') {
    const list = [];
    for (let i = (base + query) * top; i < (base + query + 1) * top; i += 1) {
      if (keys[i] >= 0 && weights[i]) list.push({ position: keys[i], weight: weights[i] });
    }
    return { list, rest: rest[base + query] };
  }
  const key = query + 1;
  const list = [];
  for (let from = key; from < queries; from += 1) {
    for (let i = (base + from) * top; i < (base + from + 1) * top; i += 1) {
      // The step of a query is named by the token that it predicts.
      if (keys[i] === key && weights[i]) list.push({ position: from + 1, weight: weights[i] });
    }
  }
  return { list: list.sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)), rest: null };
}

/** One number per step to shade the text by, with the words that say what it is; null without anatomy or token. */
function anatomyShading() {
  const entry = anatomyNow();
  const step = anatomyStep();
  if (!entry || step === null || current().positions[step] >= entry.queries) return null;
  const mechanism = Math.max(0, entry.mechanisms.indexOf(STATE.attention));
  const numbers = new Float64Array(stepCount());
  for (const { position, weight } of anatomyList(entry, mechanism, step).list) {
    const at = stepAtPosition(position);
    if (at !== undefined) numbers[at] = Math.abs(weight);
  }
  const words = STATE.direction === 'sources' ? `to predict ${tokenName(step)}` : `to ${tokenName(step)}, by the predicted token`;
  return { numbers, label: `weight of ${entry.mechanisms[mechanism]}, head ${HEADS[STATE.anatomy].name}, ${words}` };
}

/** A weight in two digits; what would read 0.00 is told from nothing. */
function weightWords(weight) {
  return Math.abs(weight) >= 0.005 ? show(weight, 2) : weight ? `${weight < 0 ? '>−' : '<'}0.01` : '0';
}

/** The strongest keys in one sentence, for the line under the text. */
function anatomyWords() {
  const entry = STATE.shade === 'attention' ? anatomyNow() : null;
  const step = anatomyStep();
  if (!entry || step === null || current().positions[step] >= entry.queries) return '';
  const mechanism = Math.max(0, entry.mechanisms.indexOf(STATE.attention));
  const { list, rest } = anatomyList(entry, mechanism, step);
  const shown = list.slice(0, 3).map(({ position, weight }) => `${nameAtPosition(position, entry)} ${weightWords(weight)}`).join(', ');
  const others = rest === null ? '' : `; other keys ${weightWords(rest + d3.sum(list.slice(3), ({ weight }) => weight))}`;
  const what = STATE.direction === 'sources' ? `attends to ${shown || 'nothing'}${others}` : `attends to ${tokenName(step)} when predicting ${shown || 'nothing among its strongest keys'}`;
  return `${entry.mechanisms[mechanism]} of head ${HEADS[STATE.anatomy].name} ${what}`;
}

function anatomyCaption(entry) {
  const name = STATE.anatomy === null ? '' : HEADS[STATE.anatomy].name;
  if (ANATOMY.refused) return ANATOMY.refused;
  if (ANATOMY.asked !== null) return `The server lists the keys of head ${HEADS[ANATOMY.asked].name} …`;
  if (STATE.anatomy === null) {
    if (ANATOMY.host) return 'Select a head in the map to see what it attends to.';
    if (PAYLOAD.live) return 'When the run has ended and is saved, select a head to see what it attends to.';
    return 'This page stores no keys. To store them for heads that you name, measure with softgap run --anatomy 18.8,3.2; or open the study in softgap serve.';
  }
  if (!entry) return ANATOMY.heads.has(anatomyKey(STATE.anatomy)) ? '' : `The keys of head ${name} are not in this page yet.`;
  const step = anatomyStep();
  const how = STATE.pinned === null ? 'Point at a token of the text, or move with the arrow keys; click or Enter holds it.' : 'Click the token again, or press Escape, to release it.';
  if (step === null) return `Head ${name}. ${how}`;
  if (current().positions[step] >= entry.queries) return `Nothing was predicted from the last token, so head ${name} has no keys there. ${how}`;
  return STATE.direction === 'sources'
    ? `The keys that head ${name} attends to when the model predicts ${tokenName(step)} (token ${step}). ${how}`
    : `The predictions in which head ${name} attends to ${tokenName(step)} (token ${step}): those where it is among the ${entry.top} strongest keys. ${how}`;
}

function drawAnatomy() {
  fillAnatomyHeads();
  const entry = anatomyNow();
  const step = anatomyStep();
  byId('anatomy-caption').textContent = anatomyCaption(entry);
  byId('anatomy-caption').classList.toggle('waiting', ANATOMY.asked !== null);
  const missing = ANATOMY.host && STATE.anatomy !== null && ANATOMY.asked === null && !ANATOMY.heads.has(anatomyKey(STATE.anatomy));
  byId('anatomy-ask').hidden = !missing;
  if (missing) byId('anatomy-ask').textContent = `List the keys of head ${HEADS[STATE.anatomy].name}`;
  byId('direction').hidden = !entry;
  const known = entry && step !== null && current().positions[step] < entry.queries;
  byId('anatomy').replaceChildren(...(known ? entry.mechanisms.map((name, i) => anatomyColumn(entry, name, i, step)) : []));
}

function anatomyColumn(entry, name, mechanism, step) {
  const { list, rest } = anatomyList(entry, mechanism, step);
  const most = ANATOMY_ROWS[document.documentElement.clientWidth < 640 ? 'narrow' : 'wide'];
  const shown = list.slice(0, most);
  const column = element('section', `keys${STATE.attention === name ? ' chosen' : ''}`);
  const title = element('h3', '');
  const button = element('button', '', name);
  button.type = 'button';
  button.setAttribute('aria-pressed', String(STATE.attention === name));
  button.setAttribute('aria-label', `Shade the text by the weights of ${name}`);
  button.addEventListener('click', () => update({ attention: name, shade: 'attention' }));
  title.append(button);
  const rows = element('ol');
  const greatest = Math.max(1e-9, ...shown.map(({ weight }) => Math.abs(weight)));
  for (const { position, weight } of shown) rows.append(anatomyRow(nameAtPosition(position, entry), weight, greatest, stepAtPosition(position)));
  if (!shown.length) rows.append(element('li', 'others', 'none'));
  column.append(title, rows);
  if (rest !== null) {
    const others = rest + d3.sum(list.slice(most), ({ weight }) => weight);
    column.append(element('p', 'others', `other keys: ${weightWords(others)}`));
    const whole = others + d3.sum(shown, ({ weight }) => weight);
    if (name === 'softmax' && whole < 0.995) column.append(element('p', 'others', `learned sink: ${weightWords(1 - whole)}`));
  } else if (list.length > most) column.append(element('p', 'others', `and ${plural(list.length - most, 'more prediction')}`));
  return column;
}

function anatomyRow(name, weight, greatest, step) {
  const line = element('li');
  const bar = element('span', weight < 0 ? 'level negative' : 'level');
  bar.style.width = `${(100 * Math.abs(weight)) / greatest}%`;
  const words = element(step === undefined ? 'span' : 'button', 'key', name);
  if (step !== undefined) {
    words.type = 'button';
    words.title = `token ${step}`;
    words.addEventListener('click', () => pinStep(step));
  }
  line.append(bar, words, element('span', 'number', weightWords(weight)));
  return line;
}

/** The heads that there is something to say of, and the one that was chosen last, if the server can be asked. */
function fillAnatomyHeads() {
  const last = STATE.heads[STATE.heads.length - 1];
  const rows = HEADS.map(({ row }) => row).filter((row) => ANATOMY.heads.has(anatomyKey(row)) || (ANATOMY.host && (row === last || row === STATE.anatomy)));
  const select = byId('anatomy-head');
  byId('anatomy-head-control').hidden = !rows.length;
  if (!same(Array.from(select.options, ({ value }) => Number(value)), rows)) {
    select.replaceChildren(...rows.map((row) => option(row, HEADS[row].name)));
  }
  if (!rows.includes(STATE.anatomy)) update({ anatomy: rows.length ? rows[0] : null });
  else select.value = STATE.anatomy;
}

/** Look into the head that was chosen last, where that can be done. */
function followChosenHead() {
  const last = STATE.heads[STATE.heads.length - 1];
  if (last !== undefined && (ANATOMY.host || ANATOMY.heads.has(anatomyKey(last)))) update({ anatomy: last });
}

/** Hold a token, or let it go if it is held already; the text then shows what the head attends to. */
function pinStep(step) {
  const pinned = step === STATE.pinned ? null : step;
  const entry = ANATOMY.heads.get(anatomyKey(STATE.anatomy));
  if (pinned === null) update({ pinned, ...(STATE.shade === 'attention' && STATE.before ? { shade: STATE.before } : {}) });
  else if (entry && STATE.shade !== 'attention') update({ pinned, cursor: pinned, before: STATE.shade, shade: 'attention' });
  else update({ pinned, cursor: pinned });
  if (pinned !== null && !entry) askAnatomy();
}

/** Ask the page around this one, which knows the server; its answer arrives as a message. */
function askAnatomy() {
  const row = STATE.anatomy;
  if (!ANATOMY.host || row === null || ANATOMY.asked !== null || ANATOMY.heads.has(anatomyKey(row))) return;
  Object.assign(ANATOMY, { asked: row, refused: '' });
  const { layer, head } = HEADS[row];
  parent.postMessage({ kind: 'softgap-anatomy', head: `${layer}.${head}`, sample: PAYLOAD.live ? PAYLOAD.live.sample : PAYLOAD.samples[STATE.sample].id, index: STATE.sample }, '*');
  drawAnatomy();
}

function onHostMessage({ source, data }) {
  if (window.parent === window || source !== window.parent || !data) return;
  if (data.kind === 'softgap-host') {
    ANATOMY.host = true;
    followChosenHead();
  } else if (data.kind === 'softgap-anatomy-answer') {
    ANATOMY.asked = null;
    ANATOMY.refused = data.error ? `${data.error[0].toUpperCase()}${data.error.slice(1)}.` : '';
    if (data.heads) {
      addAnatomy(data.index, data.heads);
      if (STATE.pinned !== null && STATE.shade !== 'attention') update({ before: STATE.shade, shade: 'attention' });
    }
  } else return;
  update({ arrived: STATE.arrived + 1 });
}

function startAnatomy() {
  PAYLOAD.samples.forEach((sample, index) => addAnatomy(index, (sample.data && sample.data.anatomy) || []));
  byId('anatomy-head').addEventListener('change', (event) => update({ anatomy: Number(event.target.value) }));
  byId('direction').addEventListener('change', (event) => update({ direction: event.target.value }));
  byId('anatomy-ask').addEventListener('click', askAnatomy);
  addEventListener('message', onHostMessage);
  listen(['heads'], followChosenHead);
  listen(['sample'], () => update({ pinned: null }));
  listen(['anatomy'], () => {
    ANATOMY.refused = '';
    if (STATE.pinned !== null) askAnatomy();
  });
  listen(['sample', 'heads', 'anatomy', 'direction', 'attention', 'cursor', 'pinned', 'arrived', 'width'], drawAnatomy);
  drawAnatomy();
}
