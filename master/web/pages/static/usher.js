"use strict";
/* Keeps a page up to date with what the server renders. Everything works without it. */
(() => {
  const one = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
  const two = (value) => String(value).padStart(2, "0");
  const clock = (when) => `${two(when.getHours())}:${two(when.getMinutes())}`;
  /* Times are of this browser's zone, with UTC beside the pointer; without scripts they are UTC. */
  const localize = (root) => {
    for (const time of all("time[datetime]:not([title])", root)) {
      const when = new Date(time.dateTime);
      if (Number.isNaN(when.getTime())) continue;
      time.title = `${time.textContent} UTC`;
      time.textContent = `${when.getFullYear()}-${two(when.getMonth() + 1)}-${two(when.getDate())} ${clock(when)}:${two(when.getSeconds())}${time.dateTime.slice(19, -1)}`;
    }
    const texts = all(".summary, .explain li, .trouble div, .trouble p", root).flatMap((told) => [told, ...told.children]);
    for (const text of texts.flatMap((told) => Array.from(told.childNodes)).filter((child) => child.nodeType === Node.TEXT_NODE))
      text.data = text.data.replace(/\b(\d\d):(\d\d):(\d\d) UTC\b/g, (...told) => {
        const when = new Date(new Date().setUTCHours(told[1], told[2], told[3]));
        return `${clock(when)}:${told[3]}`;
      });
    for (const mark of all("[data-clock]", root)) mark.textContent = clock(new Date(Number(mark.dataset.clock)));
    const zone = one("#zone", root);
    const name = Intl.DateTimeFormat().resolvedOptions().timeZone || "local";
    if (zone && name !== "UTC") zone.textContent = `Times are ${name}, UTC under the pointer`;
  };

  // -- parts of a page that the server renders again, at most once in two seconds

  /* Makes an element what the server made of it, and touches only what differs: focus, scroll, what is open, ticked or
     typed stay as they are. Elements with an id stay themselves where others come or go before them. */
  const morph = (old, made) => {
    if (old.isEqualNode(made)) return;
    if (!old.attributes) { old.data = made.data; return; }
    for (const { name, value } of made.attributes) if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
    for (const name of old.getAttributeNames()) if (name !== "open" && !made.hasAttribute(name)) old.removeAttribute(name);
    const ids = new Set(Array.from(made.children, (child) => child.id)), named = {};
    for (const child of Array.from(old.children)) if (child.id) { if (ids.has(child.id)) named[child.id] = child; else child.remove(); }
    let at = old.firstChild;
    for (const child of Array.from(made.childNodes)) {
      const known = child.id ? named[child.id] : at && !at.id && at.nodeName === child.nodeName ? at : null;
      if (!known) { old.insertBefore(document.adoptNode(child), at); continue; }
      if (known === at) at = at.nextSibling; else old.insertBefore(known, at);
      morph(known, child);
    }
    while (at) { const gone = at; at = at.nextSibling; gone.remove(); }
  };
  const unhide = (root) => { for (const box of all(navigator.clipboard ? "[data-all], [data-copy]" : "[data-all]", root)) box.hidden = false; };
  const link = one("#link"), bar = one("#stale"), untitled = (text) => text.replace("Not up to date · ", "");
  /* Milliseconds: of a beat, and of the last answer that the server itself called fresh. Silence is not good news: after two beats
     nothing here says OK, whoever is away. */
  const beat_ms = 3000, every_ms = () => Number(one("[data-again]")?.dataset.again) * 1000 || 0;
  let title = untitled(document.title), asked = false, asked_ms = Date.now(), fresh_ms = Number(bar.dataset.since) || Date.now(), why = bar.dataset.why || "";
  const judge = (is_stale) => {
    const told = `Not up to date since ${new Date(fresh_ms).toLocaleTimeString("en-GB")}: ${why || "no answer from this master"}`;
    if (is_stale && bar.textContent !== told) bar.textContent = told;
    bar.hidden = !is_stale;
    document.title = is_stale ? `Not up to date · ${title}` : title;
    if (!link) return;
    link.textContent = is_stale || why ? "Not up to date; trying again" : every_ms() ? "Live" : "";
    link.classList.toggle("away", Boolean(is_stale || why));
  };
  const swap = async () => {
    if (asked || document.hidden) return;
    asked = true;
    asked_ms = Date.now();
    let wrong = "no answer from this master";
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" }, redirect: "manual" });
      if (answer.type === "opaqueredirect") { location.reload(); return; } // the session has ended: to the log-in
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!answer.ok) { wrong = one("main p", fresh)?.textContent || `status ${answer.status}`; throw new Error(wrong); }
      localize(fresh);
      unhide(fresh);
      title = untitled(fresh.title);
      for (const old of all("[data-swap]")) { const made = fresh.getElementById(old.id); if (made) morph(old, made); }
      why = one("#stale", fresh).dataset.why || "";
      if (!why) fresh_ms = Date.now();
      judge(why);
    } catch { why = wrong; judge(!bar.hidden); } finally { asked = false; }
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { fresh_ms = Date.now(); swap(); } });
  setInterval(() => {
    const ms = every_ms();
    if (!ms || document.hidden) return;
    if (Date.now() - asked_ms >= Math.max(ms, 2000)) swap();
    if (Date.now() - fresh_ms > 2 * Math.max(ms, beat_ms)) judge(true);
  }, 1000);

  // -- buttons and keys

  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey && one("#search")) {
      event.preventDefault();
      one("#search").select();
      one("#search").focus();
    } else if (event.key === "Escape" && typing) {
      event.target.blur();
    }
  });
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (button) { await navigator.clipboard.writeText(button.dataset.copy); button.textContent = "Copied"; }
  });
  document.addEventListener("change", (event) => {
    const box = event.target.closest("[data-all]");
    if (box) for (const other of all(`[name="${box.dataset.all}"][type="checkbox"]`)) other.checked = box.checked;
  });
  unhide(document);
  /* A time of a form is of this browser's zone; without scripts it is UTC. */
  for (const zone of all("#at-zone")) zone.textContent = "";
  for (const time of all("#at")) time.form.addEventListener("submit", () => { time.form.elements.due_ms.value = time.value && new Date(time.value).getTime(); });
  localize(document);
  judge(!bar.hidden);
})();
