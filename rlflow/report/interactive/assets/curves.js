// Metrics over iterations: panels of chosen ones, runs laid over each other, smoothed.
const PALETTE = [["#0072B2", "#5fb4e8"], ["#C24E00", "#f0924f"], ["#00805C", "#3fc79a"], ["#AA4499", "#e08ad0"], ["#5D3FA8", "#a78bf0"], ["#6B6B00", "#c6c64a"], ["#A3123F", "#f4789c"], ["#00788C", "#4cc3d8"]];
const curves = {chosen: new Set(), smooth: 0, charts: [], filter: "", started: false};

function plot(home, label, series, data, height, text) {
  const axis = {stroke: colour("--soft"), grid: {stroke: colour("--hair"), width: 1}, ticks: {stroke: colour("--line"), width: 1}, font: "11px system-ui, sans-serif"};
  const options = {width: Math.max(260, home.clientWidth), height, scales: {x: {time: false}}, series, legend: {live: true},
    axes: [{...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000]}, {...axis, size: 62, values: text ? (_, all) => all.map(text) : undefined}],
    cursor: {sync: {key: "iteration"}, drag: {x: true, y: false}}};
  const chart = new uPlot(options, data, home);
  const canvas = home.querySelector("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  return chart;
}

function moving(values, window) {
  if (window < 2) return values;
  const half = Math.floor(window / 2), sums = [0], counts = [0];
  for (const value of values) { sums.push(sums[sums.length - 1] + (value ?? 0)); counts.push(counts[counts.length - 1] + (value === null || value === undefined ? 0 : 1)); }
  return values.map((value, n) => {
    const from = Math.max(0, n - half), to = Math.min(values.length, n + half + 1), count = counts[to] - counts[from];
    return value === null || value === undefined || !count ? null : (sums[to] - sums[from]) / count;
  });
}

function metricPanel(key) {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" || document.documentElement.dataset.theme === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const tables = [], series = [{label: "iteration"}], told = [];
  page.data.curves.forEach((metrics, run) => {
    const found = metrics[key];
    if (!found) return;
    const shade = PALETTE[run % PALETTE.length][dark ? 1 : 0], name = page.data.runs.length > 1 ? page.data.runs[run] : shortMetric(key);
    const few = found[0].length < 40, width = found[0].length < 8 ? 1 : curves.smooth;
    tables.push([found[0], found[1]]);
    series.push({label: width > 1 ? `${name}, each` : name, stroke: width > 1 ? `${shade}55` : shade, width: width > 1 ? 1 : 1.8, points: {show: few, size: 4}, spanGaps: true});
    if (width > 1) {
      tables.push([found[0], moving(found[1], width)]);
      series.push({label: `${name}, mean of ${width}`, stroke: shade, width: 2.2, points: {show: false}, spanGaps: true});
    }
    const known = found[1].filter((v) => v !== null);
    told.push(`${page.data.runs[run]}: ${known.length ? `${digits(known[0], 4)} at first, ${digits(known[known.length - 1], 4)} at last, from ${digits(known.reduce((a, b) => Math.min(a, b)), 4)} to ${digits(known.reduce((a, b) => Math.max(a, b)), 4)}` : "no number"}`);
  });
  const home = make("div"), panel = make("div", {class: "panel"}, make("h3", {}, key), home);
  return {panel, draw: () => plot(home, `${key} by iteration. ${told.join(". ")}`, series, uPlot.join(tables), 230)};
}
const shortMetric = (key) => key.slice(key.lastIndexOf("/") + 1);

function drawCurves() {
  for (const chart of curves.charts) chart.destroy();
  const panels = [...curves.chosen].map(metricPanel);
  curves.panels.replaceChildren(...panels.map((each) => each.panel));
  curves.charts = panels.map((each) => each.draw());
  for (const button of curves.names.children) button.setAttribute("aria-pressed", curves.chosen.has(button.textContent));
}

function listNames() {
  const all = [...new Set(page.data.curves.flatMap((metrics) => Object.keys(metrics)))].sort();
  const found = all.filter((key) => key.toLowerCase().includes(curves.filter));
  const isDrawn = (key) => curves.chosen.has(key);
  const shown = [...found.filter(isDrawn), ...found.filter((key) => !isDrawn(key))];
  curves.names.replaceChildren(...shown.map((key) => make("button", {type: "button", "aria-pressed": curves.chosen.has(key), onclick: () => {
    if (!curves.chosen.delete(key)) curves.chosen.add(key);
    drawCurves();
  }}, key)));
}

function startCurves() {
  const home = byId("curves");
  const all = new Set(page.data.curves.flatMap((metrics) => Object.keys(metrics)));
  if (!home || !all.size) return;
  if (!curves.started) {
    for (const key of page.data.headline.length ? page.data.headline : [...all].slice(0, 2)) curves.chosen.add(key);
    const longest = Math.max(...page.data.curves.flatMap((metrics) => Object.values(metrics).map(([xs]) => xs.length)));
    curves.smooth = longest < 8 ? 1 : Math.floor(Math.min(15, Math.max(3, Math.floor(longest / 15))) / 2) * 2 + 1;
    curves.most = Math.max(3, Math.floor(longest / 4) * 2 + 1);
    curves.started = true;
  }
  const said = make("output", {}, String(curves.smooth));
  const slider = make("input", {type: "range", min: 1, max: curves.most, step: 2, value: curves.smooth, oninput: (e) => { curves.smooth = Number(e.target.value); said.textContent = e.target.value; drawCurves(); }});
  const filter = make("input", {type: "search", placeholder: "loss, length…", value: curves.filter, oninput: (e) => { curves.filter = e.target.value.trim().toLowerCase(); listNames(); }});
  curves.names = make("div", {class: "names", role: "group", "aria-label": "metrics shown"});
  curves.panels = make("div", {class: "panels"});
  const runs = page.data.runs.length > 1 ? [make("p", {class: "note"}, `Runs: ${page.data.runs.join(", ")}. All below the curves is about the first.`)] : [];
  home.replaceChildren(...runs, make("div", {class: "tools"}, make("label", {}, "mean of", slider, said), make("label", {}, "find a metric", filter)), curves.names, curves.panels);
  listNames();
  drawCurves();
}
page.drawers.push(() => { if (curves.panels?.isConnected) drawCurves(); detail(page.selected); });
