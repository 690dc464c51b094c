/* The chat box: streams from /v1/chat/completions of this server. */

import { el } from "./charts.js";
import { time } from "./format.js";

const byId = (id) => document.getElementById(id);
const talk = byId("talk"), form = byId("chat-form"), say = byId("say");
const picture = byId("picture");
const send = byId("chat-send"), stop = byId("chat-stop");
let messages = []; // of the conversation, as the server wants them
let running = null; // an AbortController while an answer comes

/* The data of each server-sent event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

function bubble(role, text) {
  const item = talk.appendChild(el("article", `said ${role}`));
  item.append(el("b", "", role === "user" ? "You" : "Model"), el("p", "", text));
  follow();
  return item;
}

function follow() { talk.scrollTop = talk.scrollHeight; }

function busy(controller) {
  running = controller;
  stop.hidden = controller === null;
  send.hidden = controller !== null;
  talk.setAttribute("aria-busy", String(controller !== null));
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/* Stream one answer into its bubble. */
async function answer(item, messages, headers, signal) {
  const started = performance.now();
  let first = null, usage = null, text = "", thought = "";
  const body = item.querySelector("p"), thinking = el("p", "thought");
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { ...headers, "Content-Type": "application/json" },
    body: JSON.stringify({
      model: byId("model").dataset.name || undefined,
      messages,
      max_tokens: Number(byId("max-tokens").value) || 256,
      temperature: Number(byId("temperature").value),
      stream: true,
      stream_options: { include_usage: true },
    }),
    signal,
  });
  if (!response.ok) throw new Error(await failure(response));
  for await (const data of events(response.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    const delta = chunk.choices[0]?.delta ?? {};
    if (delta.content || delta.reasoning_content) first ??= performance.now();
    if (delta.reasoning_content) {
      if (!thought) body.before(thinking);
      thinking.textContent = thought += delta.reasoning_content;
    }
    if (delta.content) body.textContent = text += delta.content;
    follow();
  }
  item.append(el("small", "", figures(started, first, performance.now(), usage)));
}

function figures(started, first, ended, usage) {
  if (first === null || usage === null) return "no text";
  const count = usage.completion_tokens, cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const rate = count > 1 ? ` · ${(1000 * (count - 1) / (ended - first)).toFixed(1)} tok/s` : "";
  const seen = usage.prompt_tokens_details?.image_tokens;
  const images = seen ? ` · ${seen} image tokens` : "";
  const known = cached ? ` · ${cached} of ${usage.prompt_tokens} prompt tokens cached` : "";
  return `${count} tokens · first after ${time(first - started)}${rate}${images}${known}`;
}

/* The file that was chosen as a data: URL; null without one. */
function chosen() {
  const file = picture.files[0];
  if (!file) return Promise.resolve(null);
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, url: reader.result });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/* What is said, with the image before it. */
function spoken(text, image) {
  if (image === null) return text;
  const part = { type: "image_url", image_url: { url: image.url } };
  return [part, { type: "text", text }];
}

export function startChat(authorization) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const words = say.value.trim();
    if (!words || running) return;
    const controller = new AbortController();
    busy(controller);
    const conversation = messages;
    let image;
    try {
      image = await chosen();
    } catch (error) {
      const file = picture.files[0].name;
      bubble("user", words).append(el("small", "wrong", `${file}: ${error.message}`));
      return busy(null);
    }
    conversation.push({ role: "user", content: spoken(words, image) });
    const asked = bubble("user", words);
    if (image !== null) asked.append(el("small", "", image.name));
    say.value = picture.value = "";
    const item = bubble("model", "");
    try {
      await answer(item, conversation, authorization(), controller.signal);
    } catch (error) {
      const stopped = controller.signal.aborted;
      item.append(el("small", stopped ? "" : "wrong", stopped ? "stopped" : error.message));
    }
    const text = item.querySelector("p:not(.thought)").textContent;
    if (text) conversation.push({ role: "assistant", content: text });
    else conversation.pop();
    follow();
    busy(null);
  });
  say.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  stop.addEventListener("click", () => running?.abort());
  byId("chat-clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    talk.replaceChildren();
    say.focus();
  });
}
