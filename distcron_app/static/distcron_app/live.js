// Keeps the regions of a page live. Without it every page works the same, by reloading.
//
// A region names its address (data-dc-poll) and how often to ask (data-dc-seconds). The
// answer is 304 while nothing changed. Nobody asks for a hidden tab, and a region that
// is being read (focus, selection, open details) is held until the reader lets go.

const TIMEOUT_MS = 10000;
const LONGEST_BACKOFF = 6;

const label = document.getElementById("dc-live");

function isHeld(region) {
  if (region.contains(document.activeElement)) return true;
  if (region.querySelector("details[open]")) return true;
  const selection = document.getSelection();
  return Boolean(selection && !selection.isCollapsed && selection.containsNode(region, true));
}

// The output of a running job is followed to its end, unless the reader has scrolled up.
function follow(output) {
  output.scrollTop = output.scrollHeight;
}

function replace(region, html) {
  const before = region.querySelector("#dc-output");
  const top = before ? before.scrollTop : 0;
  const isAtEnd = !before || before.scrollHeight - before.clientHeight - top < 8;
  const wasFollowed = before && before.hasAttribute("data-dc-follow");
  region.innerHTML = html;
  const after = region.querySelector("#dc-output");
  if (!after) return;
  if (isAtEnd && (wasFollowed || after.hasAttribute("data-dc-follow"))) follow(after);
  else after.scrollTop = top;
}

class Region {
  constructor(element) {
    this.element = element;
    this.etag = element.dataset.dcEtag;
    this.seconds = Number(element.dataset.dcSeconds);
    this.freshAt = performance.now();
    this.failures = 0;
    this.isAsking = false;
    this.timer = 0;
    this.plan();
  }

  plan() {
    clearTimeout(this.timer);
    if (!this.seconds || document.hidden) return;
    const slower = Math.min(2 ** this.failures, LONGEST_BACKOFF);
    this.timer = setTimeout(() => this.tick(), this.seconds * 1000 * slower);
  }

  async tick() {
    if (this.isAsking || document.hidden || !this.seconds) return;
    if (isHeld(this.element)) {
      this.plan();
      return;
    }
    this.isAsking = true;
    try {
      await this.ask();
      this.failures = 0;
      this.freshAt = performance.now();
    } catch {
      // Whatever it was, the label says how old the region is, and it is tried again.
      this.failures += 1;
    } finally {
      this.isAsking = false;
      this.plan();
    }
  }

  async ask() {
    const answer = await fetch(this.element.dataset.dcPoll, {
      headers: { "If-None-Match": this.etag },
      credentials: "same-origin",
      cache: "no-store",
      redirect: "error", // the session ended: the sign-in page is not this region
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    if (answer.status !== 200 && answer.status !== 304) throw new Error(`status ${answer.status}`);
    this.seconds = Number(answer.headers.get("X-Distcron-Poll"));
    if (answer.status === 304) return;
    const html = await answer.text();
    // The reader may have begun while the answer was on its way.
    if (isHeld(this.element)) return;
    this.etag = answer.headers.get("ETag");
    replace(this.element, html);
  }

  get state() {
    if (!this.seconds) return "done";
    if (isHeld(this.element)) return "held";
    return this.failures ? "stale" : "live";
  }

  get age() {
    return Math.round((performance.now() - this.freshAt) / 1000);
  }
}

const regions = [...document.querySelectorAll("[data-dc-poll]")].map((each) => new Region(each));

function show() {
  if (!label || !regions.length) return;
  const order = ["stale", "held", "live", "done"];
  const worst = regions.reduce((a, b) => (order.indexOf(b.state) < order.indexOf(a.state) ? b : a));
  const state = worst.state;
  const text = label.dataset[state].replace("%s", worst.age);
  if (label.textContent !== text) label.textContent = text;
  label.title = state === "held" ? label.dataset.heldTitle : "";
  label.className = `dc-live dc-live--${state}`;
  label.hidden = false;
}

document.addEventListener("visibilitychange", () => {
  for (const region of regions) {
    if (document.hidden) clearTimeout(region.timer);
    else region.tick();
  }
});

for (const output of document.querySelectorAll("[data-dc-follow]")) follow(output);
show();
if (regions.length) setInterval(() => document.hidden || show(), 500);
