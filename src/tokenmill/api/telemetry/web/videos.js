/* The page of a video server: its jobs, with a picture of each that is asked for when it is new. */

import { clock, el } from "./charts.js";
import { byId, keyed, pairs, set } from "./elements.js";
import { bytes, num, percent, plural, time, timeParts } from "./format.js";
import { STATES, authorization, drawHead, drawTiles, startPage } from "./live_page.js";

const STATUSES = { queued: "note", in_progress: "warn", completed: "good", failed: "bad" };

function drawFigures(data) {
  const { counts, ended } = data;
  const step = data.num_steps ? timeParts(1000 * data.steps_s / data.num_steps) : ["–", ""];
  const tiles = [
    ["Being made", num(counts.in_progress), "", `${counts.queued} wait · ${data.max_jobs} at most`],
    ["A step, mean", ...step, `${plural(data.num_steps, "step")} since the start`],
    ["Completed", num(ended.completed ?? 0), "", `${ended.failed ?? 0} failed · ${ended.deleted ?? 0} deleted, since the start`],
    ["Stored", bytes(data.stored_bytes), "", `${plural(counts.completed, "video")} · ${bytes(data.max_stored_bytes)} at most`],
  ];
  drawTiles(tiles);
}

function drawWorkers({ workers }) {
  keyed(byId("workers"), workers, (w) => w.name, (worker) => {
    const card = el("article", "worker"), head = el("div", "head");
    head.append(el("b", "", worker.name), el("span", "pill"));
    card.append(head, el("dl", "pairs"), el("p", "wrong"));
    return card;
  }, (card, worker) => {
    set(card.querySelector(".pill"), worker.state);
    card.querySelector(".pill").className = `pill ${STATES[worker.state] ?? "note"}`;
    pairs(card.querySelector(".pairs"), [
      ["videos now · in all", `${worker.num_open} · ${worker.routed}`],
      ["busy in the last minute", percent(worker.busy)],
      ["failures · restarts", `${worker.failures} · ${worker.restarts}`, worker.failures ? "bad" : ""],
    ]);
    set(card.querySelector(".wrong"), worker.last_failure ? `Last failure: ${worker.last_failure}` : "");
  });
}

// Jobs.

function makeJob(job) {
  const card = el("article", "worker job"), head = el("div", "head"), use = el("p", "use"), foot = el("p", "row");
  const picture = el("img"), remove = el("button", "", "Delete"), download = el("button", "", "Download");
  picture.hidden = true;
  head.append(el("b", "", clock(job.created_at)), el("span", "pill"));
  use.append(el("meter"), el("em"));
  use.querySelector("meter").max = 100;
  use.querySelector("meter").setAttribute("aria-label", "Progress");
  remove.type = download.type = "button";
  remove.addEventListener("click", () => fetch(`/v1/videos/${job.id}`, { method: "DELETE", headers: authorization() }));
  download.addEventListener("click", () => save(job.id));
  foot.append(download, remove);
  card.append(head, picture, el("p", "hint of"), el("p", "prompt", job.prompt), use, el("p", "hint steps"), el("p", "wrong"), foot);
  return card;
}

function drawJob(card, job) {
  set(card.querySelector(".pill"), job.status.replace("_", " "));
  card.querySelector(".pill").className = `pill ${STATUSES[job.status]}`;
  card.querySelector("meter").value = job.progress;
  set(card.querySelector(".use em"), percent(job.progress / 100));
  const took = Object.values(job.inference_seconds).reduce((sum, seconds) => sum + seconds, 0);
  const loose = job.approximations.length ? `, not exact (${job.approximations.join(", ")})` : "";
  const asked = `${job.size}, ${job.seconds} s, seed ${job.seed}${loose}`;
  const steps = `step ${job.steps_done} of ${job.num_inference_steps}`;
  set(card.querySelector(".steps"), `${asked} · ${took ? `made in ${time(1000 * took)}` : steps}`);
  set(card.querySelector(".wrong"), job.error ? job.error.message : "");
  card.querySelector("button").hidden = job.status !== "completed";
  const now = job.status === "in_progress" ? `${job.steps_done}` : job.status;
  if (now !== "queued" && now !== "failed" && now !== "0" && card.dataset.picture !== now) show(card, job, now);
}

/* Pictures come as data, since no other place may give this page any. */
async function show(card, job, now) {
  card.dataset.picture = now;
  const response = await fetch(`/v1/videos/${job.id}/content?variant=thumbnail`, { headers: authorization() }).catch(() => null);
  if (!response?.ok) return delete card.dataset.picture;
  const of = response.headers.get("x-picture-of"), reader = new FileReader();
  reader.addEventListener("load", () => {
    const picture = card.querySelector("img");
    picture.src = reader.result;
    picture.alt = of === "frame" ? "Middle frame of the video" : "Latents of the video";
    picture.hidden = false;
    set(card.querySelector(".of"), of === "frame" ? "middle frame" : "latents, three channels as colours");
  });
  reader.readAsDataURL(await response.blob());
}

async function save(id) {
  const response = await fetch(`/v1/videos/${id}/content`, { headers: authorization() });
  if (!response.ok) return;
  const link = el("a"), url = URL.createObjectURL(await response.blob());
  link.href = url;
  link.download = `${id}.mp4`;
  link.click();
  URL.revokeObjectURL(url);
}

byId("make").addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = { prompt: byId("prompt").value, size: byId("size").value, seconds: byId("seconds").value, num_inference_steps: Number(byId("steps").value) };
  const headers = { ...authorization(), "Content-Type": "application/json" };
  const response = await fetch("/v1/videos", { method: "POST", headers, body: JSON.stringify(body) }).catch(() => null);
  const answer = await response?.json();
  set(byId("make-wrong"), response?.ok ? "" : answer?.error.message ?? "no connection");
});

function draw(data) {
  drawHead(data, data.workers, [`${data.dtype} on ${data.device}`, plural(data.workers.length, "worker")]);
  drawFigures(data);
  drawWorkers(data);
  keyed(byId("jobs"), data.jobs, (job) => job.id, makeJob, drawJob);
}

startPage(draw);
