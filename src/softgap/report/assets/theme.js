'use strict';
// Light, dark, or as the machine has it.

/** The button that goes through the three; `tell` is called whenever colours have changed. */
function startTheme(tell) {
  const button = byId('theme');
  button.addEventListener('click', () => {
    const next = { undefined: 'light', light: 'dark' }[document.documentElement.dataset.theme];
    chooseTheme(next);
    button.textContent = `Theme: ${next || 'auto'}`;
    tell();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', tell);
}

function chooseTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}
