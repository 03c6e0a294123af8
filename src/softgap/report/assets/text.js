'use strict';
// The text: every token on the colour of the step that predicted it.

const SHADES = [
  { key: 'divergence', label: 'divergence', unit: '1 − cos' },
  { key: 'logprob', label: 'log-probability', unit: 'nats; strong colour is unlikely' },
  { key: 'entropy', label: 'entropy of the prediction', unit: 'nats' },
  { key: 'attention', label: 'attention of a head', unit: 'weight' },
  { key: 'none', label: 'nothing', unit: '' },
];

// Of every shown token: { first, count, node }; and which of them shows a step.
let shown = [];
let ofStep = [];
let anchor = null;

/** One number per step to shade by, with the words that say what it is; null while it is on its way. */
function shading() {
  const data = current();
  if (STATE.shade === 'none') return { numbers: null, label: '' };
  if (STATE.shade === 'attention') return anatomyShading() || { numbers: null, label: '' };
  if (STATE.shade !== 'divergence') {
    const shade = SHADES.find(({ key }) => key === STATE.shade);
    const sign = STATE.shade === 'logprob' ? -1 : 1;
    const numbers = data[STATE.shade].map((value) => (value === null ? NaN : sign * value));
    return { numbers, label: STATE.shade === 'logprob' ? '−log-probability of the token, nats' : `${shade.label}, ${shade.unit}` };
  }
  const array = values(divergenceKey());
  if (!array) return null;
  const [rows, who] = shadedHeads();
  return { numbers: meanOfRows(array, rows), label: `divergence from ${STATE.mechanism}, ${who}` };
}

function shadedHeads() {
  const everyone = HEADS.map(({ row }) => row);
  if (STATE.shadeOf === 'all' || !STATE.heads.length) return [everyone, `mean of all ${HEADS.length} heads`];
  if (STATE.shadeOf === 'heads') {
    const names = STATE.heads.map((row) => HEADS[row].name).join(', ');
    return [STATE.heads, STATE.heads.length === 1 ? `head ${names}` : `mean of heads ${names}`];
  }
  const { layer } = HEADS[STATE.heads[STATE.heads.length - 1]];
  return [HEADS.filter((head) => head.layer === layer).map(({ row }) => row), `mean of layer ${layer}`];
}

function buildText() {
  byId('tokens').replaceChildren();
  shown = [];
  ofStep = [];
  for (const part of ['prompt', 'completion']) extendText(part, 0);
  if (!shown.length) byId('tokens').append(element('p', 'empty', current().empty || 'No measured step predicted a token of this sample.'));
}

/** Build the pieces of a part anew from one on; of the completion, or before any of it is there. */
function extendText(part, from) {
  const pieces = current().pieces[part];
  if (!pieces.length) return;
  const place = byId('tokens');
  place.querySelector('.empty')?.remove();
  const box = place.querySelector(`.part.${part}`) || place.appendChild(partBox(part));
  // The heading comes first.
  while (box.childElementCount > from + 1) {
    if (shown.length && shown[shown.length - 1].node === box.lastChild) ofStep.length = shown.pop().first;
    box.lastChild.remove();
  }
  for (const piece of pieces.slice(from)) box.append(tokenNode(...piece));
  if (shown.length && !shown.some(({ node }) => node.tabIndex === 0)) shown[0].node.tabIndex = 0;
}

function partBox(part) {
  const box = element('div', `part ${part}`);
  box.setAttribute('role', 'group');
  box.setAttribute('aria-label', part === 'prompt' ? 'Prompt' : 'Completion');
  const title = element('b', '', part === 'prompt' ? 'Prompt' : 'Completion');
  title.setAttribute('aria-hidden', 'true');
  box.append(title);
  return box;
}

function tokenNode(text, first, count, inText) {
  if (first < 0) {
    const unread = element('span', 'unread', text);
    unread.setAttribute('role', 'presentation');
    unread.title = 'No measured step predicted this token.';
    return unread;
  }
  const node = element('span', inText ? 't' : 't hidden-token', text);
  node.setAttribute('role', 'option');
  node.setAttribute('aria-selected', 'false');
  node.tabIndex = -1;
  node.dataset.step = first;
  if (!text.trim()) node.setAttribute('aria-label', text.includes('\n') ? 'line break' : 'space');
  for (let step = first; step < first + count; step += 1) ofStep[step] = shown.length;
  shown.push({ first, count, node });
  return node;
}

