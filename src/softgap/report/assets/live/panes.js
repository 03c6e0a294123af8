'use strict';
// Up to two runs or saved studies, side by side; which ones is kept in the address, so a page that is opened again
// shows the same.

const MOST_PANES = 2;
// Of every pane: { name, isLive, frame, last }, `last` being the number of the last event it was given.
let panes = [];

function shownNames() {
  return panes.map(({ name }) => name);
}

function namesInAddress() {
  return new URLSearchParams(location.hash.slice(1)).getAll('show').slice(0, MOST_PANES);
}

/** Show these, in this order; frames that stay are not loaded again. */
function showPanes(names) {
  const place = byId('panes');
  const before = panes;
  panes = names.slice(0, MOST_PANES).map((name) => {
    const isLive = RUNS.has(name);
    return before.find((pane) => pane.name === name && pane.isLive === isLive) || newPane(name, isLive);
  });
  for (const pane of before) if (!panes.includes(pane)) pane.box.remove();
  panes.forEach((pane, i) => {
    if (place.children[i] !== pane.box) place.insertBefore(pane.box, place.children[i] || null);
  });
  place.classList.toggle('two', panes.length > 1);
  const query = new URLSearchParams(shownNames().map((name) => ['show', name])).toString();
  if (location.hash.slice(1) !== query) history.replaceState(null, '', `#${query}`);
  const live = panes.filter(({ isLive }) => isLive).map(({ name }) => name);
  if (!STREAM.source || live.join() !== STREAM.runs.join()) watch(live);
  drawPaneHeads();
}

function newPane(name, isLive) {
  const box = element('section', 'pane-box');
  const head = element('div', 'pane-head');
  const title = element('h2', '', name);
  title.id = `pane-${name}`;
  box.setAttribute('aria-labelledby', title.id);
  const tools = element('div', 'tools');
  head.append(title, tools);
  const frame = element('iframe', isLive ? 'live' : 'saved');
  frame.title = `Explorer of ${name}`;
  const pane = { name, isLive, box, title, tools, frame, state: element('span', 'state'), last: 0, waiting: [] };
  frame.addEventListener('load', () => {
    pane.receive = isLive && frame.contentWindow.receive;
    themePane(pane);
    pane.waiting.splice(0).forEach((event) => pane.receive && pane.receive(...event));
  });
  frame.src = isLive ? `/runs/${encodeURIComponent(name)}` : `/studies/${encodeURIComponent(name)}`;
  box.append(head, frame);
  return pane;
}

function themePane(pane) {
  if (pane.isLive && pane.receive) pane.frame.contentWindow.receiveTheme(document.documentElement.dataset.theme);
}

/** Hand an event to the pane of its run, once: after a connection was lost, some may come again. */
function toPane(kind, data, number) {
  const pane = panes.find(({ name, isLive }) => isLive && name === data.run);
  if (!pane || number <= pane.last) return;
  pane.last = number;
  if (pane.receive) pane.receive(kind, data);
  else pane.waiting.push([kind, data]);
}

function drawPaneHeads() {
  for (const pane of panes) {
    const run = RUNS.get(pane.name);
    pane.title.textContent = run ? run.prompt.trim().slice(0, 90) : pane.name;
    pane.state.textContent = run ? stateWords(run) : 'saved study';
    const parts = [];
    if (run && isOpen(run)) parts.push(button('Stop', `Stop the run “${run.prompt.trim().slice(0, 40)}”`, () => stopRun(run.id)));
    if (!run || run.saved) parts.push(...downloads(pane.name));
    parts.push(button('Close', `Close ${pane.title.textContent}`, () => showPanes(shownNames().filter((name) => name !== pane.name))));
    // Buttons stay while they are the same ones: a new one under a pressed finger would not be clicked.
    const sign = parts.map((part) => part.textContent).join('|');
    if (pane.sign === sign) continue;
    pane.sign = sign;
    const held = pane.tools.contains(document.activeElement) ? document.activeElement.textContent : null;
    pane.tools.replaceChildren(pane.state, ...parts);
    if (held) [...pane.tools.children].find((part) => part.textContent === held)?.focus();
  }
}

function downloads(name) {
  return [['report.html', 'HTML', 'the report'], ['study.zip', 'ZIP', 'the study']].map(([file, words, what]) => {
    const link = element('a', 'download', words);
    link.href = `/studies/${encodeURIComponent(name)}/${file}`;
    link.download = '';
    link.setAttribute('aria-label', `Download ${what} ${name} as ${words}`);
    return link;
  });
}

function button(words, label, act) {
  const node = element('button', '', words);
  node.type = 'button';
  node.setAttribute('aria-label', label);
  node.addEventListener('click', act);
  return node;
}
