/* The live page: asks /dashboard/data once a second and keeps the history itself. */

import { Chart, Spark, clock, el } from "./charts.js";
import { startChat } from "./chat.js";

const POLL_MS = 1000, TIMEOUT_MS = 5000, SPANS_S = [60, 120, 300], SPARK_S = 60, RATE_S = 60;
const NUM_DECISIONS = 8, NUM_EVENTS = 50;
const STATES = { ready: "good", starting: "note", restarting: "warn", draining: "warn", failed: "bad" };
const ROLES = { both: "prefill + decode" };
const POLICIES = {
  "kv": "the lowest cost wins: uncached and queued prefill, KV in use, requests",
  "round-robin": "workers take turns",
  "least-loaded": "the fewest requests win",
  "random": "any worker, at random",
};
const TERMS = [
  ["uncached_tokens", "uncached"], ["queued_tokens", "queued"], ["decode_tokens", "KV in use"],
  ["num_requests", "requests"], ["cost", "cost"],
];

const byId = (id) => document.getElementById(id);
let key = ""; // in memory alone
let samples = [], before = null;

// Numbers as text.

function num(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(value < 1e7 ? 2 : 1)}\u00a0M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}\u00a0k`;
  if (value >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toFixed(value < 10 ? 2 : 1);
}
const percent = (share) => share === null ? "–" : `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)}\u00a0%`;
const ms = (value) => value === undefined ? "–" : num(value);
const share = (part, whole) => whole > 0 ? part / whole : null;
const plural = (count, name) => `${num(count)} ${name}${count === 1 ? "" : "s"}`;

function duration(seconds) {
  const [h, m] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  if (h >= 48) return `${Math.floor(h / 24)} days`;
  return h ? `${h} h ${m} min` : m ? `${m} min` : `${Math.floor(seconds)} s`;
}

// Elements that stay and whose text changes.

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/* One child per item, made once by its key, in the order of the items. */
function keyed(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const name = keyOf(item);
    let child = old.get(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    old.delete(name);
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update?.(child, item);
  });
  for (const child of old.values()) child.remove();
}

function pairs(list, rows) {
  keyed(list, rows, ([name]) => name, ([name]) => {
    const row = el("div");
    row.append(el("dt", "", name), el("dd"));
    return row;
  }, (row, [, text, tone]) => {
    set(row.lastChild, text);
    row.lastChild.className = tone ?? "";
  });
}

// A sample of the history.

function sampleOf(data) {
  const { engine, floor } = data;
  const dt = before ? data.time_s - before.time_s : 0;
  const rate = (now, then) => dt > 0 && now >= then ? (now - then) / dt : null;
  const earlier = new Map((before?.floor.workers ?? []).map((w) => [w.name, w.output_tokens]));
  const base = samples.find((sample) => sample.time >= data.time_s - RATE_S);
  const [hits, queries] = [engine.prefix_hit_tokens, engine.prefix_query_tokens];
  return {
    time: data.time_s,
    tokens: before ? rate(data.output_tokens, before.output_tokens) : null,
    byWorker: new Map(floor.workers.map((w) => [w.name, rate(w.output_tokens, earlier.get(w.name) ?? Infinity)])),
    generating: floor.num_open - data.num_pending,
    pending: data.num_pending,
    ttft: data.ttft_ms, tpot: data.tpot_ms,
    kv: share(engine.num_kv_blocks_used, engine.num_kv_blocks),
    hits, queries,
    hitShare: base ? share(hits - base.hits, queries - base.queries) : null,
  };
}

// The parts of the page.

function drawHead(data) {
  const { floor } = data;
  set(byId("model"), data.model);
  document.title = `${data.model} · tokenmill`;
  byId("model").dataset.name = data.model;
  const engine = [`${data.dtype} on ${data.device}`, `context ${num(data.max_model_len)}`, `blocks of ${data.block_size} tokens`];
  const facts = [
    ...(data.dtype ? engine : []), plural(floor.workers.length, data.dtype ? "worker" : "backend"), ...(floor.workers.length > 1 ? [`router ${floor.router}`] : []), `up ${duration(data.uptime_s)}`,
  ];
  keyed(byId("facts"), facts.map((text, i) => [String(i), text]), ([i]) => i, () => el("li"), (li, [, text]) => set(li, text));
  set(byId("foot"), `tokenmill ${data.version} · figures of ${clock(data.time_s)}`);
  const ready = floor.workers.filter((w) => w.state === "ready").length;
  if (data.draining) live("draining", "warn");
  else if (!ready) live("no worker", "bad");
  else if (ready < floor.workers.length) live(`${ready} of ${floor.workers.length} ready`, "warn");
  else live("live", "good");
}

function live(text, tone) {
  set(byId("live"), text);
  byId("live").className = `pill ${tone}`;
}

function drawTiles(data, sample) {
  const { engine, floor, ttft_ms: ttft, tpot_ms: tpot } = data;
  const rate = floor.workers.reduce((sum, w) => sum + w.tokens_per_s, 0);
  const late = (summary) => "p50" in summary
    ? `p90\u00a0${num(summary.p90)} · p99\u00a0${num(summary.p99)} in the last ${data.window_s}\u00a0s` : `none in the last ${data.window_s}\u00a0s`;
  const held = floor.num_held ? ` · ${floor.num_held} held` : "";
  const tiles = [
    ["Output", num(rate), "tok/s", `over 10 s · ${plural(data.output_tokens, "token")} in all`],
    ["Open requests", num(floor.num_open), "", `${sample.generating} generating · ${data.num_pending} in queue or prefill${held}`],
    ["TTFT, median", ms(ttft.p50), "p50" in ttft ? "ms" : "", late(ttft)],
    ["TPOT, median", ms(tpot.p50), "p50" in tpot ? "ms" : "", late(tpot)],
    ["KV in use", percent(sample.kv), "", `${num(engine.num_kv_blocks_used)} of ${plural(engine.num_kv_blocks, "block")}`],
    ["Prefix hits", percent(sample.hitShare), "", `last minute · ${percent(share(sample.hits, sample.queries))} in all`],
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

const quantiles = (field) => [["p50", "var(--c1)"], ["p99", "var(--c2)"]].map(([name, color]) => (
  { name, color, value: (sample) => sample[field][name] ?? null }));
const charts = [
  { title: "Output", unit: " tok/s", series: [{ name: "tokens", color: "var(--c1)", value: (s) => s.tokens }], least: 10 },
  {
    title: "Requests", unit: "", least: 4,
    series: [
      { name: "generating", color: "var(--c1)", value: (s) => s.generating },
      { name: "in queue or prefill", color: "var(--c2)", value: (s) => s.pending },
    ],
  },
  { title: "TTFT, last minute", unit: " ms", series: quantiles("ttft"), least: 1 },
  { title: "TPOT, last minute", unit: " ms", series: quantiles("tpot"), least: 1 },
  { title: "KV in use", unit: "", format: percent, top: 1, series: [{ name: "blocks", color: "var(--c3)", value: (s) => s.kv }] },
  {
    title: "Prefix hits, last minute", unit: "", format: percent, top: 1,
    series: [{ name: "prompt tokens", color: "var(--c3)", value: (s) => s.hitShare }],
  },
].map((chart) => new Chart(byId("charts"), { format: num, ...chart }));

const sparks = new WeakMap();

function makeWorker(worker) {
  const card = el("article", "worker"), head = el("div", "head"), rate = el("p", "rate"), use = el("p", "use");
  head.append(el("b", "", worker.name), el("span", "role"), el("span", "pill"));
  rate.append(el("span", "value"), " ", el("small", "", "tok/s"), el("span", "line"));
  use.append(el("span", "", "KV"), el("meter"), el("em"));
  const meter = use.querySelector("meter");
  meter.max = 1;
  meter.setAttribute("aria-label", `KV in use at ${worker.name}`);
  card.append(head, rate, use, el("dl", "pairs"), el("p", "wrong"));
  sparks.set(card, new Spark(rate.querySelector(".line"), SPARK_S));
  return card;
}

function drawWorker(card, worker) {
  const kv = share(worker.kv_blocks_used, worker.kv_blocks) ?? 0;
  set(card.querySelector(".role"), ROLES[worker.role] ?? worker.role);
  set(card.querySelector(".pill"), worker.state);
  card.querySelector(".pill").className = `pill ${STATES[worker.state] ?? "note"}`;
  set(card.querySelector(".value"), num(worker.tokens_per_s));
  sparks.get(card).draw(samples.map((s) => [s.time, s.byWorker.get(worker.name) ?? null]));
  card.querySelector("meter").value = kv;
  set(card.querySelector(".use em"), percent(kv));
  pairs(card.querySelector(".pairs"), [
    ["running · waiting", `${worker.num_running} · ${worker.num_waiting}`],
    ["prefill queued", plural(worker.queued_tokens, "token")],
    ["cached blocks", num(worker.cached_blocks)],
    ["routed here", plural(worker.routed, "request")],
    ["found cached", percent(share(worker.overlap_tokens, worker.routed_tokens))],
    ["failures · restarts", `${worker.failures} · ${worker.restarts}`, worker.failures ? "bad" : ""],
  ]);
  set(card.querySelector(".wrong"), worker.last_failure ? `Last failure: ${worker.last_failure}` : "");
}

function drawWorkers({ floor }) {
  const ready = floor.workers.filter((w) => w.state === "ready").length;
  set(byId("workers-hint"), `${ready} of ${floor.workers.length} ready`);
  keyed(byId("workers"), floor.workers, (w) => w.name, makeWorker, drawWorker);
}

function drawTransfers({ engine, time_s: timeS }) {
  const received = engine.num_kv_blocks_received ?? 0;
  byId("transfers").hidden = !(received || engine.num_receiving || engine.num_leases);
  const then = before?.engine.num_kv_blocks_received ?? received;
  const rate = before && timeS > before.time_s ? Math.max(received - then, 0) / (timeS - before.time_s) : 0;
  pairs(byId("transfer-pairs"), [
    ["blocks received", num(received)],
    ["blocks a second", num(rate)],
    ["requests receiving", num(engine.num_receiving ?? 0)],
    ["leases held", num(engine.num_leases ?? 0)],
    ["leases expired", num(engine.num_leases_expired ?? 0), engine.num_leases_expired ? "bad" : ""],
  ]);
}

/* Why this worker, in a few words; costs are those of the KV policy. */
function reason(decision, policy) {
  if (policy === "round-robin") return "its turn";
  if (policy === "random") return "drawn at random";
  const mine = decision.terms[decision.worker];
  const field = policy === "kv" ? "cost" : "num_requests";
  const others = Object.entries(decision.terms).filter(([name]) => name !== decision.worker);
  const [next, terms] = others.reduce((best, each) => each[1][field] < best[1][field] ? each : best);
  if (terms[field] === mine[field]) return `a tie with ${next}, drawn`;
  if (policy !== "kv") return `${mine.num_requests} requests there, ${next} has ${terms.num_requests}`;
  const gains = TERMS.slice(0, 4).map(([term]) => [terms[term] - mine[term], term]);
  const [gain, term] = gains.reduce((best, each) => each[0] > best[0] ? each : best);
  const why = gain > 0 ? `: ${num(gain)} fewer ${term.replace("num_", "").replace("_", " ")}` : "";
  return `cost ${num(mine.cost)} against ${num(terms.cost)} at ${next}${why}`;
}

function makeDecision(decision, policy) {
  const details = el("details", "decision"), summary = details.appendChild(el("summary"));
  const known = share(decision.cached_tokens, decision.prompt_tokens);
  const moved = decision.resumed_tokens ? ` · goes on after ${plural(decision.resumed_tokens, "token")}` : "";
  summary.append(
    el("time", "", clock(decision.time_s)), el("b", "", decision.worker),
    el("span", "what", `${plural(decision.prompt_tokens, "token")}, ${percent(known)} cached${moved}`),
    el("span", "why", reason(decision, policy)),
  );
  details.append(termsTable(decision, policy), el("p", "hint", `Request ${decision.request_id}`));
  return details;
}

function termsTable(decision, policy) {
  const columns = TERMS.filter(([term]) => term !== "cost" || policy === "kv");
  const table = el("table"), head = table.createTHead().insertRow(), body = table.createTBody();
  head.append(el("th", "text", "worker"), ...columns.map(([, name]) => el("th", "", name)));
  for (const cell of head.children) cell.scope = "col";
  const rows = Object.entries(decision.terms).sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  for (const [name, terms] of rows) {
    const chosen = name === decision.worker, row = body.insertRow();
    row.className = chosen ? "chosen" : "";
    row.append(el("td", "text", chosen ? `${name} ✓` : name), ...columns.map(([term]) => el("td", "", num(terms[term]))));
  }
  const frame = el("div", "table");
  frame.append(table);
  return frame;
}

function drawDecisions({ floor }) {
  if (byId("decisions").querySelector("details[open]")) {
    set(byId("decisions-hint"), "The list stands still while one is open");
    return;
  }
  const last = floor.decisions.slice(-NUM_DECISIONS).reverse();
  const alone = floor.workers.length < 2;
  const policy = `${floor.router}: ${POLICIES[floor.router] ?? ""}`;
  set(byId("decisions-hint"), alone ? "One worker: there is nothing to choose" : policy);
  byId("decisions").parentElement.classList.toggle("bare", !last.length);
  keyed(byId("decisions"), last, (d) => `${d.request_id} ${d.time_s}`, (d) => makeDecision(d, floor.router));
}

function drawCounts({ finished, floor, restarts, engine }) {
  const sum = (field) => floor.workers.reduce((total, worker) => total + worker[field], 0);
  const bad = (count) => count ? "bad" : "";
  const [failures, hangs] = [sum("failures"), sum("hangs")];
  const ends = Object.entries(finished).sort().map(([name, count]) => [
    `ended: ${name}`, num(count), name === "error" ? "bad" : ""]);
  pairs(byId("counts"), [
    ...ends,
    ["preempted", num(engine.num_preemptions)],
    ["went on at another worker", num(floor.migrations), floor.migrations ? "warn" : ""],
    ["workers failed", num(failures), bad(failures)],
    ["of these, hung", num(hangs), bad(hangs)],
    ["workers restarted", num(restarts), restarts ? "warn" : ""],
  ]);
}

// What changed between two answers.

function note(timeS, tone, text) {
  const list = byId("events"), item = el("li", tone);
  item.append(el("time", "", clock(timeS)), el("span", "", text));
  list.prepend(item);
  while (list.children.length > NUM_EVENTS) list.lastChild.remove();
}

function noteChanges(data) {
  if (!before) return;
  const at = data.time_s, old = new Map(before.floor.workers.map((w) => [w.name, w]));
  for (const worker of data.floor.workers) {
    noteWorker(at, worker, old.get(worker.name));
    old.delete(worker.name);
  }
  for (const name of old.keys()) note(at, "note", `${name} left the floor`);
  const moved = data.floor.migrations - before.floor.migrations;
  if (moved > 0) note(at, "warn", `${plural(moved, "request")} went on at another worker`);
  const errors = (data.finished.error ?? 0) - (before.finished.error ?? 0);
  if (errors > 0) note(at, "bad", `${plural(errors, "request")} ended in an error`);
  if (data.draining && !before.draining) note(at, "warn", "the server is draining");
}

function noteWorker(at, worker, old) {
  if (!old) {
    note(at, "note", `${worker.name} joined the floor, ${worker.state}`);
    return;
  }
  if (worker.failures > old.failures) note(at, "bad", `${worker.name} failed: ${worker.last_failure}`);
  if (worker.restarts > old.restarts) note(at, "good", `${worker.name} was restarted`);
  else if (worker.state !== old.state) note(at, STATES[worker.state] ?? "note", `${worker.name} is ${worker.state}`);
}

// The loop.

function draw(data) {
  if (before && data.uptime_s < before.uptime_s) {
    samples = [];
    before = null;
    note(data.time_s, "warn", "the server was started anew");
  }
  const sample = sampleOf(data);
  const longest = SPANS_S[SPANS_S.length - 1];
  samples = [...samples.filter((s) => s.time >= data.time_s - longest), sample];
  const spanS = SPANS_S.find((span) => data.time_s - samples[0].time <= span) ?? longest;
  drawHead(data);
  drawTiles(data, sample);
  drawWorkers(data);
  drawTransfers(data);
  drawDecisions(data);
  drawCounts(data);
  noteChanges(data);
  byId("floor").hidden = false;
  for (const chart of charts) chart.draw(samples, spanS);
  before = data;
}

const authorization = () => key ? { Authorization: `Bearer ${key}` } : {};

function askKey(wrong) {
  live("key needed", "warn");
  byId("floor").hidden = true;
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
    live("no connection", "bad");
    return true;
  }
  if (response.status === 401) {
    askKey(key ? "The server does not know this key." : "");
    return false;
  }
  if (!response.ok) live(`the server answers ${response.status}`, "bad");
  else draw(data);
  return true;
}

async function run() {
  byId("key-form").hidden = true;
  for (;;) {
    const started = performance.now();
    if (!document.hidden && !await poll()) return;
    await new Promise((wake) => setTimeout(wake, Math.max(0, POLL_MS - (performance.now() - started))));
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  run();
});
startChat(authorization);
if (document.querySelector("meta[name=needs-key]").content === "yes") askKey("");
else run();
