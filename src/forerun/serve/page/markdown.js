// Markdown to DOM nodes. What a model writes is untrusted: every character of it ends up in a text node, never in HTML.
//
// Known: paragraphs, headings, rules, code fences, lists, inline code, bold and italic. Everything else, links and images
// included, stays the text it is. Positions in the source are kept all the way, so that marks of tokens survive.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(?=\S)/;
const RULE = /^ {0,3}(?:-[ \t]*){3,}$|^ {0,3}(?:\*[ \t]*){3,}$|^ {0,3}(?:_[ \t]*){3,}$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])[ \t]+(?=\S)/;
const BLANK = /^\s*$/;
// Bounded, so that a line of a thousand asterisks takes no time.
const INLINE = new RegExp(
  [
    "(`+)(?!`)([\\s\\S]{1,2000}?)(?<!`)\\1(?!`)",
    "(\\*\\*|(?<!\\w)__)(?=\\S)([\\s\\S]{0,2000}?\\S)\\3",
    "(\\*(?![*\\s])|(?<!\\w)_(?![_\\s]))([^*_\\n]{0,1000}?[^\\s*_])(\\*(?!\\*)|_(?!\\w))",
  ].join("|"),
  "g",
);

/** Which parts of a text are accepted draft tokens: appended as they come, looked up by position. */
export class Marks {
  #ends = [];
  #isDraft = [];

  /** The length of the text so far. */
  get length() {
    return this.#ends.at(-1) ?? 0;
  }

  append(text, isDraft) {
    if (text.length > 0) {
      this.#ends.push(this.length + text.length);
      this.#isDraft.push(isDraft);
    }
  }

