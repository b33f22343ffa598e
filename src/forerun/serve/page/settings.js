// The settings panel: what the fields say becomes a request. The API key is kept for this tab, nothing else is kept.

const KEY = "forerun.api-key";
const WIDE = "(min-width: 70rem)"; // as in the style sheet: here the panel has a place beside the conversation
const byId = (id) => document.getElementById(id);

export class Settings {
  #panel = byId("settings");
  #toggle = byId("toggle-settings");
  #form = byId("parameters");

  /** `onKey` is called when another API key has been entered. */
  constructor(onKey) {
    this.#toggle.addEventListener("click", () => this.show(this.#panel.hidden));
    byId("close-settings").addEventListener("click", () => this.show(false));
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    byId("api-key").value = sessionStorage.getItem(KEY) ?? "";
    byId("api-key").addEventListener("change", () => {
      sessionStorage.setItem(KEY, this.apiKey);
      onKey();
    });
    byId("show-marks").addEventListener("change", () => this.#showMarks());
    byId("speculate").addEventListener("change", () => this.#speculate());
    this.#showMarks();
    this.#speculate();
    this.#setVisible(matchMedia(WIDE).matches);
  }

  get apiKey() {
    return byId("api-key").value.trim();
  }

  /** Offers the drafters that the server has; where there is none, nothing can be switched on. */
  offer(drafters) {
    byId("method").replaceChildren(new Option("all of them", ""), ...drafters.map((name) => new Option(name, name)));
    byId("method-field").hidden = drafters.length < 2;
    byId("speculate").disabled = drafters.length === 0;
    byId("speculate").checked &&= drafters.length > 0;
    this.#speculate();
  }

  /** Shows or hides the panel; focus goes along. */
  show(isVisible) {
    this.#setVisible(isVisible);
    if (isVisible) byId("speculate").focus();
    else if (this.#panel.contains(document.activeElement) || document.activeElement === document.body)
      this.#toggle.focus();
  }

  /** Whether the panel covers the conversation. */
  get isCovering() {
    return !this.#panel.hidden && !matchMedia(WIDE).matches;
  }

  showKey() {
    this.#setVisible(true);
    byId("api-key").focus();
  }

  setSeed(seed) {
    byId("seed").value = String(seed);
  }

  /** Whether all fields make sense; shows the first that doesn't. */
  check() {
    const isExact = Number.isSafeInteger(Number(byId("seed").value)); // larger ones would be rounded on their way
    byId("seed").setCustomValidity(isExact ? "" : `The largest seed here is ${Number.MAX_SAFE_INTEGER}.`);
    if (this.#form.checkValidity()) return true;
    this.#setVisible(true);
    this.#form.reportValidity();
    return false;
  }

  /** The request's fields, messages apart. */
  fields() {
    const { checked: isOn, disabled: isFixed } = byId("speculate");
    const method = byId("method").value;
    return {
      ...numbers({ temperature: "temperature", top_p: "top-p", max_tokens: "max-tokens", seed: "seed" }),
      speculative: {
        ...(isOn || isFixed ? {} : { enabled: false }),
        ...(isOn && method ? { method } : {}),
        metrics: "steps",
      },
    };
  }

  /** The conversation's first message, if there is a system prompt. */
  systemMessages() {
    const content = byId("system").value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  #setVisible(isVisible) {
    this.#panel.hidden = !isVisible;
    this.#toggle.setAttribute("aria-expanded", String(isVisible));
  }

  #showMarks() {
    document.body.classList.toggle("no-marks", !byId("show-marks").checked);
  }

  #speculate() {
    byId("method").disabled = !byId("speculate").checked;
  }
}

/** The values of number fields that aren't empty, by the names the API has for them. */
function numbers(fields) {
  const given = Object.entries(fields).filter(([, id]) => byId(id).value.trim() !== "");
  return Object.fromEntries(given.map(([name, id]) => [name, Number(byId(id).value)]));
}
