// What a page's data say: decoded, searched, put into words. Knows nothing of the page.

const DEVICE = 0, ARGUMENT = 1, RESULT = 2, HOST = 3, DISK = 4;
const COPIES = new Set([1, 2, 5, 6, 10]);
const ROW_OF_KIND = [0, 1, 2, 3, 0, 4, 5, 6, 4, 5, 3];
const ROWS = ["compute", "host to device", "device to host", "between devices", "disk to host",
  "host to disk", "host compute"];
const NO_DEVICE = 4; // rows from here on belong to the whole machine
const WHY = ["", "for what it reads", "for room to write to", "for its lane, which was busy"];

function decode(packed) {
  const text = atob(packed.data), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const types = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f8: Float64Array };
  const numbers = new types[packed.type](bytes.buffer);
  return packed.times === 1 ? numbers : Float64Array.from(numbers, (x) => x * packed.times);
}

function formatBytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; Math.abs(count) >= 1024 && unit < 4; unit++) count /= 1024;
  return (unit && count < 100 ? String(+count.toPrecision(3)) : count.toFixed(0)) + " " + units[unit];
}

function formatSeconds(seconds) {
  if (!seconds) return "0 s";
  const [unit, scale] = seconds >= 1 ? ["s", 1] : seconds >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return +(seconds * scale).toPrecision(4) + " " + unit;
}

// A scene's arrays, decoded; `liveRanges` holds for each of its times when versions are in place,
// `came` the vertex that came in each one's turn, where sums take what they add in any order.
function modelOf(scene) {
  const part = (fields) =>
    Object.fromEntries(Object.entries(fields).map(([name, packed]) => [name, decode(packed)]));
  const model = { ...scene, tensor: part(scene.tensor), version: part(scene.version),
    vertex: part(scene.vertex) };
  const tick = scene.seconds / (2 ** 32 - 1);
  model.times = scene.times.map((t) => ({
    label: t.label, seconds: t.seconds, whom: decode(t.whom), why: decode(t.why),
    came: decode(t.came),
    start: Float64Array.from(decode(t.start), (x) => x * tick),
    end: Float64Array.from(decode(t.end), (x) => x * tick),
  }));
  model.liveRanges = model.times.map((times) => liveRanges(model, times));
  return model;
}

function liveRanges(model, times) {
  const { writer, overwriter } = model.version, { reads, inputs } = model.vertex;
  const begin = new Float64Array(writer.length), end = new Float64Array(writer.length);
  for (let v = 0; v < writer.length; v++) {
    if (!writer[v]) continue;
    const made = times.came[writer[v] - 1] ?? writer[v] - 1;
    begin[v] = times.start[made], end[v] = times.end[made];
  }
  for (let vertex = 0, at = 0; vertex < reads.length; vertex++) {
    for (const stop = at + reads[vertex]; at < stop; at++) {
      const v = inputs[at];
      const isOver = overwriter[v] === vertex + 1;
      const until = isOver ? times.start[times.came[vertex] ?? vertex] : times.end[vertex];
      if (until > end[v]) end[v] = until;
    }
  }
  return { begin, end };
}

// Boxes in order of their begin; `reach` is the latest end of any box up to each.
function boxesOf(ids, begin, end) {
  const order = Uint32Array.from(ids).sort((a, b) => begin[a] - begin[b] || a - b);
  const boxes = { id: order, begin: new Float64Array(order.length),
    end: new Float64Array(order.length), reach: new Float64Array(order.length) };
  let reach = -Infinity;
  for (let i = 0; i < order.length; i++) {
    boxes.begin[i] = begin[order[i]];
    boxes.end[i] = end[order[i]];
    boxes.reach[i] = reach = Math.max(reach, boxes.end[i]);
  }
  return boxes;
}

function bisect(sorted, x, after) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x || (after && sorted[middle] === x)) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Positions [first, last) beyond which no box is seen between two times.
function visible(boxes, from, to) {
  return [bisect(boxes.reach, from, false), bisect(boxes.begin, to, true)];
}

function boxesIn(model, which, space, index) {
  const ids = [], { version } = model, { begin, end } = model.liveRanges[which];
  for (let v = 0; v < version.space.length; v++) {
    if (version.space[v] === space && (space !== DEVICE || version.index[v] === index)) ids.push(v);
  }
  const boxes = boxesOf(ids, begin, end), tensors = boxes.id.map((v) => version.tensor[v]);
  boxes.low = Float64Array.from(boxes.id, (v) => version.offset[v]);
  boxes.bytes = Float64Array.from(tensors, (t) => model.tensor.bytes[t]);
  boxes.kind = Uint8Array.from(tensors, (t) => model.tensor.kind[t]);
  return boxes;
}

// The version at a time and an address, or -1; of several the one written last.
function hit(model, boxes, time, address) {
  const [first, last] = visible(boxes, time, time);
  for (let i = last - 1; i >= first; i--) {
    if (boxes.end[i] < time) continue;
    if (boxes.low[i] <= address && address < boxes.low[i] + boxes.bytes[i]) return boxes.id[i];
  }
  return -1;
}

