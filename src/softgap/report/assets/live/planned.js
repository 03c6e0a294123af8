'use strict';
// A run under a plan while it is written: the text, and the bytes of the cache beside those of the original's.

const RUN = { promptTokens: 0, steps: 0, characters: [], seconds: [], bytes: [], original: [], timer: null };
const DRAW_EVERY = 120;
const CHART = { height: 220, left: 64, right: 14, top: 14, bottom: 38 };

document.documentElement.classList.add('pane');

function begin({ promptTokens }) {
  RUN.promptTokens = promptTokens;
  byId('saving').textContent = 'The model reads the prompt.';
}

function step(data) {
  if (data.step !== RUN.steps) throw new Error(`step ${data.step} came after step ${RUN.steps - 1}`);
  RUN.characters.splice(data.from, Infinity, ...data.text);
  for (const name of ['seconds', 'bytes', 'original']) RUN[name].push(data[name]);
  RUN.steps += 1;
}

function end(data) {
  byId('saving').textContent = data.state === 'failed' ? `This run failed: ${data.reason}.`
    : data.sentence || 'This run stopped before its first token.';
  document.documentElement.dataset.ended = data.state;
}

function megabytes(count) {
  return count >= 1e5 ? `${(count / 1e6).toFixed(1)} MB` : `${(count / 1e3).toFixed(1)} kB`;
}

function last(list) {
  return list[list.length - 1];
}

function drawSaving() {
  const [now, original] = [last(RUN.bytes), last(RUN.original)];
  if (!document.documentElement.dataset.ended) byId('saving').textContent = `${RUN.steps} tokens written.`;
  const later = RUN.seconds.slice(1);
  const facts = [
    [megabytes(now), 'cache now, under the plan'],
    [megabytes(original), 'cache now, of the original'],
    [original ? `${Math.round((100 * now) / original)} %` : '–', 'of the original'],
    [later.length ? `${(1e3 * d3.mean(later)).toFixed(1)} ms` : '–', 'per token under the plan, mean'],
    [`${RUN.seconds[0].toFixed(2)} s`, 'until the first token'],
  ];
  byId('facts').replaceChildren(...facts.map(([number, label]) => {
    const box = element('div');
    box.append(element('dt', '', label), element('dd', '', number));
    return box;
  }));
}

/** Bytes of the two caches by the length of the text. */
function drawBytes() {
  const box = byId('bytes');
  const { height, left, right, top, bottom } = CHART;
  const width = box.clientWidth;
  const x = d3.scaleLinear().domain([RUN.promptTokens, RUN.promptTokens + Math.max(1, RUN.steps - 1)]).range([left, width - right]);
  const y = d3.scaleLinear().domain([0, Math.max(1, d3.max([...RUN.bytes, ...RUN.original]))]).nice().range([height - bottom, top]);
  byId('bytes-caption').textContent = 'Bytes of the cache by tokens of text; dotted: the original’s.';
  box.replaceChildren();
  const svg = d3.select(box).append('svg').attr('width', width).attr('height', height).attr('role', 'img')
    .attr('aria-label', `The cache holds ${megabytes(last(RUN.bytes))} under the plan and ${megabytes(last(RUN.original))} without it.`);
  const axis = (scale, count) => scale.ticks(count).slice(0, 12);
  const whole = axis(x, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger);
  svg.append('g').attr('class', 'axis').attr('transform', `translate(0,${height - bottom})`).call(d3.axisBottom(x).tickValues(whole).tickFormat(d3.format(',')));
  svg.append('g').attr('class', 'axis').attr('transform', `translate(${left},0)`).call(d3.axisLeft(y).tickValues(axis(y, 5)).tickFormat(megabytes));
  svg.append('text').attr('x', width - right).attr('y', height - 4).attr('text-anchor', 'end').text('tokens of text');
  const path = d3.line().x((_, i) => x(RUN.promptTokens + i)).y((value) => y(value));
  svg.append('path').attr('class', 'mean').attr('d', path(RUN.original));
  svg.append('path').attr('class', 'trace planned-trace').attr('d', path(RUN.bytes));
}

function draw() {
  byId('written').textContent = RUN.characters.join('');
  if (!RUN.steps) return;
  drawSaving();
  drawBytes();
}

/** Draw what has arrived, a few times a second. */
function drawSoon() {
  RUN.timer = RUN.timer || setTimeout(() => {
    RUN.timer = null;
    draw();
  }, DRAW_EVERY);
}

/** Called by the page around this one. */
function receive(kind, data) {
  ({ begin, step, end })[kind](data);
  drawSoon();
}

function receiveTheme(name) {
  chooseTheme(name);
}

byId('asked').textContent = PAYLOAD.prompt;
byId('notes').append(...PAYLOAD.notes.map((words) => element('p', '', words)));
if (window.frameElement) {
  new ResizeObserver(() => {
    window.frameElement.style.height = `${document.body.offsetHeight}px`;
    if (RUN.steps) drawSoon();
  }).observe(document.body);
} else location.replace(`/#show=${encodeURIComponent(PAYLOAD.run)}`);
document.documentElement.dataset.ready = String(Math.round(performance.now()));
