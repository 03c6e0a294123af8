'use strict';
// Colours. In both scales lightness in CIELAB changes in equal steps, so they also work in grey and for colour-blind
// readers; the least value lies near the colour of the page, in light and in dark.

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === 'dark' : window.matchMedia('(prefers-color-scheme: dark)').matches;
}

/** From the page's colour at 0 to the strongest at 1. */
function sequential(share) {
  const t = Math.min(1, Math.max(0, share));
  // Chroma stays where screens can show it: more of it at the strong end, where there is room.
  return isDark() ? d3.hcl(285 - 190 * t, 24 + 22 * t, 21 + 69 * t) : d3.hcl(100 + 190 * t, 10 + 36 * t, 96 - 70 * t);
}

/** Blue below 0, orange above it, the page's colour in between. */
function diverging(share) {
  const t = Math.min(1, Math.max(-1, share));
  const size = Math.abs(t);
  const hue = t < 0 ? 262 : 58;
  return isDark() ? d3.hcl(hue, 68 * size, 19 + 58 * size) : d3.hcl(hue, 68 * size, 96 - 50 * size);
}

/** Black or white, whichever can be read on a colour. */
function inkOn(colour) {
  const { r, g, b } = d3.rgb(colour);
  const [red, green, blue] = [r, g, b].map((part) => {
    const share = Math.min(255, Math.max(0, part)) / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? '#000000' : '#ffffff';
}

// Okabe and Ito's colours, adapted to each ground; every line also has its own dashes.
const LINE_COLOURS = {
  light: ['#0072b2', '#c24e00', '#007f5c', '#a8487d', '#8a6a00', '#3b6fd4', '#5b5b5b', '#8d2b2b'],
  dark: ['#56b4e9', '#f08a3c', '#2fcf9f', '#e59ac4', '#e8c245', '#9bb4ff', '#c8c8c8', '#ff9d9d'],
};
const DASHES = ['', '7 3', '2 3', '10 3 2 3', '4 2', '12 4', '1 2', '6 2 1 2'];
const MOST_CHOSEN = LINE_COLOURS.light.length;

function lineColour(i) {
  return LINE_COLOURS[isDark() ? 'dark' : 'light'][i % MOST_CHOSEN];
}

/** Beyond the end of a scale with fixed ends: a hue that the scale does not have. */
function beyondScale() {
  return isDark() ? d3.hcl(20, 90, 62) : d3.hcl(30, 95, 52);
}

/** A scale for some values: { colour(value), domain, diverging }; its ends are quantiles, so no outlier takes all.
 * With `fixed` ends what lies beyond the upper one has a colour of its own. */
function colourScale(values, { isDiverging = false, ends = [0.02, 0.98], strength = 1, fixed = null } = {}) {
  const reach = d3.extent(Array.from(values).filter((value) => value === value));
  if (fixed) {
    const [low, high] = fixed;
    const over = Array.from(values).filter((value) => value > high).length;
    return { domain: fixed, isDiverging: false, reach, over, colour: (value) => (value > high ? beyondScale() : sequential(strength * (value - low) / (high - low))) };
  }
  if (isDiverging) {
    const [far] = quantiles(Array.from(values, Math.abs), [ends[1]]);
    const most = far > 0 ? far : 1;
    return { domain: [-most, most], isDiverging, reach, colour: (value) => diverging(value / most) };
  }
  let [low, high] = quantiles(values, ends);
  if (!(high > low)) [low, high] = [low || 0, (low || 0) + 1];
  return { domain: [low, high], isDiverging, reach, colour: (value) => sequential(strength * Math.min(1, (value - low) / (high - low))) };
}

/** How far the values go beyond the ends of their scale, in words; nothing where they do not. */
function reachWords({ domain, reach }) {
  if (!reach || reach[0] === undefined || (reach[0] >= domain[0] && reach[1] <= domain[1])) return '';
  return `; values from ${show(reach[0])} to ${show(reach[1])}`;
}

/** Draw a scale with its ends and its unit into a group of an SVG, `width` wide and 34 high. */
function drawLegend(group, scale, width, label) {
  const bars = 48;
  const [low, high] = scale.domain;
  // Beyond a fixed end there is a field of its own, with room for its words.
  const bar = Math.min(width - 8 - (scale.over ? 205 : 0), 320);
  d3.range(bars).forEach((i) => {
    group.append('rect').attr('x', (i * bar) / bars).attr('width', bar / bars + 0.6).attr('height', 9)
      .attr('fill', scale.colour(low + ((high - low) * i) / (bars - 1)).toString());
  });
  group.append('rect').attr('class', 'frame').attr('width', bar).attr('height', 9);
  const place = d3.scaleLinear().domain([low, high]).range([0, bar]);
  const count = bar < 160 ? 2 : 4;
  const ticks = place.ticks(count);
  const written = place.tickFormat(count);
  for (const tick of ticks) {
    group.append('line').attr('class', 'zero').attr('x1', place(tick)).attr('x2', place(tick)).attr('y1', 9).attr('y2', 12);
    group.append('text').attr('x', place(tick)).attr('y', 23).attr('text-anchor', tick === ticks[0] && place(tick) < 12 ? 'start' : 'middle')
      .text(written(tick));
  }
  if (scale.over) {
    group.append('rect').attr('class', 'frame beyond').attr('x', bar + 14).attr('width', 14).attr('height', 9).style('fill', scale.colour(Infinity).toString());
    group.append('text').attr('class', 'beyond').attr('x', bar + 33).attr('y', 9)
      .text(`above ${high}: ${plural(scale.over, 'head')}, up to ${scale.reach[1].toFixed(2)}`);
  }
  group.append('text').attr('y', 37).text(label);
}
