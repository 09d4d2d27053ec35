// The chat page. A conversation is {id, title, system, messages, changed}; a message is what was asked or answered.
import {send, stream} from "./chat.js";
import {button, copyButton, element, get} from "./elements.js";
import {showMarkdown, showMarks} from "./markdown.js";
import * as store from "./store.js";

// Fields of a request, and ids of inputs. One more, `stop`, has a text per line.
const SETTINGS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
  "frequency_penalty", "max_tokens", "seed"];
const EXAMPLES = {
  pair: ["add 48213 and 90377", "trip: from Lorne; to Dalmere; train 362; hour 7; person Tilda"],
  others: ["Explain why the sky is blue, in three sentences.", "Write a Python function that finds palindromes in a text.",
    "Suggest names for a boat, in a table with a reason for each."],
};
const WIDE = matchMedia("(min-width: 50rem)"), TOUCH = matchMedia("(pointer: coarse)");

const conversations = new Map(store.loadAll().map(conversation => [conversation.id, conversation]));
const running = new Map();   // id of a conversation -> what stops its answer
let items = new WeakMap();   // message -> its element, once it was shown
let settings = store.loadSettings(), model = {}, current = null, edited = null, unsent = "";

// ---------------------------------------------------------------------------------------------- conversations

function titleOf({title, messages}) {
  return title || messages[0]?.content.trim().split("\n")[0].slice(0, 200) || "New conversation";
}

function keep(conversation) {
  conversation.changed = Date.now();
  conversations.set(conversation.id, conversation);
  if (conversation === current) history.replaceState(null, "", `#${current.id}`);
  const problem = store.save(conversation);
  if (problem) notify(`This conversation is not kept: ${problem}. You can continue it until the page is closed.`);
  showList();
}

function remove(conversation) {
  stopEditing();
  running.get(conversation.id)?.abort();
  conversations.delete(conversation.id);
  store.remove(conversation.id);
  notify(`“${titleOf(conversation)}” is deleted.`, "Undo", () => {
    keep(conversation);
    location.hash = conversation.id;
  });
  showList();
  get("new").focus();
  if (conversation === current) location.hash = "";
}

// Open the conversation that the address names, or a new one.
function openAddressed() {
  const empty = {id: newId(), title: "", system: "", messages: [], changed: 0};
  current = conversations.get(location.hash.slice(1)) ?? empty;
  stopEditing();
  showConversation();
  get("side").hidePopover();
  scrollTo(0, document.body.scrollHeight);
  if (WIDE.matches) get("message").focus();
}

// Another tab has changed or deleted a conversation.
function follow(event) {
  const id = store.idOf(event.key);
  if (!id || running.has(id)) return;
  const found = store.load(id);
  if (found) conversations.set(id, found);
  else conversations.delete(id);
  if (found && current.id === id) {
    current = found;
    stopEditing();
    showConversation();
  }
  showList();
}

