'use strict';
// The map: one cell per head, layers along one side and heads along the other, KV groups set apart.

const NARROW = 560;
const GROUP_GAP = 6;
// The legend of kinds: the width of an entry and the height of a line. Letters below a size cannot be read.
const LEGEND_COLUMN = 90;
const LEGEND_LINE = 20;
const SMALLEST_LETTER = 6;
let mapFocus = 0;

/** Heads that begin a new KV group, if all layers are cut alike and groups have several heads; else none. */
function groupStarts() {
  const cuts = PAYLOAD.kvGroup.map((row) => row.flatMap((kv, head) => (head && kv >= 0 && kv !== row[head - 1] ? [head] : [])).join());
  const starts = cuts[0] ? cuts[0].split(',').map(Number) : [];
  const shared = starts.length + 1 < MOST_HEADS;
  return shared && cuts.every((cut) => cut === cuts[0]) ? starts : [];
}

const GROUP_STARTS = groupStarts();

function gapsBefore(head) {
  return GROUP_STARTS.filter((start) => start <= head).length * GROUP_GAP;
}

function mapLayout(width, entry = quantity()) {
  const across = width >= NARROW;
  const layers = PAYLOAD.layers.length;
  const gaps = GROUP_STARTS.length * GROUP_GAP;
  const left = 46;
  const top = 22;
  const [columns, rows] = across ? [layers, MOST_HEADS] : [MOST_HEADS, layers];
  const cellWidth = Math.max(5, Math.min(44, (width - left - 14 - (across ? 0 : gaps)) / columns));
  const cellHeight = Math.max(8, Math.min(across ? Math.max(20, Math.min(36, 1.7 * cellWidth)) : 20, 400 / rows));
  const place = ({ at, head }) => (across
    ? [left + at * cellWidth, top + head * cellHeight + gapsBefore(head)]
    : [left + head * cellWidth + gapsBefore(head), top + at * cellHeight]);
  const legendTop = top + rows * cellHeight + (across ? gaps : 0) + 26;
  const height = legendTop + (entry === KIND ? 6 + LEGEND_LINE * Math.ceil(PAYLOAD.kinds.names.length / legendColumns(width - left)) : 40);
  return { across, left, top, cellWidth, cellHeight, place, legendTop, height, width };
}

function mapScale(numbers, entry) {
  if (entry === KIND) return { colour: (kind) => d3.color(PAYLOAD.kinds.colours[kind]) };
  if (showsDifference() && !entry.of) return colourScale(numbers, { isDiverging: true });
  return colourScale(numbers, { isDiverging: entry.isDiverging, fixed: entry.fixed });
}

// What does not depend on the mechanism: kinds, quantities measured elsewhere, the focus of softmax.
const ABOUT_SOFTMAX = ['sparsity', 'attention_entropy', 'largest_weight'];

/** What a picture of heads shows, and of which mechanism. */
function mapTitle(entry) {
  const name = `${entry.label[0].toUpperCase()}${entry.label.slice(1)} (${entry.unit})`;
  if (entry.of) return name;
  if (ABOUT_SOFTMAX.includes(entry.key)) return `${name}, softmax`;
  const word = { divergence: 'from', distance: 'from', gap: 'from', slope: 'of the divergence from' }[entry.key];
  if (word) return `${name}, ${word} ${STATE.mechanism}`;
  return `${name}, ${['relative_l2', 'norm_ratio'].includes(entry.key) ? '' : 'divergence from '}${STATE.mechanism}`;
}

function mapCaption(entry, of, scale) {
  const more = entry === KIND ? '. Show other quantities, such as the divergence on this text, with the list above' : scale ? reachWords(scale) : '';
  return `${mapTitle(entry)}, ${of}${more}.`;
}

