"use strict";
/* Draws a page of tables and charts from its data; bench/report/page.py says what the data are. */

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000, HEIGHT = 300;  // units of a drawing, which stretches to the page
const MAX_TICKS = 5;
const MAX_PINS = 12;  // points of a line up to which each is marked
const MARK_WIDTH = 0.27;  // of a plot on a phone: labels of marks nearer than this get rows of their own
const MANY_MS = 2000;  // from which an axis of times has ticks with units

/* "div.card" with attributes and children; texts stay texts. */
function el(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") made.style.cssText = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.flat().filter((child) => child !== ""));
  return made;
}

function drawing(width, height, paths, stretched) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-hidden", "true");
  if (stretched) svg.setAttribute("preserveAspectRatio", "none");
  for (const [name, style, d] of paths) {
    const path = svg.appendChild(document.createElementNS(SVG, "path"));
    path.setAttribute("class", name);
    path.setAttribute("d", d);
    path.style.cssText = style;
  }
  return svg;
}

/* Three digits that matter. */
function short(value) {
  const size = Math.abs(value), three = (number) => String(Number(number.toPrecision(3)));
  if (size >= 999500) return three(value / 1e6) + "M";
  if (size >= 10000) return three(value / 1e3) + "k";
  return size >= 1000 ? Math.round(value).toLocaleString("en-US") : three(value);
}

/* A latency in the unit that suits it: 421 ms, 10.7 s, 12 min. */
function inMs(value) {
  if (Math.abs(value) >= 600000) return short(value / 60000) + " min";
  return Math.abs(value) >= 1000 ? short(value / 1000) + " s" : short(value) + " ms";
}

const SHOW = { short, ms: inMs, count: (value) => Math.round(value).toLocaleString("en-US"),
  share: (value) => (100 * value).toFixed(1) + "%" };

const isTime = (axis) => axis.label.startsWith("ms");
const isLong = (axis) => isTime(axis) && axis.high >= MANY_MS;

/* Where a value is between the ends of an axis, from 0 to 1. */
function place(axis, value) {
  const scale = axis.log ? Math.log : Number;
  const [low, high] = [scale(axis.low), scale(axis.high)];
  return Math.min(Math.max((scale(Math.max(value, axis.log ? axis.low : value)) - low) / (high - low), 0), 1);
}

function ticks(low, high) {
  const least = (high - low) / MAX_TICKS, power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor >= least * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) found.push(i * step);
  return found;
}

function logTicks(low, high) {
  let found = [];
  for (const factors of [[1, 2, 5], [1, 3], [1]]) {
    found = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
      found.push(...factors.map((factor) => factor * 10 ** p).filter((v) => low <= v && v <= high));
    }
    if (found.length <= MAX_TICKS + 1) return found;
  }
  const every = Math.ceil(found.length / MAX_TICKS);
  return found.filter((_, index) => index % every === 0);
}

/* [value, text] of each tick. */
function labels(axis) {
  if (axis.ticks.length) return axis.ticks;
  const values = axis.log ? logTicks(axis.low, axis.high) : ticks(axis.low, axis.high);
  return values.map((value) => [value, isLong(axis) ? inMs(value) : short(value)]);
}

/* The label; ticks that have units need no other one. */
const axisName = (axis) => isLong(axis) ? axis.label.replace("ms", "time") : axis.label;

function shapes(chart, series) {
  const x = (value) => (WIDTH * place(chart.x, value)).toFixed(1);
  const y = (value) => (HEIGHT * (1 - place(chart.y, value))).toFixed(1);
  const known = chart.xs.map((at, i) => [at, series.values[i], series.bounds[i]]).filter(([, v]) => v !== null);
  const fill = `fill:${series.color}`;
  if (series.shape === "bars") {
    const bar = (value, i) => value ? `M${x(chart.edges[i])} ${HEIGHT}V${y(value)}H${x(chart.edges[i + 1])}V${HEIGHT}Z` : "";
    return [["bars", fill, series.values.map(bar).join("")]];
  }
  if (!known.length || series.shape === "dots") return [];
  const line = series.shape === "steps"
    ? `M0 ${y(known[0][1])}${known.map(([at, v]) => `V${y(v)}H${x(at)}`).join("")}V${HEIGHT}`
    : "M" + known.map(([at, v]) => `${x(at)} ${y(v)}`).join("L");
  const found = [["line", `stroke:${series.color}`, line]];
  if (series.bounds.length) {
    const high = known.map(([at, , b]) => `${x(at)} ${y(b[1])}`), low = known.map(([at, , b]) => `${x(at)} ${y(b[0])}`);
    found.unshift(["band", fill, `M${[...high, ...low.reverse()].join("L")}Z`]);
  }
  if (series.shape === "area") {
    found.unshift(["fill", fill, `M${x(known[0][0])} ${HEIGHT}${line.replace("M", "L")}L${x(known.at(-1)[0])} ${HEIGHT}Z`]);
  }
  return found;
}

