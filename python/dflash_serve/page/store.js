// Conversations and settings in the browser's storage, under one key each: two tabs seldom write the same one.
const NO_NUMBERS = {tokens: 0, stepTokens: 0, first: null, seconds: 0, seed: null};
const PREFIX = "dflash/conversation/", SETTINGS = "dflash/settings", KEY = "dflash/key";

// Return an object that was kept as JSON; null if there is none, or the storage cannot be read.
function read(key) {
  try {
    const found = JSON.parse(localStorage.getItem(key));
    return found && typeof found === "object" ? found : null;
  } catch {
    return null;
  }
}

// Keep an object. Returns why that failed, or an empty text.
function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return "";
  } catch (error) {
    const isFull = error.name === "QuotaExceededError";
    return isFull ? "this browser's storage for the page is full" : `this browser stores nothing (${error.message})`;
  }
}

export function loadAll() {
  let keys = [];
  try {
    keys = Object.keys(localStorage);
  } catch {}  // the browser forbids it
  return keys.map(idOf).filter(Boolean).map(load).filter(Boolean);
}

export function load(id) {
  const found = read(PREFIX + id);
  return found && Array.isArray(found.messages) ? {system: "", title: "", changed: 0, ...found, id} : null;
}

// Return the conversations of a file that this page has written. Throws if it is another.
export function readExport(text) {
  const isText = value => typeof value === "string";
  const isMessage = message => ["user", "assistant"].includes(message?.role) && isText(message.content);
  let found;
  try {
    found = JSON.parse(text).conversations;
  } catch {}
  const isWhole = each => isText(each?.id) && Array.isArray(each.messages) && each.messages.every(isMessage);
  if (!Array.isArray(found) || !found.every(isWhole)) throw new Error("it is no export of this page");
  return found.map(({id, title, system, changed, messages}) => ({
    id, title: String(title ?? ""), system: String(system ?? ""), changed: Number(changed) || 0,
    messages: messages.map(({role, content, reasoning}) => role === "user" ? {role, content} :
      {role, content, reasoning: String(reasoning ?? ""), end: "stop", numbers: {...NO_NUMBERS, steps: {}}}),
  }));
}

export const idOf = key => key?.startsWith(PREFIX) ? key.slice(PREFIX.length) : null;
export const save = conversation => write(PREFIX + conversation.id, conversation);
export const loadSettings = () => read(SETTINGS) ?? {};
export const saveSettings = settings => write(SETTINGS, settings);

export function remove(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {}  // then it was not kept
}

// The server's key, for as long as the tab is open.
export function loadKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function saveKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {}  // it is asked for again
}