function drawMap() {
  const box = byId('map');
  const { numbers, of } = quantityNow();
  const entry = quantity();
  const scale = numbers && mapScale(numbers, entry);
  byId('map-caption').textContent = mapCaption(entry, of, scale);
  if (!numbers) return;
  const layout = mapLayout(box.clientWidth);
  const hadFocus = box.contains(document.activeElement) && document.activeElement.classList.contains('cell');
  box.replaceChildren();
  const svg = d3.select(box).append('svg').attr('width', layout.width).attr('height', layout.height)
    .attr('role', 'grid').attr('aria-label', `Map of heads: ${entry.label}${entry === KIND ? `; ${kindCounts().map(([name, count]) => `${name} ${plural(count, 'head')}`).join(', ')}` : ''}`).attr('aria-multiselectable', 'true');
  drawMapAxes(svg, layout);
  const byLine = groupBy(HEADS, layout.across ? 'head' : 'at');
  for (const line of byLine) {
    const row = svg.append('g').attr('role', 'row');
    for (const head of line) drawCell(row, head, numbers[head.row], scale, layout, entry);
  }
  drawChosen(svg, layout);
  const legend = svg.append('g').attr('transform', `translate(${layout.left},${layout.legendTop})`).attr('aria-hidden', 'true');
  if (entry === KIND) drawKindLegend(legend, layout.width - layout.left);
  else if (numbers.some((value) => value === value)) drawLegend(legend, scale, layout.width - layout.left, entry.unit);
  else legend.append('text').attr('y', 12).text(emptyWords(entry));
  if (hadFocus) box.querySelector(`[data-row="${mapFocus}"]`).focus();
}

/** The name of each kind and how many heads need it; last, where there are some, those of unknown kind. */
function kindCounts() {
  const { names, labels } = PAYLOAD.kinds;
  const unknown = labels.filter((kind) => kind === null).length;
  return [...names.map((name, i) => [name, labels.filter((kind) => kind === i).length]), ...(unknown ? [['unknown', unknown]] : [])];
}

function legendColumns(width) {
  return Math.max(1, Math.min(PAYLOAD.kinds.names.length, Math.floor(width / LEGEND_COLUMN)));
}

/** One field per kind with its letter, its name and the number of heads. */
function drawKindLegend(group, width) {
  const columns = legendColumns(width);
  const { colours, letters, names } = PAYLOAD.kinds;
  kindCounts().slice(0, names.length).forEach(([name, count], i) => {
    const item = group.append('g').attr('class', 'kind')
      .attr('transform', `translate(${(i % columns) * LEGEND_COLUMN},${Math.floor(i / columns) * LEGEND_LINE})`);
    item.append('rect').attr('class', 'frame').attr('width', 15).attr('height', 14).attr('rx', 2).style('fill', colours[i]);
    drawLetter(item, letters[i], 7.5, 7, 11, colours[i]);
    item.append('text').attr('class', 'count').attr('x', 20).attr('y', 11).text(`${name} ${count}`);
  });
}

/** A letter in the middle of a field, in an ink that can be read on it. */
function drawLetter(parent, letter, x, y, size, ground) {
  parent.append('text').attr('class', 'letter').attr('aria-hidden', 'true').attr('x', x).attr('y', y + 0.36 * size).attr('text-anchor', 'middle')
    .style('font-size', `${size}px`).style('fill', inkOn(ground)).text(letter);
}

function emptyWords(entry) {
  if (['entropy', 'z', 'complexity'].includes(entry.key)) return `too few tokens: ${leastWindows()} windows are needed`;
  return 'not available for this selection';
}

function groupBy(heads, name) {
  const lines = new Map();
  for (const head of heads) lines.set(head[name], [...(lines.get(head[name]) || []), head]);
  return [...lines.entries()].sort((a, b) => a[0] - b[0]).map(([, line]) => line);
}

function drawCell(row, head, value, scale, layout, entry) {
  const [x, y] = layout.place(head);
  const known = value === value;
  const selected = STATE.heads.indexOf(head.row);
  const inset = Math.min(layout.cellWidth, layout.cellHeight) > 9 ? 1 : 0.4;
  const cell = row.append('rect').attr('class', `cell${selected >= 0 ? ' chosen' : ''}`).attr('role', 'gridcell')
    .attr('x', x + inset).attr('y', y + inset).attr('rx', 2)
    .attr('width', layout.cellWidth - 2 * inset).attr('height', layout.cellHeight - 2 * inset)
    .attr('tabindex', head.row === mapFocus ? 0 : -1).attr('data-row', head.row)
    .attr('aria-selected', String(selected >= 0))
    .attr('aria-label', `head ${head.name}, KV group ${head.kv}, ${entry.label} ${known ? valueWords(entry, value) : 'unknown'}`);
  if (known) cell.attr('fill', scale.colour(value).toString());
  else cell.style('fill', 'var(--none)');
  cell.datum({ head, value });
  const size = Math.min(13, 0.8 * layout.cellWidth, 0.8 * layout.cellHeight);
  if (entry === KIND && known && size >= SMALLEST_LETTER) {
    drawLetter(row, PAYLOAD.kinds.letters[value], x + layout.cellWidth / 2, y + layout.cellHeight / 2, size, PAYLOAD.kinds.colours[value]);
  }
}

