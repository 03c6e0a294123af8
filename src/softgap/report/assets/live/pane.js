'use strict';
// The explorer while its run is written: events of the server fill the arrays that a report would carry.

const PANE = { began: false, columns: 1, held: false, late: false, timer: null };
const SAMPLE = PAYLOAD.samples[0];
const DRAW_EVERY = 120;

document.documentElement.classList.add('pane');

function numbersOf(base64) {
  return new Float32Array(bytesOf(base64).buffer);
}

/** Arrays of this many steps, what is known of the first ones kept and the others unknown. */
function resize(columns) {
  for (const index of Object.values(SAMPLE.data.arrays)) {
    const old = unpacked.get(index);
    const values = new Float32Array(HEADS.length * columns).fill(NaN);
    if (old) {
      const shared = Math.min(columns, old.columns);
      for (let row = 0; row < HEADS.length; row += 1) {
        values.set(old.values.subarray(row * old.columns, row * old.columns + shared), row * columns);
      }
    }
    unpacked.set(index, { rows: HEADS.length, columns, values });
  }
  PANE.columns = columns;
}

function begin(data) {
  const { promptSteps, promptTokens, tokens, positions, logprob, entropy, pieces, arrays, steps } = data;
  Object.assign(SAMPLE, { promptTokens });
  Object.assign(SAMPLE.data, { promptSteps, tokens, positions, logprob, entropy });
  if (pieces.length) SAMPLE.data.pieces.prompt = pieces;
  resize(steps);
  for (const [key, text] of Object.entries(arrays)) {
    const { values } = unpacked.get(SAMPLE.data.arrays[key]);
    const numbers = numbersOf(text);
    for (let row = 0; row < HEADS.length; row += 1) values.set(numbers.subarray(row * promptSteps, (row + 1) * promptSteps), row * steps);
  }
  PANE.began = true;
  buildText();
}

function step(data) {
  const sample = SAMPLE.data;
  if (data.step !== sample.tokens.length) throw new Error(`step ${data.step} came after step ${sample.tokens.length - 1}`);
  for (const name of ['token', 'position']) sample[`${name}s`].push(data[name]);
  for (const name of ['logprob', 'entropy']) sample[name].push(data[name]);
  const numbers = numbersOf(data.values);
  PAYLOAD.live.keys.forEach((key, i) => {
    const { values } = unpacked.get(sample.arrays[key]);
    for (let row = 0; row < HEADS.length; row += 1) values[row * PANE.columns + data.step] = numbers[i * HEADS.length + row];
  });
  sample.pieces.completion.splice(data.from, Infinity, ...data.pieces);
  const box = byId('tokens');
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  extendText('completion', data.from);
  if (atEnd && !box.contains(document.activeElement)) box.scrollTop = box.scrollHeight;
  SAMPLE.steps += 1;
}

function end(data) {
  if (data.dynamics) PAYLOAD.dynamics = data.dynamics;
  if (data.about) PAYLOAD.about = data.about;
  if (data.headline) Object.assign(PAYLOAD, { headline: data.headline, heldOut: data.heldOut });
  SAMPLE.data.empty = data.state === 'failed' ? `This run failed: ${data.reason}.` : 'This run stopped before its first token.';
  if (PANE.began) resize(Math.max(1, SAMPLE.data.tokens.length));
  else buildText();
  document.documentElement.dataset.ended = data.state;
}

function summarise() {
  const known = (list) => list.slice(SAMPLE.data.promptSteps).filter((value) => value !== null);
  SAMPLE.logprob = known(SAMPLE.data.logprob).length ? d3.mean(known(SAMPLE.data.logprob)) : null;
  SAMPLE.entropy = known(SAMPLE.data.entropy).length ? d3.mean(known(SAMPLE.data.entropy)) : null;
  SAMPLE.divergence = PAYLOAD.mechanisms.map((name) => {
    const array = values(divergenceKey(name));
    const mean = d3.mean(HEADS, ({ row }) => meanOver(array, row, SAMPLE.data.promptSteps, SAMPLE.data.tokens.length) || undefined);
    return mean === undefined ? null : mean;
  });
}

/** Draw what has arrived, a few times a second, and never under a pressed pointer: a click would miss what it was at. */
function drawSoon() {
  PANE.timer = PANE.timer || setTimeout(() => {
    PANE.timer = null;
    if (PANE.held) {
      PANE.late = true;
      return;
    }
    summarise();
    drawFacts();
    if (!STATE.heads.length && !PANE.chose && SAMPLE.steps) {
      PANE.chose = true;
      update({ heads: firstHeads() });
    }
    update({ arrived: STATE.arrived + 1 });
  }, DRAW_EVERY);
}

/** Called by the page around this one. */
function receive(kind, data) {
  ({ begin, step, end })[kind](data);
  drawSoon();
}

function receiveTheme(name) {
  chooseTheme(name);
  update({ theme: `${name || 'auto'}, ${isDark() ? 'dark' : 'light'}` });
}

addEventListener('pointerdown', () => { PANE.held = true; }, true);
for (const kind of ['pointerup', 'pointercancel', 'blur']) {
  addEventListener(kind, () => {
    PANE.held = false;
    // After the click that this may become.
    if (PANE.late) setTimeout(drawSoon, 0);
    PANE.late = false;
  }, true);
}
resize(1);
if (window.frameElement) {
  new ResizeObserver(() => { window.frameElement.style.height = `${document.body.offsetHeight}px`; }).observe(document.body);
} else location.replace(`/#show=${encodeURIComponent(PAYLOAD.live.run)}`);
