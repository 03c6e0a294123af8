'use strict';
// Put the parts together.

function fillSelect(id, entries, name) {
  const select = byId(id);
  select.replaceChildren(...entries.map(({ key, label }) => option(key, label)));
  select.value = STATE[name];
  select.addEventListener('change', () => update({ [name]: select.value }));
}

/** Quantities come and go with the mechanism: nothing is far from uniform if uniform itself is shown. */
function fillQuantities() {
  const available = QUANTITIES.filter((entry) => entry.available());
  const listed = Array.from(byId('quantity').options, ({ value }) => value);
  if (same(listed, available.map(({ key }) => key))) return;
  byId('quantity').replaceChildren(...available.map(({ key, label }) => option(key, label)));
  if (!available.some(({ key }) => key === STATE.quantity)) update({ quantity: 'divergence' });
  byId('quantity').value = STATE.quantity;
}

function startControls() {
  fillSelect('mechanism', PAYLOAD.mechanisms.map((name) => ({ key: name, label: name === BASELINE ? `${name} (baseline)` : name })), 'mechanism');
  fillSelect('shade', SHADES, 'shade');
  listen(['shade'], () => { byId('shade').value = STATE.shade; });
  byId('shade-of').addEventListener('change', () => update({ shadeOf: byId('shade-of').value }));
  fillQuantities();
  byId('quantity').addEventListener('change', () => update({ quantity: byId('quantity').value }));
  listen(['mechanism', 'arrived'], fillQuantities);
  for (const name of ['view', 'zoom']) byId(name).addEventListener('change', (event) => update({ [name]: event.target.value }));
  listen(['shade'], () => { byId('shade-of-control').hidden = STATE.shade !== 'divergence'; });
  startRange();
  startTheme(() => update({ theme: `${document.documentElement.dataset.theme || 'auto'}, ${isDark() ? 'dark' : 'light'}` }));
}

function startRange() {
  const fields = ['from', 'to'].map(byId);
  // A number that is being typed is the reader's until it is finished.
  const typing = new Set();
  const read = () => {
    const [from, to] = fields.map((field) => (field.value === '' ? NaN : Math.round(field.valueAsNumber)));
    if (from === from && to === to) chooseRange(from, to);
  };
  const write = () => {
    const [a, b] = STATE.range || [0, stepCount()];
    [a, b - 1].forEach((step, i) => {
      Object.assign(fields[i], { min: 0, max: Math.max(0, stepCount() - 1) });
      if (!typing.has(fields[i])) fields[i].value = Math.max(0, step);
    });
    byId('clear').disabled = !STATE.range;
  };
  for (const field of fields) {
    field.addEventListener('input', () => typing.add(field));
    field.addEventListener('blur', () => typing.delete(field));
    field.addEventListener('change', () => {
      typing.delete(field);
      read();
      write();
    });
  }
  byId('clear').addEventListener('click', () => update({ range: null }));
  listen(['range', 'sample', 'arrived'], write);
  write();
}

/** What can be said in a few numbers; again whenever tokens have arrived. */
function drawFacts() {
  const { samples, layers, mechanisms } = PAYLOAD;
  const single = samples.length === 1;
  const parts = [PAYLOAD.model, single ? '' : plural(samples.length, 'sample'), `${layers.length} layers`, plural(HEADS.length, 'head')];
  byId('subject').textContent = parts.filter(Boolean).join(' · ');
  byId('headline').textContent = PAYLOAD.headline || '';
  byId('headline').hidden = !PAYLOAD.headline;
  byId('held-out').textContent = PAYLOAD.heldOut || '';
  byId('held-out').hidden = !PAYLOAD.heldOut;
  const steps = samples.reduce((total, sample) => total + sample.steps, 0);
  const mean = (at) => d3.mean(samples, (sample) => sample.divergence[at] ?? undefined);
  const facts = [
    [plural(steps, 'token').split(' ')[0], 'completion tokens'],
    [HEADS.length.toLocaleString('en'), 'heads'],
    ...mechanisms.slice(0, 4).map((name, at) => [show(mean(at)), `mean divergence from ${name}`]),
    [show(d3.mean(samples, (sample) => sample.logprob ?? undefined)), 'log-probability per token'],
  ];
  byId('facts').replaceChildren(...facts.map(([number, label]) => {
    const box = element('div');
    box.append(element('dt', '', label), element('dd', '', number));
    return box;
  }));
  byId('about').replaceChildren(...PAYLOAD.about.flatMap(([heading, words]) => [element('dt', '', heading), element('dd', '', words)]));
}

/** The heads with the most and the least of what ranks them: something to look at from the start. */
function firstHeads() {
  const { ranking, quantity: first } = PAYLOAD.opening || {};
  const means = quantityNow(quantity(ranking || first || 'divergence')).numbers;
  if (!means || !means.some((value) => value === value)) return [];
  const sorted = HEADS.map(({ row }) => row).filter((row) => means[row] === means[row]).sort((a, b) => means[b] - means[a]);
  return [...new Set([sorted[0], sorted[sorted.length - 1]])];
}

function watchWidth() {
  let known = 0;
  new ResizeObserver(() => {
    const width = document.documentElement.clientWidth;
    if (width !== known) update({ width });
    known = width;
  }).observe(document.documentElement);
}

async function start() {
  // Where it would push every picture below the fold it is a click away.
  byId('more-lead').open = window.innerWidth >= 1060 && window.innerHeight >= 860;
  drawFacts();
  startControls();
  startText();
  startOther();
  startAnatomy();
  startMap();
  startLines();
  startProfile();
  startPlane();
  startTable();
  startSamples();
  addSaving();
  await unpackFirst();
  update({ heads: firstHeads(), width: document.documentElement.clientWidth, arrived: STATE.arrived + 1 });
  watchWidth();
  requestAnimationFrame(() => requestAnimationFrame(() => {
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  }));
}

function unpackFirst() {
  const keys = [divergenceKey(), divergenceKey(BASELINE)].filter(carries);
  const samples = (PAYLOAD.compare && PAYLOAD.compare.samples) || [STATE.sample];
  const indices = samples.flatMap((sample) => keys.map((key) => PAYLOAD.samples[sample].data.arrays[key]));
  return Promise.all(indices.map((index) => new Promise((resolve) => {
    if (arrayAt(index, resolve)) resolve();
  })));
}

start().catch(fail);
