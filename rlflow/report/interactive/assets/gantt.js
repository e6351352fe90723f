// The timeline: rows of devices, a bar an action instance, what each gap waited for, memory.
const LEFT = 104, LANE = 24, STRIP = 15, MEMORY = 46, AXIS = 24, MOST = 3000;
const gantt = {from: 0, to: 1, lanes: [], search: "", memory: true, focus: null, width: 900};
const shortName = (name) => name.slice(name.lastIndexOf(".") + 1);

function spanAt(n) {
  const {spans, names} = page.data.timeline;
  return {n, name: names[spans.action[n]], iteration: spans.iteration[n], start: spans.start[n], length: spans.length[n],
    rows: spans.places[spans.place[n]], held: spans.held[n], released: spans.released[n], failed: gantt.failed.has(n)};
}

function dealLanes() {
  const {spans, rows} = page.data.timeline;
  gantt.failed = new Set(spans.failed);
  gantt.lanes = rows.map(() => ({of: new Map(), count: 1, own: []}));
  const free = rows.map(() => []);
  for (let n = 0; n < spans.start.length; n++) for (const row of spans.places[spans.place[n]]) {
    let lane = free[row].findIndex((end) => end <= spans.start[n]);
    if (lane < 0) lane = free[row].length < 6 ? free[row].length : 5;
    free[row][lane] = spans.start[n] + spans.length[n];
    gantt.lanes[row].of.set(n, lane);
    gantt.lanes[row].own.push(n);
    gantt.lanes[row].count = Math.max(gantt.lanes[row].count, lane + 1);
  }
}

const window_ = (number) => page.data.timeline.iterations.find(([i]) => i === number);

function goTo(number) {
  const known = page.data.timeline.iterations;
  const found = window_(number) ?? known.reduce((a, b) => (Math.abs(b[0] - number) < Math.abs(a[0] - number) ? b : a));
  gantt.iteration = found[0];
  const edge = Math.max(1, (found[2] - found[1]) * 0.015);
  gantt.from = found[1] - edge; gantt.to = found[2] + edge;
  if (gantt.number) { gantt.number.value = found[0]; gantt.slider.value = known.indexOf(found); }
  drawGantt();
}

function zoom(factor, at = 0.5) {
  const middle = gantt.from + at * (gantt.to - gantt.from);
  const whole = page.data.timeline.iterations;
  const most = 1.1 * (whole[whole.length - 1][2] - whole[0][1]) + 2;
  const width = Math.min(most, Math.max(2, (gantt.to - gantt.from) * factor));
  gantt.from = middle - at * width; gantt.to = gantt.from + width;
  drawGantt();
}
function pan(share) {
  const move = share * (gantt.to - gantt.from);
  gantt.from += move; gantt.to += move;
  drawGantt();
}

// What was waited for between two moments of a gap, the longest first.
function causesOf([start, end, , pieces], from = start, to = end) {
  const by = new Map();
  let at = start;
  for (const [cause, micro] of pieces) {
    const inside = Math.min(at + micro, to) - Math.max(at, from);
    if (inside > 0) by.set(cause, (by.get(cause) ?? 0) + inside);
    at += micro;
  }
  return longest(by);
}
const longest = (by) => [...by].sort((a, b) => b[1] - a[1]);

function causesText(causes, length) {
  return causes.map(([cause, micro]) => `${percent(micro / length)} ${cause < 0
    ? "outside the plan's actions (dispatch, a save, the controller)" : page.data.timeline.names[cause]}`).join(", ");
}
function gapText(gap, row) {
  const [from, to, place] = gap, causes = causesOf(gap).slice(0, 4);
  const next = spanAt(place);
  return `${page.data.timeline.rows[row].label} idle for ${seconds((to - from) / 1e6)} before ${next.name} of iteration ${next.iteration}.\nIt waited for: ${causesText(causes, to - from)}`;
}
function spanText(span) {
  const plan = page.data.actions[span.name];
  const parts = [`${span.name}, iteration ${span.iteration}: ${seconds(span.length / 1e6)}${span.failed ? ", failed" : ""}`];
  if (plan && plan.predicted !== null) parts.push(`predicted ${seconds(plan.predicted)}, so it took ${digits(span.length / 1e6 / plan.predicted, 2)} times as long`);
  if (span.released >= 0) { const by = spanAt(span.released); parts.push(`let start by ${by.name} of iteration ${by.iteration}`); }
  if (span.held !== null) parts.push(`memory ${bytes(span.held)} (${page.data.timeline.memory})${plan && plan.peak !== null ? `; the plan proves ${bytes(plan.peak)}` : ""}`);
  return parts.join("\n");
}