/* The names of dots; one that would lie on another's is left to the pointer. */
function clearNames(chart) {
  const taken = [];
  return chart.names.map((name, i) => {
    const [a, b] = [place(chart.x, chart.xs[i]), place(chart.y, chart.series[0].values[i])];
    if (taken.some(([x, y]) => Math.abs(x - a) <= 0.06 && Math.abs(y - b) <= 0.09)) return "";
    taken.push([a, b]);
    return name;
  });
}

/* Round whatever the width: dots with names, and pins on lines of few points. */
function dots(chart) {
  const names = clearNames(chart), found = [];
  for (const series of chart.series) {
    const isDots = series.shape === "dots";
    if (series.quiet || !(isDots || series.shape === "line" && chart.xs.length <= MAX_PINS)) continue;
    series.values.forEach((value, i) => {
      if (value === null) return;
      const at = `left:${100 * place(chart.x, chart.xs[i])}%;bottom:${100 * place(chart.y, value)}%;--dot:${series.color}`;
      found.push(el(isDots ? "span.dot" : "span.dot.pin", { style: at }, isDots ? names[i] ?? "" : ""));
    });
  }
  return found;
}

/* Lines across the chart; the label of none lies on another's. */
function marks(chart) {
  const ends = [];  // of the last label in each row
  const found = [...chart.marks].sort((a, b) => a.value - b.value).map((mark) => {
    const at = place(chart.x, mark.value);
    let row = ends.findIndex((end) => at - end > MARK_WIDTH);
    if (row < 0) row = ends.length;
    ends[row] = at;
    const name = `span.mark${mark.limit ? ".limit" : ""}${at < 0.1 ? ".first" : ""}${at > 0.9 ? ".last" : ""}`;
    const text = `${mark.label} ${isTime(chart.x) ? inMs(mark.value) : short(mark.value)}`;
    return el(name, { style: `left:${100 * at}%;--row:${row}` }, el("b", {}, text));
  });
  return [found, ends.length];
}

function drawChart(chart) {
  const spoken = chart.series.filter((series) => !series.quiet);
  const [lines, rows] = marks(chart), [xTicks, yTicks] = [labels(chart.x), labels(chart.y)];
  const grid = yTicks.map(([value]) => `M0 ${HEIGHT * (1 - place(chart.y, value))}H${WIDTH}`).join("");
  const paths = [["grid", "", grid], ...chart.series.flatMap((series) => shapes(chart, series))];
  const texts = (axis, found, side) => found.map(([value, text]) =>
    el("span", { style: `${side}:${100 * place(axis, value)}%` }, text));
  const width = Math.max(1, ...yTicks.map(([, text]) => text.length));
  const area = el("div.area", {}, drawing(WIDTH, HEIGHT, paths, true), dots(chart), lines, el("i.cursor"));
  const plot = el("div.plot",
    { tabindex: 0, role: "group", "aria-label": chart.about, style: `--y-width:${width}ch;--mark-rows:${rows}` },
    el("div.y-name", {}, axisName(chart.y)), el("div.y-axis", {}, texts(chart.y, yTicks, "bottom")), area,
    el("div.x-axis", {}, texts(chart.x, xTicks, "left")), el("div.x-name", {}, axisName(chart.x)),
    el("div.tip", { role: "status" }));
  const legend = spoken.map((one) => el("li", {}, el("i", { style: `background:${one.color}` }), one.name));
  listen(chart, spoken, plot, area);
  return el("figure.chart", {}, el("figcaption", {}, chart.title),
    legend.length > 1 ? el("ul.legend", {}, legend) : "", plot);
}