  /** The tokens between two positions, as [start, end, isDraft]; neighbours that are no drafts are one. */
  *between(start, end) {
    let index = this.#firstEndingAfter(start);
    while (start < end && index < this.#ends.length) {
      const isDraft = this.#isDraft[index];
      while (!isDraft && this.#ends[index] < end && this.#isDraft[index + 1] === false) index += 1;
      const until = Math.min(this.#ends[index], end);
      yield [start, until, isDraft];
      start = until;
      index += 1;
    }
    if (start < end) yield [start, end, false];
  }

  #firstEndingAfter(position) {
    let [low, high] = [0, this.#ends.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#ends[middle] > position) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

/** A text's lines as {start, end, text}, line breaks apart. */
function linesOf(source) {
  const lines = [];
  for (let start = 0; start <= source.length; ) {
    const found = source.indexOf("\n", start);
    const end = found < 0 ? source.length : found;
    lines.push({ start, end, text: source.slice(start, end) });
    start = end + 1;
  }
  return lines;
}

const beginsBlock = (text) => FENCE.test(text) || HEADING.test(text) || RULE.test(text) || ITEM.test(text);

/** The blocks of a text, each with the part of the source it covers. A later text that begins alike begins with the same. */
export function parseBlocks(source) {
  const lines = linesOf(source);
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    const { text } = lines[i];
    if (BLANK.test(text)) i += 1;
    else {
      const [block, next] =
        (FENCE.test(text) && fence(lines, i)) ||
        (HEADING.test(text) && heading(lines, i)) ||
        (RULE.test(text) && rule(lines, i)) ||
        (ITEM.test(text) && list(lines, i)) ||
        paragraph(lines, i);
      blocks.push({ ...block, start: lines[i].start, end: lines[next - 1].end });
      i = next;
    }
  }
  return blocks;
}

function fence(lines, first) {
  const [, marker, language] = FENCE.exec(lines[first].text);
  const isEnd = ({ text }) => text.trim().startsWith(marker) && /^[`~]+$/.test(text.trim());
  let last = first + 1;
  while (last < lines.length && !isEnd(lines[last])) last += 1;
  const from = lines[first + 1]?.start ?? lines[first].end;
  const to = last > first + 1 ? lines[last - 1].end : from;
  return [{ kind: "code", language, from, to }, Math.min(last + 1, lines.length)];
}

function heading(lines, first) {
  const [prefix, hashes] = HEADING.exec(lines[first].text);
  const { start, end } = lines[first];
  return [{ kind: "heading", level: hashes.length, from: start + prefix.length, to: end }, first + 1];
}

function rule(lines, first) {
  return [{ kind: "rule" }, first + 1];
}

function paragraph(lines, first) {
  let last = first + 1;
  while (last < lines.length && !BLANK.test(lines[last].text) && !beginsBlock(lines[last].text)) last += 1;
  return [{ kind: "paragraph", from: lines[first].start, to: lines[last - 1].end }, last];
}

/** A run of items; lines that begin no block belong to the item before them. */
function list(lines, first) {
  const items = [];
  let i = first;
  for (; i < lines.length; i += 1) {
    const { start, end, text } = lines[i];
    const match = ITEM.exec(text);
    if (match && !RULE.test(text)) {
      const number = /\d/.test(match[2]) ? parseInt(match[2], 10) : null;
      items.push({ indent: match[1].length, number, from: start + match[0].length, to: end });
    } else if (BLANK.test(text)) {
      const next = lines.slice(i + 1).find((line) => !BLANK.test(line.text));
      if (!next || !ITEM.test(next.text)) break;
    } else if (beginsBlock(text)) break;
    else items.at(-1).to = end;
  }
  return [{ kind: "list", items }, i];
}

/** One block as an element. */
export function renderBlock(source, block, marks) {
  const inline = (element, from, to) => renderInline(element, source, from, to, marks);
  switch (block.kind) {
    case "code":
      return renderCode(source, block, marks);
    case "heading":
      return inline(document.createElement(`h${Math.min(block.level + 2, 6)}`), block.from, block.to);
    case "rule":
      return document.createElement("hr");
    case "list":
      return renderList(block.items, inline);
    default:
      return inline(document.createElement("p"), block.from, block.to);
  }
}

function renderCode(source, { from, to, language }, marks) {
  const figure = document.createElement("figure");
  figure.className = "code";
  const bar = figure.appendChild(document.createElement("figcaption"));
  bar.append(language || "text");
  if (navigator.clipboard) {
    const copy = bar.appendChild(document.createElement("button"));
    copy.type = "button";
    copy.className = "quiet";
    copy.textContent = "Copy";
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(source.slice(from, to));
      copy.textContent = "Copied";
    });
  }
  const pre = figure.appendChild(document.createElement("pre"));
  pre.tabIndex = 0; // long lines scroll, also by keyboard
  emit(pre.appendChild(document.createElement("code")), source, from, to, marks);
  return figure;
}

function renderList(items, inline) {
  const create = ({ number, indent }) => {
    const element = document.createElement(number === null ? "ul" : "ol");
    if (number !== null) element.start = number;
    return { element, indent, isOrdered: number !== null };
  };
  const root = document.createDocumentFragment();
  let stack = [];
  for (const item of items) {
    while (stack.length > 0 && item.indent < stack.at(-1).indent) stack.pop();
    const top = stack.at(-1);
    if (top && item.indent > top.indent + 1) {
      const nested = create(item);
      top.element.lastElementChild.append(nested.element);
      stack.push(nested);
    } else if (!top || top.isOrdered !== (item.number !== null)) {
      stack.pop();
      const fresh = create(item);
      (stack.at(-1)?.element.lastElementChild ?? root).append(fresh.element);
      stack.push(fresh);
    }
    stack.at(-1).element.append(inline(document.createElement("li"), item.from, item.to));
  }
  const holder = document.createElement("div");
  holder.append(root);
  return holder;
}

function renderInline(element, source, from, to, marks) {
  let done = from;
  for (const match of source.slice(from, to).matchAll(INLINE)) {
    const start = from + match.index;
    const end = start + match[0].length;
    emit(element, source, done, start, marks);
    if (match[1]) {
      const width = match[1].length;
      emit(element.appendChild(document.createElement("code")), source, start + width, end - width, marks);
    } else {
      const width = match[3] ? 2 : 1;
      const child = element.appendChild(document.createElement(match[3] ? "strong" : "em"));
      renderInline(child, source, start + width, end - width, marks);
    }
    done = end;
  }
  emit(element, source, done, to, marks);
  return element;
}

/** Appends a part of the source as text, accepted draft tokens in spans of their own without the space before them. */
function emit(element, source, from, to, marks) {
  for (const [start, end, isDraft] of marks.between(from, to)) {
    const text = source.slice(start, end);
    const word = isDraft ? text.trimStart() : "";
    element.append(text.slice(0, text.length - word.length));
    if (word) {
      const span = element.appendChild(document.createElement("span"));
      span.className = "draft";
      span.textContent = word;
    }
  }
}
