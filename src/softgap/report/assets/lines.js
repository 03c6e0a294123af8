'use strict';
// Trajectories of the chosen heads over the tokens, with the range of tokens to choose.

const LINES = { height: 300, left: 56, right: 14, top: 14, bottom: 38 };
let linesBrush = null;
// Whether the reader is drawing a range, and whether the range is being moved to where the page has it.
let brushing = false;
let following = false;
let linesAnchor = null;
let drawnLines = null;

/** What is drawn of one series of numbers: points [{ at, value }] by step. */
function viewed(series) {
  if (STATE.view === 'raw') return Array.from(series, (value, at) => ({ at, value }));
  const changes = differences(series);
  if (STATE.view === 'diff') return Array.from(changes, (value, at) => ({ at: at + 1, value }));
  return windowedEntropy(changes, leastWindows()).map(({ at, value }) => ({ at: at + 0.5, value }));
}

function viewWords() {
  const least = leastWindows();
  return {
    raw: `Divergence from ${STATE.mechanism} at every token (1 − cos)`,
    diff: `Change of the divergence from ${STATE.mechanism} from token to token`,
    entropy: `Permutation entropy of the changes in intervals of ${least} windows, order 3; 1 is white noise`,
  }[STATE.view];
}

function drawLines() {
  const box = byId('lines');
  const array = values(divergenceKey());
  if (!array || brushing) return;
  const traces = STATE.heads.map((row, i) => ({ row, colour: lineColour(i), dash: DASHES[i % DASHES.length], points: viewed(seriesOf(array, row, 0, array.columns)) }));
  const mean = viewed(meanOfRows(array, HEADS.map(({ row }) => row)));
  const other = otherSample();
  if (other !== null) {
    const beside = onSample(other, () => values(divergenceKey()));
    if (!beside) return;
    // At the same place of its completion.
    const shift = current().promptSteps - PAYLOAD.samples[other].data.promptSteps;
    for (const { row, colour } of [...traces]) {
      const points = viewed(seriesOf(beside, row, 0, beside.columns)).map(({ at, value }) => ({ at: at + shift, value }))
        .filter(({ at }) => at >= 0 && at < array.columns);
      traces.push({ row, colour, dash: '1 3', points });
    }
  }
  const everything = [...traces.flatMap(({ points }) => points), ...mean].map(({ value }) => value).filter((value) => value === value);
  byId('lines-caption').textContent = `${viewWords()}; dotted: the mean of all heads.${other === null ? '' : ` Fine dots in the colour of a head: ${sideName(other)}, from the same place of its completion.`}`;
  box.replaceChildren();
  drawnLines = null;
  if (!everything.length) {
    box.append(element('p', 'empty', STATE.view === 'entropy'
      ? `${plural(array.columns, 'token')} are too few for intervals of ${leastWindows()} windows; use a longer text.`
      : 'No values here.'));
    return;
  }
  const width = box.clientWidth;
  const { height, left, right, top, bottom } = LINES;
  const x = d3.scaleLinear().domain([-0.5, array.columns - 0.5]).range([left, width - right]);
  const y = d3.scaleLinear().domain(d3.extent(everything)).nice().range([height - bottom, top]);
  const svg = d3.select(box).append('svg').attr('width', width).attr('height', height).attr('aria-hidden', 'true');
  drawLinesFrame(svg, x, y, width);
  const path = d3.line().defined(({ value }) => value === value).x(({ at }) => x(at)).y(({ value }) => y(value));
  svg.append('path').attr('class', 'mean').attr('d', path(mean));
  for (const { points, colour, dash } of traces) {
    svg.append('path').attr('class', 'trace').attr('d', path(points)).attr('stroke', colour).attr('stroke-dasharray', dash);
  }
  drawnLines = { svg, x, y, traces, array };
  drawBrush(svg, x, height);
  svg.append('line').attr('class', 'cursor').attr('y1', top).attr('y2', height - bottom).attr('visibility', 'hidden');
  showLinesCursor();
}

function drawLinesFrame(svg, x, y, width) {
  const { height, left, right, top, bottom } = LINES;
  const { promptSteps } = current();
  if (promptSteps) {
    svg.append('rect').attr('class', 'promptband').attr('x', x(-0.5)).attr('width', x(promptSteps - 0.5) - x(-0.5))
      .attr('y', top).attr('height', height - top - bottom);
    if (x(promptSteps) - x(0) > 50) svg.append('text').attr('x', x(-0.5) + 6).attr('y', top + 14).text('prompt');
  }
  svg.append('g').attr('class', 'grid').attr('transform', `translate(${left},0)`)
    .call(d3.axisLeft(y).ticks(5).tickSize(-(width - left - right)).tickFormat('')).select('.domain').remove();
  svg.append('g').attr('class', 'axis').attr('transform', `translate(${left},0)`).call(d3.axisLeft(y).ticks(5));
  svg.append('g').attr('class', 'axis').attr('transform', `translate(0,${height - bottom})`)
    .call(d3.axisBottom(x).ticks(Math.max(3, Math.min(12, width / 90))).tickFormat(d3.format('d')));
  svg.append('text').attr('x', width - right).attr('y', height - 5).attr('text-anchor', 'end').text('token');
  const unit = { raw: 'divergence, 1 − cos', diff: 'change per token', entropy: 'permutation entropy' }[STATE.view];
  svg.append('text').attr('transform', `translate(12,${(height - bottom + top) / 2}) rotate(-90)`).attr('text-anchor', 'middle').text(unit);
  if (STATE.view === 'diff') svg.append('line').attr('class', 'zero').attr('x1', left).attr('x2', width - right).attr('y1', y(0)).attr('y2', y(0));
}

