// The page of a plan or run: memory over time, places, lanes, and one cursor through all of them.
// Follows model.js in one function. Each <div class="jaxoffload-view"> holds its own data
// (report/view.py); where no script runs the static picture in it stays.

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function start(root) {
  root.dataset.live = "yes";
  const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  const state = { scene: data.selected, which: 0, both: false, device: 0, from: 0, to: 1,
    cursor: null, over: -1, chosen: -1, drag: null };
  const models = [];
  // Pixels as image data hold them: alpha, blue, green, red.
  const inkOf = (colour) => {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  };
  const inks = data.colours.map(inkOf), laneInk = inkOf("#56B4E9"), over = inkOf("#888888");
  let model, panels, rows, layers;

  const canvas = make("canvas", { tabindex: 0, role: "img" });
  const front = make("canvas", { "aria-hidden": "true" });
  const stage = make("div", { class: "stage" }, canvas, front);
  const facts = make("dl", { "aria-live": "polite" }), hits = make("div", { class: "hits" });
  const bar = make("div", { class: "bar" }), says = make("output", {});
  const slider = make("label", { class: "slider" }, "budget ", make("input", { type: "range", min: 0,
    max: data.scenes.length - 1, value: state.scene, oninput: (event) => {
      state.scene = +event.target.value;
      load();
    } }), says);
  slider.hidden = data.scenes.length < 2;
  const legend = make("div", { class: "legend" });
  data.scenes[0].kinds.forEach((kind, k) => legend.append(make("span", {},
    make("i", { style: "background:" + data.colours[k] }), kind)));
  legend.append(make("span", {}, make("i", { class: "reserved" }), "workspace and in place"));
  const help = make("p", { class: "help" }, "Drag to zoom, double click to reset, click a box to see " +
    "its tensor everywhere. Keys: arrows move, + and - zoom, 0 resets, Escape lets go.");

  function choose(label, options, current, act) {
    const select = make("select", { onchange: () => act(+select.value) });
    options.forEach((text, i) => select.append(make("option", { value: i }, text)));
    select.value = current;
    return make("label", {}, label + " ", select);
  }

  function controls() {
    bar.replaceChildren();
    if (model.times.length > 1) {
      const labels = model.times.map((t) => t.label + " (" + formatSeconds(t.seconds) + ")");
      const pairs = labels.map((label, i) => label + " over " + model.times[1 - i].label);
      const options = [...labels, ...pairs];
      bar.append(choose("times", options, state.which + (state.both ? 2 : 0), (n) => {
        const isWhole = state.to - state.from === span();
        state.which = n % 2;
        state.both = n > 1;
        if (isWhole) state.from = 0, state.to = span();
        arrange();
      }));
    }
    if (model.devices > 1) {
      const names = Array.from({ length: model.devices }, (_, d) => "device " + d);
      bar.append(choose("", names, state.device, (d) => ((state.device = d), arrange())));
    }
    bar.append(make("button", { type: "button", onclick: reset }, "whole run"), make("input", {
      type: "search", placeholder: "find a tensor, line or argument", "aria-label": "find a tensor",
      oninput: (event) => {
        const found = search(model, event.target.value, 40);
        hits.replaceChildren(...found.map((v) => make("button", { type: "button",
          onclick: () => pick(v), onfocus: () => pick(v) }, nameOf(model, v))));
      } }));
  }

  function load() {
    model = models[state.scene] ??= modelOf(data.scenes[state.scene]);
    state.which = Math.min(state.which, model.times.length - 1);
    state.both = state.both && model.times.length > 1;
    state.device = Math.min(state.device, model.devices - 1);
    state.over = state.chosen = -1;
    state.from = 0, state.to = span();
    canvas.setAttribute("aria-label", model.title + ": memory and lanes over time");
    root.querySelector(".title strong").textContent = model.title;
    says.textContent = model.budget ? formatBytes(model.budget) : "no limit";
    hits.replaceChildren();
    facts.replaceChildren();
    arrange();
  }

  // Seconds of what is shown: of one of the times, or of both.
  function span() {
    const shown = state.both ? model.times : [model.times[state.which]];
    return Math.max(...shown.map((t) => t.seconds)) || 1;
  }

  // What is drawn where, from the top down, for one device.
  function arrange() {
    const seen = state.both ? [state.which, 1 - state.which] : [state.which];
    layers = seen.map((which) => {
      const arena = boxesIn(model, which, DEVICE, state.device), { kind, device } = model.vertex;
      const ids = ROWS.map(() => []), { start, end } = model.times[which];
      for (let v = 0; v < kind.length; v++) {
        const row = ROW_OF_KIND[kind[v]];
        if (row >= NO_DEVICE || device[v] === state.device) ids[row].push(v);
      }
      return { which, use: usage(model, arena), lanes: ids.map((of) => boxesOf(of, start, end)),
        maps: [arena, boxesIn(model, which, HOST, 0), boxesIn(model, which, DISK, 0)] };
    });
    const tops = layers[0].maps.map((boxes) => boxes.id.reduce((top, v) =>
      Math.max(top, model.version.offset[v] + model.tensor.bytes[model.version.tensor[v]]), 0));
    const used = layers[0].use.total.reduce((top, bytes) => Math.max(top, bytes), 0);
    const most = Math.max(model.budget || 0, used + model.reserved, 1);
    // A fifth more, for the budget's line and its words.
    panels = [{ name: "in use", says: "≤ " + formatBytes(used + model.reserved), tall: 120,
      top: 1.2 * most }];
    ["device " + state.device, "host memory", "disk"].forEach((name, n) => {
      if (n && !tops[n]) return;
      panels.push({ name, says: formatBytes(tops[n]), map: n, tall: n ? 70 : 280, top: tops[n] || 1 });
    });
    rows = ROWS.map((name, row) => ({ name, row })).filter(({ row }) => layers[0].lanes[row].id.length);
    let y = 8;
    for (const panel of panels) panel.y = y, y += panel.tall + 14;
    for (const row of rows) row.y = y, row.tall = 22, y += 27;
    stage.style.height = y + 22 + "px";
    controls();
    draw();
  }

  let colours, wide, left, context, above;
  function measure() {
    const style = getComputedStyle(root), ratio = window.devicePixelRatio || 1;
    colours = { text: style.color, line: style.getPropertyValue("--line"), lane: "#56B4E9",
      ground: style.getPropertyValue("--ground"), reserved: style.getPropertyValue("--reserved") };
    const width = stage.clientWidth, height = stage.clientHeight;
    left = width < 600 ? 62 : 104, wide = Math.max(width - left - 8, 50);
    [context, above] = [canvas, front].map((c) => {
      if (c.width !== Math.round(width * ratio) || c.height !== Math.round(height * ratio)) {
        c.width = Math.round(width * ratio), c.height = Math.round(height * ratio);
      }
      const context = c.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, height);
      context.font = (width < 600 ? 10 : 12) + "px sans-serif";
      return context;
    });
  }

  const xOf = (seconds) => left + (wide * (seconds - state.from)) / (state.to - state.from);
  const timeOf = (x) => state.from + ((x - left) * (state.to - state.from)) / wide;
  const yOf = (panel, bytes) => panel.y + panel.tall * (1 - bytes / panel.top);

  let asked = 0;
  function draw() {
    if (!asked) asked = requestAnimationFrame(() => ((asked = 0), paint()));
  }

  function paint() {
    measure();
    if (!stage.clientWidth) return;
    for (const panel of panels) panel.map === undefined ? paintUse(panel) : paintMap(panel);
    for (const row of rows) paintLane(row);
    context.fillStyle = colours.text;
    for (const panel of panels) {
      label(panel.name, panel.y + 12);
      label(panel.says, panel.y + 26);
      context.strokeStyle = colours.line;
      context.strokeRect(left + 0.5, panel.y + 0.5, wide, panel.tall);
    }
    for (const row of rows) label(row.name, row.y + 15);
    const bottom = stage.clientHeight - 6;
    context.fillText(formatSeconds(state.from), left, bottom);
    context.textAlign = "right";
    context.fillText(formatSeconds(state.to), left + wide, bottom);
    context.textAlign = "left";
    paintAbove();
  }

  function label(text, y) {
    context.textAlign = "right";
    context.fillText(text, left - 6, y, left - 8);
    context.textAlign = "left";
  }

  // Of each column the moment at which most is in use, so that no peak is lost.
  function paintUse(panel) {
    const { at, of, total } = layers[0].use;
    const scale = panel.tall / panel.top, base = panel.y + panel.tall;
    for (let x = 0; x < wide; x++) {
      const until = timeOf(left + x + 1);
      let n = Math.max(bisect(at, timeOf(left + x), true) - 1, 0), best = n, most = -1;
      for (const last = bisect(at, until, false); n < Math.max(last, best + 1); n++) {
        if (total[n] > most) most = total[n], best = n;
      }
      if (until > model.times[layers[0].which].seconds + (state.to - state.from) / wide) break;
      let y = base - model.reserved * scale;
      context.fillStyle = colours.reserved;
      context.fillRect(left + x, y, 1, base - y);
      for (let k = 0; k < of.length; k++) {
        const tall = (of[k][best] || 0) * scale;
        context.fillStyle = data.colours[k];
        if (tall) context.fillRect(left + x, (y -= tall), 1, tall);
      }
    }
    if (layers[1]) paintLine(panel, layers[1]);
    if (model.budget) {
      const y = yOf(panel, model.budget);
      context.fillStyle = colours.text;
      context.fillRect(left, y, wide, 2);
      context.fillText("budget " + formatBytes(model.budget), left + 6, y - 4);
    }
  }

  function paintLine(panel, { which, use: { at, total } }) {
    const ends = model.times[which].seconds;
    context.strokeStyle = colours.text;
    context.setLineDash([4, 3]);
    context.beginPath();
    for (let x = 0; x < wide && timeOf(left + x) <= ends; x++) {
      const n = Math.max(bisect(at, timeOf(left + x), true) - 1, 0);
      context.lineTo(left + x, yOf(panel, model.reserved + (total[n] || 0)));
    }
    context.stroke();
    context.setLineDash([]);
  }

  // Boxes do not overlap, so each pixel is written about once, however many boxes there are.
  function paintMap(panel) {
    const boxes = layers[0].maps[panel.map], ratio = canvas.width / stage.clientWidth;
    const [first, last] = visible(boxes, state.from, state.to);
    const width = Math.ceil(wide * ratio), height = Math.round(panel.tall * ratio);
    const image = context.createImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    const scale = width / (state.to - state.from), lift = height / panel.top;
    for (let i = first; i < last; i++) {
      if (boxes.end[i] < state.from) continue;
      const low = boxes.low[i] * lift, tall = boxes.bytes[i] * lift, ink = inks[boxes.kind[i]];
      const x = Math.max(Math.floor((boxes.begin[i] - state.from) * scale), 0);
      let until = Math.min(Math.max(Math.round((boxes.end[i] - state.from) * scale), x + 1), width);
      const bottom = height - Math.floor(low);
      let y = Math.max(Math.min(Math.round(height - low - tall), bottom - 1), 0);
      if (until - x > 4) until--; // a gap between boxes that are large enough for one
      if (bottom - y > 4) y++;
      // Of thin boxes that share a row those that add nothing to it are left out.
      const middle = y * width + ((x + until) >> 1);
      if (tall < 1 && pixels[y * width + x] === ink && pixels[middle] === ink &&
        pixels[y * width + until - 1] === ink) continue;
      for (; y < bottom; y++) {
        if (until - x === 1) pixels[y * width + x] = ink;
        else pixels.fill(ink, y * width + x, y * width + until);
      }
    }
    context.putImageData(image, Math.round(left * ratio), Math.round(panel.y * ratio));
    if (layers[1]) outline(panel, layers[1].maps[panel.map]);
  }

  function outline(panel, boxes) {
    const [first, last] = visible(boxes, state.from, state.to);
    context.strokeStyle = colours.text;
    context.lineWidth = 0.5;
    for (let i = first; i < last; i++) {
      const x = xOf(boxes.begin[i]), w = xOf(boxes.end[i]) - x, v = boxes.id[i];
      const h = (panel.tall * model.tensor.bytes[model.version.tensor[v]]) / panel.top;
      if (w < 4 || h < 4) continue; // a frame would hide it
      const from = Math.max(x, left), to = Math.min(x + w, left + wide);
      context.strokeRect(from, yOf(panel, model.version.offset[v]) - h, to - from, h);
    }
    context.lineWidth = 1;
  }

  // Each column is as opaque as the lane was busy in it.
  function paintLane(row) {
    const ratio = canvas.width / stage.clientWidth, width = Math.ceil(wide * ratio);
    const scale = width / (state.to - state.from);
    layers.forEach((layer, n) => {
      const boxes = layer.lanes[row.row], [first, last] = visible(boxes, state.from, state.to);
      const busy = new Float32Array(width), tall = row.tall / layers.length;
      for (let i = first; i < last; i++) {
        const from = Math.max((boxes.begin[i] - state.from) * scale, 0);
        let to = Math.min((boxes.end[i] - state.from) * scale, width);
        if (to - from > 4) to -= 0.5;
        for (let x = Math.floor(from); x < to; x++) busy[x] += Math.min(x + 1, to) - Math.max(x, from);
      }
      const image = context.createImageData(width, Math.max(Math.round((tall - 1) * ratio), 1));
      const pixels = new Uint32Array(image.data.buffer), ink = n ? over : laneInk;
      for (let x = 0; x < width; x++) {
        pixels[x] = busy[x] ? (ink & 0xffffff) | (Math.min(40 + 215 * busy[x], 255) << 24) : 0;
      }
      for (let y = 1; y < image.height; y++) pixels.copyWithin(y * width, 0, width);
      context.putImageData(image, Math.round(left * ratio), Math.round((row.y + n * tall) * ratio));
    });
    context.strokeStyle = colours.line;
    context.strokeRect(left + 0.5, row.y + 0.5, wide, row.tall);
  }

  // The cursor, and the chosen tensor in all its places.
  function paintAbove() {
    above.clearRect(0, 0, stage.clientWidth, stage.clientHeight);
    const { version, tensor, vertex } = model, { begin, end } = model.liveRanges[state.which];
    const run = model.times[state.which];
    const v = state.over >= 0 ? state.over : state.chosen;
    above.save();
    above.beginPath();
    above.rect(left - 1, 0, wide + 2, stage.clientHeight);
    above.clip();
    if (v >= 0) {
      above.strokeStyle = above.fillStyle = colours.text;
      above.lineWidth = 2;
      for (const p of placesOf(model, version.tensor[v])) {
        const n = { [DEVICE]: 0, [HOST]: 1, [DISK]: 2 }[version.space[p]];
        const panel = panels.find((candidate) => candidate.map === n);
        const writer = version.writer[p] - 1;
        const line = writer >= 0 ? ROW_OF_KIND[vertex.kind[writer]] : -1;
        const row = rows.find((r) => r.row === line);
        if (row && (line >= NO_DEVICE || vertex.device[writer] === state.device)) {
          const x = xOf(run.start[writer]), w = xOf(run.end[writer]) - x;
          above.strokeRect(x, row.y, Math.max(w, 2), row.tall);
        }
        if (!panel || (n === 0 && version.index[p] !== state.device)) continue;
        const h = (panel.tall * tensor.bytes[version.tensor[p]]) / panel.top;
        const x = xOf(begin[p]), w = xOf(end[p]) - x;
        above.strokeRect(x, yOf(panel, version.offset[p]) - h, Math.max(w, 2), Math.max(h, 2));
      }
    }
    if (state.drag) {
      above.fillStyle = colours.lane + "55";
      above.fillRect(state.drag.from, 0, state.drag.to - state.drag.from, stage.clientHeight);
    }
    above.fillStyle = colours.text;
    if (state.cursor !== null) above.fillRect(xOf(state.cursor), 0, 1, stage.clientHeight - 18);
    above.restore();
    above.fillStyle = colours.text;
    if (state.cursor !== null) {
      const x = Math.min(Math.max(xOf(state.cursor) + 4, left + 80), left + wide - 150);
      above.fillText(formatSeconds(state.cursor), x, stage.clientHeight - 6);
    }
  }

  function at(event) {
    const frame = canvas.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  }

  function under([x, y]) {
    const maps = panels.filter((p) => p.map !== undefined), time = timeOf(x);
    const panel = maps.find((p) => y >= p.y && y < p.y + p.tall);
    if (panel) {
      return hit(model, layers[0].maps[panel.map], time, panel.top * (1 - (y - panel.y) / panel.tall));
    }
    const row = rows.find((r) => y >= r.y && y < r.y + r.tall);
    if (!row) return -1;
    const boxes = layers[0].lanes[row.row], i = bisect(boxes.begin, time, true) - 1;
    // What a vertex wrote stands for it.
    return i >= 0 && boxes.end[i] >= time ? model.version.writer.indexOf(boxes.id[i] + 1) : -1;
  }

  function tell() {
    const v = state.over >= 0 ? state.over : state.chosen;
    facts.replaceChildren();
    for (const [what, text] of v < 0 ? [] : describe(model, state.which, v)) {
      facts.append(make("dt", {}, what), make("dd", {}, text));
    }
    // What follows the view moves down once, not with every box.
    facts.style.minHeight = Math.max(parseFloat(facts.style.minHeight) || 0, facts.offsetHeight) + "px";
    paintAbove();
  }

  function pick(v) {
    state.chosen = v, state.over = -1;
    const { begin, end } = model.liveRanges[state.which];
    if (v >= 0 && model.version.space[v] === DEVICE && model.version.index[v] !== state.device) {
      state.device = model.version.index[v];
      arrange();
    }
    if (v >= 0 && (end[v] < state.from || begin[v] > state.to)) {
      show(begin[v] - (state.to - state.from) / 2, begin[v] + (state.to - state.from) / 2);
    }
    tell();
  }

  function show(from, to) {
    const whole = span(), length = Math.min(Math.max(to - from, whole * 1e-7), whole);
    state.from = Math.min(Math.max(from, 0), whole - length);
    state.to = state.from + length;
    draw();
  }

  function reset() {
    show(0, Infinity);
  }

  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = at(event);
    state.cursor = Math.min(Math.max(timeOf(x), state.from), state.to);
    if (state.drag) state.drag.to = x;
    else state.over = under([x, y]);
    tell();
  });
  canvas.addEventListener("pointerleave", () => ((state.cursor = null), (state.over = -1), tell()));
  canvas.addEventListener("pointerdown", (event) => {
    state.drag = { from: at(event)[0], to: at(event)[0] };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    const drag = state.drag;
    state.drag = null;
    if (drag && Math.abs(drag.to - drag.from) > 4) {
      show(timeOf(Math.min(drag.from, drag.to)), timeOf(Math.max(drag.from, drag.to)));
    } else pick(under(at(event)));
  });
  canvas.addEventListener("dblclick", reset);
  canvas.addEventListener("wheel", (event) => {
    const length = state.to - state.from;
    if (event.ctrlKey || event.metaKey) {
      const middle = timeOf(at(event)[0]), factor = Math.exp(event.deltaY * 0.005);
      show(middle - (middle - state.from) * factor, middle + (state.to - middle) * factor);
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      show(state.from + (event.deltaX / wide) * length, state.to + (event.deltaX / wide) * length);
    } else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const length = state.to - state.from, step = length / 10;
    const moves = {
      ArrowLeft: () => show(state.from - step, state.to - step),
      ArrowRight: () => show(state.from + step, state.to + step),
      ArrowUp: () => show(state.from + step, state.to - step),
      ArrowDown: () => show(state.from - step, state.to + step),
      "+": () => show(state.from + step, state.to - step),
      "=": () => show(state.from + step, state.to - step),
      "-": () => show(state.from - step, state.to + step),
      0: reset, Home: reset, Escape: () => pick(-1),
    };
    if (!moves[event.key] || event.altKey || event.ctrlKey || event.metaKey) return;
    moves[event.key]();
    event.preventDefault();
  });

  root.querySelector(".static").replaceWith(slider, bar, hits, stage, legend, help, facts);
  load();
  new ResizeObserver(draw).observe(stage);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new MutationObserver(draw).observe(document.body, { attributes: true }); // a notebook's theme
}

document.querySelectorAll(".jaxoffload-view:not([data-live])").forEach(start);
