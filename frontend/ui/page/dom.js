// Elements, lists of them that keep their focus, and requests with the API key.
// Text only ever enters the page through textContent.

export const byId = (id) => document.getElementById(id);

export function el(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// One child per item in the items' order. A child lives as long as its key.
export function keep(parent, items, keyOf, make, update) {
  const known = (parent.known ??= new Map());
  const present = new Set(items.map(keyOf));
  for (const [key, child] of known) {
    if (!present.has(key)) {
      child.remove();
      known.delete(key);
    }
  }
  items.forEach((item, index) => {
    const key = keyOf(item);
    if (!known.has(key)) known.set(key, make(item));
    const child = known.get(key);
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update(child, item);
  });
}

export function setOptions(select, values, textOf = String) {
  keep(select, values, String, (value) => {
    const option = el("option", "", textOf(value));
    option.value = value;
    return option;
  }, () => {});
}

export const shortId = (id) => id.slice(0, 8);

export const ms = (value) =>
  value === null ? "–" : value < 10 ? `${value.toFixed(1)} ms` : `${Math.round(value)} ms`;

const STORED = "tandem-key";
export const storeKey = (key) => sessionStorage.setItem(STORED, key);

// The key of a link is for all tabs, and leaves the address. A key that was typed is for its tab alone.
function takeKeyOfLink() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!key) return false;
  localStorage.setItem(STORED, key);
  sessionStorage.removeItem(STORED);
  history.replaceState(null, "", location.pathname);
  return true;
}
takeKeyOfLink();
addEventListener("hashchange", () => {
  if (takeKeyOfLink()) location.reload();
});

export function ask(path, options = {}) {
  const key = sessionStorage.getItem(STORED) ?? localStorage.getItem(STORED);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  return fetch(path, { ...options, headers, cache: "no-store" });
}

export async function failure(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the frontend answered ${response.status}`;
}

// The data of each event of a stream, as text.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}
