/* Rolling line charts and sparklines: stretched SVG with HTML text around it. */

const SVG = "http://www.w3.org/2000/svg";
const GAP_S = 5; // a longer pause breaks the line

export function el(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== "") element.textContent = text;
  return element;
}

export function clock(timeS) {
  return new Date(timeS * 1000).toLocaleTimeString([], { hourCycle: "h23" });
}

function stretched(className) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add(className);
  return svg;
}

function path(svg, className, color) {
  const element = svg.appendChild(document.createElementNS(SVG, "path"));
  element.setAttribute("class", className);
  if (color) element.style.setProperty("--color", color);
  return element;
}

/* The next value of 1, 2, 5 times a power of ten, halved or quartered well. */
function ceiling(value, least) {
  const top = Math.max(value, least);
  const power = 10 ** Math.floor(Math.log10(top));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= top * 0.999);
}

/* Runs of points without a gap: [[[x, y], ...], ...]. */
function runs(points) {
  const all = [];
  let last = -Infinity;
  for (const [time, value, x, y] of points) {
    if (value === null) continue;
    if (time - last > GAP_S) all.push([]);
    all[all.length - 1].push([x, y]);
    last = time;
  }
  return all;
}

const pair = ([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`;
const line = (run) => run.length > 1 ? `M${run.map(pair).join("L")}` : `M${pair(run[0])}h.01`;
const area = (run) => `${line(run)}L${run[run.length - 1][0].toFixed(2)} 100L${run[0][0].toFixed(2)} 100Z`;

export class Chart {
  /* series: [{name, color, value: sample => number or null}] */
  constructor(parent, { title, unit, format, series, least = 1, top = null }) {
    Object.assign(this, { unit, format, series, least, top, samples: [], at: null });
    const figure = parent.appendChild(el("figure", "chart"));
    const caption = figure.appendChild(el("figcaption", "", title));
    this.now = caption.appendChild(el("span", "now"));
    this.plot = figure.appendChild(el("div", "plot"));
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "img");
    this.title = title;
    const axis = this.plot.appendChild(el("div", "y-axis"));
    this.marks = [0, 50, 100].map((share) => {
      const mark = axis.appendChild(el("span"));
      mark.style.bottom = `${share}%`;
      return mark;
    });
    this.area = this.plot.appendChild(el("div", "area"));
    const svg = this.area.appendChild(stretched("lines"));
    path(svg, "grid").setAttribute("d", "M0 0H100M0 50H100");
    this.paths = series.map(({ color }, index) => ({
      fill: index === 0 ? path(svg, "fill", color) : null,
      line: path(svg, "line", color),
    }));
    this.cursor = this.area.appendChild(el("i", "cursor"));
    this.tip = this.plot.appendChild(el("div", "tip"));
    const times = this.plot.appendChild(el("div", "x-axis"));
    this.since = times.appendChild(el("span"));
    times.append(el("span", "", "now"));
    if (series.length > 1) figure.appendChild(this.legend());
    this.listen();
  }

  legend() {
    const list = el("ul", "legend");
    for (const { name, color } of this.series) {
      const item = list.appendChild(el("li"));
      item.append(swatch(color), name);
    }
    return list;
  }

  draw(samples, spanS) {
    this.spanS = spanS;
    this.start = samples[samples.length - 1].time - spanS;
    this.since.textContent = `${spanS / 60} min ago`;
    this.samples = samples.filter((sample) => sample.time >= this.start);
    const columns = this.series.map(({ value }) => this.samples.map(value));
    const most = Math.max(0, ...columns.flat().filter((v) => v !== null));
    const top = this.top ?? ceiling(most, this.least);
    this.marks.forEach((mark, i) => { mark.textContent = this.format(top * i / 2); });
    columns.forEach((values, index) => {
      const points = values.map((value, i) => [
        this.samples[i].time, value, this.x(this.samples[i]), 100 - 100 * Math.min(value ?? 0, top) / top,
      ]);
      const parts = runs(points);
      this.paths[index].line.setAttribute("d", parts.map(line).join(""));
      this.paths[index].fill?.setAttribute("d", parts.map(area).join(""));
    });
    const latest = this.texts(this.samples[this.samples.length - 1]);
    this.now.textContent = latest.map(([, text]) => text).join(" / ");
    const said = latest.map(([name, text]) => `${name} ${text}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.title}: ${said}`);
    if (this.at !== null) this.show(this.at);
  }

  x(sample) { return 100 * (sample.time - this.start) / this.spanS; }

  texts(sample) {
    return this.series.map(({ name, color, value }) => {
      const number = value(sample);
      return [name, number === null ? "–" : `${this.format(number)}${this.unit}`, color];
    });
  }

  /* Show the values at a time; the time stays when the line moves on. */
  show(time) {
    if (!this.samples.length) return;
    const away = (sample) => Math.abs(sample.time - time);
    const sample = this.samples.reduce((best, s) => away(s) < away(best) ? s : best);
    this.at = sample.time;
    const x = this.x(sample);
    this.tip.replaceChildren(el("b", "", clock(sample.time)));
    for (const [name, text, color] of this.texts(sample)) {
      const row = this.tip.appendChild(el("span"));
      row.append(swatch(color), name, el("em", "", text));
    }
    this.cursor.style.left = `${x}%`;
    this.plot.classList.add("shown");
    const place = this.area.offsetLeft + this.area.clientWidth * x / 100;
    const left = place < this.plot.clientWidth / 2 ? place + 12 : place - this.tip.offsetWidth - 12;
    const most = this.plot.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.min(Math.max(left, 0), most)}px`;
  }

  hide() {
    this.at = null;
    this.plot.classList.remove("shown");
  }

  listen() {
    const pointed = (event) => {
      const box = this.area.getBoundingClientRect();
      this.show(this.start + this.spanS * (event.clientX - box.left) / box.width);
    };
    this.area.addEventListener("pointermove", pointed);
    this.area.addEventListener("pointerdown", pointed);
    this.area.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.hide(); });
    this.plot.addEventListener("blur", () => this.hide());
    this.plot.addEventListener("keydown", (event) => {
      const last = this.samples.length - 1;
      const index = this.samples.findIndex((sample) => sample.time === this.at);
      const from = index < 0 ? last + 1 : index;
      const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") this.hide();
      if (to === undefined || last < 0) return;
      event.preventDefault();
      this.show(this.samples[Math.min(Math.max(to, 0), last)].time);
    });
  }
}

function swatch(color) {
  const mark = el("i");
  mark.style.background = color;
  return mark;
}

/* A small line without axes; draw takes [[time, value], ...]. */
export class Spark {
  constructor(parent, spanS) {
    this.spanS = spanS;
    const svg = parent.appendChild(stretched("spark"));
    this.fill = path(svg, "fill", "var(--c1)");
    this.line = path(svg, "line", "var(--c1)");
  }

  draw(values) {
    const end = values[values.length - 1][0], start = end - this.spanS;
    const shown = values.filter(([time]) => time >= start);
    const top = Math.max(1, ...shown.map(([, value]) => value ?? 0));
    const parts = runs(shown.map(([time, value]) =>
      [time, value, 100 * (time - start) / this.spanS, 96 - 92 * (value ?? 0) / top]));
    this.line.setAttribute("d", parts.map(line).join(""));
    this.fill.setAttribute("d", parts.map(area).join(""));
  }
}
