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
    pane.loaded = true;
    pane.receive = isLive && frame.contentWindow.receive;
    themePane(pane);
    pane.waiting.splice(0).forEach((event) => pane.receive && pane.receive(...event));
  });
  pane.greeted = false;
  frame.addEventListener('load', () => greetPane(pane));
  frame.src = isLive ? `/runs/${encodeURIComponent(name)}` : `/studies/${encodeURIComponent(name)}`;
  const waiting = element('p', 'caption waiting', `The server prepares ${isLive ? 'the page' : `the report on ${name}`} …`);
  waiting.setAttribute('role', 'status');
  frame.addEventListener('load', () => waiting.remove(), { once: true });
  box.append(head, waiting, frame);
  return pane;
}

/** Tell the explorer in a pane that this page can ask the server about heads: once its study is saved. */
function greetPane(pane) {
  const run = RUNS.get(pane.name);
  if (PAYLOAD.plan || pane.greeted || (run && !run.saved) || (run && isOpen(run)) || !pane.loaded) return;
  pane.greeted = true;
  // A report in its sandbox has no origin to name.
  pane.frame.contentWindow.postMessage({ kind: 'softgap-host' }, '*');
}

/** A pane asks for the keys of a head; what it may name is checked by the server, and whose pane it is here. */
async function onPaneMessage({ source, data }) {
  const pane = panes.find(({ frame }) => frame.contentWindow === source);
  if (!pane || !data || data.kind !== 'softgap-anatomy') return;
  const answer = { kind: 'softgap-anatomy-answer', index: data.index };
  try {
    const { heads } = await post('/anatomy', { study: pane.name, sample: String(data.sample), head: String(data.head) });
    Object.assign(answer, { heads });
  } catch (error) {
    Object.assign(answer, { error: error.message });
  }
  source.postMessage(answer, '*');
}

addEventListener('message', onPaneMessage);

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
  drawDifferenceLink();
  for (const pane of panes) {
    greetPane(pane);
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

/** Two studies that are saved can be compared on a page of their own. */
function drawDifferenceLink() {
  const names = shownNames();
  const saved = (name) => (RUNS.has(name) ? RUNS.get(name).saved && !isOpen(RUNS.get(name)) : STUDIES.includes(name));
  const link = byId('difference');
  link.hidden = names.length < 2 || !names.every(saved);
  if (!link.hidden) link.href = `/studies/${encodeURIComponent(names[1])}/minus/${encodeURIComponent(names[0])}`;
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
