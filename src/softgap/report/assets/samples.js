'use strict';
// A study of many samples: their list, and the means of its groups with intervals.

const SAMPLES = { search: '' };

function openSample(index) {
  if (PAYLOAD.samples[index].data) update({ sample: index, range: null, cursor: null });
}

function drawSamples() {
  const search = SAMPLES.search.trim().toLowerCase();
  const rows = PAYLOAD.samples.map((sample, index) => ({ sample, index }))
    .filter(({ sample }) => !search || [sample.id, sample.label, sample.excerpt].some((text) => (text || '').toLowerCase().includes(search)));
  const labelled = PAYLOAD.samples.some(({ label }) => label !== null);
  const heading = ['', 'sample', ...(labelled ? ['label'] : []), 'text', 'prompt', 'tokens', ...PAYLOAD.mechanisms.map((name) => `divergence, ${name}`), 'log-probability', 'entropy'];
  const head = element('thead');
  head.append(element('tr'));
  heading.forEach((text, i) => {
    const cell = element(text ? 'th' : 'td', i < (labelled ? 4 : 3) ? 'word' : '', text);
    if (text) cell.scope = 'col';
    head.firstChild.append(cell);
  });
  const body = element('tbody');
  for (const { sample, index } of rows) body.append(sampleRow(sample, index, labelled));
  byId('samples').replaceChildren(head, body);
  const carried = PAYLOAD.samples.filter(({ data }) => data).length;
  byId('samples-caption').textContent = `${plural(rows.length, 'sample')}; ${carried === PAYLOAD.samples.length ? 'all can be opened'
    : `${carried} can be opened; the others count in the groups and findings (include them with softgap report --sample NAME)`}.`;
}

function sampleRow(sample, index, labelled) {
  const line = element('tr', index === STATE.sample ? 'chosen' : '');
  const first = element('td', 'word');
  if (sample.data) {
    const button = element('button', '', index === STATE.sample ? 'shown' : 'open');
    button.type = 'button';
    button.setAttribute('aria-label', `Open sample ${sample.id}`);
    button.addEventListener('click', () => openSample(index));
    first.append(button);
  }
  line.append(first, element('td', 'word', sample.id));
  if (labelled) line.append(element('td', 'word', sample.label ?? ''));
  line.append(element('td', 'word long', sample.excerpt));
  for (const number of [sample.promptTokens, sample.steps]) line.append(element('td', '', number));
  for (const number of [...sample.divergence, sample.logprob, sample.entropy]) line.append(element('td', '', show(number)));
  return line;
}

/** Which rows of the groups' steps are drawn: all heads, or the layer of the head chosen last. */
function groupRow() {
  if (STATE.shadeOf === 'all' || !STATE.heads.length) return [0, 'mean of all heads'];
  const { at, layer } = HEADS[STATE.heads[STATE.heads.length - 1]];
  return [at + 1, `mean of layer ${layer}`];
}

// Two samples have an interval too, but one so wide that it says nothing.
const LEAST_SAMPLES = 3;

function drawGroups() {
  const arrived = () => update({ arrived: STATE.arrived + 1 });
  const labels = PAYLOAD.groups.filter(({ label }) => label !== null);
  const groups = labels.length ? labels : PAYLOAD.groups;
  const [row, who] = groupRow();
  const curves = groups.map((group) => {
    const steps = group.steps[divergenceKey()];
    return { group, steps, mean: arrayAt(steps.mean, arrived), half: arrayAt(steps.halfWidth, arrived) };
  });
  drawGroupTable(groups);
  if (curves.some(({ mean, half }) => !mean || !half)) return;
  byId('groups-caption').textContent = `Divergence from ${STATE.mechanism} at every token of the completion, ${who}: means over samples, with ${
    Math.round(100 * PAYLOAD.groups[0].level)} % intervals (Student, each token by itself) where at least ${LEAST_SAMPLES} samples are that long. ${
    ''}Groups that differ in length or topic differ for many reasons; this is a description, not a test.`;
  drawCurves(curves.map(({ group, steps, mean, half }) => ({
    name: group.label ?? 'all samples',
    points: Array.from(seriesOf(mean, row, 0, mean.columns), (value, at) => ({
      at, value, half: steps.samples[at] >= LEAST_SAMPLES ? half.values[row * half.columns + at] : NaN,
    })),
  })));
}

