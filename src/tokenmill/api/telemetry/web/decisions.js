/* Routing decisions: one row each, and the terms of every worker below it, whatever they are. */

import { clock, el } from "./charts.js";
import { num, percent, plural, share, time } from "./format.js";

const NUM_DECISIONS = 12;

/* The name of a term without its unit: "num_requests" is "requests", "queue_ms" is "queue". */
const label = (term) => term.replace(/^num_/, "").replace(/_(ms|tokens)$/, "").replaceAll("_", " ");
const unit = (term) => /_(ms|tokens)$/.exec(term)?.[1] ?? "";
const value = (term, number) => unit(term) === "ms" ? time(number) : num(number);

/* Why this worker, in a few words. */
function reason(decision, policy) {
  const mine = decision.terms[decision.worker];
  const others = Object.entries(decision.terms).filter(([name]) => name !== decision.worker);
  if (!mine || !others.length) return decision.role === "both" ? "the only worker" : `the only ${decision.role} worker`;
  const field = policy.term;
  if (!(field in mine)) return policy.reason;
  const [next, terms] = others.reduce((best, each) => each[1][field] < best[1][field] ? each : best);
  if (terms[field] === mine[field]) return `a tie with ${next}, drawn`;
  const compared = `${label(field)} ${value(field, mine[field])} against ${value(field, terms[field])} at ${next}`;
  const parts = Object.keys(mine).filter((term) => term !== field && unit(term) === unit(field));
  const gains = parts.map((term) => [terms[term] - mine[term], term]).filter(([gain]) => gain > 0);
  if (!unit(field) || !gains.length) return compared;
  const [gain, term] = gains.reduce((best, each) => each[0] > best[0] ? each : best);
  return `${compared}: ${value(term, gain)} less ${label(term)}`;
}

function makeDecision(decision, policy) {
  const details = el("details", "decision"), summary = details.appendChild(el("summary"));
  const known = share(decision.cached_tokens, decision.prompt_tokens);
  const moved = decision.resumed_tokens ? ` · goes on after ${plural(decision.resumed_tokens, "token")}` : "";
  const why = [decision.note, reason(decision, policy)].filter(Boolean).join(" · ");
  summary.append(
    el("time", "", clock(decision.time_s)), el("b", "", decision.worker),
    el("span", "what", `${plural(decision.prompt_tokens, "token")}, ${percent(known)} cached${moved}`),
    el("span", "why", why),
  );
  details.append(termsTable(decision, policy), el("p", "hint", `Request ${decision.request_id}`));
  return details;
}

function termsTable(decision, policy) {
  const all = [...new Set(Object.values(decision.terms).flatMap(Object.keys))];
  const columns = policy.knows_blocks ? all : all.filter((term) => unit(term) !== "ms");
  const table = el("table"), head = table.createTHead().insertRow(), body = table.createTBody();
  const titles = columns.map((term) => unit(term) === "tokens" ? `${label(term)}, tokens` : label(term));
  head.append(el("th", "text", "worker"), ...titles.map((title) => el("th", "", title)));
  for (const cell of head.children) cell.scope = "col";
  const rows = Object.entries(decision.terms).sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  for (const [name, terms] of rows) {
    const chosen = name === decision.worker, row = body.insertRow();
    row.className = chosen ? "chosen" : "";
    const cells = columns.map((term) => el("td", "", term in terms ? value(term, terms[term]) : "–"));
    row.append(el("td", "text", chosen ? `${name} ✓` : name), ...cells);
  }
  const frame = el("div", "table");
  frame.append(table);
  return frame;
}

/* Draw the latest ones into the list; `keyed` and `set` are the page's. */
export function drawDecisions(list, hint, pool, { keyed, set }) {
  if (list.querySelector("details[open]")) {
    set(hint, "The list stands still while one is open");
    return;
  }
  const last = pool.decisions.slice(-NUM_DECISIONS).reverse();
  const alone = pool.workers.length < 2, roles = pool.workers.some((w) => w.role === "prefill");
  const policy = `${pool.router}: ${pool.policy.rule}${roles ? ", among prefill and among decode workers" : ""}`;
  const none = last.length ? "" : " · no request has come yet";
  set(hint, alone ? "One worker: there is nothing to choose" : `${policy}${none}`);
  list.parentElement.classList.toggle("bare", !last.length);
  keyed(list, last, (d) => `${d.request_id} ${d.worker} ${d.time_s}`, (d) => makeDecision(d, pool.policy));
}
