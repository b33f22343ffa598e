// The server's API as the page uses it: which model there is, and a streamed answer. Knows no element of the page.

/** Something went wrong; the message is a sentence for the reader. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** What is served: {id, drafters}, where drafters are the names one may choose from. */
export async function fetchModel(apiKey) {
  const headers = headersOf(apiKey);
  const { data } = await (await request("v1/models", { headers })).json();
  if (!data?.[0]) throw new ApiError("The server has no model.");
  const info = await (await request("server_info", { headers })).json();
  return { id: data[0].id, drafters: info.speculation.drafters };
}

/** The chunks of one answer, parsed. The signal ends the request. */
export async function* streamChat(body, apiKey, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { ...headersOf(apiKey), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(sentence(chunk.error.message ?? "The server failed."));
    yield chunk;
  }
  throw new ApiError("The server ended the answer before it was complete.");
}

const headersOf = (apiKey) => (apiKey ? { Authorization: `Bearer ${apiKey}` } : {});

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server can't be reached.");
  }
  if (!response.ok) throw new ApiError(await failure(response), response.status);
  return response;
}

async function failure(response) {
  if (response.status === 401) return "The server wants another API key; it can be entered in the settings.";
  try {
    const { error } = await response.json();
    if (error?.message) return sentence(error.message);
  } catch {
    // Whatever answered with something else than the API's errors has nothing to say to the reader.
  }
  return `The server answered with status ${response.status}.`;
}

/** The `data` of server-sent events. Lines may end in any of three ways, and chunks anywhere. */
export async function* eventsOf(stream) {
  let data = [];
  for await (const line of linesOf(stream)) {
    if (line === "") {
      if (data.length > 0) yield data.join("\n");
      data = [];
    } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
  }
}

async function* linesOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      // A carriage return at the end may be half a line break.
      const lines = rest.split(/\r\n|\n|\r(?=[\s\S])/);
      rest = lines.pop();
      yield* lines;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function sentence(message) {
  const text = String(message).trim();
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}
