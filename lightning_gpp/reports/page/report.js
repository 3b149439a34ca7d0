"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NAMES = data.timelines.measured ? ["measured", "simulated"] : ["simulated"];
  const main = data.timelines[NAMES[0]];
  const numDevices = main.devices.length;
  const seconds = Math.max(...NAMES.map((name) => data.timelines[name].seconds)) || 1;
  const BAR = { measured: 24, simulated: NAMES.length > 1 ? 12 : 24 };
  const STRIP = main.collectives.some((lane) => lane.length) ? 9 : 0;
  const MEMORY = data.timelines.simulated.memory.length ? 30 : 0;
  const TOP = 6, PAD = 8, AXIS = 24, RIGHT = 10;
  const bars = NAMES.reduce((sum, name) => sum + BAR[name] + 2, 0);
  const rowHeight = bars + STRIP + MEMORY + PAD;
  const height = TOP + numDevices * rowHeight + AXIS;
  const scroll = document.getElementById("scroll"), labels = document.getElementById("labels");
  const tip = document.getElementById("tip"), details = document.getElementById("details");
  let zoom = 1, chosen = null, pinned = null;

  // -- figures ---------------------------------------------------------------------------------------------------

  const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
  const short = (value) => String(Number(value.toPrecision(3)));
  const duration = (time) => {
    if (!time) return "0 s";
    const [factor, unit] = UNITS.find(([factor]) => Math.abs(time) >= factor) || UNITS[3];
    return `${short(time / factor)} ${unit}`;
  };
  const size = (bytes) => {
    const names = ["B", "KiB", "MiB", "GiB", "TiB"];
    let index = 0;
    while (Math.abs(bytes) >= 999.5 && index < names.length - 1) { bytes /= 1024; index += 1; }
    return `${short(bytes)} ${names[index]}`;
  };
  const percent = (share) => `${Math.round(100 * share)} %`;

  function ticks(span, most) {
    const least = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= least * (1 - 1e-9));
    const [factor, unit] = UNITS.find(([factor]) => span >= factor) || UNITS[3];
    const times = [];
    for (let number = 0; number * step <= seconds * (1 + 1e-9); number += 1) {
      times.push([number * step, number ? `${Number((number * step / factor).toPrecision(6))} ${unit}` : "0"]);
    }
    return times;
  }

  // -- drawing ---------------------------------------------------------------------------------------------------

  function element(name, attributes, parent) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (parent) parent.append(node);
    return node;
  }

  const svg = element("svg", { height, role: "img", "aria-label": "Timeline" });
  const room = document.createElement("div");
  room.className = "room";
  scroll.append(room, svg);

  const view = () => scroll.clientWidth;
  const scale = () => (view() - RIGHT) * zoom / seconds;
  const x = (time) => time * scale() - scroll.scrollLeft;
  const rowTop = (device) => TOP + device * rowHeight;
  const barTop = (device, name) => rowTop(device) + (name === "simulated" && NAMES.length > 1 ? BAR.measured + 2 : 0);

  function label() {
    let widest = 0;
    for (let device = 0; device < numDevices; device += 1) {
      const node = document.createElement("span");
      node.style.top = `${rowTop(device) + 2}px`;
      const peak = data.peaks[device] === undefined ? "" : `, ${size(data.peaks[device])}`;
      const small = document.createElement("small");
      small.textContent = `idle ${percent(main.idle[device])}${peak}`;
      node.append(`device ${device}`, small);
      labels.append(node);
      widest = Math.max(widest, small.textContent.length);
    }
    labels.style.width = `${Math.max(74, 6.1 * widest + 16)}px`;
    labels.style.height = `${height}px`;
  }

  function draw() {
    const width = view();
    svg.replaceChildren();
    svg.setAttribute("width", width);
    room.style.width = `${(width - RIGHT) * zoom + RIGHT}px`;
    const shown = seconds / zoom;
    for (const [time, text] of ticks(shown, (width - RIGHT) / 90)) {
      if (x(time) < -60 || x(time) > width + 60) continue;
      element("path", { class: "grid", d: `M ${x(time)} 0 V ${height - AXIS + 4}` }, svg);
      const anchor = time ? (x(time) > width - 30 ? "end" : "middle") : "start";
      element("text", { class: "muted small", x: x(time) + (time ? 0 : 2), y: height - 8, "text-anchor": anchor }, svg)
        .textContent = text;
    }
    for (let device = 0; device < numDevices; device += 1) {
      for (const name of NAMES) spans(device, name, width);
      strip(device, width);
      if (MEMORY) memory(device, width);
    }
    if (chosen) links(chosen);
  }

  function spans(device, name, width) {
    const top = barTop(device, name), bar = BAR[name];
    data.timelines[name].devices[device].forEach((span, index) => {
      const left = x(span[3]), right = x(span[4]);
      if (right < 0 || left > width) return;
      const is = chosen && chosen.device === device && chosen.index === index && chosen.name === name;
      const attributes = { x: left, y: top, width: Math.max(0.6, right - left - 0.7), height: bar, rx: 2 };
      const fill = data.colors[span[0]][span[1]];
      const box = element("rect", { ...attributes, fill, class: is ? "action chosen" : "action" }, svg);
      box.dataset.device = device; box.dataset.index = index; box.dataset.name = name;
      if (data.hatched.includes(span[1])) element("rect", { ...attributes, fill: "url(#hatch)", "pointer-events": "none" }, svg);
      const from = Math.max(left, 0), to = Math.min(right, width), text = caption(span, to - from);
      if (bar > 14 && text) {
        element("text", { class: "on", x: (from + to) / 2, y: top + bar / 2 + 4, "text-anchor": "middle" }, svg)
          .textContent = text;
      }
    });
  }

  function caption(span, width) {
    const whole = `${span[1]}${span[2]}`, full = `${data.stages[span[0]].name} ${whole}`;
    return [full, whole, String(span[2])].find((text) => 7 * text.length + 6 <= width) || "";
  }

  function strip(device, width) {
    for (const [stage, kind, start, stop] of main.collectives[device]) {
      if (x(stop) < -2 || x(start) > width) continue;
      // copies to the host (O) in the upper half, those back (L) in the lower one: both directions at the same time
      const height = (STRIP - 2) / ("OL".includes(kind) ? 2 : 1), y = rowTop(device) + bars + (kind === "L" ? height : 0);
      const box = { x: x(start), y, width: Math.max(2, x(stop) - x(start)), height };
      const node = element("rect", { ...box, fill: data.colors[stage][kind] }, svg);
      element("title", {}, node).textContent =
        `${data.kinds[kind]}, ${data.stages[stage].name}: ${duration(start)} to ${duration(stop)}`;
    }
  }

  const highest = Math.max(...data.peaks, 1);
  const ceiling = highest * 1.08;

  function memory(device, width) {
    const bottom = rowTop(device) + bars + STRIP + MEMORY, level = (bytes) => bottom - bytes / ceiling * (MEMORY - 2);
    const curve = data.timelines.simulated.memory[device], parts = [`M 0 ${bottom}`];
    let held = 0;
    for (const [time, bytes] of curve) {
      const at = Math.min(Math.max(x(time), 0), width);
      parts.push(`L ${at} ${level(held)} L ${at} ${level(bytes)}`);
      held = bytes;
    }
    const end = Math.min(Math.max(x(data.timelines.simulated.seconds), 0), width);
    const node = element("path", { class: "memory", d: `${parts.join(" ")} L ${end} ${level(held)} L ${end} ${bottom} Z` }, svg);
    element("title", {}, node).textContent = `memory of device ${device}, simulated: at most ${size(data.peaks[device])}`;
    const limit = data.limits[device];
    if (limit && limit <= ceiling) element("path", { class: "limit", d: `M 0 ${level(limit)} H ${width}` }, svg);
  }

  // -- dependencies ----------------------------------------------------------------------------------------------

  const keyOf = (device, span) => `${device} ${span[0]}${span[1]}${span[2]}`;
  const simulated = data.timelines.simulated;
  const into = new Map(), outOf = new Map();
  for (const message of simulated.messages) {
    const [src, producer, dst, consumer] = message;
    const from = keyOf(src, simulated.devices[src][producer]), to = keyOf(dst, simulated.devices[dst][consumer]);
    const entry = { from, to, src, dst, bytes: message[6], seconds: message[5] - message[4] };
    if (!into.has(to)) into.set(to, []);
    if (!outOf.has(from)) outOf.set(from, []);
    into.get(to).push(entry);
    outOf.get(from).push(entry);
  }
  const places = Object.fromEntries(NAMES.map((name) => [name, new Map(
    data.timelines[name].devices.flatMap((row, device) => row.map((span) => [keyOf(device, span), { device, span }])))]));

  function links(place) {
    const own = data.timelines[place.name].devices[place.device][place.index], key = keyOf(place.device, own);
    for (const [entries, kind] of [[into.get(key), "before"], [outOf.get(key), "after"]]) {
      for (const entry of entries || []) {
        const from = places[place.name].get(entry.from), to = places[place.name].get(entry.to);
        if (from && to) link(from, to, place.name, kind);
      }
    }
  }

  function link(from, to, name, kind) {
    const [x1, x2] = [x(from.span[4]), x(to.span[3])];
    const [y1, y2] = [from, to].map((end) => barTop(end.device, name) + BAR[name] / 2);
    const bend = Math.max(12, Math.abs(x2 - x1) / 2);
    element("path", { class: kind, d: `M ${x1} ${y1} C ${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}` }, svg);
    element("circle", { cx: x2, cy: y2, r: 3, fill: `var(--${kind === "before" ? "bad" : "good"})` }, svg);
  }

  function describe(place) {
    const span = data.timelines[place.name].devices[place.device][place.index], stage = data.stages[span[0]];
    const key = keyOf(place.device, span), lines = [];
    const number = span[1] === "D" ? "" : `, micro-batch ${span[2]}`;
    lines.push(["strong", `${span[0]}${span[1]}${span[2]}: ${data.kinds[span[1]]} of ${stage.name}${number}`]);
    lines.push(["div", `${place.name}: ${duration(span[3])} to ${duration(span[4])}, takes ${duration(span[4] - span[3])}`]);
    const other = NAMES.find((name) => name !== place.name);
    const twin = other && places[other].get(key);
    if (twin) lines.push(["div", `${other}: takes ${duration(twin.span[4] - twin.span[3])}`]);
    for (const entry of into.get(key) || []) lines.push(["div", `reads ${size(entry.bytes)} from device ${entry.src}, on the way ${duration(entry.seconds)}`, "before"]);
    for (const entry of outOf.get(key) || []) lines.push(["div", `sends ${size(entry.bytes)} to device ${entry.dst}`, "after"]);
    const held = heldAfter(key, place.device);
    if (held !== null) lines.push(["div", `the device holds ${size(held)} afterwards`]);
    lines.push(["div", stage.modules.slice(0, 4).join(", ") + (stage.modules.length > 4 ? ", ..." : ""), "hint"]);
    return lines.map(([tag, text, name]) => {
      const node = document.createElement(tag);
      node.textContent = text;
      if (name) node.className = name;
      return node;
    });
  }

  function heldAfter(key, device) {
    const place = places.simulated.get(key);
    if (!place || !MEMORY) return null;
    let held = null;
    for (const [time, bytes] of simulated.memory[device]) if (time <= place.span[4] * (1 + 1e-9)) held = bytes;
    return held;
  }

  // -- pointer ---------------------------------------------------------------------------------------------------

  function placeAt(event) {
    const { device, index, name } = event.target.dataset || {};
    return index === undefined ? null : { device: Number(device), index: Number(index), name };
  }

  const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

  svg.addEventListener("pointermove", (event) => {
    const place = placeAt(event);
    tip.hidden = !place;
    if (place) {
      if (tip.dataset.place !== JSON.stringify(place)) tip.replaceChildren(...describe(place));
      tip.dataset.place = JSON.stringify(place);
      const { width: tipWidth, height: tipHeight } = tip.getBoundingClientRect();
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tipWidth - 8))}px`;
      const below = event.clientY + 18;
      tip.style.top = `${below + tipHeight > innerHeight ? event.clientY - tipHeight - 12 : below}px`;
    }
    if (!same(place || pinned, chosen)) { chosen = place || pinned; draw(); }
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; chosen = pinned; draw(); });
  svg.addEventListener("click", (event) => {
    const place = placeAt(event);
    chosen = pinned = place && !same(place, pinned) ? place : null;
    details.replaceChildren(...(pinned ? describe(pinned) : []));
    draw();
  });

  // -- zoom ------------------------------------------------------------------------------------------------------

  function zoomBy(factor, at = view() / 2) {
    const time = (scroll.scrollLeft + at) / scale();
    zoom = Math.min(Math.max(1, zoom * factor), 2000);
    room.style.width = `${(view() - RIGHT) * zoom + RIGHT}px`;
    scroll.scrollLeft = time * scale() - at;
    draw();
  }
  document.getElementById("in").addEventListener("click", () => zoomBy(1.6));
  document.getElementById("out").addEventListener("click", () => zoomBy(1 / 1.6));
  document.getElementById("fit").addEventListener("click", () => zoomBy(0));
  scroll.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoomBy(event.deltaY < 0 ? 1.25 : 0.8, event.clientX - scroll.getBoundingClientRect().left);
  }, { passive: false });
  scroll.addEventListener("scroll", () => requestAnimationFrame(draw));
  addEventListener("resize", draw);

  function legend() {
    const used = new Set(NAMES.flatMap((name) => data.timelines[name].devices.flat().map((span) => span[1])));
    main.collectives.flat().forEach((entry) => used.add(entry[1]));
    const list = document.getElementById("legend");
    const add = (color, text, hatched) => {
      const entry = document.createElement("li"), swatch = document.createElement("i");
      swatch.style.background = hatched ? `repeating-linear-gradient(45deg, ${color} 0 3px, #fff8 3px 5px)` : color;
      entry.append(swatch, text);
      list.append(entry);
    };
    data.stages.forEach((stage, index) => add(data.colors[index].B, `${index} ${stage.name}`));
    for (const [kind, meaning] of Object.entries(data.kinds)) {
      if (used.has(kind)) add(data.colors[0][kind], `${kind} ${meaning}`, data.hatched.includes(kind));
    }
    if (MEMORY) add("var(--arrow)", "memory of the device, simulated" + (data.limits.every((limit) => limit > ceiling) ? `; the limit is ${size(Math.min(...data.limits))}` : "; dashed: its limit"));
  }

  document.querySelector(".controls").hidden = false;
  label();
  legend();
  draw();
  document.documentElement.dataset.drawn = "true";
})();
