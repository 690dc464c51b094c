/* The page of a language server, which keeps the history itself. */

import { Chart, Spark, clock, el } from "./charts.js";
import { startChat } from "./chat.js";
import { drawDecisions } from "./decisions.js";
import { byId, keyed, pairs, set } from "./elements.js";
import { bytes, num, percent, plural, share, time, timeParts } from "./format.js";
import { STATES, authorization, drawHead, drawTiles, startPage, total } from "./live_page.js";

const SPANS_S = [60, 120, 300], SPARK_S = 60, RATE_S = 60;
const ROLES = { both: "prefill + decode" };

let samples = [], before = null;

// The history, as the server sampled it.

/* Add what is new; the share of hits is that of the minute before each sample. */
function remember(data) {
  const longest = SPANS_S[SPANS_S.length - 1];
  for (const sample of data.history) {
    const base = samples.find((old) => old.time_s >= sample.time_s - RATE_S);
    const hitShare = base ? share(sample.hit_tokens - base.hit_tokens, sample.query_tokens - base.query_tokens) : null;
    samples.push({ ...sample, time: sample.time_s, hitShare });
  }
  samples = samples.filter((s) => s.time >= data.time_s - longest);
}

// The parts of the page.

function drawModel(data) {
  const { pool } = data;
  byId("model").dataset.name = data.model;
  byId("picture-row").hidden = !data.takes_images;
  const engine = [`${data.dtype} on ${data.device}`, `context ${num(data.max_model_len)}`, `blocks of ${data.block_size} tokens`];
  drawHead(data, pool.workers, [
    ...(data.dtype ? engine : []), plural(pool.workers.length, data.dtype ? "worker" : "backend"), ...(pool.workers.length > 1 ? [`router ${pool.router}`] : []),
  ]);
}

function drawFigures(data) {
  const { engine, pool, ttft_ms: ttft, tpot_ms: tpot } = data;
  const sum = (field) => pool.workers.reduce((total, w) => total + (w[field] ?? 0), 0);
  const late = (summary) => "p50" in summary
    ? `p90\u00a0${time(summary.p90)} · p99\u00a0${time(summary.p99)} in the last ${data.window_s}\u00a0s` : `none in the last ${data.window_s}\u00a0s`;
  const median = (summary) => "p50" in summary ? timeParts(summary.p50) : ["–", ""];
  const held = pool.num_held ? ` · ${pool.num_held} held` : "";
  const hits = share(engine.prefix_hit_tokens, engine.prefix_query_tokens);
  const known = pool.workers.some((w) => w.prompt_tokens_per_s !== null);
  const kv = engine.num_kv_blocks ? `${num(engine.num_kv_blocks_used)} of ${plural(engine.num_kv_blocks, "block")}` : "not known here";
  const tiles = [
    ["Output", num(sum("tokens_per_s")), "tok/s", `over 10 s · ${plural(data.output_tokens, "token")} in all`],
    ["Prompts", known ? num(sum("prompt_tokens_per_s")) : "–", known ? "tok/s" : "", known ? `computed, over 10 s · ${plural(data.prompt_tokens, "token")} asked` : "not known here"],
    ["Open requests", num(pool.num_open), "", `${pool.num_open - data.num_pending} generating · ${data.num_pending} in queue or prefill${held}`],
    ["TTFT, median", ...median(ttft), late(ttft)],
    ["TPOT, median", ...median(tpot), late(tpot)],
    ["KV in use", percent(share(engine.num_kv_blocks_used, engine.num_kv_blocks)), "", kv],
    ["Prefix hits", percent(samples[samples.length - 1]?.hitShare ?? null), "", `last minute · ${percent(hits)} in all`],
    ["Refused", num(total(data.rejected)), "", total(data.rejected) ? Object.keys(data.rejected).join(", ") : "calls since the start"],
  ];
  drawTiles(tiles);
}

const quantiles = (field) => [["p50", "var(--c1)"], ["p99", "var(--c2)"]].map(([name, color]) => (
  { name, color, value: (sample) => sample[field][name] ?? null }));
