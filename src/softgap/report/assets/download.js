'use strict';
// Files for the reader: charts as SVG or PNG, numbers as CSV.

function download(name, content, type) {
  const link = document.createElement('a');
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.href = address;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function csvCell(value) {
  if (typeof value === 'number') return Number.isNaN(value) ? '' : String(value);
  const text = String(value ?? '');
  // A spreadsheet would run a text that begins like a formula.
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r']/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
}

function csv(rows) {
  return rows.map((row) => row.map(csvCell).join(',')).join('\r\n') + '\r\n';
}

const KEPT = ['fill', 'fill-opacity', 'stroke', 'stroke-width', 'stroke-dasharray', 'stroke-opacity', 'opacity', 'font-family',
  'font-size', 'font-weight', 'paint-order'];

/** A chart as SVG that looks the same without this page's style. */
function standalone(svg) {
  const copy = svg.cloneNode(true);
  const originals = [svg, ...svg.querySelectorAll('*')];
  [copy, ...copy.querySelectorAll('*')].forEach((node, i) => {
    const style = getComputedStyle(originals[i]);
    for (const name of KEPT) node.setAttribute(name, style.getPropertyValue(name));
    for (const name of ['class', 'tabindex', 'role', 'cursor', 'style']) node.removeAttribute(name);
  });
  const ground = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
  ground.setAttribute('width', '100%');
  ground.setAttribute('height', '100%');
  ground.setAttribute('fill', getComputedStyle(svg.closest('.card')).backgroundColor);
  copy.prepend(ground);
  copy.setAttribute('xmlns', 'http://www.w3.org/2000/svg');
  return new XMLSerializer().serializeToString(copy);
}

function savePng(svg, name) {
  const { width, height } = svg.getBoundingClientRect();
  const picture = new Image();
  picture.onload = () => {
    const canvas = document.createElement('canvas');
    canvas.width = Math.round(width * 2);
    canvas.height = Math.round(height * 2);
    canvas.getContext('2d').drawImage(picture, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => download(name, blob, 'image/png'));
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg))}`;
}

/** Put the two buttons under every chart. */
function addSaving() {
  for (const place of document.querySelectorAll('.save')) {
    const { chart, name } = place.dataset;
    for (const kind of ['PNG', 'SVG']) {
      const button = element('button', '', kind);
      button.type = 'button';
      button.setAttribute('aria-label', `Save the chart of ${name} as ${kind}`);
      button.addEventListener('click', () => {
        const svg = byId(chart).querySelector('svg');
        if (!svg) return;
        const file = `softgap-${name}.${kind.toLowerCase()}`;
        if (kind === 'SVG') download(file, standalone(svg), 'image/svg+xml');
        else savePng(svg, file);
      });
      place.append(button);
    }
  }
}

/** The chosen heads token by token, all mechanisms the page carries. */
function trajectoriesCsv() {
  const data = current();
  const [a, b] = STATE.range || [0, stepCount()];
  const heads = STATE.heads.length ? STATE.heads : HEADS.map(({ row }) => row);
  const array = values(divergenceKey());
  if (!array) return null;
  const header = ['step', 'part', 'position', 'token', 'logprob', 'entropy',
    ...heads.map((row) => `divergence from ${STATE.mechanism} of head ${HEADS[row].name}`)];
  const rows = [header];
  for (let step = a; step < b; step += 1) {
    rows.push([step, step < data.promptSteps ? 'prompt' : 'completion', data.positions[step], data.tokens[step],
      data.logprob[step] ?? NaN, data.entropy[step] ?? NaN,
      ...heads.map((row) => Number(array.values[row * array.columns + step].toPrecision(6)))]);
  }
  return csv(rows);
}
