// One answer on the page: its text with marks, its figures, or what went wrong.

import { Marks, parseBlocks, renderBlock } from "./markdown.js";
import { Meter } from "./meter.js";

export class Answer {
  text = "";
  #marks = new Marks();
  #meter = new Meter(performance.now());
  #blocks = []; // keys of the blocks that are shown
  #frame = 0;
  #body = create("div", "text marks");
  #figures = create("p", "figures");

  constructor() {
    this.element = create("article", "answer running");
    this.element.setAttribute("aria-label", "Answer");
    this.element.append(this.#body, this.#figures);
    this.#figures.textContent = "Reading the prompt";
  }

  /** Shows what a chunk of the stream brings. */
  add(chunk) {
    const choice = chunk.choices?.[0];
    const text = choice?.delta?.content ?? "";
    const pairs = choice?.draft ?? [];
    this.#meter.add(chunk, text, pairs, performance.now());
    const isWhole = pairs.map(([part]) => part).join("") === text;
    for (const [part, isDraft] of isWhole ? pairs : [[text, false]]) this.#marks.append(part, isDraft);
    this.text += text;
    // Once per picture of the screen, however many chunks come.
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** The answer is there, or was stopped. `useSeed` is called with the seed when the reader wants it again. */
  finish(state, useSeed) {
    this.#end();
    const figures = this.#meter.figures();
    if (state) figures.unshift(state);
    this.#figures.replaceChildren(...figures.map((figure) => create("span", "", figure)));
    const { seed } = this.#meter;
    if (seed !== null) {
      const button = create("button", "quiet", `seed ${seed}`);
      button.type = "button";
      button.title = "Use this seed: the same messages then get the same answer";
      button.addEventListener("click", () => useSeed(seed));
      this.#figures.append(button);
    }
  }

  /** The answer failed: says so in a sentence and offers another try. */
  fail(message, retry) {
    this.#end();
    const notice = create("p", "notice", `${message} `);
    notice.setAttribute("role", "alert");
    const button = create("button", "quiet", "Try again");
    button.type = "button";
    button.addEventListener("click", retry);
    notice.append(button);
    this.#figures.replaceWith(notice);
  }

  #end() {
    cancelAnimationFrame(this.#frame);
    this.#draw();
    this.element.classList.remove("running");
  }

  #draw() {
    this.#frame = 0;
    this.#drawText();
    if (this.text) this.#figures.textContent = this.#meter.figures().join(" · ");
  }

  /** Blocks that are complete stay as they are, with whatever the reader has selected in them. */
  #drawText() {
    const blocks = parseBlocks(this.text);
    const keys = blocks.map(({ kind, start, end }) => `${kind} ${start} ${end}`);
    const firstChanged = keys.findIndex((key, index) => key !== this.#blocks[index]);
    if (firstChanged < 0 && keys.length === this.#blocks.length) return;
    const numKept = firstChanged < 0 ? keys.length : firstChanged;
    while (this.#body.childElementCount > numKept) this.#body.lastElementChild.remove();
    for (const block of blocks.slice(numKept)) this.#body.append(renderBlock(this.text, block, this.#marks));
    this.#blocks = keys;
  }
}

/** An element with a class and a text. */
export function create(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}
