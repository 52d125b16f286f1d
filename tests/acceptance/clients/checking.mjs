// Helpers of the files for each JavaScript client, which run in a folder of their own with the client's packages.
import { readFileSync } from "node:fs";

export const URL = process.env.ACCEPTANCE_URL ?? "http://127.0.0.1:8835";
export const MODEL = process.env.ACCEPTANCE_MODEL ?? "demo";
const CITIES = ["Zurich", "Oslo"];
export const WEATHER = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES } },
  required: ["city"],
  additionalProperties: false, // otherwise the shipped model would generate properties without end
};

// Print the version of the client.
export function packageOf(name) {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  console.log(JSON.stringify({ version }));
}

// Run a function at once, and print whether it succeeded and returned a true value.
export async function check(what, run) {
  let error = "";
  try {
    const result = await run();
    error = result ? "" : `gave ${JSON.stringify(result)}`;
  } catch (caught) {
    error = `${caught?.name}: ${String(caught?.message).split(/\s+/).join(" ").slice(0, 300)}`;
  }
  console.log(JSON.stringify({ what, error, excused: false }));
}