function iterationIdle(number) {
  const {rows, gaps} = page.data.timeline, [, start, end] = window_(number);
  return rows.map((row, r) => {
    if (row.host) return null;
    const by = new Map();
    let idle = 0;
    for (const gap of gaps[r]) {
      const inside = Math.min(gap[1], end) - Math.max(gap[0], start);
      if (inside <= 0) continue;
      idle += inside;
      for (const [cause, micro] of causesOf(gap, start, end)) by.set(cause, (by.get(cause) ?? 0) + micro);
    }
    const causes = longest(by).slice(0, 5);
    const why = idle ? `, waiting for: ${causesText(causes, end - start)}` : "";
    return `${row.label} idle ${percent(idle / (end - start))} of iteration ${number}${why}`;
  }).filter(Boolean);
}

function ticks(svg, x, bottom) {
  const span = gantt.to - gantt.from, origin = window_(gantt.iteration)[1];
  let step = 1;
  for (const power of [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10]) for (const m of [1, 2, 5]) if (span / (step = m * power) <= 9) { drawTicks(step); return; }
  drawTicks(step);
  function drawTicks(each) {
    for (let at = Math.ceil((gantt.from - origin) / each) * each; at <= gantt.to - origin; at += each) {
      svg.append(draw("line", {class: "tick", x1: x(origin + at), x2: x(origin + at), y1: AXIS - 5, y2: bottom}));
      svg.append(draw("text", {x: x(origin + at), y: 12, "text-anchor": "middle"}, seconds(at / 1e6)));
    }
  }
}

function bar(span, row, top, x) {
  const plan = page.data.actions[span.name];
  const left = Math.max(x(span.start), LEFT - 4), right = Math.min(x(span.start + span.length), gantt.width + 4);
  const width = Math.max(1.5, right - left);
  const found = gantt.search && span.name.toLowerCase().includes(gantt.search);
  const kind = ["span", span.iteration !== gantt.iteration && "other", span.failed && "failed", gantt.search && (found ? "found" : "dim"),
    page.selected === span.name && "lit"].filter(Boolean).join(" ");
  const group = draw("g", {class: kind, role: "button", tabindex: "-1", "data-key": `${row}:${span.n}`, "data-at": span.start, style: `--c: ${plan ? plan.colour : "#7B8794"}`,
    "aria-label": `${page.data.timeline.rows[row].label}: ${spanText(span)}`}, draw("rect", {x: left, y: top + 2, width, height: LANE - 5, rx: 3}));
  for (const name of [span.name, shortName(span.name)]) if (name.length * 6.3 + 8 < width) {
    group.append(draw("text", {x: left + width / 2, y: top + 15, "text-anchor": "middle"}, name));
    break;
  }
  group.tip = () => spanText(span);
  group.chosen = () => { gantt.chosen = span.n; select(span.name); };
  return group;
}

function gapBar(gap, row, top, x) {
  const left = Math.max(x(gap[0]), LEFT), right = Math.min(x(gap[1]), gantt.width), width = Math.max(1, right - left);
  const cause = causesOf(gap)[0]?.[0] ?? -1;
  const name = cause < 0 ? "" : page.data.timeline.names[cause];
  const group = draw("g", {class: "gap", role: "button", tabindex: "-1", "data-key": `${row}:gap${gap[2]}`, "data-at": gap[0]},
    draw("rect", {x: left, y: top, width, height: STRIP - 3, rx: 2}));
  let shown = "";
  for (const words of name ? [`waits for ${name}`, shortName(name)] : ["outside the plan's actions"]) if (words.length * 5.4 + 6 < width) {
    group.append(draw("text", {x: left + width / 2, y: top + 9.5, "text-anchor": "middle"}, words));
    shown = `${words}: `;
    break;
  }
  group.setAttribute("aria-label", shown + gapText(gap, row));
  group.tip = () => gapText(gap, row);
  group.chosen = () => { if (cause >= 0) select(page.data.timeline.names[cause]); };
  return group;
}

