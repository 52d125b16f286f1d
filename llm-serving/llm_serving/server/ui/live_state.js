// What the pictures of /v1/live come to: each request with what it has been doing, rates, steps.

const SPANS_S = [5, 10, 30, 120];
const ENDED_S = 5;
const RATES = 240;
const STEPS = 160;

/** Queue, preempted, prefill, decode, paused; an end is none of these. */
function phaseOfWaiting(row) {
  return row.has_run ? "preempted" : "queue";
}

export class LiveState {
  constructor() {
    this.columns = null;
    this.picture = null;
    this.requests = new Map();
    this.rates = [];
    this.past = [];
    this.steps = new Map();
    this.dropped = 0;
  }

  /** Takes the data of one event. */
  take(event, data) {
    if (event === "columns") this.columns = data;
    if (event !== "picture" || !this.columns) return;
    const before = this.picture;
    if (before && data.number > before.number + 1) this.dropped += data.number - before.number - 1;
    for (const replica of data.replicas) {
      for (const [name, fields] of Object.entries(this.columns)) {
        replica[name] = replica[name].map((row) => Object.fromEntries(fields.map((field, index) => [field, row[index]])));
      }
    }
    this.picture = data;
    this.#follow(data);
    this.#rate(before, data);
    for (const replica of data.replicas) this.#addSteps(replica);
  }

  get now() {
    return this.picture?.time ?? 0;
  }

  /** Seconds that tracks show: as many as the oldest request that lives needs, of a few that are easily read. */
  get span() {
    const oldest = Math.max(0, ...[...this.requests.values()].filter((each) => each.phase !== "ended").map((each) => this.now - each.arrived));
    return SPANS_S.find((span) => span > oldest) ?? SPANS_S.at(-1);
  }

  /** The newest rates: tokens a second. */
  get rate() {
    return this.rates.at(-1) ?? { output: 0, prompt: 0, steps: 0 };
  }

  /** Requests of a phase, in order of their coming to it; of `ended` the newest first. */
  inPhase(phase) {
    const found = [...this.requests.values()].filter((each) => each.phase === phase);
    return phase === "ended" ? found.sort((a, b) => b.since - a.since) : found.sort((a, b) => a.arrived - b.arrived);
  }

  #follow({ time, replicas, silent }) {
    const seen = new Set();
    for (const replica of replicas) {
      const place = replica.replica;
      for (const row of replica.waiting_requests) this.#see(seen, row, phaseOfWaiting(row), time, time - row.seconds, place);
      for (const row of replica.running_requests) this.#see(seen, row, row.phase, time, time - row.age, place);
      for (const row of replica.ended) {
        const known = this.requests.get(row.id);
        if (known?.phase !== "ended") this.#see(seen, row, "ended", time, known?.arrived ?? time - row.seconds, place);
      }
    }
    for (const [id, request] of this.requests) {
      const asks = silent.includes(request.replica);
      const gone = request.phase === "ended" ? time - request.since > ENDED_S : !seen.has(id) && !asks;
      if (gone) this.requests.delete(id);
    }
  }

  #see(seen, row, phase, time, arrived, replica) {
    seen.add(row.id);
    let request = this.requests.get(row.id);
    if (!request) {
      request = { id: row.id, arrived, track: [[arrived, "queue"]], phase: "", since: time };
      this.requests.set(row.id, request);
    }
    if (request.phase !== phase) {
      request.phase = phase;
      request.since = time;
      request.track.push([time, phase]);
    }
    request.row = { ...request.row, ...row };
    request.replica = replica;
    while (request.track.length > 2 && request.track[1][0] < time - SPANS_S.at(-1)) request.track.shift();
  }

  /** Over the last second: a single picture may fall between two prompts. */
  #rate(last, { time, totals }) {
    if (last) this.past.push({ time: last.time, totals: last.totals });
    while (this.past.length > 1 && this.past[1].time <= time - 1) this.past.shift();
    const [before] = this.past;
    if (!before || time <= before.time) return;
    const a_second = (name) => Math.max(0, (totals[name] - before.totals[name]) / (time - before.time));
    this.rates.push({ time, output: a_second("generation_tokens"), prompt: a_second("prompt_tokens"), steps: a_second("steps") });
    if (this.rates.length > RATES) this.rates.shift();
  }

  #addSteps({ replica, steps }) {
    const known = this.steps.get(replica) ?? [];
    const last = known.at(-1)?.ended ?? -1;
    known.push(...steps.filter((step) => step.ended > last));
    this.steps.set(replica, known.slice(-STEPS));
  }
}
