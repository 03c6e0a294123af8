'use strict';
// The queue, the runs that the server still knows, and the studies in its folder.

const RUNS = new Map();
let STUDIES = [];
let listed = '';

function isOpen(run) {
  return ['waiting', 'running'].includes(run.state);
}

function stateWords(run) {
  const before = [...RUNS.values()].filter(({ state }) => state === 'waiting').findIndex(({ id }) => id === run.id);
  const tokens = `${run.steps} of ${run.maxNewTokens} tokens`;
  return {
    waiting: `waiting, position ${before + 1} in the queue`,
    running: run.steps ? `writing, ${tokens}` : 'reading the prompt',
    finishing: `${run.steps} tokens; computing entropies`,
    finished: `finished, ${run.steps} tokens`,
    stopped: `stopped after ${run.steps} tokens`,
    failed: `failed: ${run.reason}`,
  }[run.state];
}

/** The list as it is now; the first one decides what is shown if the address does not say. */
function receiveRuns({ runs, studies }) {
  const first = listed === '';
  RUNS.clear();
  for (const run of runs) RUNS.set(run.id, run);
  STUDIES = studies;
  listed = 'yes';
  drawRuns();
  drawStudies();
  const known = shownNames().filter((name) => RUNS.has(name) || STUDIES.includes(name));
  if (first) {
    const names = namesInAddress().filter((name) => RUNS.has(name) || STUDIES.includes(name));
    const latest = runs.filter(({ state }) => state === 'running').concat(runs.slice(-1))[0];
    showPanes(names.length || !latest ? names : [latest.id]);
  } else if (known.some((name, i) => panes[i].name !== name || panes[i].isLive !== RUNS.has(name))) showPanes(known);
  else drawPaneHeads();
  const waiting = runs.filter(({ state }) => state === 'waiting').length;
  const running = runs.filter(({ state }) => ['running', 'finishing'].includes(state)).length;
  const words = running || waiting ? `${running} running, ${waiting} waiting` : 'no run is active';
  if (byId('queue-state').textContent !== words) byId('queue-state').textContent = words;
}

function drawRuns() {
  const rows = [...RUNS.values()].reverse();
  byId('runs-empty').hidden = rows.length > 0;
  refill(byId('runs'), rows.map((run) => {
    const line = element('li', run.state);
    const words = element('span', 'words', run.prompt.trim().slice(0, 120));
    const tools = element('span', 'tools');
    tools.append(
      button('Show', `Show the run “${run.prompt.trim().slice(0, 40)}”`, () => showPanes([run.id])),
      button('Beside', `Show the run “${run.prompt.trim().slice(0, 40)}” beside the other`, () => beside(run.id)),
    );
    if (isOpen(run)) tools.append(button('Stop', `Stop the run “${run.prompt.trim().slice(0, 40)}”`, () => stopRun(run.id)));
    line.append(words, element('span', 'state', stateWords(run)), tools);
    return line;
  }));
}

function drawStudies() {
  byId('studies-empty').hidden = STUDIES.length > 0;
  refill(byId('studies'), STUDIES.map((name) => {
    const line = element('li');
    const link = element('a', 'words', name);
    link.href = `/studies/${encodeURIComponent(name)}`;
    link.target = '_blank';
    link.rel = 'noopener';
    const tools = element('span', 'tools');
    tools.append(
      button('Show', `Show the study ${name}`, () => showPanes([name])),
      button('Beside', `Show the study ${name} beside the other`, () => beside(name)),
      ...downloads(name),
    );
    line.append(link, tools);
    return line;
  }));
}

/** Replace only the lines that differ: a line under a pressed finger must stay the same element. */
function refill(list, lines) {
  lines.forEach((line, i) => {
    const old = list.children[i];
    if (!old) list.append(line);
    else if (old.textContent !== line.textContent || old.className !== line.className) {
      const state = old.querySelector('.state');
      const alike = state && old.querySelector('.words').textContent === line.querySelector('.words').textContent
        && old.className === line.className;
      if (alike) state.textContent = line.querySelector('.state').textContent;
      else old.replaceWith(line);
    }
  });
  while (list.childElementCount > lines.length) list.lastChild.remove();
}

function beside(name) {
  showPanes([...shownNames().filter((other) => other !== name).slice(0, MOST_PANES - 1), name]);
}

async function stopRun(id) {
  try {
    await post(`/runs/${encodeURIComponent(id)}/stop`, {});
  } catch (error) {
    complain(error.message);
  }
}
