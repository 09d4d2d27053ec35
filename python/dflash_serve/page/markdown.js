// A model's Markdown as elements. HTML that it wrote is shown as text, an image as a link, and only http, https and
// mailto are followed.
import {copyButton, element} from "./elements.js";

const {marked, DOMPurify} = window;  // vendor/
const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul", "#text",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

marked.use({
  breaks: true,
  tokenizer: {
    html: () => undefined,
    tag(source) {  // <br> is the only way to break a line in a table
      const found = /^<br ?\/?>/i.exec(source);
      return found ? {type: "br", raw: found[0]} : undefined;
    },
  },
  renderer: {
    checkbox: ({checked}) => checked ? "☑ " : "☐ ",
    image(token) {
      const text = token.text || token.href;
      return this.link({...token, tokens: [{type: "text", raw: text, text}]});
    },
  },
});

const shown = new WeakMap();  // place -> the HTML of each of its blocks

// Show `text` in `place`. Blocks that are there already stay, and with them what is selected or focused in them.
export function showMarkdown(place, text) {
  const blocks = marked.lexer(text).filter(token => token.type !== "space").map(token => marked.parser([token]));
  const before = shown.get(place) ?? [];
  let same = 0;
  while (same < before.length && before[same] === blocks[same]) same += 1;
  while (place.children.length > same) place.lastElementChild.remove();
  place.append(...blocks.slice(same).map(makeBlock));
  shown.set(place, blocks);
}

// Show `text` as it was written, by who wrote it: `marks` are counts of characters, of accepted drafts and of bonus
// tokens in turn.
export function showMarks(place, text, marks) {
  const characters = [...text];
  let at = 0;
  const spans = marks.map((count, index) => element("span", {
    className: index % 2 ? "bonus" : "drafted", textContent: characters.slice(at, at += count).join(""),
  }));
  place.replaceChildren(...spans.filter(span => span.textContent));
  shown.delete(place);
}

function makeBlock(html) {
  const block = element("div", {}, DOMPurify.sanitize(html, ALLOWED));
  for (const link of block.querySelectorAll("a")) Object.assign(link, {target: "_blank", rel: "noopener noreferrer"});
  for (const table of block.querySelectorAll("table")) {
    const scroller = element("div", {className: "scroll"});
    table.replaceWith(scroller);
    scroller.append(table);
  }
  for (const code of block.querySelectorAll("pre > code")) {
    const language = code.className.replace("language-", "");
    code.parentElement.before(element("div", {className: "code"},
      element("span", {textContent: language}), copyButton(() => code.textContent, "Copy code")));
  }
  return block;
}