// Bytes by kind: after at[i] seconds of[kind][i] bytes are in use.
function usage(model, boxes) {
  const count = boxes.id.length;
  const byEnd = Uint32Array.from(boxes.id.keys()).sort((a, b) => boxes.end[a] - boxes.end[b]);
  const at = new Float64Array(2 * count), total = new Float64Array(2 * count);
  const of = model.kinds.map(() => new Float64Array(2 * count)), now = model.kinds.map(() => 0);
  for (let i = 0, j = 0, n = 0; n < 2 * count; n++) {
    const ends = i === count || boxes.end[byEnd[j]] <= boxes.begin[i];
    at[n] = ends ? boxes.end[byEnd[j]] : boxes.begin[i];
    if (ends) now[boxes.kind[byEnd[j]]] -= boxes.bytes[byEnd[j++]];
    else now[boxes.kind[i]] += boxes.bytes[i++];
    for (let k = 0; k < now.length; k++) total[n] += of[k][n] = now[k];
  }
  return { at, of, total };
}

function vertexText(model, vertex) {
  const { name, source, reads } = model.vertex, text = model.strings;
  let words = text[name[vertex]];
  if (COPIES.has(model.vertex.kind[vertex])) {
    model.firstRead ??= reads.reduce((sum, n) => (sum.push(sum[sum.length - 1] + n), sum), [0]);
    const tensor = model.version.tensor[model.vertex.inputs[model.firstRead[vertex]]];
    words += " of " + text[model.tensor.name[tensor]];
  }
  const where = text[source[vertex]];
  return where ? words + " at " + where : words;
}

function placesOf(model, tensor) {
  const found = [];
  for (let v = 0; v < model.version.tensor.length; v++) {
    if (model.version.tensor[v] === tensor) found.push(v);
  }
  return found;
}

function placeText(model, v) {
  const { space, index, offset } = model.version, at = formatBytes(offset[v]);
  if (space[v] === ARGUMENT) return model.arguments[index[v]] || "argument " + index[v];
  if (space[v] === RESULT) return "result " + index[v];
  if (space[v] === DEVICE) return "device " + index[v] + " at " + at;
  return (space[v] === HOST ? "host memory at " : "disk at ") + at;
}

// What a version's tensor is called: by its argument, or by its type and source line.
function nameOf(model, v) {
  const { version, tensor, strings } = model, t = version.tensor[v];
  const home = placesOf(model, t).find((p) => version.space[p] === ARGUMENT);
  const where = home === undefined ? strings[tensor.source[t]] : placeText(model, home);
  return strings[tensor.name[t]] + (where ? " " + where : "");
}

// Everything about a version, as [what, text] in the order in which one asks.
function describe(model, which, v) {
  const { version, tensor, strings, times } = model, { begin, end } = model.liveRanges[which];
  const t = version.tensor[v], run = times[which], places = placesOf(model, t);
  const lines = [
    ["tensor", nameOf(model, v) + ", " + formatBytes(tensor.bytes[t]) + ", " +
      model.kinds[tensor.kind[t]]],
    ["shape", (strings[tensor.shape[t]].replaceAll("x", " × ") || "scalar") + " of " +
      strings[tensor.dtype[t]]],
  ];
  if (strings[tensor.source[t]]) lines.push(["made at", strings[tensor.source[t]]]);
  lines.push(["here", placeText(model, v) + ", from " + formatSeconds(begin[v]) + " to " +
    formatSeconds(end[v])]);
  const writer = version.writer[v] - 1;
  if (writer >= 0) {
    lines.push(["written by", vertexText(model, writer)]);
    const whom = run.whom[writer] - 1;
    if (whom >= 0) lines.push(["waited " + WHY[run.why[writer]], vertexText(model, whom)]);
  }
  const [back] = places.filter((p) => version.space[p] === DEVICE && version.index[p] ===
    version.index[v] && begin[p] >= end[v] && p !== v).sort((a, b) => begin[a] - begin[b]);
  const next = version.next_occupant[v] - 1;
  if (version.space[v] === DEVICE && back !== undefined) {
    lines.push(["evicted", next < 0 ? "it is not read for so long" : "its place was wanted for " +
      strings[tensor.name[version.tensor[next]]] + ": " + vertexText(model, version.writer[next] - 1)]);
    lines.push(["comes back", "at " + formatSeconds(begin[back]) + ", after " +
      formatSeconds(begin[back] - end[v])]);
  } else if (version.space[v] === DEVICE) {
    lines.push(["then", "it is not read on this device any more"]);
  }
  lines.push(["all its places", places.map((p) => placeText(model, p)).join("; ")]);
  return lines;
}

// Versions in a device or a tier below whose tensor matches, one a tensor.
function search(model, words, limit) {
  const found = new Map(), wanted = words.toLowerCase(), { tensor, version, strings } = model;
  if (!wanted) return [];
  for (let v = 0; v < version.tensor.length && found.size < limit; v++) {
    const t = version.tensor[v], s = version.space[v];
    const home = s === ARGUMENT ? placeText(model, v) : "";
    const text = strings[tensor.name[t]] + " " + strings[tensor.source[t]] + " " + home;
    if (!found.has(t) && text.toLowerCase().includes(wanted)) found.set(t, v);
  }
  return [...found].map(([t, v]) =>
    placesOf(model, t).find((p) => version.space[p] === DEVICE) ?? v);
}
