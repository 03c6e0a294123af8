'use strict';
// Put the live page together.

function hello({ boot }) {
  connection('connected');
  // Another server than the one this page came from: its token and its runs are new.
  if (boot !== PAYLOAD.boot) location.reload();
}

Object.assign(STREAM.handlers, {
  hello,
  runs: receiveRuns,
  begin: (data, number) => toPane('begin', data, number),
  step: (data, number) => toPane('step', data, number),
  end: (data, number) => toPane('end', data, number),
});
byId('subject').textContent = `${PAYLOAD.model} · ${PAYLOAD.layers.length} layers · ${HEADS.length} heads`;
startForm();
startTheme(() => panes.forEach(themePane));
watch([]);
addEventListener('hashchange', () => {
  const names = namesInAddress();
  if (names.join() !== shownNames().join()) showPanes(names);
});
document.documentElement.dataset.ready = String(Math.round(performance.now()));
