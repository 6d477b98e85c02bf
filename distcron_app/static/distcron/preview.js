// Shows what the form of a schedule means while it is typed. Without it the button
// "Preview" does the same. When the network fails the last answer stays.

const DELAY_MS = 300;
const TIMEOUT_MS = 10000;

const region = document.querySelector("[data-distcron-preview]");
const form = region && region.closest("form");
let timer = 0;
let asking = null;
let shown = "";

async function ask() {
  if (asking) asking.abort();
  const mine = (asking = new AbortController());
  const late = setTimeout(() => mine.abort(), TIMEOUT_MS);
  region.setAttribute("aria-busy", "true");
  try {
    const answer = await fetch(region.dataset.distcronPreview, {
      method: "POST",
      body: new URLSearchParams(new FormData(form)),
      credentials: "same-origin",
      redirect: "error", // the page to sign in is no preview
      signal: mine.signal,
    });
    if (answer.ok) show(await answer.text());
  } catch {
    // Superseded, or no network: the last good answer stays.
  } finally {
    clearTimeout(late);
    if (asking === mine) region.removeAttribute("aria-busy");
  }
}

function show(html) {
  // An equal answer is not read out again.
  if (html === shown) return;
  shown = html;
  region.innerHTML = html;
}

function plan() {
  clearTimeout(timer);
  timer = setTimeout(ask, DELAY_MS);
}

if (form) {
  form.addEventListener("input", plan);
  form.addEventListener("change", plan);
  ask();
}