function memoryStrip(svg, row, shown, top, x) {
  const fact = page.data.timeline.rows[row];
  const planned = (span) => page.data.actions[span.name]?.peak ?? null;
  const most = Math.max(1, ...shown.map((s) => Math.max(s.held ?? 0, planned(s) ?? 0)));
  const scale = fact.budget && fact.budget < 4 * most ? Math.max(fact.budget, most) : most;
  const y = (value) => top + MEMORY - 4 - (value / scale) * (MEMORY - 10);
  const box = (s) => [Math.max(LEFT, x(s.start)), Math.min(gantt.width, x(s.start + s.length))];
  for (const span of shown) {
    const [left, right] = box(span);
    if (span.held !== null) svg.append(draw("rect", {class: "held", x: left, y: y(span.held), width: Math.max(1, right - left), height: top + MEMORY - 4 - y(span.held)}));
    if (planned(span) !== null) svg.append(draw("path", {class: "proven", d: `M${left} ${y(planned(span))}H${Math.max(right, left + 1)}`}));
  }
  if (fact.budget && scale >= fact.budget) svg.append(draw("path", {class: "budget", d: `M${LEFT} ${y(fact.budget)}H${gantt.width}`}));
  svg.append(draw("text", {x: LEFT - 8, y: top + 12, "text-anchor": "end"}, "memory"), draw("text", {x: LEFT - 8, y: top + 25, "text-anchor": "end"}, bytes(scale)));
}

function drawGantt() {
  const {rows, gaps} = page.data.timeline;
  const svg = gantt.svg;
  gantt.width = Math.max(320, svg.clientWidth || 900) - 8;
  const x = (micro) => LEFT + ((micro - gantt.from) / (gantt.to - gantt.from)) * (gantt.width - LEFT);
  svg.replaceChildren();
  let top = AXIS, left = MOST;
  const body = draw("g");
  rows.forEach((row, r) => {
    const lanes = gantt.lanes[r], height = lanes.count * LANE + 4;
    const shown = lanes.own.map((n) => n).filter((n) => page.data.timeline.spans.start[n] < gantt.to && page.data.timeline.spans.start[n] + page.data.timeline.spans.length[n] > gantt.from);
    const thin = Math.ceil(shown.length / Math.max(1, left));
    const drawn = (thin > 1 ? shown.filter((_, k) => k % thin === 0) : shown).map(spanAt);
    left -= drawn.length;
    body.append(draw("rect", {class: "field", x: LEFT, y: top, width: gantt.width - LEFT, height}));
    body.append(draw("text", {x: LEFT - 8, y: top + 16, "text-anchor": "end"}, row.label.length > 16 ? `${row.label.slice(0, 15)}…` : row.label));
    for (const span of drawn) body.append(bar(span, r, top + 2 + lanes.of.get(span.n) * LANE, x));
    top += height + 2;
    if (!row.host) {
      const inside = gaps[r].filter(([from, to]) => from < gantt.to && to > gantt.from);
      for (const gap of inside.slice(0, 600)) body.append(gapBar(gap, r, top, x));
      top += STRIP;
      if (gantt.memory && gantt.hasMemory) { memoryStrip(body, r, drawn.filter((s) => s.held !== null || page.data.actions[s.name]?.peak), top, x); top += MEMORY; }
    }
    top += 8;
  });
  svg.setAttribute("height", top);
  svg.setAttribute("viewBox", `0 0 ${gantt.width + 8} ${top}`);
  ticks(svg, x, top - 8);
  svg.append(body);
  const all = [...svg.querySelectorAll("[data-key]")];
  const keep = all.find((each) => each.dataset.key === gantt.focus) ?? all.find((each) => !each.classList.contains("other")) ?? all[0];
  if (keep) keep.setAttribute("tabindex", "0");
  if (keep && gantt.hadFocus) keep.focus({preventScroll: true});
  showIteration();
}

