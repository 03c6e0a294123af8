'use strict';
// The complexity-entropy plane: the heads among known systems, between the bounds of what is possible.

const PLANE = { height: 380, left: 52, right: 16, top: 12, bottom: 44 };
const MARKS = {
  noise: d3.symbolSquare, periodic: d3.symbolDiamond, map: d3.symbolTriangle, flow: d3.symbolCross,
};

function planeHeads() {
  const columns = PAYLOAD.dynamics.mechanisms[STATE.mechanism];
  return HEADS.map((head) => ({ head, entropy: columns.entropy[head.row], complexity: columns.complexity[head.row] }))
    .filter(({ entropy, complexity }) => entropy !== null && complexity !== null);
}

/** How many heads are not noise, said either way. */
function standingOut() {
  const { alpha, mechanisms } = PAYLOAD.dynamics;
  const tested = mechanisms[STATE.mechanism].q.filter((q) => q !== null);
  const share = `at a false discovery rate of ${100 * alpha} %`;
  const count = tested.filter((q) => q <= alpha).length;
  return count ? `${count} of ${plural(tested.length, 'head')} differ from noise ${share}.` : `No head differs from noise ${share}.`;
}

function planeDomain(heads) {
  if (STATE.zoom === 'whole') return [[0, 1.02], [0, 1.08 * d3.max(PAYLOAD.dynamics.greatest, ([, complexity]) => complexity)]];
  const around = (numbers, least) => {
    const [low, high] = d3.extent(numbers);
    const room = Math.max(least, high - low) * 0.18;
    return [Math.max(0, low - room), high + room];
  };
  const entropy = around([...heads.map((head) => head.entropy), PAYLOAD.dynamics.noise], 0.02);
  return [[entropy[0], Math.min(1.002, entropy[1])], around(heads.map((head) => head.complexity), 0.02)];
}

function drawPlane() {
  const box = byId('plane');
  box.replaceChildren();
  // Measured below as wide as it will be; hidden where it has nothing to show.
  showPlane(true);
  const { dynamics } = PAYLOAD;
  const heads = dynamics.mechanisms ? planeHeads() : [];
  if (!heads.length) {
    const reason = dynamics.reason || dynamics.mechanisms[STATE.mechanism].reason.find((words) => words) || 'no head has enough windows';
    byId('plane-note').textContent = `Complexity and entropy: no head to show, ${reason}.`;
    showPlane(false);
    return;
  }
  const { settings, noise } = dynamics;
  byId('plane-caption').textContent = `Order ${settings.order}, ${settings.transform === 'diff' ? 'differences' : settings.transform} of the divergence from ${
    STATE.mechanism}, ${PAYLOAD.samples.length === 1 ? 'the whole completion' : `${dynamics.samples} samples together`}. Solid: bounds. Dotted: white noise of this length. ${
    standingOut()}`;
  const width = box.clientWidth;
  const { height, left, right, top, bottom } = PLANE;
  const [across, up] = planeDomain(heads);
  const x = d3.scaleLinear().domain(across).range([left, width - right]);
  const y = d3.scaleLinear().domain(up).range([height - bottom, top]);
  const svg = d3.select(box).append('svg').attr('width', width).attr('height', height).attr('role', 'img')
    .attr('aria-label', `Complexity-entropy plane: ${heads.length} heads between entropy ${show(d3.min(heads, (head) => head.entropy))} and ${
      show(d3.max(heads, (head) => head.entropy))}; white noise at ${show(noise)}. The table of heads holds the numbers.`);
  drawPlaneFrame(svg, x, y, width);
  const inside = svg.append('svg').attr('x', left).attr('y', top).attr('width', width - left - right).attr('height', height - top - bottom)
    .append('g').attr('transform', `translate(${-left},${-top})`);
  const curve = d3.line().x(([entropy]) => x(entropy)).y(([, complexity]) => y(complexity));
  for (const bound of [dynamics.least, dynamics.greatest]) inside.append('path').attr('class', 'bound').attr('d', curve(bound));
  inside.append('line').attr('class', 'zero').attr('x1', x(noise)).attr('x2', x(noise)).attr('y1', top).attr('y2', height - bottom);
  drawDots(inside, heads, x, y);
  drawSystems(inside, x, y, width, heads);
}

function drawPlaneFrame(svg, x, y, width) {
  const { height, left, right, top, bottom } = PLANE;
  svg.append('g').attr('class', 'grid').attr('transform', `translate(${left},0)`)
    .call(d3.axisLeft(y).ticks(5).tickSize(-(width - left - right)).tickFormat('')).select('.domain').remove();
  svg.append('g').attr('class', 'axis').attr('transform', `translate(${left},0)`).call(d3.axisLeft(y).ticks(5));
  svg.append('g').attr('class', 'axis').attr('transform', `translate(0,${height - bottom})`).call(d3.axisBottom(x).ticks(Math.max(3, width / 110)));
  svg.append('text').attr('x', width - right).attr('y', height - 8).attr('text-anchor', 'end').text('permutation entropy (1: white noise)');
  svg.append('text').attr('transform', `translate(13,${(height - bottom + top) / 2}) rotate(-90)`).attr('text-anchor', 'middle').text('statistical complexity');
}

