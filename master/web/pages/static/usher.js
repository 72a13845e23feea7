"use strict";
/* Keeps a page up to date. Everything works without it. Values from the server are only ever set as text, and links only to paths. */
(() => {
  const one = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
  let ahead = 0; // milliseconds that the server's clock is ahead of ours

  const number = (value) => value === null || value === undefined ? "-"
    : value.toLocaleString("en-US", { maximumFractionDigits: Number.isInteger(value) || value >= 100 ? 0 : 1 });
  const duration = (ms) => {
    if (ms === null || ms === undefined) return "-";
    ms = Math.max(0, ms);
    if (ms < 1000) return `${Math.round(ms)} ms`;
    if (ms < 10000) return `${(ms / 1000).toFixed(1)} s`;
    const s = Math.floor(ms / 1000);
    for (const [size, unit, smaller, name] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
      if (s >= size) { const rest = Math.floor(s % size / smaller); return `${Math.floor(s / size)} ${unit}` + (rest ? ` ${rest} ${name}` : ""); }
    }
    return `${s} s`;
  };
  const since = (ms) => ms ? duration(Date.now() + ahead - ms) : "-";
  const path = (href) => typeof href === "string" && href.startsWith("/") && !href.startsWith("//") ? href : null;
  const two = (value) => String(value).padStart(2, "0");
  const clock = (when) => `${two(when.getHours())}:${two(when.getMinutes())}`;
  /* Times are of this browser's zone, with UTC beside the pointer; without scripts they are UTC. */
  const local = () => {
    for (const time of all("time[datetime]:not([data-since]):not([title])")) {
      const when = new Date(time.dateTime);
      if (Number.isNaN(when.getTime())) continue;
      time.title = `${time.textContent} UTC`;
      time.textContent = `${when.getFullYear()}-${two(when.getMonth() + 1)}-${two(when.getDate())} ${clock(when)}:${two(when.getSeconds())}${time.dateTime.slice(19, -1)}`;
    }
    for (const mark of all("[data-clock]")) mark.textContent = clock(new Date(Number(mark.dataset.clock)));
    const zone = one("#zone");
    if (zone) zone.textContent = `Times are ${Intl.DateTimeFormat().resolvedOptions().timeZone || "local"}, UTC under the pointer`;
  };
  const tick = () => { local(); for (const time of all("time[data-since]")) time.textContent = since(Number(time.dataset.since)); };

  // -- the overview

  const spark = (line, points) => {
    const values = points.slice(-120).map((row) => row[line.dataset.spark]).filter((value) => value !== null);
    if (values.length < 2) return;
    const top = Math.max(...values) || 1, step = 240 / 119, start = 240 - (values.length - 1) * step;
    line.setAttribute("points", values.map((value, at) => `${(start + at * step).toFixed(1)},${(38 - 36 * value / top).toFixed(1)}`).join(" "));
  };
  const history = [];
  const alarms = (rows) => {
    const list = one("#alarms"), before = JSON.stringify(rows.map((row) => row.text));
    if (list.dataset.told === before) return; // screen readers must not repeat an unchanged list
    list.dataset.told = before;
    list.replaceChildren(...rows.map((row) => {
      const item = one("#alarm-row").content.cloneNode(true), link = one("a", item), href = path(row.href);
      one("li", item).className = row.level;
      one(".level", item).textContent = row.word;
      link.textContent = row.text;
      if (href) link.setAttribute("href", href);
      return item;
    }));
  };
  const overview = (seen) => {
    ahead = seen.time_ms - Date.now();
    for (const place of all("[data-live]", one("#main"))) {
      const value = seen[place.dataset.live];
      place.textContent = place.dataset.as === "since" ? since(value) : number(value);
    }
    history.push(seen.point);
    history.splice(0, history.length - 600);
    for (const line of all("[data-spark]")) spark(line, history);
    const counts = { overview: seen.stuck + (seen.stuck === seen.stuck_most ? "+" : ""), letters: number(seen.dead_letters), rules: number(seen.rules) };
    for (const place of all("[data-count]")) if (place.dataset.count in counts) place.textContent = counts[place.dataset.count].replace(/^[0-]$/, "");
    alarms(seen.alarms);
    if (one("[data-look]").dataset.look !== seen.look) soon();
    tick();
  };

  // -- consumers

  const consumers = (seen) => {
    const rows = new Map(seen.rows.map((row) => [row.incarnation, row]));
    for (const line of all("tr[data-row]")) {
      const row = rows.get(line.dataset.row) || { state: "gone", tickets: 0, pending: 0, beat_ms: null };
      const field = (name) => one(`[data-field="${name}"]`, line), state = one(".state", line), load = field("load");
      state.textContent = row.state;
      state.className = `state ${row.state}`;
      field("tickets").textContent = number(row.tickets);
      field("pending").textContent = number(row.pending);
      field("beat").textContent = row.beat_ms === null ? "" : duration(row.beat_ms);
      if (load) load.value = row.pending;
    }
  };

  // -- parts of a page that the server renders again

  const boxes = () => { for (const box of all("[data-all]")) box.hidden = false; };

  let asked = false;
  const swap = async () => {
    if (asked || document.hidden) return;
    asked = true;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" }, redirect: "error" });
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const old of all("[data-swap]")) {
        const made = fresh.getElementById(old.id);
        const active = document.activeElement, boxed = old.contains(active) && active.type === "checkbox" ? active.value : null;
        if (!made || (old.contains(active) && boxed === null)) continue;
        const chosen = new Set(all("input[type=checkbox]:checked", old).map((box) => box.value));
        for (const box of all("input[type=checkbox]", made)) if (chosen.has(box.value)) box.checked = true;
        for (const part of all("details[id]", old)) { const now = fresh.getElementById(part.id); if (now) now.open = part.open; }
        old.replaceWith(document.adoptNode(made));
        for (const box of boxed === null ? [] : all("input[type=checkbox]", made)) if (box.value === boxed) box.focus();
      }
      boxes();
      local();
    } catch { /* tried again next time */ } finally { asked = false; }
  };

  let late = null;
  const soon = () => { if (!late) late = setTimeout(() => { late = null; swap(); }, 2000); };

  // -- the connection: none while the page is hidden

  const link = one("#link");
  const say = (text, away) => { if (link) { link.textContent = text; link.classList.toggle("away", Boolean(away)); } };
  const topics = { overview, consumers, history: (points) => history.splice(0, history.length, ...points) };
  const ticketEvents = ["entry", "hand_over", "attempt", "completed", "dead_letter", "state"];
  const live = document.body.dataset.live || "";
  let source = null, heard = Date.now(), ticks = 0;
  const open = () => {
    if (!live || source || document.hidden) return;
    source = new EventSource(live);
    source.onopen = () => { heard = Date.now(); say("Live"); };
    source.onerror = () => say("Not connected; trying again", true);
    for (const [name, show] of Object.entries(topics)) source.addEventListener(name, (event) => { heard = Date.now(); say("Live"); show(JSON.parse(event.data)); });
    for (const name of ticketEvents) source.addEventListener(name, soon);
  };
  const close = () => { if (source) { source.close(); source = null; } };
  document.addEventListener("visibilitychange", () => { if (document.hidden) { close(); } else { open(); tick(); } });
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  setInterval(() => {
    if (document.hidden) return;
    tick();
    if (source && !live.includes("/events") && Date.now() - heard > 25000) say(`No news for ${duration(Date.now() - heard)}`, true);
    const again = one("[data-again]");
    if (again && ++ticks % Number(again.dataset.again) === 0) swap();
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
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-confirm]");
    if (button && !window.confirm(button.dataset.confirm)) event.preventDefault();
  });
  document.addEventListener("change", (event) => {
    const box = event.target.closest("[data-all]");
    if (box) for (const other of all(`[name="${box.dataset.all}"][type="checkbox"]`)) other.checked = box.checked;
  });
  boxes();
  /* Times of a form may be of this browser's zone; without scripts they are UTC. */
  for (const list of all("[data-zones]")) {
    const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
    if (zone && zone !== "UTC") list.prepend(new Option(zone, zone, true, true));
  }
  const theme = one("#theme"), root = document.documentElement;
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { theme.textContent = dark() ? "Light" : "Dark"; theme.setAttribute("aria-label", `Use the ${dark() ? "light" : "dark"} theme`); };
  local();
  theme.hidden = false;
  name();
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    document.cookie = `usher_theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=strict`;
    name();
  });
})();
