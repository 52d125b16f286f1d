// Asking the server. The key lives in this tab's session storage and goes nowhere but into the header.

const KEY = "llm-serving.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

const CHOSEN = "llm-serving.model";

/** The chosen model: {id, query}, its name for requests, and for routes that select by the URL; {}: the default. */
export const chosen = {
  get: () => JSON.parse(sessionStorage.getItem(CHOSEN) ?? "{}"),
  set: (value) => sessionStorage.setItem(CHOSEN, JSON.stringify(value)),
};

export class RefusedError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** Where a path is, wherever this page is shown. */
export function address(path) {
  return new URL(path, document.baseURI).href;
}

/** What a promise of the network comes to. A browser's own words for a server that is gone tell a person little. */
async function reached(promise, otherwise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(otherwise);
  }
}

/** The path with the chosen model, which a server with several models reads from the URL. */
function ofChosen(path) {
  const { query } = chosen.get();
  return query === undefined ? path : `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(query)}`;
}

/**
 * The answer to a request, once its head has come. GET asks the chosen model, unless `ofAll`.
 * @throws {RefusedError} The server answers with an error.
 */
export async function ask(path, { method = "GET", body, signal, ofAll = false } = {}) {
  if (!/^[\x20-\x7e]*$/.test(key.get())) {
    throw new Error("an API key must consist of printable ASCII characters; enter the key again");
  }
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const where = address(method === "GET" && !ofAll ? ofChosen(path) : path);
  const asked = fetch(where, { method, headers, body, signal, cache: "no-store", credentials: "omit" });
  const response = await reached(asked, "the server does not answer");
  if (response.ok) return response;
  const text = await response.text();
  let message = text.slice(0, 500) || `status ${response.status}`;
  try {
    message = JSON.parse(text).error.message ?? message;
  } catch {
    // An answer that is not ours, of a proxy perhaps: shown as it is.
  }
  if (response.status === 401) document.dispatchEvent(new CustomEvent("key-needed"));
  throw new RefusedError(response.status, message, response.headers.get("retry-after"));
}

export async function askJson(path, options) {
  return (await ask(path, options)).json();
}

/** The server-sent events of an answer: {event, data}. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reached(reader.read(), "the connection to the server was lost");
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const found = { event: "message", data: "" };
        for (const line of block.split("\n")) {
          if (line.startsWith("data:")) found.data += line.slice(5).trim();
          else if (line.startsWith("event:")) found.event = line.slice(6).trim();
        }
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