const charts = [
  { title: "Output", unit: " tok/s", series: [{ name: "tokens", color: "var(--c1)", value: (s) => s.output_tok_s }], least: 10 },
  { title: "Prompts, over 10 s", unit: " tok/s", series: [{ name: "tokens", color: "var(--c1)", value: (s) => s.prompt_tok_s }], least: 10 },
  {
    title: "Requests", unit: "", least: 4,
    series: [
      { name: "generating", color: "var(--c1)", value: (s) => s.num_generating },
      { name: "in queue or prefill", color: "var(--c2)", value: (s) => s.num_pending },
    ],
  },
  { title: "TTFT, last minute", unit: "", format: time, series: quantiles("ttft_ms"), least: 1 },
  { title: "TPOT, last minute", unit: "", format: time, series: quantiles("tpot_ms"), least: 1 },
  { title: "Refused", unit: " a second", series: [{ name: "calls", color: "var(--c2)", value: (s) => s.rejected_per_s }], least: 1 },
  { title: "KV in use", unit: "", format: percent, top: 1, series: [{ name: "blocks", color: "var(--c3)", value: (s) => s.kv_share }] },
  {
    title: "Prefix hits, last minute", unit: "", format: percent, top: 1,
    series: [{ name: "prompt tokens", color: "var(--c3)", value: (s) => s.hitShare }],
  },
].map((chart) => new Chart(byId("charts"), { format: num, ...chart }));

const sparks = new WeakMap();

function makeWorker(worker) {
  const card = el("article", "worker"), head = el("div", "head"), rate = el("p", "rate"), use = el("p", "use");
  head.append(el("b", "", worker.name), el("span", "role"), el("span", "pill"));
  rate.append(el("span", "value"), " ", el("small"), el("span", "line"));
  use.append(el("span", "", "KV"), el("meter"), el("em"));
  const meter = use.querySelector("meter");
  meter.max = 1;
  meter.setAttribute("aria-label", `KV in use at ${worker.name}`);
  card.append(head, rate, use, el("dl", "pairs"), el("p", "wrong"));
  sparks.set(card, new Spark(rate.querySelector(".line"), SPARK_S));
  return card;
}

function drawWorker(card, worker, knowsBlocks) {
  const kv = share(worker.kv_blocks_used, worker.kv_blocks) ?? 0;
  set(card.querySelector(".role"), ROLES[worker.role] ?? worker.role);
  set(card.querySelector(".pill"), worker.state);
  card.querySelector(".pill").className = `pill ${STATES[worker.state] ?? "note"}`;
  const computes = worker.role === "prefill" ? 0 : 1; // what its rate is of: prompts or outputs
  set(card.querySelector(".value"), num(computes ? worker.tokens_per_s : worker.prompt_tokens_per_s ?? 0));
  set(card.querySelector(".rate small"), computes ? "output tok/s" : "prompt tok/s");
  if (samples.length) sparks.get(card).draw(samples.map((s) => [s.time, s.workers[worker.name]?.[computes] ?? null]));
  card.querySelector("meter").value = kv;
  set(card.querySelector(".use em"), percent(kv));
  const other = computes ? ["prompt tok/s", worker.prompt_tokens_per_s] : ["output tok/s", worker.tokens_per_s];
  pairs(card.querySelector(".pairs"), [
    ...(other[1] === null ? [] : [[other[0], num(other[1])]]),
    ["running · waiting", `${worker.num_running} · ${worker.num_waiting}`],
    ["prefill queued", plural(worker.queued_tokens, "token")],
    ...(knowsBlocks ? [["cached blocks", num(worker.cached_blocks)]] : []),
    ["routed here", plural(worker.routed, "request")],
    ...(knowsBlocks ? [["found cached", percent(share(worker.overlap_tokens, worker.routed_tokens))]] : []),
    worker.role === "backend"
      ? ["failures · returns", `${worker.failures} · ${worker.returns}`, worker.failures ? "bad" : ""]
      : ["failures · restarts", `${worker.failures} · ${worker.restarts}`, worker.failures ? "bad" : ""],
  ]);
  const failure = worker.last_failure ? [`Last failure: ${worker.last_failure}`] : [];
  set(card.querySelector(".wrong"), [...failure, ...worker.warnings].join("; "));
}

