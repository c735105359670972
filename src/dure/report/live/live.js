// Keeps the report current: events from the server change sections and data in place, so that a zoom, a choice and what
// was sorted stay as they are. It runs the page's own script, which fills what it finds: at first, and when all is anew.
"use strict";
(() => {
  const { $, data, body, redraw, fail, text } = common;
  const parts = [...document.querySelectorAll("[data-part]")];
  // As the server wrote them: the page's script fills some elements, which are then no longer as they came.
  const sources = parts.map((part) => part.cloneNode(true));
  const nonce = document.currentScript.nonce;
  let version = body.dataset.version;
  let over = body.dataset.over === "yes";
  let events = null;
  let heard = Date.now();

  const say = (kind, english) => {
    const line = $("link");
    line.className = kind;
    line.textContent = text(english);
  };

  // A change of sections: what the server has not changed is left alone, whatever the page's script made of it.
  const WIRED = "[id], button, select, input, .chart, .swatch, [data-figure]";
  const key = (node) => (node.dataset ? node.dataset.key : undefined);
  const alike = (one, other) => one.nodeType === other.nodeType && one.nodeName === other.nodeName && key(one) === key(other);
  const keyed = (element) => element.children.length > 0 && [...element.children].every((child) => key(child) !== undefined);
  // Returns false where what the page's script has wired is another one by now: then all is built anew.
  const change = (old, fresh, shown) => {
    if (old.isEqualNode(fresh)) return true;
    if (!alike(old, fresh) || !shown || !alike(old, shown)) return false;
    if (old.nodeType === Node.TEXT_NODE) {
      shown.data = fresh.data;
      return true;
    }
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) shown.setAttribute(name, value);
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) shown.removeAttribute(name);
    return keyed(fresh) ? changeRows(old, fresh, shown) : changeChildren(old, fresh, shown);
  };
  const changeChildren = (old, fresh, shown) => {
    // What the page's script has put between, such as buttons that save, is not the server's to change.
    const [before, after, there] = [old, fresh, shown].map((one) => [...one.childNodes].filter((child) => !child.dataset || child.dataset.added === undefined));
    const same = before.length === after.length && before.length === there.length && before.every((child, i) => alike(child, after[i]) && alike(child, there[i]));
    if (same) return before.every((child, i) => change(child, after[i], there[i]));
    if (old.querySelector(WIRED) || fresh.querySelector(WIRED) || shown.querySelector("[data-added]")) return false;
    shown.replaceChildren(...after.map((child) => child.cloneNode(true)));
    return true;
  };
  // Rows with keys: they may come, go, and stand in another order than the server's, such as a sorted one.
  const changeRows = (old, fresh, shown) => {
    const rows = (element) => new Map([...element.children].map((child) => [key(child), child]));
    const [before, there] = [rows(old), rows(shown)];
    for (const child of fresh.children) {
      const row = there.get(key(child));
      if (before.has(key(child)) && row) {
        if (!change(before.get(key(child)), child, row)) return false;
        if (!shown.dataset.sorted) shown.append(row);
      } else if (child.querySelector(WIRED)) return false;
      else shown.append(child.cloneNode(true));
      there.delete(key(child));
    }
    for (const row of there.values()) row.remove();
    return true;
  };

  const parsed = (place, html) => {
    const part = sources[place].cloneNode(false);
    part.innerHTML = html;
    return part;
  };

  // A change of data. Charts read it when they draw, so what lies in a curve or a figure is only drawn again.
  const patch = ([path, what, value]) => {
    const last = path[path.length - 1];
    const there = path.slice(0, -1).reduce((inside, step) => inside[step], data);
    if (what === "cut") delete there[last];
    // Another array: plotly takes one that it has drawn for unchanged.
    else if (what === "add") there[last] = [...there[last], ...value];
    else there[last] = value;
  };
  const inside = ([path]) => (path[0] === "curves" && path[1] === "series" && path.length > 4) || (path[0] === "figures" && path.length > 2);

  // The page's own script, which does not run by itself.
  const run = () => {
    const script = document.createElement("script");
    script.nonce = nonce;
    script.textContent = $("page").textContent;
    body.append(script);
    script.remove();
  };

  // All anew: sections as they are now, and the page's script once more. What was chosen is chosen again.
  const rebuild = () => {
    const at = scrollY;
    const chosen = [...document.querySelectorAll(".choice[id]")].map((one) => [one.id, one.querySelector("[aria-pressed=true]")?.textContent]);
    const held = [...document.querySelectorAll("input[id], select[id]")].map((one) => [one.id, one.type === "checkbox" ? one.checked : one.value]);
    const off = [...document.querySelectorAll(".legend button[aria-pressed=false]")].map((one) => one.textContent);
    const open = [...document.querySelectorAll("details")].map((one) => one.open);
    for (const chart of document.querySelectorAll(".js-plotly-plot")) Plotly.purge(chart);
    parts.forEach((part, place) => part.replaceChildren(...sources[place].cloneNode(true).childNodes));
    run();
    for (const [id, text] of chosen) [...($(id)?.children || [])].find((one) => one.textContent === text && one.getAttribute("aria-pressed") !== "true")?.click();
    for (const [id, value] of held) {
      const one = $(id);
      if (!one || (one.type === "checkbox" ? one.checked : one.value) === value) continue;
      if (one.type === "checkbox") one.checked = value;
      else if (one.tagName !== "SELECT" || [...one.options].some((option) => option.value === value)) one.value = value;
      for (const kind of ["input", "change"]) one.dispatchEvent(new Event(kind, { bubbles: true }));
    }
    for (const one of document.querySelectorAll(".legend button")) if (off.includes(one.textContent)) one.click();
    document.querySelectorAll("details").forEach((one, place) => { if (place < open.length) one.open = open[place]; });
    scrollTo(0, at);
    body.dataset.built = Number(body.dataset.built || 0) + 1;
  };

  const take = (told) => {
    version = told.version;
    over = told.over;
    document.title = told.title;
    body.dataset.version = version;
    body.dataset.over = over ? "yes" : "no";
    say(over ? "over" : "live", over ? "ended: this is the final report" : "live");
  };
  const whole = (told) => {
    told.sections.forEach((html, place) => { sources[place] = parsed(place, html); });
    for (const name of Object.keys(data)) delete data[name];
    Object.assign(data, told.data);
    rebuild();
    take(told);
  };
  const some = (told) => {
    // Of a state that this page has not seen: it asks for all of it.
    if (told.since !== version) return listen(true);
    told.changes.forEach(patch);
    let anew = !told.changes.every(inside);
    for (const [place, html] of Object.entries(told.sections)) {
      const fresh = parsed(place, html);
      anew = !change(sources[place], fresh, parts[place]) || anew;
      sources[place] = fresh;
    }
    if (anew) rebuild();
    else if (told.changes.length) redraw();
    take(told);
  };

  const SILENT = 30000;
  const AGAIN = 2000;
  const hear = (then) => (event) => {
    heard = Date.now();
    try {
      then(JSON.parse(event.data));
    } catch (error) {
      fail(error.stack || error);
    }
  };
  const listen = (all = false) => {
    events?.close();
    heard = Date.now();
    events = new EventSource(`events?since=${all ? "" : version}&language=${document.documentElement.lang}`);
    events.addEventListener("whole", hear(whole));
    events.addEventListener("patch", hear(some));
    events.addEventListener("beat", hear(() => say(over ? "over" : "live", over ? "ended: this is the final report" : "live")));
    events.addEventListener("bye", hear(() => {
      if (over) leave("ended: this is the final report, and the server has gone");
      else say("lost", "the server has gone; looking for it again");
    }));
    events.onerror = () => {
      if (over) return leave("ended: this is the final report, and the server has gone");
      say("lost", "no answer from the server; looking for it again");
      // A browser tries again by itself, but for an answer that is no stream: of a server that wants its token, say.
      if (events.readyState === EventSource.CLOSED) setTimeout(ask, AGAIN);
    };
  };
  const leave = (english) => {
    events.close();
    events = null;
    say("over", english);
  };
  const ask = () =>
    fetch("here", { cache: "no-store" }).then(
      (answer) => (answer.status === 401 ? say("lost", "the server asks for its token again: reload this page") : listen()),
      () => setTimeout(ask, AGAIN),
    );
  // Nothing heard for long, though no error was told: a machine that slept, or a link that broke.
  setInterval(() => { if (events && Date.now() - heard > SILENT) listen(); }, 5000);
  addEventListener("load", () => listen());
  run();
  take({ version, over, title: document.title });
})();
