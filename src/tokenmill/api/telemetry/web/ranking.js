/* The page of a ranking server, which keeps what it was told for its charts. */

import { Chart, el } from "./charts.js";
import { byId, keyed, pairs, set } from "./elements.js";
import { num, percent, plural, share, time, timeParts } from "./format.js";
import { STATES, drawHead, drawTiles, startPage, total } from "./live_page.js";

const SPAN_S = 120;
const FIGURE = /^(\w+?)(?:\{(.*)\})?$/;
let samples = [];

/* Figures of a name with labels: [[{table, tier}, value], ...]. */
function labelled(figures, name) {
  return Object.entries(figures).map(([figure, value]) => [FIGURE.exec(figure), value])
    .filter(([found]) => found && found[1] === name && found[2])
    .map(([found, value]) => [Object.fromEntries(found[2].split(",").map((pair) => pair.replaceAll('"', "").split("="))), value]);
}

/* What was done a second since the sample before. */
function remember(data) {
  const figures = data.figures, before = samples[samples.length - 1];
  const now = {
    time: data.time_s, answered: data.answered, steps: figures.steps_total ?? 0, tokens: figures.tokens_total ?? 0,
    waiting: figures.num_waiting ?? 0, open: data.num_open, p50: data.latency_ms.p50 ?? null, p99: data.latency_ms.p99 ?? null,
    perSecond: null, batch: null,
  };
  if (before && now.time > before.time && now.answered >= before.answered) {
    now.perSecond = (now.answered - before.answered) / (now.time - before.time);
    const steps = now.steps - before.steps;
    now.batch = steps > 0 ? (now.tokens - before.tokens) / steps : null;
  }
  samples = [...samples.filter((sample) => sample.time >= now.time - SPAN_S), now];
}

const charts = [
  { title: "Requests answered", unit: "/s", format: num, series: [{ name: "requests", color: "var(--c1)", value: (s) => s.perSecond }] },
  {
    title: "Latency of the last minute", unit: " ms", format: num,
    series: [{ name: "p50", color: "var(--c1)", value: (s) => s.p50 }, { name: "p99", color: "var(--c2)", value: (s) => s.p99 }],
  },
  { title: "Open requests", unit: "", format: num, series: [{ name: "open", color: "var(--c1)", value: (s) => s.open }] },
  { title: "Tokens of a batch", unit: "", format: num, series: [{ name: "tokens", color: "var(--c1)", value: (s) => s.batch }] },
].map((chart) => new Chart(byId("charts"), chart));

function facts({ facts, workers }) {
  return [
    `${facts.dtype} on ${facts.device}`, plural(facts.num_items, "item"), `${num(facts.max_candidates)} candidates at most`,
    facts.scaling_seqlen === "batch" ? "scores depend on the batch" : `scaling_seqlen ${facts.scaling_seqlen}`,
    plural(workers.length, "worker"),
  ];
}

function drawFigures(data) {
  const { figures, latency_ms: latency } = data, now = samples[samples.length - 1];
  const median = "p50" in latency ? timeParts(latency.p50) : ["–", ""];
  const late = "p99" in latency ? `p90 ${time(latency.p90)} · p99 ${time(latency.p99)}, last minute` : "none in the last minute";
  const steps = figures.steps_total ?? 0, requests = figures.batch_requests_sum ?? 0;
  const keys = labelled(figures, "embedding_keys_total");
  const near = labelled(figures, "embedding_hits_total").reduce((sum, [, hits]) => sum + hits, 0);
  const all = keys.reduce((sum, [, count]) => sum + count, 0);
  const tiles = [
    ["Answered", now.perSecond === null ? "–" : num(now.perSecond), "/s", `${plural(data.answered, "request")} in all`],
    ["Latency, median", ...median, late],
    ["Open", num(data.num_open), "", `${num(figures.num_waiting ?? 0)} wait · ${num(data.max_open)} at most`],
    ["A batch, mean", steps ? num(requests / steps) : "–", "requests", steps ? `${num(figures.tokens_total / steps)} tokens · ${plural(steps, "step")}` : "none yet"],
    ["A step, mean", ...(steps ? timeParts(1000 * figures.step_seconds_total / steps) : ["–", ""]), `${num(figures.candidates_total ?? 0)} candidates scored`],
    ["Nearest tier", percent(share(near, all)), "", `of ${plural(all, "key")} looked up`],
    ["Refused", num(total(data.rejected)), "", total(data.rejected) ? Object.keys(data.rejected).join(", ") : "calls since the start"],
  ];
  drawTiles(tiles);
}

/* Each table's keys by tier, as shares. */
function drawTables({ figures }) {
  const tables = {};
  for (const [{ table, tier }, count] of labelled(figures, "embedding_keys_total")) (tables[table] ??= []).push([tier, count]);
  pairs(byId("tables"), Object.entries(tables).map(([table, tiers]) => {
    const sum = tiers.reduce((all, [, count]) => all + count, 0);
    return [table, `${tiers.map(([tier, count]) => `${percent(share(count, sum))} ${tier}`).join(", ")} of ${plural(sum, "key")}`];
  }));
}

function drawWorkers({ workers, migrations }) {
  set(byId("workers-hint"), `${plural(migrations, "request")} went on at another worker`);
  keyed(byId("workers"), workers, (w) => w.name, (worker) => {
    const card = el("article", "worker"), head = el("div", "head");
    head.append(el("b", "", worker.name), el("span", "pill"));
    card.append(head, el("dl", "pairs"), el("p", "wrong"));
    return card;
  }, (card, worker) => {
    const pill = card.querySelector(".pill");
    set(pill, worker.state);
    pill.className = `pill ${STATES[worker.state] ?? "note"}`;
    pairs(card.querySelector(".pairs"), [
      ["Open", num(worker.num_open)], ["Answered", num(worker.ended)], ["Busy", percent(worker.busy)],
      ["Failures", num(worker.failures), worker.failures ? "bad" : ""],
    ]);
    set(card.querySelector(".wrong"), worker.last_failure);
  });
}

function drawCounts({ figures, rejected, migrations }) {
  const finished = labelled(figures, "requests_total").map(([{ finish }, count]) => [`Ended: ${finish}`, num(count)]);
  const refused = Object.entries(rejected).map(([code, count]) => [`Refused: ${code}`, num(count), "warn"]);
  pairs(byId("counts"), [...finished, ["Went on elsewhere", num(migrations)], ...refused]);
}

function draw(data) {
  remember(data);
  drawHead(data, data.workers, facts(data));
  drawFigures(data);
  for (const chart of charts) chart.draw(samples, SPAN_S);
  drawTables(data);
  drawWorkers(data);
  drawCounts(data);
}

startPage(draw);