function valueWords(entry, value) {
  return entry === KIND ? PAYLOAD.kinds.names[value] : show(value);
}

/** A frame in the head's colour around each chosen cell, with a rim that shows on every ground. */
function drawChosen(svg, layout) {
  const frames = svg.append('g').attr('aria-hidden', 'true').attr('pointer-events', 'none');
  STATE.heads.forEach((row, i) => {
    const [x, y] = layout.place(HEADS[row]);
    for (const [className, colour] of [['rim', null], ['ring', lineColour(i)]]) {
      const frame = frames.append('rect').attr('class', className).attr('x', x - 1).attr('y', y - 1).attr('rx', 3)
        .attr('width', layout.cellWidth + 2).attr('height', layout.cellHeight + 2);
      if (colour) frame.attr('stroke', colour);
    }
  });
}

function drawMapAxes(svg, layout) {
  const { across, left, top, cellWidth, cellHeight } = layout;
  const axes = svg.append('g').attr('aria-hidden', 'true');
  const every = (size, least) => Math.max(1, Math.ceil(least / size));
  const layerSize = across ? cellWidth : cellHeight;
  PAYLOAD.layers.forEach((layer, at) => {
    if (at % every(layerSize, across ? 18 : 13)) return;
    const middle = (at + 0.5) * layerSize;
    axes.append('text').attr('x', across ? left + middle : left - 5).attr('y', across ? top - 6 : top + middle + 4)
      .attr('text-anchor', across ? 'middle' : 'end').text(layer);
  });
  const headSize = across ? cellHeight : cellWidth;
  for (let head = 0; head < MOST_HEADS; head += 1) {
    if (head % every(headSize, across ? 12 : 18)) continue;
    const middle = (head + 0.5) * headSize + gapsBefore(head);
    axes.append('text').attr('x', across ? left - 5 : left + middle).attr('y', across ? top + middle + 4 : top - 6)
      .attr('text-anchor', across ? 'end' : 'middle').text(head);
  }
  axes.append('text').attr('class', 'axis-name').attr('x', left - 5).attr('y', top - 6).attr('text-anchor', 'end').text(across ? 'layer' : 'head');
  const middle = (top + layout.legendTop - 26) / 2;
  axes.append('text').attr('class', 'axis-name').attr('transform', `translate(12,${middle}) rotate(-90)`).attr('text-anchor', 'middle').text(across ? 'head' : 'layer');
  if (GROUP_STARTS.length) {
    axes.append('text').attr('x', layout.width - 4).attr('y', layout.legendTop - 6).attr('text-anchor', 'end').text('gaps separate the KV groups');
  }
}

/** Both sides of a difference, in words. */
function sidesWords(row) {
  const { names, samples, groups } = PAYLOAD.compare;
  const entry = quantity();
  const sides = samples ? samples.map((sample) => onSample(sample, () => (entry.compute(...span()) || [])[row]))
    : groups.map((group) => ((entry.group && PAYLOAD.groups[group].heads[entry.group()]) || [])[row]);
  return ` (${names.map((name, i) => `${name} ${show(sides[i])}`).join(', ')})`;
}

function describeHead({ head, value }) {
  const mates = HEADS.filter(({ at, kv }) => at === head.at && kv === head.kv);
  const shared = mates.length > 1 ? `, shares keys and values with ${mates.filter(({ row }) => row !== head.row).map(({ name }) => name).join(', ')}` : '';
  const name = `Head ${head.name} (layer ${head.layer}, head ${head.head}${shared})`;
  return quantity() === KIND ? `${name}: ${kindWords(head.row, value)}` : `${name}: ${quantity().label} ${show(value)}${showsDifference() && !quantity().of && value === value ? sidesWords(head.row) : ''}`;
}