function shadeText() {
  const shades = shading();
  if (!shades) return;
  const { numbers, label } = shades;
  // Weights are few and far apart: their scale begins at 0 and ends at the largest.
  const weights = numbers && STATE.shade === 'attention';
  const scale = numbers && colourScale(numbers, weights ? { fixed: [0, d3.max(numbers) || 1], strength: 0.85 } : { ends: [0.05, 0.95], strength: 0.85 });
  for (const { first, count, node } of shown) {
    const value = numbers ? meanOf(numbers, first, count) : NaN;
    const inside = !STATE.range || (first < STATE.range[1] && first + count > STATE.range[0]);
    const colour = value === value && inside && !(weights && !value) ? scale.colour(value).toString() : '';
    node.style.backgroundColor = colour;
    node.style.color = colour && inkOn(colour);
    node.classList.toggle('in', Boolean(STATE.range) && inside);
    node.classList.toggle('out', !inside);
    node.setAttribute('aria-selected', String(Boolean(STATE.range) && inside));
  }
  const legend = d3.select('#text-legend');
  legend.selectAll('*').remove();
  legend.attr('height', scale ? 44 : 0).attr('width', 340).attr('aria-label', scale
    ? `Colours from ${show(scale.domain[0])} to ${show(scale.domain[1])}: ${label}` : 'No shading');
  if (scale) drawLegend(legend.append('g').attr('transform', 'translate(4,2)'), scale, 332, label);
}

function meanOf(numbers, first, count) {
  let total = 0;
  for (let step = first; step < first + count; step += 1) total += numbers[step];
  return total / count;
}

/** Everything about one step, in words. */
function describeStep(step) {
  const data = current();
  const part = step < data.promptSteps ? 'prompt' : 'completion';
  const facts = [`${tokenName(step)} · token ${step} (${part}, predicted at position ${data.positions[step]})`];
  for (const mechanism of PAYLOAD.mechanisms) {
    const array = values(divergenceKey(mechanism));
    if (!array) continue;
    const [rows, who] = shadedHeads();
    facts.push(`${mechanism} ${show(meanOfRows(array, rows, step, step + 1)[0])}${mechanism === PAYLOAD.mechanisms[0] ? ` (${who})` : ''}`);
  }
  facts.push(`log-probability ${show(data.logprob[step])}`, `entropy ${show(data.entropy[step])} nats`);
  return facts.join(' · ');
}

function showCursor() {
  for (const node of byId('tokens').querySelectorAll('.at')) node.classList.remove('at');
  const place = byId('token-readout');
  if (STATE.cursor === null) {
    place.textContent = 'Point at a token, or move with the arrow keys, to see its values.';
    return;
  }
  const entry = shown[ofStep[STATE.cursor]];
  if (entry) {
    entry.node.classList.add('at');
    reveal(entry.node);
  }
  place.textContent = [anatomyWords(), describeStep(STATE.cursor)].filter(Boolean).join(' · ');
}

/** Of a page on two single runs, the sample that is not shown; else null. */
function otherSample() {
  const { samples } = PAYLOAD.compare || {};
  return samples && samples.includes(STATE.sample) ? samples.find((sample) => sample !== STATE.sample) : null;
}

function sideName(sample) {
  return PAYLOAD.compare.names[PAYLOAD.compare.samples.indexOf(sample)];
}

/** The text of the other sample, whose tokens follow the same cursor. */
function buildOther() {
  const other = otherSample();
  byId('other-text').hidden = other === null;
  if (other === null) return;
  const { pieces } = PAYLOAD.samples[other].data;
  byId('other-title').textContent = `${sideName(other)}, with the same cursor`;
  byId('other-tokens').replaceChildren(...['prompt', 'completion'].flatMap((part) => pieces[part].map(([text, first, count]) => {
    const node = element('span', first < 0 ? 'unread' : 't', text);
    if (first >= 0) Object.assign(node.dataset, { other: first, until: first + count });
    return node;
  })));
}

/** How many steps the other sample is ahead at the same place of its completion. */
function otherShift() {
  return PAYLOAD.samples[otherSample()].data.promptSteps - current().promptSteps;
}

function showOther() {
  if (otherSample() === null) return;
  const box = byId('other-tokens');
  const step = STATE.cursor === null ? NaN : STATE.cursor + otherShift();
  for (const node of box.querySelectorAll('.t')) {
    const at = step >= Number(node.dataset.other) && step < Number(node.dataset.until);
    node.classList.toggle('at', at);
    if (at && !box.matches(':hover')) box.scrollTop += node.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 2;
  }
}

