'use strict';
// The layer profile: what the map shows, by depth, with its spread over the heads of each layer.

const PROFILE = { height: 300, left: 56, right: 14, top: 14, bottom: 38 };

/** Of every layer its heads with a number, the median of these, and their quartiles. */
function layerProfile(numbers) {
  return PAYLOAD.layers.map((layer, at) => {
    const heads = HEADS.filter((head) => head.at === at).map((head) => ({ head, value: numbers[head.row] })).filter(({ value }) => value === value);
    const [low, median, high] = quantiles(heads.map(({ value }) => value), [0.25, 0.5, 0.75]);
    return { layer, at, heads, low, median, high };
  });
}

function drawProfile() {
  const box = byId('profile');
  const { numbers, of } = quantityNow();
  const entry = quantity();
  if (!numbers) return;
  box.replaceChildren();
  const known = numbers.filter((value) => value === value);
  byId('profile-caption').textContent = entry === KIND
    ? `${mapTitle(entry)}, ${of}: how many heads of each layer need which kind.`
    : `${mapTitle(entry)}, ${of}. Line: the median of a layer’s heads; band: half of them; dots: heads.`;
  byId('profile-readout').textContent = '';
  if (!known.length) {
    box.append(element('p', 'empty', emptyWords(entry)));
    return;
  }
  const width = box.clientWidth;
  const { height, left, right, top, bottom } = PROFILE;
  const x = d3.scaleLinear().domain([-0.6, PAYLOAD.layers.length - 0.4]).range([left, width - right]);
  const layers = layerProfile(numbers);
  const most = d3.max(layers, ({ heads }) => heads.length);
  const y = d3.scaleLinear().domain(entry === KIND ? [0, most] : d3.extent(known)).nice().range([height - bottom, top]);
  const svg = d3.select(box).append('svg').attr('width', width).attr('height', height).attr('role', 'img').attr('aria-label', profileWords(entry, layers));
  svg.append('g').attr('class', 'grid').attr('transform', `translate(${left},0)`)
    .call(d3.axisLeft(y).ticks(5).tickSize(-(width - left - right)).tickFormat('')).select('.domain').remove();
  svg.append('g').attr('class', 'axis').attr('transform', `translate(${left},0)`).call(d3.axisLeft(y).ticks(5));
  const every = Math.max(1, Math.ceil(PAYLOAD.layers.length / Math.max(2, width / 45)));
  svg.append('g').attr('class', 'axis').attr('transform', `translate(0,${height - bottom})`)
    .call(d3.axisBottom(x).tickValues(d3.range(0, PAYLOAD.layers.length, every)).tickFormat((at) => PAYLOAD.layers[at]));
  svg.append('text').attr('x', width - right).attr('y', height - 5).attr('text-anchor', 'end').text('layer');
  svg.append('text').attr('transform', `translate(12,${(height - bottom + top) / 2}) rotate(-90)`).attr('text-anchor', 'middle')
    .text(entry === KIND ? 'heads' : entry.label);
  if (entry === KIND) drawKindBars(svg, layers, x, y);
  else drawSpread(svg, layers, x, y);
}

function profileWords(entry, layers) {
  if (entry === KIND) return 'Kinds of heads by layer; the table of heads holds them';
  const known = layers.filter(({ median }) => median === median);
  const highest = known.reduce((best, layer) => (layer.median > best.median ? layer : best), known[0]);
  return `Layer profile: ${entry.label}; the median is highest in layer ${highest.layer} (${show(highest.median)}). The table of heads holds the numbers.`;
}

function drawSpread(svg, layers, x, y) {
  const known = ({ median }) => median === median;
  const area = d3.area().defined(known).x(({ at }) => x(at)).y0(({ low }) => y(low)).y1(({ high }) => y(high));
  const line = d3.line().defined(known).x(({ at }) => x(at)).y(({ median }) => y(median));
  svg.append('path').attr('class', 'band').attr('d', area(layers));
  svg.append('path').attr('class', 'trace').attr('d', line(layers)).attr('stroke', 'currentColor');
  for (const { at, heads } of layers) {
    for (const { head, value } of heads) {
      const selected = STATE.heads.indexOf(head.row);
      svg.append('circle').attr('class', `dot${selected >= 0 ? ' chosen' : ''}`).attr('data-row', head.row).attr('cx', x(at)).attr('cy', y(value))
        .attr('r', selected >= 0 ? 5.5 : 2.6).attr('fill', selected >= 0 ? lineColour(selected) : 'var(--soft)').datum({ head, value });
    }
  }
}

/** How many heads of a layer need which kind, one field above the other. */
function drawKindBars(svg, layers, x, y) {
  const bar = Math.max(2, 0.8 * (x(1) - x(0)));
  for (const { at, heads } of layers) {
    let below = 0;
    PAYLOAD.kinds.names.forEach((name, kind) => {
      const count = heads.filter(({ value }) => value === kind).length;
      if (!count) return;
      svg.append('rect').attr('class', 'level-bar').attr('x', x(at) - bar / 2).attr('width', bar).attr('y', y(below + count)).attr('height', y(below) - y(below + count))
        .attr('fill', PAYLOAD.kinds.colours[kind]);
      const size = Math.min(12, bar, y(below) - y(below + count));
      if (size >= SMALLEST_LETTER) drawLetter(svg, PAYLOAD.kinds.letters[kind], x(at), (y(below) + y(below + count)) / 2, size, PAYLOAD.kinds.colours[kind]);
      below += count;
    });
  }
}

function startProfile() {
  const box = byId('profile');
  const dotUnder = (event) => (event.target.classList && event.target.classList.contains('dot') ? event.target : null);
  box.addEventListener('click', (event) => {
    const dot = dotUnder(event);
    if (dot) chooseHead(Number(dot.dataset.row), event.shiftKey || event.ctrlKey || event.metaKey);
  });
  box.addEventListener('pointerover', (event) => {
    const dot = dotUnder(event);
    if (dot) byId('profile-readout').textContent = describeHead(d3.select(dot).datum());
  });
  listen(['sample', 'mechanism', 'quantity', 'scope', 'range', 'heads', 'theme', 'arrived', 'width'], drawProfile);
}