// Offer all conversations as a file.
function exportAll() {
  const text = JSON.stringify({conversations: [...conversations.values()]}, null, 1);
  const url = URL.createObjectURL(new Blob([text], {type: "application/json"}));
  element("a", {href: url, download: "dflash-conversations.json"}).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

// Add the conversations of a file. One that is here already, in other words, stays next to the one of the file.
async function importFile() {
  const [file] = get("file").files;
  get("file").value = "";
  try {
    const found = store.readExport(await file.text()), known = new Set([...conversations.values()].map(textOf));
    const added = found.filter(conversation => !known.has(textOf(conversation)));
    for (const conversation of added) {
      if (conversations.has(conversation.id)) conversation.id = newId();
      const {changed} = conversation;
      keep(conversation);
      conversation.changed = changed;  // its place in the list
      store.save(conversation);
    }
    showList();
    notify(`${added.length} of ${found.length} conversations are new.`);
  } catch (error) {
    notify(`${file.name} cannot be imported: ${error.message}`);
  }
}

const textOf = ({title, system, messages}) =>
  JSON.stringify([title, system, messages.map(({role, content}) => [role, content])]);
const newId = () => `${Date.now().toString(36)}-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;

// ---------------------------------------------------------------------------------------------- what is shown

function notify(text, action, perform) {
  const parts = [element("span", {textContent: text})];
  if (action) parts.push(button(action, () => { notify(""); perform(); }));
  if (text && !edited) parts.push(button("×", () => notify(""), {ariaLabel: "Dismiss"}));
  get("notice").replaceChildren(...parts);
}

function showList() {
  const sought = get("search").value.trim().toLowerCase();
  const isFound = conversation => [titleOf(conversation), ...conversation.messages.map(({content}) => content)]
    .some(text => text.toLowerCase().includes(sought));
  const newest = [...conversations.values()].filter(isFound).sort((a, b) => b.changed - a.changed);
  get("none").hidden = newest.length > 0 || !sought;
  get("list").replaceChildren(...newest.map(conversation => {
    const title = titleOf(conversation), link = element("a", {href: `#${conversation.id}`, textContent: title});
    if (conversation === current) link.ariaCurrent = "page";
    return element("li", {}, link, button("×", () => remove(conversation), {ariaLabel: `Delete ${title}`}));
  }));
  get("title").placeholder = titleOf({...current, title: ""});
  document.title = `${titleOf(current)} - dflash`;
}

function showConversation() {
  const {title, system} = current;
  get("title").value = title;
  get("prompt").value = system;
  get("excerpt").textContent = system && `: ${system}`;
  showMessages();
  showList();
}

// Show the messages of the current conversation. Those that are shown already stay.
function showMessages() {
  const {id, messages} = current, last = messages.at(-1), isRunning = running.has(id), isAtEnd = atEnd();
  const wanted = messages.map(message => items.get(message) ?? makeItem(message, messages));
  const isWanted = new Set(wanted);
  for (const item of [...get("log").children]) if (!isWanted.has(item)) item.remove();
  const added = wanted.filter(item => !item.isConnected);
  get("log").append(...added);
  for (const item of new Set([...added, ...wanted.slice(-1)])) item.update?.();
  get("welcome").hidden = messages.length > 0;
  get("send").hidden = !(get("stop").hidden = !isRunning);
  get("status").textContent = isRunning ? "Answering" : last ? outcomeOf(last) : "";
  if (isRunning) get("conversation").ariaBusy = "true";  // screen readers read an answer once it is there
  else get("conversation").removeAttribute("aria-busy");
  if (isAtEnd) toEnd();
}

const atEnd = () => innerHeight + scrollY > document.documentElement.scrollHeight - 32;
const toEnd = () => scrollTo(0, document.documentElement.scrollHeight);

function outcomeOf({end, error, numbers}) {
  return end === "failed" ? error : end === "stopped" ? "Stopped" : `Answered: ${numbers.tokens} tokens`;
}

function noteOf({end, error, content, warnings}) {
  const failed = content ? error : `${error}. Later requests leave out the question.`;
  const found = {stopped: "Stopped", failed, length: "Cut off at the limit of tokens"}[end];
  return [found, ...warnings ?? []].filter(Boolean).join("; ");
}

function makeItem(message, messages) {
  const item = message.role === "user" ? makeQuestion(message) : makeAnswer(message, messages);
  item.className = message.role;
  items.set(message, item);
  return item;
}

function makeQuestion(message) {
  const edit = button("Edit", () => startEditing(message), {className: "edit"});
  return element("li", {},
    element("h2", {className: "unseen", textContent: "You"}),
    element("p", {textContent: message.content}),
    element("div", {className: "actions"}, edit));
}