function drawBrush(svg, x, height) {
  const { left, top, bottom } = LINES;
  function read() {
    // Moves that come from elsewhere in the page are not the reader's.
    if (!brushing) return;
    const selection = d3.brushSelection(this);
    if (!selection) return update({ range: null });
    const [a, b] = selection.map((place) => Math.round(x.invert(place)));
    update({ range: [Math.max(0, a), Math.min(stepCount(), Math.max(a, b) + 1)], ...sampleScope() });
  }
  linesBrush = d3.brushX().extent([[left, top], [x.range()[1], height - bottom]])
    .on('start', () => { brushing = !following; })
    .on('brush', read)
    .on('end', function end() {
      read.call(this);
      brushing = false;
    });
  svg.append('g').attr('class', 'brush').call(linesBrush);
  showRangeInLines();
}

function showRangeInLines() {
  if (!drawnLines || brushing) return;
  const { svg, x } = drawnLines;
  following = true;
  svg.select('.brush').call(linesBrush.move, STATE.range ? [x(STATE.range[0] - 0.5), x(STATE.range[1] - 0.5)] : null);
  following = false;
}

function showLinesCursor() {
  const readout = byId('lines-readout');
  if (!drawnLines) {
    readout.textContent = '';
    return;
  }
  const { svg, x, array } = drawnLines;
  const step = STATE.cursor;
  const line = svg.select('.cursor');
  if (step === null) {
    line.attr('visibility', 'hidden');
    readout.textContent = STATE.heads.length ? '' : 'Select a head in the map or the table to see its trajectory.';
    return;
  }
  line.attr('visibility', null).attr('x1', x(step)).attr('x2', x(step));
  const numbers = STATE.heads.map((row) => `head ${HEADS[row].name} ${show(array.values[row * array.columns + step])}`);
  readout.textContent = [`Token ${step} ${tokenName(step)}`, ...numbers].join(' · ');
}

function showChips() {
  const place = byId('chosen');
  place.replaceChildren();
  STATE.heads.forEach((row, i) => {
    const chip = element('li');
    const sign = d3.select(chip).append('svg').attr('width', 26).attr('height', 8).attr('aria-hidden', 'true');
    sign.append('line').attr('x2', 26).attr('y1', 4).attr('y2', 4).attr('stroke', lineColour(i)).attr('stroke-width', 2.4)
      .attr('stroke-dasharray', DASHES[i % DASHES.length]);
    chip.append(element('span', '', `head ${HEADS[row].name}`));
    const away = element('button', '', '×');
    away.type = 'button';
    away.setAttribute('aria-label', `Remove head ${HEADS[row].name}`);
    away.addEventListener('click', () => chooseHead(row, true));
    chip.append(away);
    place.append(chip);
  });
}

function onLinesKey(event) {
  const last = stepCount() - 1;
  const from = STATE.cursor ?? span()[0];
  const far = event.ctrlKey || event.metaKey ? 10 : 1;
  const moves = { ArrowLeft: from - far, ArrowRight: from + far, Home: 0, End: last, PageUp: from - 25, PageDown: from + 25 };
  if (event.key in moves) {
    event.preventDefault();
    const to = Math.min(last, Math.max(0, moves[event.key]));
    linesAnchor = event.shiftKey ? linesAnchor ?? from : null;
    if (event.shiftKey) chooseRange(linesAnchor, to);
    else update({ cursor: to });
  } else if (event.key === 'Escape') {
    linesAnchor = null;
    update({ range: null });
  }
}

function startLines() {
  const box = byId('lines');
  box.addEventListener('pointermove', (event) => {
    if (!drawnLines) return;
    const { left } = box.getBoundingClientRect();
    const step = Math.round(drawnLines.x.invert(event.clientX - left));
    if (step >= 0 && step < stepCount()) update({ cursor: step });
  });
  box.addEventListener('keydown', onLinesKey);
  listen(['sample', 'mechanism', 'view', 'heads', 'theme', 'arrived', 'width'], drawLines);
  listen(['heads', 'theme'], showChips);
  listen(['range'], showRangeInLines);
  listen(['cursor'], showLinesCursor);
}
