export const get = id => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export const button = (text, onclick, properties = {}) =>
  element("button", {type: "button", textContent: text, onclick, ...properties});

// Return a button that copies what `text()` returns.
export function copyButton(text, label) {
  const made = button("Copy", async () => {
    await copy(text());
    made.focus();
    made.textContent = get("status").textContent = "Copied";
    setTimeout(() => { made.textContent = "Copy"; }, 2000);
  }, {ariaLabel: label});
  return made;
}

async function copy(text) {
  try {
    return await navigator.clipboard.writeText(text);
  } catch {}  // browsers have it only on https and on this machine
  const area = element("textarea", {value: text, className: "unseen"});
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
