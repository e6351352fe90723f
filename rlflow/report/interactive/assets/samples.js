// A bounded number of samples: found by text and iteration, sorted by a column, a page at a time.
const samples = {text: "", iteration: "", sort: "iteration", down: true, shown: 25};

function sampleRows() {
  const {columns, rows} = page.data.samples, by = columns.indexOf(samples.sort);
  const wanted = rows.filter((row) => (samples.iteration === "" || row[0] === Number(samples.iteration))
    && (!samples.text || row.some((cell) => typeof cell === "string" && cell.toLowerCase().includes(samples.text))));
  const order = (a, b) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -1 : 1);
  return wanted.sort((a, b) => (samples.down ? -1 : 1) * order(a[by], b[by]));
}

function drawSamples() {
  const {columns} = page.data.samples, found = sampleRows();
  const cell = (value) => (typeof value === "string" ? make("td", {}, make("div", {class: "text"}, value))
    : make("td", {class: "number"}, value === null ? "-" : Array.isArray(value) ? value.join(" ") : digits(Number(value), 4)));
  const heads = columns.map((name) => make("th", {scope: "col", "aria-sort": samples.sort === name ? (samples.down ? "descending" : "ascending") : null},
    make("button", {type: "button", class: "link", onclick: () => { samples.down = samples.sort === name && !samples.down; samples.sort = name; drawSamples(); }}, name)));
  samples.table.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...found.slice(0, samples.shown).map((row) => make("tr", {}, ...row.map(cell))))));
  samples.count.textContent = `${Math.min(samples.shown, found.length)} of ${found.length} found`;
  samples.more.hidden = found.length <= samples.shown;
}

function startSamples() {
  const home = byId("samples");
  if (!home || !page.data.samples) return;
  const numbers = [...new Set(page.data.samples.rows.map((row) => row[0]))];
  const choose = make("select", {onchange: (e) => { samples.iteration = e.target.value; drawSamples(); }}, make("option", {value: ""}, "all"), ...numbers.map((i) => make("option", {value: i}, String(i))));
  choose.value = samples.iteration;
  const find = make("input", {type: "search", value: samples.text, oninput: (e) => { samples.text = e.target.value.toLowerCase(); drawSamples(); }});
  samples.count = make("output", {class: "note"});
  samples.more = make("button", {type: "button", onclick: () => { samples.shown += 100; drawSamples(); }}, "more");
  samples.table = make("div", {class: "wide", tabindex: "0"});
  home.replaceChildren(make("div", {class: "tools"}, make("label", {}, "iteration", choose), make("label", {}, "find text", find), samples.count, samples.more), samples.table);
  drawSamples();
}
