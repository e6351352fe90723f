// What all parts of the page share: its data, elements, units, the theme, the action selected.
const page = {data: null, selected: null, drawers: [], selections: []};
const byId = (id) => document.getElementById(id);

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const digits = (value, count = 3) => Number(value.toPrecision(count)).toString();
function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (value === 0) return "0";
  if (Math.abs(value) < 1e-3) return `${digits(value * 1e6)} us`;
  if (Math.abs(value) < 1) return `${digits(value * 1e3)} ms`;
  if (Math.abs(value) < 120) return `${digits(value)} s`;
  return `${digits(value / 60)} min`;
}
function bytes(value) {
  if (value === null || value === undefined) return "-";
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["KB", 1e3]])
    if (Math.abs(value) >= size) return `${(value / size).toFixed(1)} ${unit}`;
  return `${value} B`;
}
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0095 ? 1 : 0)} %`;

const colour = (name) => {
  const probe = make("span", {style: `color: var(${name})`});
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};

function redraw() { for (const each of page.drawers) each(); }

function select(action) {
  page.selected = page.selected === action ? null : action;
  showSelected();
}

function showSelected() {
  const action = page.selected;
  const known = action && page.data.actions[action];
  for (const row of document.querySelectorAll("tr[data-action]"))
    row.classList.toggle("lit", row.dataset.action === action);
  const wanted = new Set();
  if (action) wanted.add(action.replaceAll(":", "_"));
  if (known && known.node) wanted.add(known.node.replaceAll(":", "_"));
  for (const node of document.querySelectorAll(".picture g.node")) {
    const title = node.querySelector("title");
    node.classList.toggle("lit", title !== null && wanted.has(title.textContent));
  }
  for (const each of page.selections) each(action);
}

function linkPictures() {
  const nodes = new Map();
  for (const [id, action] of Object.entries(page.data.actions)) {
    nodes.set(id.replaceAll(":", "_"), id);
    if (action.node && !nodes.has(action.node.replaceAll(":", "_"))) nodes.set(action.node.replaceAll(":", "_"), id);
  }
  for (const picture of document.querySelectorAll(".picture svg")) {
    picture.setAttribute("role", "group");
    picture.setAttribute("aria-label", "picture: its nodes select actions");
    for (const node of picture.querySelectorAll("g.node")) {
      const action = nodes.get(node.querySelector("title")?.textContent);
      if (!action) continue;
      const words = [...node.querySelectorAll("text")].map((each) => each.textContent).join(" ");
      for (const [key, value] of [["role", "button"], ["tabindex", "0"], ["aria-label", `${words}: select ${action}`]]) node.setAttribute(key, value);
      node.addEventListener("click", () => select(action));
      node.addEventListener("keydown", (event) => { if (event.key === "Enter") select(action); });
    }
  }
}

document.addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-action]");
  if (row) select(row.dataset.action);
});

function tip(text, x, y) {
  const box = byId("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const {width, height} = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  box.style.top = `${y + height + 24 > innerHeight ? Math.max(4, y - height - 12) : y + 16}px`;
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

function themeButton() {
  const dark = () => document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => (dark() ? "light page" : "dark page");
  const button = make("button", {id: "theme", type: "button", onclick: () => {
    setTheme(dark() ? "light" : "dark");
    button.textContent = name();
    redraw();
  }}, name());
  byId("head").append(button);
  const follow = () => { button.textContent = name(); redraw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", follow);
  let before;
  addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; setTheme("light"); redraw(); });
  addEventListener("afterprint", () => { setTheme(before); redraw(); });
}
