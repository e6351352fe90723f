// The start of the page; where it is served, what changed is asked for again and again.
async function load(texts) {
  if (texts.data) page.data = await unpack(texts.data);
  for (const start of [startCurves, startGantt, startSamples, linkPictures]) start();
  showSelected();
}

function show(parts) {
  for (const [name, html] of Object.entries(parts)) {
    const home = name === "head" ? byId("head") : byId(name)?.querySelector(".still");
    if (!home || home.served === html) continue;
    const open = [...home.querySelectorAll("details")].map((each) => each.open), button = byId("theme");
    home.innerHTML = html;
    home.served = html;
    home.querySelectorAll("details").forEach((each, n) => { each.open = open[n] ?? false; });
    if (name === "head" && button) home.append(button);
  }
}

async function follow(url) {
  let seen = "", wait = 2000;
  const state = make("span", {role: "status"}, "live");
  byId("head").after(make("div", {class: "tools live"}, state));
  for (;;) {
    await new Promise((done) => { setTimeout(done, wait); });
    const began = performance.now();
    try {
      const answer = await fetch(`${url}&seen=${encodeURIComponent(seen)}`, {cache: "no-store"});
      if (answer.status === 200) {
        const found = await answer.json();
        seen = found.seen;
        show(found.parts);
        await load(found);
        state.textContent = `live, as of ${new Date().toLocaleTimeString()}`;
      } else if (answer.status !== 204) state.textContent = `the server says ${answer.status}`;
    } catch { state.textContent = "no answer: rlflow watch has ended, or the run's files are not whole"; }
    wait = Math.max(2000, 4 * (performance.now() - began));
  }
}

(async () => {
  themeButton();
  const text = (id) => byId(id)?.textContent ?? "";
  await load({data: text("data-run")});
  document.documentElement.dataset.ready = "yes";
  const live = byId("data-live");
  if (live) follow(live.textContent.trim());
})();

let width = innerWidth, timer;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  clearTimeout(timer);
  timer = setTimeout(redraw, 120);
});
