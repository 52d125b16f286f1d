// A request as JSON, as a command and as a program. Texts may hold anything: each form quotes in its own way.

/** JSON; integers beyond 2^53 are BigInt and keep all their digits. */
export function json(value, indent = "", step = "") {
  const inner = indent + step;
  const [open, between, close] = step ? [`\n${inner}`, `,\n${inner}`, `\n${indent}`] : ["", ", ", ""];
  if (typeof value === "bigint") return String(value);
  if (Array.isArray(value)) {
    return value.length ? `[${open}${value.map((each) => json(each, inner, step)).join(between)}${close}]` : "[]";
  }
  if (value !== null && typeof value === "object") {
    const pairs = Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${json(each, inner, step)}`);
    return pairs.length ? `{${open}${pairs.join(between)}${close}}` : "{}";
  }
  return JSON.stringify(value);
}

/** A value as Python writes it. */
export function python(value) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, each]) => `${python(name)}: ${python(each)}`).join(", ")}}`;
  }
  if (typeof value !== "string") return String(value);
  // What JSON escapes Python reads alike; what it leaves as it is may end a line.
  return JSON.stringify(value).replace(/[\u007f-\u009f\u2028\u2029]/g, (each) => `\\u${each.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function shell(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

const OF_THE_CLIENT = {
  completions: "best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop stream stream_options suffix temperature top_p user",
  "chat/completions": "frequency_penalty logit_bias logprobs max_completion_tokens max_tokens messages model n presence_penalty seed stop stream stream_options temperature top_logprobs top_p user",
};

/** For a terminal; the key, where one is needed, is read from the environment. */
export function asCurl(base, route, body, withKey) {
  const lines = [`curl -sN ${shell(`${base}v1/${route}`)}`, "-H 'Content-Type: application/json'"];
  if (withKey) lines.push('-H "Authorization: Bearer $LLM_SERVING_API_KEY"');
  lines.push(`-d ${shell(json(body))}`);
  return lines.join(" \\\n  ");
}

/** For the openai package; what it has no name for goes into `extra_body`. */
export function asPython(base, route, body, withKey) {
  const known = OF_THE_CLIENT[route].split(" ");
  const own = Object.entries(body).filter(([name]) => known.includes(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !known.includes(name)));
  const lines = own.map(([name, value]) => `    ${name}=${python(value)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra)},`);
  const chat = route !== "completions";
  const text = chat ? "delta.content or \"\"" : "text";
  const whole = chat ? "message.content" : "text";
  return [
    ...(withKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${python(`${base}v1`)}, api_key=${withKey ? 'os.environ["LLM_SERVING_API_KEY"]' : '"none"'})`,
    `answer = client.${chat ? "chat.completions" : "completions"}.create(`,
    ...lines,
    ")",
    ...(body.stream
      ? ["for piece in answer:", "    for choice in piece.choices:", `        print(choice.${text}, end="", flush=True)`]
      : [`print(answer.choices[0].${whole})`]),
    "",
  ].join("\n");
}