/** The kind of a head in a sentence, and what the kinds of equal memory leave in it, where that is known. */
function kindWords(row, kind) {
  const { names, left } = PAYLOAD.kinds;
  if (kind !== kind) return 'its kind is unknown';
  const needs = names[kind] === 'softmax' ? 'needs softmax, nothing cheaper suffices' : `${names[kind]} suffices`;
  const parts = Object.entries(left).flatMap(([name, { gap, energy }]) => {
    const shares = [['gap', gap[row]], ['energy', energy[row]]].filter(([, share]) => share !== null);
    return shares.length ? [`${name} leaves ${shares.map(([of, share]) => `${show(share)} of the ${of}`).join(' and ')}`] : [];
  });
  return `${needs}${parts.length ? `; ${parts.join(', ')}` : ''}`;
}

function cellUnder(event) {
  return event.target.classList && event.target.classList.contains('cell') ? event.target : null;
}

function markMates(cell) {
  const { head } = d3.select(cell).datum();
  for (const other of byId('map').querySelectorAll('.cell')) {
    const target = HEADS[Number(other.dataset.row)];
    other.classList.toggle('mate', target.at === head.at && target.kv === head.kv && target.row !== head.row);
  }
  const words = describeHead(d3.select(cell).datum());
  byId('map-readout').textContent = words;
  showTip(cell, words);
}

/** The same words beside the cell, so that nobody has to look for them below the fold. */
function showTip(cell, words) {
  const tip = byId('head-tip');
  const [box, place] = [byId('map'), cell].map((node) => node.getBoundingClientRect());
  tip.textContent = words;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const middle = place.left + place.width / 2 - box.left;
  tip.style.left = `${Math.max(0, Math.min(box.width - width, middle - width / 2))}px`;
  // Below the cell, or above it where the window ends.
  const below = place.bottom + 8 + height < window.innerHeight;
  tip.style.top = `${byId('map').offsetTop + (below ? place.bottom - box.top + 6 : place.top - box.top - height - 6)}px`;
}

function hideTip() {
  byId('head-tip').hidden = true;
}

function onMapKey(event) {
  const cell = cellUnder(event);
  if (!cell) return;
  const focused = HEADS[Number(cell.dataset.row)];
  const { across } = mapLayout(byId('map').clientWidth);
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (event.key in steps) {
    event.preventDefault();
    const [right, down] = steps[event.key];
    const [at, head] = across ? [focused.at + right, focused.head + down] : [focused.at + down, focused.head + right];
    const neighbour = HEADS.find((other) => other.at === at && other.head === head);
    if (neighbour) focusCell(neighbour.row);
  } else if (event.key === 'Enter' || event.key === ' ') {
    event.preventDefault();
    chooseHead(focused.row, event.shiftKey);
  } else if (event.key === 'Escape') update({ range: null });
}

function focusCell(row) {
  for (const cell of byId('map').querySelectorAll('.cell')) {
    cell.setAttribute('tabindex', Number(cell.dataset.row) === row ? 0 : -1);
  }
  mapFocus = row;
  byId('map').querySelector(`[data-row="${row}"]`).focus();
}

function startMap() {
  const box = byId('map');
  box.addEventListener('click', (event) => {
    const cell = cellUnder(event);
    if (!cell) return;
    mapFocus = Number(cell.dataset.row);
    chooseHead(mapFocus, event.shiftKey || event.ctrlKey || event.metaKey);
  });
  for (const kind of ['pointerover', 'focusin']) {
    box.addEventListener(kind, (event) => {
      const cell = cellUnder(event);
      if (cell) markMates(cell);
    });
  }
  for (const kind of ['pointerleave', 'focusout']) box.addEventListener(kind, hideTip);
  box.addEventListener('keydown', onMapKey);
  // Once: it does not change while tokens arrive.
  byId('kinds-hint').textContent = PAYLOAD.kindsHint || '';
  byId('kinds-hint').hidden = !PAYLOAD.kindsHint;
  byId('map-readout').textContent = 'Point at a head, or move with the arrow keys, to see its value.';
  listen(['sample', 'mechanism', 'quantity', 'scope', 'range', 'heads', 'theme', 'arrived', 'width'], drawMap);
}
