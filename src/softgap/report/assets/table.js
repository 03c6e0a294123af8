'use strict';
// The table of heads: everything the map can show, side by side.

const FIRST_ROWS = 60;
const TABLE = { sort: 'divergence', down: true, search: '', all: false, rows: [], columns: [] };

function tableColumns() {
  const numbers = QUANTITIES.filter((entry) => entry !== KIND && entry.available()).map((entry) => ({ key: entry.key, label: entry.label, numbers: entry.compute(...span()) }));
  const place = [
    { key: 'layer', label: 'layer', numbers: HEADS.map(({ layer }) => layer), whole: true },
    { key: 'head', label: 'head', numbers: HEADS.map(({ head }) => head), whole: true },
    { key: 'kv', label: 'KV group', numbers: HEADS.map(({ kv }) => kv), whole: true },
  ];
  const words = hasDynamics() ? [{ key: 'nearest', label: 'nearest known system', words: PAYLOAD.dynamics.mechanisms[STATE.mechanism].nearest }] : [];
  const q = hasDynamics() ? [{ key: 'q', label: 'q', numbers: dynamicsColumn('q') }] : [];
  const kinds = PAYLOAD.kinds ? [{ key: 'kind', label: KIND.label, words: PAYLOAD.kinds.labels.map(kindName) }] : [];
  return [...place, ...kinds, ...numbers, ...q, ...words];
}

function kindName(kind) {
  return kind === null ? '' : PAYLOAD.kinds.names[kind];
}

/** Whether a head fits what is searched for: "18", "18.8", "layer 3", "head 2", a kind, a known system. */
function fits(head, nearest) {
  const search = TABLE.search.trim().toLowerCase();
  if (!search) return true;
  const named = search.match(/^(layer|head|kv)\s*:?\s*(\d+)$/);
  if (named) return String(head[named[1]]) === named[2];
  if (/^\d+$/.test(search)) return String(head.layer) === search;
  if (PAYLOAD.kinds && kindName(PAYLOAD.kinds.labels[head.row]).startsWith(search)) return true;
  return head.name.startsWith(search) || (nearest || '').toLowerCase().includes(search);
}

function drawTable() {
  const columns = tableColumns();
  if (columns.some(({ numbers, words }) => !numbers && !words)) return;
  const nearest = columns.find(({ key }) => key === 'nearest');
  const by = columns.find(({ key }) => key === TABLE.sort) || columns[0];
  const rows = HEADS.filter((head) => fits(head, nearest && nearest.words[head.row])).map(({ row }) => row);
  rows.sort((a, b) => compare(by, a, b) || a - b);
  Object.assign(TABLE, { rows, columns });
  const table = byId('heads');
  const focusKey = document.activeElement && table.contains(document.activeElement) ? document.activeElement.dataset.keep : null;
  table.replaceChildren(tableHead(columns), tableBody(columns, rows));
  if (focusKey) table.querySelector(`[data-keep="${focusKey}"]`)?.focus();
  byId('table-caption').textContent = `${plural(rows.length, 'head')}${rows.length < HEADS.length ? ` of ${HEADS.length}` : ''}; ${
    STATE.range ? `tokens ${STATE.range[0]} to ${STATE.range[1] - 1}` : 'the whole completion'}; divergence from ${STATE.mechanism}.`;
  const more = byId('more');
  more.hidden = TABLE.all || rows.length <= FIRST_ROWS;
  more.textContent = `Show all ${rows.length} rows`;
}

function compare(column, one, other) {
  const sign = TABLE.down ? -1 : 1;
  if (column.words) return sign * column.words[one].localeCompare(column.words[other]);
  const [a, b] = [column.numbers[one], column.numbers[other]];
  // What is unknown comes last either way.
  if (a !== a || b !== b) return (a !== a) - (b !== b);
  return sign * (a - b);
}

function tableHead(columns) {
  const head = element('thead');
  const line = element('tr');
  const choose = element('th', 'word', 'show');
  choose.scope = 'col';
  line.append(choose);
  for (const { key, label, words } of columns) {
    const cell = element('th', words ? 'word' : '');
    cell.scope = 'col';
    const sorted = TABLE.sort === key;
    cell.setAttribute('aria-sort', sorted ? (TABLE.down ? 'descending' : 'ascending') : 'none');
    const button = element('button', '', `${label}${sorted ? (TABLE.down ? ' ↓' : ' ↑') : ''}`);
    button.type = 'button';
    button.dataset.sort = key;
    button.dataset.keep = `sort-${key}`;
    cell.append(button);
    line.append(cell);
  }
  head.append(line);
  return head;
}

function tableBody(columns, rows) {
  const body = element('tbody');
  for (const row of rows.slice(0, TABLE.all ? rows.length : FIRST_ROWS)) {
    const line = element('tr', STATE.heads.includes(row) ? 'chosen' : '');
    const choose = element('td', 'word');
    const box = element('input');
    box.type = 'checkbox';
    box.checked = STATE.heads.includes(row);
    box.dataset.row = row;
    box.dataset.keep = `row-${row}`;
    box.setAttribute('aria-label', `Show head ${HEADS[row].name}`);
    choose.append(box);
    line.append(choose);
    for (const { numbers, words, whole } of columns) {
      line.append(words ? element('td', 'word', words[row]) : element('td', '', whole ? numbers[row] : show(numbers[row])));
    }
    body.append(line);
  }
  return body;
}

/** The rows of the table as they stand; only the chosen heads if there are some. */
function headsCsv() {
  const { columns } = TABLE;
  const rows = STATE.heads.length ? TABLE.rows.filter((row) => STATE.heads.includes(row)) : TABLE.rows;
  return csv([columns.map(({ label }) => label), ...rows.map((row) => columns.map(({ numbers, words }) => (words ? words[row] : Number(numbers[row].toPrecision(6)))))]);
}

function startTable() {
  const table = byId('heads');
  table.addEventListener('click', (event) => {
    const button = event.target.closest('[data-sort]');
    if (!button) return;
    const key = button.dataset.sort;
    Object.assign(TABLE, { down: TABLE.sort === key ? !TABLE.down : true, sort: key });
    drawTable();
  });
  table.addEventListener('change', (event) => {
    if (event.target.dataset.row !== undefined) chooseHead(Number(event.target.dataset.row), true);
  });
  byId('search').addEventListener('input', (event) => {
    TABLE.search = event.target.value;
    drawTable();
  });
  byId('more').addEventListener('click', () => {
    TABLE.all = true;
    drawTable();
  });
  byId('csv-heads').addEventListener('click', () => download('softgap-heads.csv', headsCsv(), 'text/csv'));
  byId('csv-trajectories').addEventListener('click', () => {
    const content = trajectoriesCsv();
    if (content) download('softgap-trajectories.csv', content, 'text/csv');
  });
  listen(['sample', 'mechanism', 'range', 'heads', 'arrived'], () => {
    // Not put off again and again while tokens arrive.
    TABLE.waiting = TABLE.waiting || setTimeout(() => {
      TABLE.waiting = null;
      drawTable();
    }, 60);
  });
}
