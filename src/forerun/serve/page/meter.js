// Counts and times of one answer: estimated while it comes, as the server has them once it is there.

export class Meter {
  #startedMs;
  #firstMs = null;
  #lastMs = null;
  #numTokens = 0;
  #numPasses = 0;
  #numAccepted = 0;
  #usage = null;
  #metrics = null;
  seed = null;

  constructor(nowMs) {
    this.#startedMs = nowMs;
  }

  /** Takes a chunk in. `pairs` are its tokens as [text, isDraft]; without them a chunk counts as one token. */
  add(chunk, text, pairs, nowMs) {
    const choice = chunk.choices?.[0];
    this.#usage = chunk.usage ?? this.#usage;
    this.#metrics = choice?.metrics ?? chunk.metrics ?? this.#metrics;
    this.seed = choice?.seed ?? chunk.seed ?? this.seed;
    if (!text && pairs.length === 0) return;
    this.#numTokens += Math.max(pairs.length, 1);
    this.#numAccepted += pairs.filter(([, isDraft]) => isDraft).length;
    this.#numPasses += 1;
    this.#firstMs ??= nowMs;
    this.#lastMs = nowMs;
  }

  /** The figures as texts, the most telling first; those that aren't known yet are left out. */
  figures() {
    const speculation = this.#metrics?.speculative_decoding;
    const numTokens = this.#usage?.completion_tokens ?? this.#numTokens;
    const numAccepted = speculation?.num_accepted_draft_tokens ?? this.#numAccepted;
    const rate = this.#metrics?.tokens_per_second ?? this.#ownRate();
    const figures = [];
    if (rate) figures.push(`${rounded(rate)} tok/s`);
    // Every pass of the model gives its accepted guesses and one token more; the prompt's own pass gave the first token.
    const numPasses = this.#usage ? numTokens - 1 - numAccepted : this.#numPasses - 1;
    if (numPasses > 0) figures.push(`${((numTokens - 1) / numPasses).toFixed(2)} tokens per pass`);
    if (speculation) figures.push(`${numAccepted} of ${speculation.num_draft_tokens} guesses accepted`);
    else if (numAccepted > 0) figures.push(`${numAccepted} guesses accepted`);
    figures.push(numTokens === 1 ? "1 token" : `${numTokens} tokens`);
    if (this.#firstMs !== null) figures.push(`first after ${duration(this.#firstTokenMs())}`);
    return figures;
  }

  #firstTokenMs() {
    return this.#metrics?.time_to_first_token_ms ?? this.#firstMs - this.#startedMs;
  }

  #ownRate() {
    const seconds = (this.#lastMs - this.#firstMs) / 1000;
    return seconds > 0.05 ? (this.#numTokens - 1) / seconds : null;
  }
}

const rounded = (value) => (value < 100 ? value.toFixed(1) : String(Math.round(value)));
const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
