// The chat page: a conversation with the model of this server.

import { Answer, create } from "./answer.js";
import { ApiError, fetchModel, streamChat } from "./api.js";
import { Settings } from "./settings.js";

const EXAMPLES = {
  "Correct a text":
    "Correct the spelling of this text and repeat it:\n\nThe harbor offise opens at seven, but the boats have usualy " +
    "left by then. Marta unlocks the door, sets the kettle on the small stove and reads the notes that the night watch " +
    "has left on the desk.",
  "Write some code": "Write a Python class for a bank account with deposit, withdraw and a list of transactions.",
  "Explain a thing": "Explain in a few sentences how a lighthouse works and why each one has its own rhythm.",
};
const NEAR_END_PX = 80;

const byId = (id) => document.getElementById(id);
const [prompt, send, stop, scroller] = ["prompt", "send", "stop", "scroller"].map(byId);
const settings = new Settings(loadModel);

let model = null;
let turns = []; // {question, answer}: what was asked, and the text of the answer once there is one
let running = null; // the AbortController of the answer that is being written
let isFollowing = true; // whether the newest text is kept in view

async function loadModel() {
  try {
    model = await fetchModel(settings.apiKey);
  } catch (error) {
    notice(explain(error));
    if (error.status === 401) settings.showKey();
    return;
  }
  notice("");
  byId("model").textContent = model.id;
  document.title = `${model.id} · forerun`;
  settings.offer(model.drafters);
}

/** Asks the turn's question, with all earlier turns before it. */
async function ask(turn) {
  const answer = new Answer();
  turn.element.append(answer.element);
  running = new AbortController();
  showRunning(true);
  try {
    for await (const chunk of streamChat(requestFor(turn), settings.apiKey, running.signal)) {
      answer.add(chunk);
      follow();
    }
    finish(turn, answer, "");
  } catch (error) {
    if (error.name === "AbortError") finish(turn, answer, "Stopped");
    else fail(turn, answer, error);
  } finally {
    running = null;
    showRunning(false);
    follow();
  }
}

function requestFor(turn) {
  const earlier = turns.slice(0, turns.indexOf(turn)).filter(({ answer }) => answer);
  const messages = [
    ...settings.systemMessages(),
    ...earlier.flatMap(({ question, answer }) => [
      { role: "user", content: question },
      { role: "assistant", content: answer },
    ]),
    { role: "user", content: turn.question },
  ];
  return { model: model?.id, messages, stream: true, stream_options: { include_usage: true }, ...settings.fields() };
}

function finish(turn, answer, state) {
  turn.answer = answer.text;
  answer.finish(state, (seed) => {
    settings.setSeed(seed);
    say(`Seed ${seed} is set.`);
  });
  say(state || "The answer is complete.");
}

function fail(turn, answer, error) {
  answer.fail(explain(error), () => {
    if (running) return;
    answer.element.remove();
    ask(turn);
  });
  if (error.status === 401) settings.showKey();
}

/** One sentence for whatever went wrong; faults of this page are also left in the console. */
function explain(error) {
  if (error instanceof ApiError) return error.message;
  console.error(error);
  return "This page failed to read the answer.";
}

function submit() {
  const question = prompt.value.trim();
  if (!question || running || !settings.check()) return;
  if (settings.isCovering) settings.show(false);
  prompt.value = "";
  fitPrompt();
  byId("welcome").hidden = true;
  const turn = { question, answer: "", element: create("section", "turn") };
  turn.element.append(create("p", "question", question));
  byId("conversation").append(turn.element);
  turns.push(turn);
  isFollowing = true;
  ask(turn);
}

function newChat() {
  running?.abort();
  turns = [];
  byId("conversation").replaceChildren();
  byId("welcome").hidden = false;
  prompt.focus();
  say("A new chat.");
}

function showRunning(isRunning) {
  const hadFocus = document.activeElement === stop;
  send.hidden = isRunning;
  stop.hidden = !isRunning;
  if (hadFocus) prompt.focus();
}

function notice(message) {
  byId("notice").textContent = message;
  byId("notice").hidden = !message;
}

/** Tells those who don't see the page. */
function say(message) {
  byId("status").textContent = message;
}

function follow() {
  if (isFollowing) requestAnimationFrame(() => scroller.scrollTo({ top: scroller.scrollHeight }));
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function onKey(event) {
  if (event.key === "Escape" && running) running.abort();
  else if (event.key === "Escape" && settings.isCovering) settings.show(false);
}

prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  // While an input method composes a character, Enter is its own.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
stop.addEventListener("click", () => running?.abort());
byId("new-chat").addEventListener("click", newChat);
document.addEventListener("keydown", onKey);
scroller.addEventListener("scroll", () => {
  isFollowing = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;
});
byId("examples").append(
  ...Object.entries(EXAMPLES).map(([name, text]) => {
    const button = create("button", "example", name);
    button.type = "button";
    button.append(create("span", "", text));
    button.addEventListener("click", () => {
      prompt.value = text;
      submit();
    });
    const item = create("li");
    item.append(button);
    return item;
  }),
);
loadModel();