function showIteration() {
  gantt.idle.replaceChildren(...iterationIdle(gantt.iteration).map((line) => make("li", {}, line)));
  const own = [];
  const {spans} = page.data.timeline;
  for (let n = 0; n < spans.start.length; n++) if (spans.iteration[n] === gantt.iteration) own.push(spanAt(n));
  const origin = window_(gantt.iteration)[1];
  const head = ["action", "on", "starts", "took", "predicted", "ratio", "memory", "plan's proof", "let start by"];
  const rows = own.map((s) => {
    const plan = page.data.actions[s.name] ?? {}, by = s.released >= 0 ? spanAt(s.released) : null;
    return [s.name, s.rows.map((r) => page.data.timeline.rows[r].label).join(" + "), seconds((s.start - origin) / 1e6), seconds(s.length / 1e6), seconds(plan.predicted),
      plan.predicted ? digits(s.length / 1e6 / plan.predicted, 2) : "-", bytes(s.held), bytes(plan.peak), by ? `${by.name}${by.iteration === s.iteration ? "" : ` of ${by.iteration}`}` : "-"];
  });
  gantt.table.replaceChildren(table(head, rows, (row) => ({"data-action": row[0]})));
}

function table(head, rows, attributes = () => ({})) {
  const cell = (text, column) => make("td", {class: /^[-\d.,]/.test(text) ? "number" : "name"}, column ? text : make("button", {type: "button", class: "link"}, text));
  return make("table", {}, make("thead", {}, make("tr", {}, ...head.map((each) => make("th", {scope: "col"}, each)))),
    make("tbody", {}, ...rows.map((row) => make("tr", attributes(row), ...row.map(cell)))));
}

function moveFocus(event) {
  const at = event.target.closest("[data-key]");
  const steps = {ArrowLeft: -1, ArrowRight: 1};
  if (event.key === "+" || event.key === "=") return zoom(0.6);
  if (event.key === "-") return zoom(1.7);
  if (event.key === "0") return goTo(gantt.iteration);
  if (event.key === "PageDown" || event.key === "PageUp") { event.preventDefault(); return stepIteration(event.key === "PageDown" ? 1 : -1); }
  if (!at) return undefined;
  if (event.key === "Enter" || event.key === " ") { event.preventDefault(); return at.chosen(); }
  if (event.shiftKey && event.key in steps) { event.preventDefault(); return pan(0.2 * steps[event.key]); }
  const all = [...gantt.svg.querySelectorAll("[data-key]")], row = Number(at.dataset.key.split(":")[0]);
  let next;
  if (event.key in steps) {
    const own = all.filter((each) => Number(each.dataset.key.split(":")[0]) === row).sort((a, b) => a.dataset.at - b.dataset.at);
    next = own[own.indexOf(at) + steps[event.key]];
  } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const rows = [...new Set(all.map((each) => Number(each.dataset.key.split(":")[0])))].sort((a, b) => a - b);
    const other = rows[rows.indexOf(row) + (event.key === "ArrowDown" ? 1 : -1)];
    const near = all.filter((each) => Number(each.dataset.key.split(":")[0]) === other);
    next = near.sort((a, b) => Math.abs(a.dataset.at - at.dataset.at) - Math.abs(b.dataset.at - at.dataset.at))[0];
  } else return undefined;
  event.preventDefault();
  if (next) { gantt.focus = next.dataset.key; at.setAttribute("tabindex", "-1"); next.setAttribute("tabindex", "0"); next.focus(); }
  return undefined;
}

function stepIteration(by) {
  const known = page.data.timeline.iterations, at = known.findIndex(([i]) => i === gantt.iteration);
  goTo(known[Math.max(0, Math.min(known.length - 1, at + by))][0]);
}

function listen(svg) {
  const show = (event) => {
    const at = event.target.closest("[data-key]");
    const box = at?.getBoundingClientRect();
    tip(at ? at.tip() : "", event.clientX ?? box?.left + 8, event.clientY ?? box?.bottom);
  };
  svg.addEventListener("pointermove", (event) => { if (gantt.drag === undefined) show(event); });
  svg.addEventListener("pointerleave", () => tip(""));
  svg.addEventListener("focusin", (event) => { gantt.hadFocus = true; gantt.focus = event.target.dataset.key ?? gantt.focus; if (event.target.matches(":focus-visible")) show(event); });
  svg.addEventListener("focusout", () => { tip(""); if (svg.isConnected) setTimeout(() => { gantt.hadFocus = svg.contains(document.activeElement); }, 0); });
  svg.addEventListener("keydown", moveFocus);
  svg.addEventListener("click", (event) => { if (!gantt.dragged) event.target.closest("[data-key]")?.chosen(); });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    const at = Math.min(1, Math.max(0, (event.offsetX - LEFT) / (gantt.width - LEFT)));
    if (event.shiftKey) pan((event.deltaX || event.deltaY) / 900); else zoom(event.deltaY > 0 ? 1.25 : 0.8, at);
  }, {passive: false});
  svg.addEventListener("pointerdown", (event) => { gantt.drag = event.clientX; gantt.dragged = false; });
  addEventListener("pointerup", () => { gantt.drag = undefined; });
  addEventListener("pointermove", (event) => {
    if (gantt.drag === undefined || Math.abs(event.clientX - gantt.drag) < 4) return;
    gantt.dragged = true;
    pan((gantt.drag - event.clientX) / (gantt.width - LEFT));
    gantt.drag = event.clientX;
  });
}