function drawCurves(curves) {
  const box = byId('groups');
  const width = box.clientWidth;
  const { height, left, right, top, bottom } = LINES;
  const [low, high] = d3.extent(curves.flatMap(({ points }) => points.map(({ value }) => value)).filter((value) => value === value));
  const room = 0.5 * Math.max(0.02, high - low);
  const x = d3.scaleLinear().domain([-0.5, d3.max(curves, ({ points }) => points.length) - 0.5]).range([left, width - right]);
  const y = d3.scaleLinear().domain([Math.max(0, low - room), high + room]).range([height - bottom, top]);
  box.replaceChildren();
  const svg = d3.select(box).append('svg').attr('width', width).attr('height', height).attr('role', 'img')
    .attr('aria-label', `Group means over tokens: ${curves.map(({ name }) => name).join(', ')}; the table below lists the means`);
  svg.append('g').attr('class', 'axis').attr('transform', `translate(${left},0)`).call(d3.axisLeft(y).ticks(5));
  svg.append('g').attr('class', 'axis').attr('transform', `translate(0,${height - bottom})`)
    .call(d3.axisBottom(x).ticks(Math.max(3, Math.min(12, width / 90))).tickFormat(d3.format('d')));
  svg.append('text').attr('x', width - right).attr('y', height - 5).attr('text-anchor', 'end').text('token of the completion');
  svg.append('text').attr('transform', `translate(12,${(height - bottom + top) / 2}) rotate(-90)`).attr('text-anchor', 'middle').text('divergence, 1 − cos');
  // An SVG of its own cuts off what is wider than the frame.
  const inside = svg.append('svg').attr('x', left).attr('y', top).attr('width', width - left - right).attr('height', height - top - bottom)
    .append('g').attr('transform', `translate(${-left},${-top})`);
  const known = ({ value, half }) => value === value && half === half;
  const band = d3.area().defined(known).x(({ at }) => x(at)).y0(({ value, half }) => y(value - half)).y1(({ value, half }) => y(value + half));
  const path = d3.line().defined(({ value }) => value === value).x(({ at }) => x(at)).y(({ value }) => y(value));
  curves.forEach(({ points }, i) => {
    inside.append('path').attr('d', band(points)).attr('fill', lineColour(i)).attr('opacity', 0.16);
    inside.append('path').attr('class', 'trace').attr('d', path(points)).attr('stroke', lineColour(i)).attr('stroke-dasharray', DASHES[i % DASHES.length]);
  });
}

function drawGroupTable(groups) {
  const head = element('thead');
  const row = STATE.heads.length ? STATE.heads[STATE.heads.length - 1] : null;
  const key = divergenceKey();
  const heading = ['group', 'samples', ...PAYLOAD.mechanisms.map((name) => `divergence, ${name}`), ...(row === null ? [] : [`head ${HEADS[row].name}, ${STATE.mechanism}`])];
  head.append(element('tr'));
  heading.forEach((text, i) => {
    const cell = element('th', i ? '' : 'word', text);
    cell.scope = 'col';
    head.firstChild.append(cell);
  });
  const body = element('tbody');
  const between = (mean, half) => (half === null ? show(mean) : `${show(mean)} ± ${show(half)}`);
  groups.forEach((group, i) => {
    const line = element('tr');
    const name = element('td', 'word');
    const sign = d3.select(name).append('svg').attr('width', 26).attr('height', 8).attr('aria-hidden', 'true').style('display', 'inline-block');
    sign.append('line').attr('x2', 26).attr('y1', 4).attr('y2', 4).attr('stroke', lineColour(i)).attr('stroke-width', 2.4).attr('stroke-dasharray', DASHES[i % DASHES.length]);
    name.append(element('span', '', ` ${group.label ?? 'all samples'}`));
    line.append(name, element('td', '', group.samples));
    for (const mechanism of PAYLOAD.mechanisms) line.append(element('td', '', between(...group.overall[divergenceKey(mechanism)])));
    if (row !== null) line.append(element('td', '', between(group.heads[key][row], group.halfWidth[key][row])));
    body.append(line);
  });
  byId('groups-table').replaceChildren(head, body);
}

function startSamples() {
  if (PAYLOAD.samples.length < 2) return;
  byId('samples-card').hidden = false;
  byId('groups-card').hidden = false;
  byId('sample-control').hidden = false;
  byId('scope-control').hidden = false;
  const select = byId('sample');
  PAYLOAD.samples.forEach((sample, index) => {
    if (sample.data) select.append(option(index, sample.label === null ? sample.id : `${sample.id} (${sample.label})`));
  });
  select.addEventListener('change', () => openSample(Number(select.value)));
  const scope = byId('scope');
  scope.append(option('sample', 'this sample'));
  if (PAYLOAD.compare) scope.append(option('difference', `${PAYLOAD.compare.names[1]} minus ${PAYLOAD.compare.names[0]}`));
  PAYLOAD.groups.forEach((group, index) => scope.append(option(index, group.label === null ? 'all samples' : `label ${group.label}`)));
  scope.addEventListener('change', () => update({ scope: scope.value }));
  byId('search-samples').addEventListener('input', (event) => {
    SAMPLES.search = event.target.value;
    drawSamples();
  });
  listen(['sample'], () => { select.value = STATE.sample; drawSamples(); });
  scope.value = STATE.scope;
  listen(['scope'], () => { scope.value = STATE.scope; });
  listen(['mechanism', 'heads', 'shadeOf', 'theme', 'arrived', 'width'], drawGroups);
  drawSamples();
}
