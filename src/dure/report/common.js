// What the scripts of all pages share: errors, colours by name, figures, marks of runs, the theme. A page's own script
// takes from `common` what it needs. Colours come from style.css by name, so a change of theme is one redraw. What went
// wrong is kept in body[data-errors], and how many charts were drawn in body[data-charts-drawn].
"use strict";
const common = (() => {
  const body = document.body;
  const errors = [];
  // Kept in the page, where a test that opened it in a browser can read them.
  const fail = (what) => {
    errors.push(String(what));
    body.dataset.errors = JSON.stringify(errors);
  };
  body.dataset.errors = "[]";
  addEventListener("error", (event) => fail(event.message));
  addEventListener("unhandledrejection", (event) => fail(event.reason));

  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const touch = matchMedia("(pointer: coarse)").matches;
  // An English text in the page's language, with values for the names in braces.
  const text = (english, values = {}) =>
    ((data.words || {})[english] || english).replace(/\{(\w+)\}/g, (all, name) => (name in values ? values[name] : all));
  // plotly reads a little HTML in texts: those from a run folder are escaped.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // Colours: "var(--name)" anywhere in a figure becomes what the style sheet says now.
  const colour = (text) => {
    $("probe").style.color = text;
    return getComputedStyle($("probe")).color;
  };
  const coloured = (value) => {
    if (typeof value === "string") return value.startsWith("var(--") ? colour(value) : value;
    // Arrays of numbers, which may be long, stay as they are.
    if (Array.isArray(value)) return value.some((v) => v && typeof v !== "number") ? value.map(coloured) : value;
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]));
    return value;
  };

  const axis = (more) => ({
    gridcolor: "var(--line)", linecolor: "var(--line)", tickcolor: "var(--line)", zeroline: false, automargin: true,
    tickfont: { color: "var(--soft)" }, ...more,
  });
  const layout = (more) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    margin: { l: 12, r: 12, t: 12, b: 40 }, dragmode: touch ? false : "zoom",
    font: { family: "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', sans-serif", size: 13, color: "var(--ink)" },
    hoverlabel: { bgcolor: "var(--raised)", bordercolor: "var(--line)", font: { color: "var(--ink)", size: 13 }, align: "left" },
    ...more,
  });
  const draw = (element, traces, wanted) =>
    // react, not newPlot: to draw a chart again changes it, and makes no other in its place.
    Plotly.react(element, coloured(traces), coloured(layout(wanted)), { responsive: true, displayModeBar: false });

  // Runs as little lines: in the table, the legend and the headings.
  const shapes = {
    circle: "M14 2a4 4 0 1 1 0 8a4 4 0 1 1 0-8", square: "M10.4 2.4h7.2v7.2h-7.2z", diamond: "M14 1l5 5-5 5-5-5z",
    "triangle-up": "M14 1.5l4.8 8.3H9.2z", "triangle-down": "M14 10.5L9.2 2.2h9.6z",
    x: "M10 3.6L11.6 2 14 4.4 16.4 2 18 3.6 15.6 6 18 8.4 16.4 10 14 7.6 11.6 10 10 8.4 12.4 6z",
    cross: "M12.8 1.5h2.4v3.3h3.3v2.4h-3.3v3.3h-2.4V7.2H9.5V4.8h3.3z",
  };
  const dashes = { solid: "", dash: "5 3", dot: "1.5 2.5", dashdot: "6 2 1.5 2" };
  const mark = (element, look) => {
    element.innerHTML =
      `<path d="M0 6H28" fill="none" stroke="${look.color}" stroke-width="2" stroke-dasharray="${dashes[look.dash]}"/>` +
      `<path d="${shapes[look.symbol]}" fill="${look.color}"/>`;
  };

  const symbol = (element, look) => {
    element.innerHTML = `<path d="${shapes[look.symbol]}" fill="${look.color}"/>`;
  };

  // Short texts for the labels of an axis.
  const short = (value) => `${Number(value.toPrecision(2))}`;
  const bytes = (value) => {
    const power = Math.min(4, Math.max(0, Math.floor(Math.log10(value) / 3)));
    return `${short(value / 1000 ** power)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
  };
  const seconds = (value) => (value < 1 ? `${short(value * 1000)} ms` : `${short(value)} s`);

  // The first charts at once; each of the others after the browser has shown what there is. `now`: all of them at once,
  // as for paper. Another call, such as for another theme, begins anew.
  let newest = 0;
  const drawEach = (charts, now = false) => {
    const mine = ++newest;
    let drawn = 0;
    const end = () => {
      body.dataset.chartsDrawn = drawn;
      body.dataset.width = document.documentElement.scrollWidth;
    };
    const from = (place) => {
      if (mine !== newest) return;
      if (place === charts.length) return end();
      try {
        charts[place]();
        drawn += 1;
      } catch (error) {
        fail(error.stack || error);
      }
      if (now || place < 1) from(place + 1);
      else setTimeout(() => from(place + 1));
    };
    from(0);
  };

  // Theme: the system's until the button is pressed.
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const remember = (theme) => { try { localStorage.setItem("dure-theme", theme); } catch { /* a file page may have no storage */ } };
  try {
    const kept = localStorage.getItem("dure-theme");
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  } catch { /* the system's theme stands */ }
  // A page that is shown live runs its script again when its sections are others: what is listened to for good is
  // listened to here, once, and draws what was drawn last.
  let latest = { drawAll: () => {}, print: () => {} };
  system.addEventListener("change", () => latest.drawAll());
  addEventListener("beforeprint", () => latest.print(true));
  addEventListener("afterprint", () => latest.print(false));
  const redraw = () => latest.drawAll();
  const onTheme = (drawAll, print = () => {}) => {
    latest = { drawAll, print };
    $("theme").addEventListener("click", () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
      root.dataset.theme = dark ? "light" : "dark";
      remember(root.dataset.theme);
      drawAll();
    });
  };
  return { body, fail, $, data, touch, text, plain, axis, draw, mark, symbol, bytes, seconds, drawEach, root, onTheme, redraw };
})();