function ganttTools(known) {
  const button = (words, label, act) => make("button", {type: "button", "aria-label": label, title: label, onclick: act}, words);
  gantt.number = make("input", {type: "number", min: known[0][0], max: known[known.length - 1][0], onchange: (e) => goTo(Number(e.target.value))});
  gantt.slider = make("input", {type: "range", min: 0, max: known.length - 1, "aria-label": "iteration, by its place", oninput: (e) => goTo(known[e.target.value][0])});
  const search = make("input", {type: "search", placeholder: "update, reshard…", oninput: (e) => { gantt.search = e.target.value.trim().toLowerCase(); drawGantt(); }});
  const memory = make("input", {type: "checkbox", checked: true, onchange: (e) => { gantt.memory = e.target.checked; drawGantt(); }});
  return make("div", {class: "tools"}, make("label", {}, "iteration", gantt.number), button("‹", "the iteration before", () => stepIteration(-1)), gantt.slider,
    button("›", "the iteration after", () => stepIteration(1)), make("label", {}, "find", search), button("+", "zoom in", () => zoom(0.6)), button("−", "zoom out", () => zoom(1.7)),
    button("←", "earlier", () => pan(-0.4)), button("→", "later", () => pan(0.4)), button("whole iteration", "back to the whole iteration", () => goTo(gantt.iteration)),
    ...(gantt.hasMemory ? [make("label", {}, memory, "memory")] : []));
}

function legend() {
  const entries = new Map();
  for (const name of page.data.timeline.names) {
    const action = page.data.actions[name];
    if (action) entries.set(action.kind === "run" ? action.model ?? "no model" : action.kind, action.colour);
  }
  const key = (style, words) => make("li", {}, make("span", {class: "key", style}), words);
  const items = [...entries].map(([words, c]) => key(`background: color-mix(in srgb, ${c} 34%, var(--paper)); border: 1px solid ${c}`, words));
  items.push(key("background: var(--gap)", "idle, and what it waits for"));
  if (gantt.hasMemory) items.push(key("background: color-mix(in srgb, var(--accent) 40%, transparent)", `memory, ${page.data.timeline.memory || "not measured"}`), key("background: var(--second); height: 3px; vertical-align: 3px", "the plan's proof"));
  return make("ul", {class: "legend"}, ...items);
}

function startGantt() {
  const home = byId("gantt"), found = page.data.timeline;
  if (!home || !found || !found.iterations.length) return;
  const {spans} = found;
  gantt.hasMemory = spans.held.some((each) => each !== null);
  const before = gantt.svg ? [gantt.iteration, gantt.from, gantt.to] : null;
  dealLanes();
  gantt.svg = draw("svg", {role: "group", "aria-label": "timeline: arrows move between bars, Enter selects, plus and minus zoom, page keys change the iteration"});
  listen(gantt.svg);
  gantt.idle = make("ul", {class: "idle"});
  gantt.table = make("div", {class: "wide", tabindex: "0"});
  const left = found.left_out ? [make("p", {class: "note"}, `${found.left_out} iterations are left out of the timeline: the run has more spans than a page should hold.`)] : [];
  home.replaceChildren(ganttTools(found.iterations), ...left, gantt.svg, legend(), make("h3", {}, "Why devices were idle"), gantt.idle, make("div", {id: "detail", "aria-live": "polite"}),
    make("details", {}, make("summary", {}, "this iteration as a table"), gantt.table));
  goTo(before && window_(before[0]) ? before[0] : found.begin ?? found.iterations[0][0]);
  if (before && window_(before[0])) { [, gantt.from, gantt.to] = before; drawGantt(); }
}
page.drawers.push(() => { if (gantt.svg?.isConnected) drawGantt(); });
page.selections.push(() => { if (gantt.svg?.isConnected) drawGantt(); });