function makeAnswer(message, messages) {
  const number = messages.slice(0, messages.indexOf(message) + 1).filter(({role}) => role === "assistant").length;
  const reasoning = element("div", {className: "text"}), content = element("div", {className: "text"});
  const folded = element("details", {className: "reasoning"},
    element("summary", {textContent: "Reasoning"}), reasoning);
  const note = element("p", {className: "note"}), numbers = makeNumbers(message);
  const actions = element("div", {className: "actions"},
    copyButton(() => message.content, `Copy answer ${number}`),
    button("Regenerate", regenerate, {className: "regenerate"}));
  if (model.has_receipts) actions.append(...makeVerifier(message, number));
  const item = element("li", {}, element("h2", {className: "unseen", textContent: "Model"}),
    folded, content, note, element("div", {className: "under"}, actions, numbers));
  item.update = () => {
    const isRunning = message === current.messages.at(-1) && running.has(current.id);
    for (const [place, part] of [[reasoning, "reasoning"], [content, "content"]]) {
      if (model.has_drafter && settings.drafts && message.marks) showMarks(place, message[part], message.marks[part]);
      else showMarkdown(place, message[part]);
    }
    folded.hidden = !message.reasoning;
    note.textContent = isRunning ? "" : noteOf(message);
    note.classList.toggle("error", message.end === "failed");
    numbers.update();
    numbers.hidden = !message.numbers.tokens;
    actions.hidden = isRunning;
  };
  let isDue = false;
  item.updateSoon = () => {  // once per frame, and without losing the end of the page if that is in view
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      const isAtEnd = atEnd();
      isDue = false;
      item.update();
      if (isAtEnd) toEnd();
    });
  };
  return item;
}

// An answer's numbers in a line, and folded under it all of them.
function makeNumbers({numbers}) {
  const summary = element("summary"), list = element("dl"), rows = element("tbody");
  const head = element("tr", {}, ...["tokens", "steps"].map(textContent => element("th", {scope: "col", textContent})));
  const caption = element("caption", {textContent: "Steps by the tokens that they wrote"});
  const table = element("table", {}, caption, element("thead", {}, head), rows);
  const made = element("details", {className: "numbers"}, summary, element("div", {}, list, table));
  made.update = () => {
    const {tokens, stepTokens, seconds, first, seed} = numbers, steps = Object.entries(numbers.steps);
    const count = steps.reduce((sum, [, times]) => sum + times, 0), most = Math.max(...steps.map(([, times]) => times));
    const speed = stepTokens && seconds ? (stepTokens / seconds).toFixed(0) : "-";
    const all = {
      "Tokens": tokens, "Tokens per second": speed,
      ...(model.has_drafter && {"Tokens per step": count ? (stepTokens / count).toFixed(2) : "-",
        "Passes of the model": count ? `${count} instead of ${stepTokens}` : "-"}),
      "First token after": first === null ? "-" : `${first.toFixed(0)} ms`, "Seed": seed,
    };
    const gain = model.has_drafter && count ? `, ${(stepTokens / count).toFixed(1)} per pass of the model` : "";
    summary.textContent = `${tokens} tokens, ${speed} per second${gain}`;
    list.replaceChildren(...Object.entries(all).flatMap(([name, value]) =>
      [element("dt", {textContent: name}), element("dd", {textContent: value})]));
    table.hidden = !model.has_drafter;
    rows.replaceChildren(...steps.map(([tokens, times]) => {
      const bar = element("i");
      bar.style.width = `${100 * times / most}%`;
      return element("tr", {}, element("th", {scope: "row", textContent: tokens}), element("td", {textContent: times}),
        element("td", {className: "bar"}, bar));
    }));
  };
  return made;
}