function startOther() {
  if (!PAYLOAD.compare) return;
  byId('other-tokens').addEventListener('pointerover', (event) => {
    if (event.target.dataset.other === undefined) return;
    const step = Number(event.target.dataset.other) - otherShift();
    if (step >= 0 && step < stepCount()) update({ cursor: step });
  });
  listen(['sample'], buildOther);
  listen(['sample', 'cursor'], showOther);
  buildOther();
}

/** A frame around the token that a click holds. */
function showPinned() {
  for (const node of byId('tokens').querySelectorAll('.pinned')) node.classList.remove('pinned');
  const entry = STATE.pinned === null ? null : shown[ofStep[STATE.pinned]];
  if (entry) entry.node.classList.add('pinned');
}

/** Scroll the text, and only the text, to a token that was pointed at from elsewhere. */
function reveal(node) {
  const box = byId('tokens');
  if (box.matches(':hover') || box.contains(document.activeElement)) return;
  const [inside, place] = [box, node].map((part) => part.getBoundingClientRect());
  if (place.top < inside.top || place.bottom > inside.bottom) box.scrollTop += place.top - inside.top - inside.height / 2;
}

function focusToken(index, extend) {
  const entry = shown[Math.min(shown.length - 1, Math.max(0, index))];
  if (!entry) return;
  for (const { node } of shown) node.tabIndex = -1;
  entry.node.tabIndex = 0;
  entry.node.focus();
  if (extend) chooseRange(anchor, entry.first < anchor ? entry.first : entry.first + entry.count - 1);
  else update({ cursor: entry.first });
}

function onTokenKey(event) {
  const at = ofStep[Number(event.target.dataset.step)];
  if (at === undefined) return;
  const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: beside(at, -1), ArrowDown: beside(at, 1), Home: 0, End: shown.length - 1 };
  if (event.key in moves) {
    event.preventDefault();
    anchor = event.shiftKey ? anchor ?? shown[at].first : null;
    focusToken(moves[event.key], event.shiftKey);
  } else if (event.key === 'Enter' || event.key === ' ') {
    event.preventDefault();
    pinStep(shown[at].first);
  } else if (event.key === 'Escape') {
    anchor = null;
    if (STATE.pinned !== null) pinStep(STATE.pinned);
    update({ range: null });
  }
}

/** The token above or below: the nearest one of the next line. */
function beside(at, direction) {
  const current = shown[at].node.getBoundingClientRect();
  let best = at;
  let least = Infinity;
  for (let i = at + direction; i >= 0 && i < shown.length; i += direction) {
    const candidate = shown[i].node.getBoundingClientRect();
    const down = Math.abs(candidate.top - current.top);
    if (down < current.height * 0.6) continue;
    const away = Math.abs(candidate.left - current.left) + 4 * down;
    if (away < least) [best, least] = [i, away];
    else if (down > current.height * 4) break;
  }
  return best;
}

function stepUnder(event) {
  const node = event.target.closest ? event.target.closest('.t') : null;
  return node ? Number(node.dataset.step) : null;
}

function startText() {
  const place = byId('tokens');
  let from = null;
  let moved = false;
  place.addEventListener('pointerover', (event) => {
    const step = stepUnder(event);
    if (step === null) return;
    if (from !== null && step !== from && event.pointerType === 'mouse') {
      moved = true;
      getSelection().removeAllRanges();
      chooseRange(from, step);
    } else update({ cursor: step });
  });
  place.addEventListener('pointerdown', (event) => {
    from = event.button === 0 ? stepUnder(event) : null;
    moved = false;
  });
  addEventListener('pointerup', () => { from = null; });
  place.addEventListener('click', (event) => {
    const step = stepUnder(event);
    if (step === null || moved) return;
    if (event.shiftKey && anchor !== null) chooseRange(anchor, step);
    else {
      anchor = step;
      pinStep(step);
    }
    focusToken(ofStep[step], false);
  });
  place.addEventListener('focusin', (event) => {
    if (event.target.dataset.step) update({ cursor: Number(event.target.dataset.step) });
  });
  place.addEventListener('keydown', onTokenKey);
  listen(['sample'], buildText);
  listen(['sample', 'mechanism', 'shade', 'shadeOf', 'heads', 'range', 'theme', 'arrived', 'anatomy', 'direction', 'attention', 'pinned', 'cursor'], (names) => {
    // The cursor matters to the shades of attention only.
    if (STATE.shade === 'attention' || names.size > 1 || !names.has('cursor')) shadeText();
  });
  listen(['cursor', 'sample', 'mechanism', 'shade', 'shadeOf', 'heads', 'arrived', 'anatomy', 'direction', 'attention', 'pinned'], showCursor);
  listen(['sample', 'pinned', 'arrived'], showPinned);
  buildText();
}