/** Known systems, with names where there is room: each name looks for the first free line below or above its mark, on
 * either side, past all marks, dots of chosen heads and their names. What finds none is told by pointing at its mark. */
function drawSystems(group, x, y, width, heads) {
  const { height, left, right, top, bottom } = PLANE;
  const seen = PAYLOAD.dynamics.systems.map(([name, kind, entropy, complexity]) => ({ name, kind, px: x(entropy), py: y(complexity) }))
    .filter(({ px, py }) => px >= left && px <= width - right && py >= top && py <= height - bottom)
    .sort((a, b) => a.px - b.px);
  const field = (x0, x1, y0, y1) => ({ x0, x1, y0, y1 });
  const taken = [
    ...seen.map(({ px, py }) => field(px - 5, px + 5, py - 5, py + 5)),
    ...heads.filter(({ head }) => STATE.heads.includes(head.row)).map(({ entropy, complexity }) => field(x(entropy) - 7, x(entropy) + 40, y(complexity) - 17, y(complexity) + 7)),
  ];
  // Rather not on a head either, but a few dots under a name still can be seen.
  const dots = heads.map(({ entropy, complexity }) => field(x(entropy) - 3, x(entropy) + 3, y(complexity) - 3, y(complexity) + 3));
  const meets = (one, other) => one.x0 < other.x1 && one.x1 > other.x0 && one.y0 < other.y1 && one.y1 > other.y0;
  const isFree = (place) => place.y0 > top && place.y1 < height - bottom && place.x0 > left && place.x1 < width - right
    && !taken.some((other) => meets(place, other));
  const downs = d3.range(0, 9).flatMap((line) => (line ? [13 * line, -13 * line] : [0]));
  for (const { name, kind, px, py } of seen) {
    const mark = group.append('path').attr('class', 'known').attr('transform', `translate(${px},${py})`).attr('d', d3.symbol().type(MARKS[kind] || d3.symbolCircle).size(46)());
    mark.append('title').text(name);
    const text = group.append('text').attr('class', 'known-name').text(name);
    // As long as this browser's letters make it.
    const long = text.node().getComputedTextLength();
    const places = downs.flatMap((down) => [px + 8, px - 8 - long].map((x0) => field(x0 - 1, x0 + long + 1, py + down - 7, py + down + 6)));
    const free = places.filter(isFree);
    const place = free.find((one) => !dots.some((dot) => meets(one, dot))) || free[0];
    if (!place) {
      text.remove();
      continue;
    }
    taken.push(place);
    text.attr('x', place.x0 + 1).attr('y', place.y0 + 11);
    const onRight = place.x0 > px;
    if (Math.abs(place.y0 + 7 - py) > 8) {
      group.insert('line', 'text').attr('class', 'leader').attr('x1', px).attr('y1', py).attr('x2', onRight ? place.x0 : place.x1).attr('y2', place.y0 + 7);
    }
  }
}

function drawDots(group, heads, x, y) {
  const layers = PAYLOAD.layers.length;
  const later = (a, b) => STATE.heads.includes(a.head.row) - STATE.heads.includes(b.head.row);
  for (const { head, entropy, complexity } of heads.sort(later)) {
    const selected = STATE.heads.indexOf(head.row);
    const colour = selected >= 0 ? lineColour(selected) : sequential(0.25 + (0.75 * head.at) / Math.max(1, layers - 1)).toString();
    group.append('circle').attr('class', `dot${selected >= 0 ? ' chosen' : ''}`).attr('cx', x(entropy)).attr('cy', y(complexity))
      .attr('r', selected >= 0 ? 6.5 : 4).attr('fill', colour).attr('data-row', head.row);
    if (selected >= 0) group.append('text').attr('class', 'strong').attr('x', x(entropy) + 9).attr('y', y(complexity) - 6).text(head.name);
  }
}

function showPlane(visible) {
  byId('plane-card').hidden = !visible;
  byId('plane-note').hidden = visible;
  const single = byId('plane-pair').classList.contains('single');
  byId('plane-pair').classList.toggle('single', !visible);
  if (single === visible) drawProfile();
}

function startPlane() {
  const box = byId('plane');
  const rowUnder = (event) => (event.target.classList && event.target.classList.contains('dot') ? Number(event.target.dataset.row) : null);
  box.addEventListener('click', (event) => {
    const row = rowUnder(event);
    if (row !== null) chooseHead(row, event.shiftKey || event.ctrlKey || event.metaKey);
  });
  const idle = 'Filled dots are heads, stronger in later layers; open marks are known systems: squares noise, diamonds periodic, triangles maps, crosses flows.';
  box.addEventListener('pointerover', (event) => {
    const row = rowUnder(event);
    if (row === null) return;
    const columns = PAYLOAD.dynamics.mechanisms[STATE.mechanism];
    byId('plane-readout').textContent = `Head ${HEADS[row].name}: entropy ${show(columns.entropy[row], 4)} (95 % interval ${show(columns.low[row], 4)} to ${
      show(columns.high[row], 4)}), complexity ${show(columns.complexity[row], 4)}, z ${show(columns.z[row], 1)}; nearest known system: ${columns.nearest[row]}`;
  });
  byId('plane-readout').textContent = idle;
  listen(['mechanism', 'zoom', 'heads', 'theme', 'width'], drawPlane);
}
