'use strict';
// One connection to the server, over which everything comes that happens there.

const STREAM = { source: null, runs: [], handlers: {} };

/** Listen to the list of runs, and to all events of these runs from their beginning on. */
function watch(runs) {
  STREAM.runs = runs;
  if (STREAM.source) STREAM.source.close();
  const query = new URLSearchParams(runs.map((run) => ['run', run]));
  const source = new EventSource(`/events?${query}`);
  STREAM.source = source;
  for (const kind of ['hello', 'runs', 'begin', 'step', 'end']) {
    source.addEventListener(kind, (event) => STREAM.handlers[kind](JSON.parse(event.data), Number(event.lastEventId.split('.')[1] || 0)));
  }
  source.addEventListener('open', () => connection('connected'));
  source.addEventListener('error', () => {
    connection('no connection; reconnecting');
    // A browser tries again by itself, unless the server has answered with a refusal.
    if (source.readyState === EventSource.CLOSED && STREAM.source === source) setTimeout(() => watch(STREAM.runs), 1500);
  });
}

function connection(words) {
  const place = byId('connection');
  if (place.textContent !== words) place.textContent = words;
  place.classList.toggle('bad', words !== 'connected');
}

/** Ask the server to do something; its refusal is an error with the server's own sentence. */
async function post(address, body) {
  let answer;
  try {
    answer = await fetch(address, {
      method: 'POST',
      headers: { 'Content-Type': 'application/json', 'X-Softgap-Token': PAYLOAD.token },
      body: JSON.stringify(body),
    });
  } catch {
    throw new Error('the server does not answer; is softgap serve still running?');
  }
  const reply = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(reply.error || `the server refused (${answer.status})`);
  return reply;
}