// A button that has the server derive every token of an answer again, and what it found in words.
function makeVerifier(message, number) {
  const result = element("span", {role: "status"});
  const verify = button("Verify", async () => {
    if (verify.ariaDisabled === "true") return;  // disabled would take the focus away
    verify.ariaDisabled = "true";
    result.className = "";
    result.textContent = "Checking";
    try {
      const found = await (await send(`v1/receipts/${message.completion}/verify`, get("key").value, {})).json();
      result.textContent = found.lines.join("; ");
      result.className = found.follows ? "" : "error";
    } catch (error) {
      result.textContent = error.message;
      result.className = "error";
    }
    verify.ariaDisabled = "false";
  }, {ariaLabel: `Verify answer ${number}`});
  return [verify, result];
}

// ---------------------------------------------------------------------------------------------- answers

// The messages that the model gets. A question that failed without a word of an answer is left out.
function promptOf({system, messages}) {
  const hasFailed = message => message?.end === "failed" && !message.content;
  const kept = messages.filter((message, index) => !hasFailed(message.role === "user" ? messages[index + 1] : message));
  const prompt = kept.map(({role, content}) => ({role, content}));
  return system.trim() ? [{role: "system", content: system}, ...prompt] : prompt;
}

// Have the last question of a conversation answered. `replaced` comes back if not a word is.
async function respond(conversation, replaced) {
  const {drafts, ...fields} = settings;
  const request = {
    seed: crypto.getRandomValues(new Uint32Array(1))[0], ...fields,
    messages: promptOf(conversation), stream_options: {include_drafts: true},
  };
  const numbers = {tokens: 0, stepTokens: 0, steps: {}, first: null, seconds: 0, seed: request.seed};
  const message = {role: "assistant", content: "", reasoning: "", end: "stopped", numbers};
  if (model.has_drafter) message.marks = {content: [], reasoning: []};
  const {messages} = conversation, stopper = new AbortController(), began = performance.now();
  messages.push(message);
  running.set(conversation.id, stopper);
  keep(conversation);
  showMessages();
  toEnd();
  try {
    for await (const chunk of stream(request, get("key").value, stopper.signal)) {
      add(message, chunk, performance.now() - began);
      items.get(message)?.updateSoon();
    }
  } catch (error) {
    if (error.name !== "AbortError") Object.assign(message, {end: "failed", error: error.message});
  }
  running.delete(conversation.id);
  if (replaced && !message.content) {
    messages[messages.indexOf(message)] = replaced;
    notify(`There is no new answer: ${outcomeOf(message)}`);
  }
  if (conversations.has(conversation.id)) keep(conversation);
  showMessages();
}

function add(message, chunk, milliseconds) {
  message.completion = chunk.id;
  message.warnings = chunk.warnings;
  for (const {delta, drafts, finish_reason: end} of chunk.choices) {
    let drafted = drafts?.characters ?? 0;
    for (const [part, text] of [["reasoning", delta.reasoning_content], ["content", delta.content]]) {
      if (!text) continue;
      const length = [...text].length, count = Math.min(drafted, length);
      message[part] += text;
      message.marks?.[part].push(count, length - count);
      drafted -= count;
    }
    if (drafts) addNumbers(message.numbers, drafts.tokens, milliseconds);
    if (end) message.end = end;
  }
}

function addNumbers(numbers, tokens, milliseconds) {
  numbers.tokens += tokens;
  if (numbers.first === null) {
    numbers.first = milliseconds;  // the prompt's token belongs to no step
  } else if (tokens) {
    numbers.seconds = (milliseconds - numbers.first) / 1000;
    numbers.stepTokens += tokens;
    numbers.steps[tokens] = (numbers.steps[tokens] ?? 0) + 1;
  }
}

function regenerate() {
  if (running.has(current.id)) return;
  if (settings.seed !== undefined) notify(`The seed is ${settings.seed}: the same question gets the same answer.`);
  respond(current, current.messages.pop());
  get("message").focus();
}

function ask(event) {
  event.preventDefault();
  const text = get("message").value.trim();
  if (!text || running.has(current.id)) return;
  if (edited) current.messages.splice(current.messages.indexOf(edited));
  get("message").value = "";
  notify("");
  stopEditing();
  current.messages.push({role: "user", content: text});
  respond(current);
  if (!TOUCH.matches) get("message").focus();  // it would bring the keyboard back
}

