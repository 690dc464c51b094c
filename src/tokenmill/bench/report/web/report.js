"use strict";
for (const plot of document.querySelectorAll(".plot")) {
  const rows = JSON.parse(plot.dataset.hover), series = JSON.parse(plot.dataset.series);
  const area = plot.querySelector(".area"), tip = plot.querySelector(".tip");
  const cursor = plot.querySelector(".cursor");
  const dotted = plot.querySelector(".dot") !== null;
  const knobs = series.map(([, color]) => {
    const knob = area.appendChild(document.createElement("i"));
    knob.className = "knob";
    knob.hidden = true;
    knob.style.background = color;
    return knob;
  });
  let at = -1;

  function line(name, text, color) {
    const row = document.createElement("span"), swatch = document.createElement("i");
    const value = document.createElement("em");
    swatch.style.background = color;
    value.textContent = text;
    row.append(swatch, name, value);
    return row;
  }

  function show(index) {
    at = Math.min(Math.max(index, 0), rows.length - 1);
    const [x, label, texts, heights] = rows[at];
    const head = document.createElement("b");
    head.textContent = label;
    tip.replaceChildren(head, ...texts.flatMap((text, i) =>
      text === null ? [] : [line(series[i][0], text, series[i][1])]));
    cursor.style.left = x + "%";
    knobs.forEach((knob, i) => {
      knob.hidden = heights[i] === null;
      knob.style.left = x + "%";
      knob.style.bottom = heights[i] + "%";
    });
    plot.classList.add("shown");
    const place = area.offsetLeft + area.clientWidth * x / 100;
    const left = place < plot.clientWidth / 2 ? place + 12 : place - tip.offsetWidth - 12;
    tip.style.left = Math.min(Math.max(left, 0), plot.clientWidth - tip.offsetWidth) + "px";
  }

  function hide() {
    plot.classList.remove("shown");
    for (const knob of knobs) knob.hidden = true;
  }

  function nearest(event) {
    const box = area.getBoundingClientRect();
    const distance = ([x, , , heights]) => {
      const dx = box.left + box.width * x / 100 - event.clientX;
      const gaps = heights.filter((h) => h !== null)
        .map((h) => Math.abs(box.bottom - box.height * h / 100 - event.clientY));
      const dy = dotted && gaps.length ? Math.min(...gaps) : 0;
      return dx * dx + dy * dy;
    };
    let best = 0;
    rows.forEach((row, i) => { if (distance(row) < distance(rows[best])) best = i; });
    return best;
  }

  const moves = {
    ArrowLeft: () => at - 1, ArrowRight: () => at + 1, Home: () => 0, End: () => rows.length - 1,
  };
  area.addEventListener("pointermove", (event) => show(nearest(event)));
  area.addEventListener("pointerdown", (event) => show(nearest(event)));
  area.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  plot.addEventListener("focus", () => {
    if (plot.matches(":focus-visible")) show(at < 0 ? Math.floor(rows.length / 2) : at);
  });
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]());
  });
}
