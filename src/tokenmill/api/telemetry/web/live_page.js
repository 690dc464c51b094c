/* What all live pages do: they ask /dashboard/data once a second, and say when it stays away. */

import { clock, el } from "./charts.js";
import { byId, keyed, set } from "./elements.js";
import { duration } from "./format.js";

const POLL_MS = 1000, TIMEOUT_MS = 5000;
export const STATES = { ready: "good", starting: "note", restarting: "warn", draining: "warn", failed: "bad" };

let key = ""; // in memory alone
let lastTime = null, lostAt = null;

export const authorization = () => key ? { Authorization: `Bearer ${key}` } : {};
export const total = (counts) => Object.values(counts).reduce((sum, count) => sum + count, 0);

function live(text, tone) {
  set(byId("live"), text);
  byId("live").className = `pill ${tone}`;
}

/* The model, facts about it, and how many workers are ready. */
export function drawHead(data, workers, facts) {
  set(byId("model"), data.model);
  document.title = `${data.model} · tokenmill`;
  const chips = [...facts, `up ${duration(data.uptime_s)}`];
  keyed(byId("facts"), chips.map((text, i) => [String(i), text]), ([i]) => i, () => el("li"), (li, [, text]) => set(li, text));
  set(byId("foot"), `tokenmill ${data.version} · figures of ${clock(data.time_s)}`);
  const ready = workers.filter((w) => w.state === "ready").length;
  if (data.draining) live("draining", "warn");
  else if (!ready) live("no worker", "bad");
  else if (ready < workers.length) live(`${ready} of ${workers.length} ready`, "warn");
  else live("live", "good");
}

/* Rows of [name, value, unit, what stands below]. */
export function drawTiles(tiles) {
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

/* Figures that are no longer true say so, and since when. */
function lose(why) {
  lostAt ??= Date.now() / 1000;
  live(why, "bad");
  byId("pool").classList.add("stale");
  byId("lost").hidden = false;
  const figures = lastTime ? `The figures below are of ${clock(lastTime)}. ` : "";
  set(byId("lost"), `No figures since ${clock(lostAt)}: ${why}. ${figures}This page asks again every second.`);
}

function regain() {
  lostAt = null;
  byId("pool").classList.remove("stale");
  byId("lost").hidden = true;
}

function askKey(wrong) {
  live("key needed", "warn");
  byId("pool").hidden = true;
  byId("key-form").hidden = false;
  set(byId("key-wrong"), wrong);
  byId("key").focus();
}

/* One answer drawn; false when a key is needed first. */
async function poll(draw, query) {
  let response, data;
  try {
    response = await fetch(`/dashboard/data${query()}`, { headers: authorization(), signal: AbortSignal.timeout(TIMEOUT_MS) });
    data = await response.json();
  } catch {
    lose("no connection");
    return true;
  }
  const wantsOperator = data.error?.code === "not_operator";
  if (response.status === 401 || wantsOperator) {
    if (wantsOperator) askKey("These are figures of all keys: give the server's control token.");
    else askKey(key ? "The server does not know this key." : "");
    return false;
  }
  if (!response.ok) {
    lose(`the server answers ${response.status}`);
    return true;
  }
  regain();
  byId("pool").hidden = false; // charts ask how wide they are
  draw(data);
  lastTime = data.time_s;
  return true;
}

async function run(draw, query) {
  byId("key-form").hidden = true;
  for (;;) {
    const started = performance.now();
    if (!document.hidden && !await poll(draw, query)) return;
    await new Promise((wake) => setTimeout(wake, Math.max(0, POLL_MS - (performance.now() - started))));
  }
}

/* Draw every answer; `query` is what is added to the path. */
export function startPage(draw, query = () => "") {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key = byId("key").value.trim();
    byId("key").value = "";
    run(draw, query);
  });
  if (document.querySelector("meta[name=needs-key]").content === "yes") askKey("");
  else run(draw, query);
}
