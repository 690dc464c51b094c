/* The page of a ranking server: asks /dashboard/data once a second and keeps what it was told. */

import { Chart, clock, el } from "./charts.js";
import { byId, keyed, pairs, set } from "./elements.js";
import { duration, num, percent, plural, share, time, timeParts } from "./format.js";

const POLL_MS = 1000, TIMEOUT_MS = 5000, SPAN_S = 120;
const STATES = { ready: "good", starting: "note", restarting: "warn", draining: "warn", failed: "bad" };
const FIGURE = /^(\w+?)(?:\{(.*)\})?$/;
let key = ""; // in memory alone
let samples = [], lastTime = null, lostAt = null;

const authorization = () => key ? { Authorization: `Bearer ${key}` } : {};
const total = (counts) => Object.values(counts).reduce((sum, count) => sum + count, 0);

function live(text, tone) {
  set(byId("live"), text);
  byId("live").className = `pill ${tone}`;
}

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

function drawHead(data) {
  const { facts, workers } = data;
  set(byId("model"), data.model);
  document.title = `${data.model} · tokenmill`;
  const chips = [
    `${facts.dtype} on ${facts.device}`, plural(facts.num_items, "item"), `${num(facts.max_candidates)} candidates at most`,
    facts.scaling_seqlen === "batch" ? "scores depend on the batch" : `scaling_seqlen ${facts.scaling_seqlen}`,
    plural(workers.length, "worker"), `up ${duration(data.uptime_s)}`,
  ];
  keyed(byId("facts"), chips.map((text, i) => [String(i), text]), ([i]) => i, () => el("li"), (li, [, text]) => set(li, text));
  set(byId("foot"), `tokenmill ${data.version} · figures of ${clock(data.time_s)}`);
  const ready = workers.filter((w) => w.state === "ready").length;
  if (data.draining) live("draining", "warn");
  else if (!ready) live("no worker", "bad");
  else if (ready < workers.length) live(`${ready} of ${workers.length} ready`, "warn");
  else live("live", "good");
}

function drawTiles(data) {
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
  keyed(byId("tiles"), tiles, ([name]) => name, ([name]) => {
    const tile = el("div", "tile"), value = el("dd");
    value.append(el("span", "value"), " ", el("small"));
    tile.append(el("dt", "", name), value, el("dd", "below"));
    return tile;
  }, (tile, [, value, unit, below]) => {
    set(tile.querySelector(".value"), value);
    set(tile.querySelector("small"), unit);
    set(tile.querySelector(".below"), below);
  });
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
  lastTime = data.time_s;
  remember(data);
  byId("pool").hidden = false;
  drawHead(data);
  drawTiles(data);
  for (const chart of charts) chart.draw(samples, SPAN_S);
  drawTables(data);
  drawWorkers(data);
  drawCounts(data);
}

function lose(why) {
  lostAt ??= Date.now() / 1000;
  live(why, "bad");
  byId("pool").classList.add("stale");
  byId("lost").hidden = false;
  const figures = lastTime ? `The figures below are of ${clock(lastTime)}. ` : "";
  set(byId("lost"), `No figures since ${clock(lostAt)}: ${why}. ${figures}This page asks again every second.`);
}

function askKey(wrong) {
  live("key needed", "warn");
  byId("pool").hidden = true;
  byId("key-form").hidden = false;
  set(byId("key-wrong"), wrong);
  byId("key").focus();
}

/* One answer drawn; false when a key is needed first. */
async function poll() {
  let response, data;
  try {
    response = await fetch("/dashboard/data", { headers: authorization(), signal: AbortSignal.timeout(TIMEOUT_MS) });
    data = await response.json();
  } catch {
    lose("no connection");
    return true;
  }
  if (response.status === 401) {
    askKey(key ? "The server does not know this key." : "");
    return false;
  }
  if (!response.ok) {
    lose(`the server answers ${response.status}`);
    return true;
  }
  lostAt = null;
  byId("pool").classList.remove("stale");
  byId("lost").hidden = true;
  draw(data);
  return true;
}

async function run() {
  byId("key-form").hidden = true;
  for (;;) {
    if (!document.hidden && !await poll()) return;
    await new Promise((wake) => setTimeout(wake, POLL_MS));
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  run();
});
if (document.querySelector("meta[name=needs-key]").content === "yes") askKey("");
else run();
