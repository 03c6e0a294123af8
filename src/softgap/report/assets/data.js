'use strict';
// The data of the page: one JSON document, and arrays that are unpacked when they are first looked at.

const PAYLOAD = JSON.parse(document.getElementById('payload').textContent);
const BASELINE = 'uniform';

// Every head, in the order of the rows of all arrays.
const HEADS = [];
PAYLOAD.layers.forEach((layer, at) => {
  for (let head = 0; head < PAYLOAD.headsPerLayer[at]; head += 1) {
    HEADS.push({ row: HEADS.length, at, layer, head, kv: PAYLOAD.kvGroup[at][head], name: `${layer}.${head}` });
  }
});
const MOST_HEADS = Math.max(...PAYLOAD.headsPerLayer);

function byId(id) {
  return document.getElementById(id);
}

/** An element with a class and, as text and never as markup, some content. */
function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined && text !== null) node.textContent = text;
  return node;
}

function option(value, text) {
  const node = element('option', '', text);
  node.value = value;
  return node;
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const raw = atob(base64);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

/** An array as { rows, columns, values }; softgap/report/packing.py says how it is laid out. */
async function unpack(index) {
  const [rows, columns] = PAYLOAD.shapes[index];
  const packed = new Blob([bytesOf(byId(`array-${index}`).textContent)]);
  const plain = packed.stream().pipeThrough(new DecompressionStream('deflate'));
  const buffer = await new Response(plain).arrayBuffer();
  const size = rows * columns;
  const scale = new Float32Array(buffer, 0, 2 * rows);
  const high = new Uint8Array(buffer, 8 * rows, size);
  const lower = new Uint8Array(buffer, 8 * rows + size, size);
  const values = new Float32Array(size);
  for (let row = 0, i = 0; row < rows; row += 1) {
    const low = scale[row];
    const step = scale[rows + row];
    for (const end = i + columns; i < end; i += 1) {
      const code = (high[i] << 8) | lower[i];
      values[i] = code === 65535 ? NaN : low + step * code;
    }
  }
  return { rows, columns, values };
}

const unpacked = new Map();

/** The array if it is at hand; otherwise null, and `arrived` is called once it is. */
function arrayAt(index, arrived) {
  if (index === undefined) return null;
  const known = unpacked.get(index);
  if (known && known.values) return known;
  if (known) {
    known.waiting.add(arrived);
    return null;
  }
  const entry = { waiting: new Set([arrived]) };
  unpacked.set(index, entry);
  unpack(index).then((values) => {
    unpacked.set(index, values);
    entry.waiting.forEach((call) => call());
  }, fail);
  return null;
}

function fail(error) {
  const place = byId('failure');
  place.textContent = `The browser could not draw this report (${error.message}). Use a current browser. The study itself is unchanged.`;
  place.hidden = false;
  throw error;
}

/** A number for people: about three digits that matter. */
function show(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e5)) return value.toExponential(1).replace('-', '−');
  return value.toFixed(size >= 100 ? 1 : digits).replace('-', '−');
}