/* Shows the values under the pointer or the arrow keys. */
function listen(chart, spoken, plot, area) {
  const tip = plot.querySelector(".tip"), cursor = plot.querySelector(".cursor");
  const dotted = plot.querySelector(".dot") !== null, last = chart.xs.length - 1;
  const left = chart.xs.map((x) => 100 * place(chart.x, x));
  const height = (series, i) => series.values[i] === null ? null : 100 * place(chart.y, series.values[i]);
  const knobs = spoken.map(({ color }) => area.appendChild(el("i.knob", { hidden: "", style: `background:${color}` })));
  let at = -1;

  function text(series, i) {
    const show = SHOW[chart.show], bounds = series.bounds[i];
    return show(series.values[i]) + (bounds ? ` (${show(bounds[0])} to ${show(bounds[1])})` : "");
  }

  function show(index) {
    at = Math.min(Math.max(index, 0), last);
    const rows = spoken.filter((series) => series.values[at] !== null).map((series) =>
      el("span", {}, el("i", { style: `background:${series.color}` }), series.name, el("em", {}, text(series, at))));
    tip.replaceChildren(el("b", {}, chart.labels[at]), ...rows);
    cursor.style.left = left[at] + "%";
    knobs.forEach((knob, i) => {
      knob.hidden = height(spoken[i], at) === null;
      knob.style.left = left[at] + "%";
      knob.style.bottom = height(spoken[i], at) + "%";
    });
    plot.classList.add("shown");
    const middle = area.offsetLeft + area.clientWidth * left[at] / 100;
    const start = middle < plot.clientWidth / 2 ? middle + 12 : middle - tip.offsetWidth - 12;
    tip.style.left = Math.min(Math.max(start, 0), plot.clientWidth - tip.offsetWidth) + "px";
  }

  function hide() {
    plot.classList.remove("shown");
    for (const knob of knobs) knob.hidden = true;
  }

  function nearest(event) {
    const box = area.getBoundingClientRect();
    const distance = (i) => {
      const dx = box.left + box.width * left[i] / 100 - event.clientX;
      const gaps = spoken.map((series) => height(series, i)).filter((h) => h !== null)
        .map((h) => Math.abs(box.bottom - box.height * h / 100 - event.clientY));
      const dy = dotted && gaps.length ? Math.min(...gaps) : 0;
      return dx * dx + dy * dy;
    };
    return chart.xs.reduce((best, _, i) => distance(i) < distance(best) ? i : best, 0);
  }

  const moves = { ArrowLeft: () => at - 1, ArrowRight: () => at + 1, Home: () => 0, End: () => last };
  area.addEventListener("pointermove", (event) => show(nearest(event)));
  area.addEventListener("pointerdown", (event) => show(nearest(event)));
  area.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  plot.addEventListener("focus", () => {
    if (plot.matches(":focus-visible")) show(at < 0 ? Math.floor((last + 1) / 2) : at);
  });
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]());
  });
}

/* A speed-up with its interval on a logarithmic scale that reaches as far to both sides of 1. */
function whisker({ value, bounds, reach, tone }) {
  const x = (ratio) => 80 + Math.log(Math.min(Math.max(ratio, 1e-3), 1e3)) / reach * 74;
  const line = bounds.length ? `M${x(bounds[0])} 9H${x(bounds[1])}` : "";
  const dot = `M${x(value)} 9h.01`;
  return el(`span.whisker.${tone}`, {}, drawing(160, 18, [["one", "", "M80 0V18"], ["range", "", line], ["value", "", dot]]));
}

const CELLS = {
  text: ({ text, tone }) => el(`span.${tone}`, {}, text),
  whisker,
  bar: ({ share, text }) => el("span.bar", { style: `--share:${share}` }, el("i"), text),
};

function drawTable({ label, rows: [head, ...body], text_columns: left, heading }) {
  const cells = (tag, row) => row.map((cell, i) => el(left.includes(i) ? `${tag}.text` : tag, {},
    typeof cell === "string" ? cell : CELLS[cell.kind](cell)));
  const table = el("div.table", { role: "region", tabindex: 0, "aria-label": label }, el("table", {},
    el("thead", {}, el("tr", {}, cells("th", head))),
    el("tbody", {}, body.map((row) => el("tr", {}, cells("td", row))))));
  return heading ? [el("h3", {}, label), table] : [table];
}

const BLOCKS = {
  table: drawTable,
  lines: ({ tone, lines }) => tone ? el(`ul.says.${tone}`, {}, lines.map((line) => el("li", {}, line)))
    : lines.map((line) => el("p", {}, line)),
  grid: ({ charts }) => el("div.charts", {}, charts.map(drawChart)),
  folded: ({ summary, blocks }) => el("details", {}, el("summary", {}, summary), blocks.flatMap(drawBlock)),
  pairs: ({ values }) => el("dl.pairs", {}, Object.entries(values).map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
};
const drawBlock = (block) => BLOCKS[block.kind](block);

function drawTile({ label, value, unit, note, tone }) {
  return el(`div.tile.${tone}`, {}, el("dt", {}, label),
    el("dd", {}, value, unit && " ", unit && el("small", {}, unit)), note && el("dd.below", {}, note));
}

function drawPage(page) {
  document.title = page.title;
  const verdict = page.verdict ? [" ", el(`span.verdict.${page.verdict[0]}`, {}, page.verdict[1])] : [];
  const sections = page.sections.map(({ title, intro, blocks }, index) =>
    el("section.card", { id: `s${index}` }, el("h2", {}, title), intro && el("p.intro", {}, intro), blocks.flatMap(drawBlock)));
  const notices = page.notices.map(({ tone, title, lines }) => el(`section.notice.${tone}`, {}, el("strong", {}, title),
    lines.length ? el("ul", {}, lines.map((line) => el("li", {}, line))) : ""));
  document.body.prepend(
    el("header", {}, el("p.kind", {}, page.kind), el("h1", {}, page.title, verdict),
      el("ul.chips", {}, page.chips.map((chip) => el("li", {}, chip)))),
    el("nav", { "aria-label": "Sections" },
      page.sections.map(({ title }, index) => el("a", { href: `#s${index}` }, title))),
    el("main", {}, notices, page.tiles.length ? el("dl.tiles", {}, page.tiles.map(drawTile)) : "", sections));
}

drawPage(JSON.parse(document.getElementById("page").content.textContent));