function drawWorkers({ pool }) {
  const ready = pool.workers.filter((w) => w.state === "ready").length;
  set(byId("workers-hint"), `${ready} of ${pool.workers.length} ready`);
  const knowsBlocks = pool.policy.knows_blocks;
  keyed(byId("workers"), pool.workers, (w) => w.name, makeWorker, (card, w) => drawWorker(card, w, knowsBlocks));
}

function drawTransfers({ engine, pool }) {
  const { transfers, failed_transfers: failed, rates } = pool;
  byId("transfers").hidden = !(rates || transfers || failed || engine.num_kv_blocks_received || engine.num_leases);
  pairs(byId("transfer-pairs"), [
    ["prompts handed over", num(transfers)],
    ["lost on the way", num(failed), failed ? "bad" : ""],
    ["KV moved", bytes(pool.transferred_bytes)],
    ["blocks received", num(engine.num_kv_blocks_received ?? 0)],
    ["requests receiving", num(engine.num_receiving ?? 0)],
    ["leases held", num(engine.num_leases ?? 0)],
    ["leases expired", num(engine.num_leases_expired ?? 0), engine.num_leases_expired ? "bad" : ""],
    ...(rates ? [
      ["prefill · decode busy", `${percent(rates.prefill_busy)} · ${percent(rates.decode_busy)}`, rates.starving ? "warn" : ""],
      ["prefill:decode that would fit", `${rates.fitting_prefill}:${rates.fitting_decode}`],
    ] : []),
  ]);
}

function drawImages({ engine, pool }) {
  const images = pool.images;
  byId("images").hidden = !images;
  if (!images) return;
  const refused = Object.entries(images.refused).sort().map(([stage, count]) => [`refused by ${stage}`, num(count), "bad"]);
  pairs(byId("image-pairs"), [
    ["images", num(images.images)],
    ["tokens of prompts", num(images.tokens)],
    ["decoded", num(images.decoded)],
    ["fetched", num(images.fetched)],
    ["were ready", num(images.cached)],
    ["encoded", num(images.encoded)],
    ["patches a step", engine.num_steps ? num(Math.round(images.patches / engine.num_steps)) : "–"],
    ["found encoded", num(images.encoder_hits)],
    ...refused,
  ]);
}

function drawCounts({ finished, rejected, pool, restarts, engine }) {
  const sum = (field) => pool.workers.reduce((total, worker) => total + worker[field], 0);
  const bad = (count) => count ? "bad" : "";
  const [failures, hangs] = [sum("failures"), sum("hangs")];
  const ends = Object.entries(finished).sort().map(([name, count]) => [
    `ended: ${name}`, num(count), name === "error" ? "bad" : ""]);
  pairs(byId("counts"), [
    ...ends,
    ...Object.entries(rejected).sort().map(([name, count]) => [`refused: ${name}`, num(count), "warn"]),
    ["preempted", num(engine.num_preemptions)],
    ["went on at another worker", num(pool.migrations), pool.migrations ? "warn" : ""],
    ["workers failed", num(failures), bad(failures)],
    ["of these, hung", num(hangs), bad(hangs)],
    ["workers restarted", num(restarts), restarts ? "warn" : ""],
  ]);
}

function drawEvents({ events }) {
  keyed(byId("events"), events.toReversed(), (event) => String(event.number), (event) => {
    const item = el("li", event.tone);
    item.append(el("time", "", clock(event.time_s)), el("span", "", event.text));
    return item;
  });
}

// The loop.

function draw(data) {
  if (before && data.uptime_s < before.uptime_s) {
    samples = []; // another server: its history begins anew
    byId("events").replaceChildren();
  }
  remember(data);
  drawModel(data);
  drawFigures(data);
  drawWorkers(data);
  drawTransfers(data);
  drawImages(data);
  drawDecisions(byId("decisions"), byId("decisions-hint"), data.pool, { keyed, set });
  drawCounts(data);
  drawEvents(data);
  if (samples.length) {
    const spanS = SPANS_S.find((span) => data.time_s - samples[0].time <= span) ?? SPANS_S[SPANS_S.length - 1];
    for (const chart of charts) chart.draw(samples, spanS);
  }
  before = data;
}

startChat(authorization);
// A request begins where the history ends; a new server has none of it.
startPage(draw, () => `?since=${samples.length ? samples[samples.length - 1].time_s : 0}`);
