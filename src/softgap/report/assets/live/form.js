'use strict';
// What to write: one prompt or two, and how.

const DRAFT = 'softgap-draft';

function fillMechanisms() {
  byId('mechanisms').append(...PAYLOAD.mechanisms.map((name) => {
    const label = element('label');
    const box = element('input');
    box.type = 'checkbox';
    box.value = name;
    box.checked = PAYLOAD.chosen.includes(name);
    label.append(box, element('span', '', name));
    return label;
  }));
}

function chosenMechanisms() {
  return [...byId('mechanisms').querySelectorAll('input:checked')].map(({ value }) => value);
}

/** A number field's value, null where it is empty; what is no number is refused here, in words. */
function numberIn(id, what) {
  const field = byId(id);
  if (field.validity.badInput) throw new Error(`${what} must be a number; correct it`);
  return field.value === '' ? null : field.valueAsNumber;
}

function complain(words) {
  const place = byId('refused');
  place.textContent = words ? `${words[0].toUpperCase()}${words.slice(1)}.` : '';
  place.hidden = !words;
}

async function ask(event) {
  if (event) event.preventDefault();
  complain('');
  byId('generate').disabled = true;
  try {
    const length = numberIn('length', 'the length');
    const body = {
      prompts: ['prompt', 'second'].map((id) => byId(id).value).filter((text, i) => i === 0 || text.trim()),
      ...(PAYLOAD.plan ? {} : { mechanisms: chosenMechanisms() }),
      temperature: numberIn('temperature', 'the temperature'),
      seed: numberIn('seed', 'the seed'),
      ...(length === null ? {} : { max_new_tokens: length }),
    };
    const { runs } = await post('/runs', body);
    for (const id of runs) if (!RUNS.has(id)) RUNS.set(id, { id, prompt: body.prompts[runs.indexOf(id)], state: 'waiting', steps: 0, maxNewTokens: length });
    showPanes(runs);
  } catch (error) {
    complain(error.message);
  }
  byId('generate').disabled = false;
}

/** What was typed outlives a reload, in this tab. */
function keepDraft() {
  const fields = ['prompt', 'second', 'length', 'temperature', 'seed'];
  const draft = JSON.parse(sessionStorage.getItem(DRAFT) || '{}');
  for (const id of fields) {
    if (draft[id]) byId(id).value = draft[id];
    byId(id).addEventListener('input', () => {
      sessionStorage.setItem(DRAFT, JSON.stringify(Object.fromEntries(fields.map((name) => [name, byId(name).value]))));
    });
  }
  if (byId('second').value) byId('second').closest('details').open = true;
}

function startForm() {
  byId('mechanism-choice').hidden = Boolean(PAYLOAD.plan);
  byId('plan-notes').hidden = !PAYLOAD.plan;
  byId('plan-notes').append(...(PAYLOAD.plan || []).map((words) => element('p', '', words)));
  if (PAYLOAD.plan) byId('studies-empty').textContent = 'No saved studies. Runs under a plan are not saved.';
  fillMechanisms();
  keepDraft();
  byId('length').max = PAYLOAD.limits.newTokens;
  byId('form').addEventListener('submit', ask);
  for (const id of ['prompt', 'second']) {
    byId(id).addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) ask(event);
    });
  }
}