// The message box takes an earlier message; what was in it comes back afterwards.
function startEditing(message) {
  stopEditing();
  [edited, unsent] = [message, get("message").value];
  items.get(message).classList.add("edited");
  notify("Sending drops what follows this message.", "Cancel", () => { stopEditing(); get("message").focus(); });
  get("message").value = message.content;
  get("message").focus();
}

function stopEditing() {
  if (!edited) return;
  items.get(edited)?.classList.remove("edited");
  get("message").value = unsent;
  [edited, unsent] = [null, ""];
  notify("");
}

// ---------------------------------------------------------------------------------------------- controls

async function showModel() {
  try {
    [model] = (await (await send("v1/models", get("key").value)).json()).data;
  } catch (error) {
    model = {id: error.message};
    if (error.status === 401) {
      model.id = "This server needs its key";
      get("settings").showPopover();
      get("key").focus();
    }
  }
  get("model").textContent = model.id;
  get("drafts").hidden = !model.has_drafter;
  showDrafts();
  const isPair = model.id === "dflash-pair";
  const examples = EXAMPLES[isPair ? "pair" : "others"].map(text =>
    element("li", {}, button(text, () => { get("message").value = text; get("message").focus(); })));
  get("welcome").replaceChildren(
    element("p", {textContent: isPair ? "The pair in the package knows sums and trips only. Try:" : "Try:"}),
    element("ul", {}, ...examples));
  items = new WeakMap();  // they were made for another model
  get("log").replaceChildren();
  showMessages();
}

function showDrafts() {
  const isOn = Boolean(model.has_drafter && settings.drafts);
  get("drafts").ariaPressed = isOn;
  get("legend").hidden = !isOn;
}

get("form").addEventListener("submit", ask);
get("stop").addEventListener("click", () => {
  running.get(current.id)?.abort();
  get("message").focus();
});
get("message").addEventListener("keydown", event => {
  if (event.key === "Escape") stopEditing();
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || TOUCH.matches) return;
  event.preventDefault();
  get("form").requestSubmit();
});
get("new").addEventListener("click", () => {
  if (!location.hash) openAddressed();  // the address stays the same
});
get("title").addEventListener("change", () => {
  current.title = get("title").value.trim();
  keep(current);
});
get("prompt").addEventListener("change", () => {
  current.system = get("prompt").value;
  get("excerpt").textContent = current.system && `: ${current.system}`;
  keep(current);
});
get("drafts").addEventListener("click", () => {
  settings.drafts = !settings.drafts;
  store.saveSettings(settings);
  showDrafts();
  for (const item of get("log").children) item.update?.();
});
for (const name of SETTINGS) {
  get(name).value = settings[name] ?? "";
  get(name).addEventListener("change", () => {
    if (get(name).value === "") delete settings[name];
    else settings[name] = Number(get(name).value);
    store.saveSettings(settings);
  });
}
get("stop-strings").value = (settings.stop ?? []).join("\n");
get("stop-strings").addEventListener("change", () => {
  settings.stop = get("stop-strings").value.split("\n").filter(Boolean);
  store.saveSettings(settings);
});
get("search").addEventListener("input", showList);
get("export").addEventListener("click", exportAll);
get("import").addEventListener("click", () => get("file").click());
get("file").addEventListener("change", importFile);
get("settings").addEventListener("submit", event => {
  event.preventDefault();
  get("settings").hidePopover();
});
get("key").value = store.loadKey();
get("key").addEventListener("change", () => {
  store.saveKey(get("key").value);
  showModel();
});
addEventListener("hashchange", openAddressed);
addEventListener("storage", follow);
addEventListener("pagehide", () => {
  for (const id of running.keys()) if (conversations.has(id)) store.save(conversations.get(id));
});
openAddressed();
showModel();
