// Everything about the selected action: of the plan, of the run, and its seconds over iterations.
function detail(action) {
  const home = byId("detail");
  if (!home) return;
  const plan = page.data.actions[action];
  if (!action) {
    home.replaceChildren(make("p", {class: "note"}, "Select a bar, a row of the plan or a node of the graph: all that is known of it stands here, and it is lit wherever it is drawn."));
    return;
  }
  const {spans, names} = page.data.timeline, place = names.indexOf(action), own = [];
  for (let n = 0; n < spans.start.length; n++) if (spans.action[n] === place) own.push(n);
  const here = own.find((n) => spans.iteration[n] === gantt.iteration);
  const facts = [];
  if (plan) {
    const mode = plan.mode ? ` (${plan.mode})` : "";
    facts.push(["what", `${plan.kind}${mode}${plan.what === action ? "" : ` ${plan.what}`}${plan.model ? `, model ${plan.model}` : ""}, on ${plan.pool}, ${plan.lane} lane`], ["because", plan.reason]);
    const ratio = plan.predicted && plan.measured ? `: ${digits(plan.measured / plan.predicted, 3)} times the prediction` : "";
    facts.push(["predicted", `${seconds(plan.predicted)}, from ${plan.source}`], ["measured", `${seconds(plan.measured)}, the median of ${own.length} instances${ratio}`]);
    facts.push(["memory", `the plan proves ${bytes(plan.peak)} on each device while it runs`]);
    const waits = plan.after.map(([name, distance, kind]) => `${name}${distance ? ` of ${distance} ${distance === 1 ? "turn" : "turns"} before` : ""} (${kind})`);
    facts.push(["waits for", waits.join(", ") || "nothing"]);
  }
  if (here !== undefined) facts.push([`iteration ${gantt.iteration}`, spanText(spanAt(here)).split("\n").slice(0).join("; ")]);
  const chart = make("div");
  home.replaceChildren(make("h3", {}, action), make("dl", {}, ...facts.flatMap(([word, text]) => [make("dt", {}, word), make("dd", {}, text)])), chart);
  if (own.length > 1) secondsChart(chart, own, plan);
}

function secondsChart(home, own, plan) {
  const {spans} = page.data.timeline, totals = new Map();
  for (const n of own) totals.set(spans.iteration[n], (totals.get(spans.iteration[n]) ?? 0) + spans.length[n] / 1e6);
  const xs = [...totals.keys()].sort((a, b) => a - b), data = [xs, xs.map((i) => totals.get(i))];
  const series = [{label: "iteration"}, {label: "measured, s", stroke: colour("--accent"), width: 1.5, points: {show: xs.length < 80}, value: (_, v) => seconds(v)}];
  if (plan?.predicted) {
    data.push(xs.map(() => plan.predicted));
    series.push({label: "predicted, s", stroke: colour("--second"), width: 1.5, dash: [6, 4], points: {show: false}, value: (_, v) => seconds(v)});
  }
  plot(home, `seconds of it by iteration, ${seconds(Math.min(...data[1]))} to ${seconds(Math.max(...data[1]))}`, series, data, 150, seconds);
}
page.selections.push(detail);
