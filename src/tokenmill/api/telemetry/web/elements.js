/* Elements that stay and whose text changes. */

import { el } from "./charts.js";

export const byId = (id) => document.getElementById(id);

export function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/* One child per item, made once by its key, in the order of the items. */
export function keyed(parent, items, keyOf, make, update) {
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

export function pairs(list, rows) {
  keyed(list, rows, ([name]) => name, ([name]) => {
    const row = el("div");
    row.append(el("dt", "", name), el("dd"));
    return row;
  }, (row, [, text, tone]) => {
    set(row.lastChild, text);
    row.lastChild.className = tone ?? "";
  });
}
