// Draws the charts of a benchmark from the page's JSON with plotly; theme, and contenders switched on and off.
// Colours come from style.css by name, so a change of theme is one redraw. What went wrong is kept in
// body[data-errors], and how many charts were drawn in body[data-charts-drawn].
"use strict";
(() => {
  const body = document.body;
  const errors = [];
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
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const colour = (text) => {
    $("probe").style.color = text;
    return getComputedStyle($("probe")).color;
  };
  const coloured = (value) => {
    if (typeof value === "string") return value.startsWith("var(--") ? colour(value) : value;
    if (Array.isArray(value)) return value.some((v) => v && typeof v !== "number") ? value.map(coloured) : value;
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]));
    return value;
  };

  const sizeText = (bytes) => {
    for (const unit of ["B", "KiB", "MiB"]) {
      if (bytes < 1024) return `${Number(bytes.toPrecision(3))} ${unit}`;
      bytes /= 1024;
    }
    return `${Number(bytes.toPrecision(3))} GiB`;
  };
  const secondsText = (s) => (s < 1e-3 ? `${Number((s * 1e6).toPrecision(3))} µs` : s < 1 ? `${Number((s * 1e3).toPrecision(3))} ms` : `${Number(s.toPrecision(3))} s`);
  // Powers of ten, with 2 and 5 between them where there are few.
  const ticksOf = (low, high) => {
    const ticks = [];
    const steps = high > 300 * low ? [1] : high > 30 * low ? [1, 3] : [1, 2, 5];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1)
      for (const step of steps) ticks.push(step * 10 ** e);
    return ticks;
  };
  const axis = (more) => ({
    gridcolor: "var(--line)", linecolor: "var(--line)", tickcolor: "var(--line)", zeroline: false, automargin: true,
    tickfont: { color: "var(--soft)", size: 12 }, type: "log", ...more,
  });
  const sizeAxis = (sizes) => {
    const few = sizes.filter((_, i) => sizes.length < 6 || i % 2 === 0);
    return axis({ tickvals: few, ticktext: few.map(sizeText), tickangle: 0, range: [Math.log10(sizes[0] / 1.4), Math.log10(sizes[sizes.length - 1] * 1.4)] });
  };
  const valueAxis = (values, text) => {
    const known = values.filter((v) => v > 0);
    const ticks = ticksOf(Math.min(...known), Math.max(...known));
    const pad = 1.3;
    return axis({ tickvals: ticks, ticktext: ticks.map(text), range: [Math.log10(Math.min(...known) / pad), Math.log10(Math.max(...known) * pad)] });
  };
  const layout = (more) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    margin: { l: 12, r: 12, t: 12, b: 32 }, dragmode: touch ? false : "zoom",
    font: { family: "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', sans-serif", size: 13, color: "var(--ink)" },
    hoverlabel: { bgcolor: "var(--raised)", bordercolor: "var(--line)", font: { color: "var(--ink)", size: 13 }, align: "left" },
    ...more,
  });
  const draw = (element, traces, wanted) =>
    Plotly.react(element, coloured(traces), coloured(layout(wanted)), { responsive: true, displayModeBar: false });

  const shapes = {
    circle: "M14 2a4 4 0 1 1 0 8a4 4 0 1 1 0-8", square: "M10.4 2.4h7.2v7.2h-7.2z", diamond: "M14 1l5 5-5 5-5-5z",
    cross: "M12.8 1.5h2.4v3.3h3.3v2.4h-3.3v3.3h-2.4V7.2H9.5V4.8h3.3z",
  };
  const dashes = { solid: "", dash: "5 3", dot: "1.5 2.5", dashdot: "6 2 1.5 2" };
  const swatch = (element, look) => {
    element.innerHTML =
      `<path d="M0 6H28" fill="none" stroke="${look.color}" stroke-width="2" stroke-dasharray="${dashes[look.dash]}"/>` +
      `<path d="${shapes[look.symbol]}" fill="${look.color}"/>`;
  };
  for (const element of document.querySelectorAll(".swatch")) swatch(element, data.contenders[element.dataset.run]);

  const charts = [];
  const hidden = new Set();
  let lit = null;

  const look = (one, faint) => ({
    type: "scatter", mode: "lines+markers", opacity: faint ? 0.15 : 1,
    line: { color: one.color, dash: one.dash, width: 2 }, marker: { color: one.color, symbol: one.symbol, size: 7 },
  });
  const panel = (element, place, key, text, unit) => {
    const { ranks, series } = data.panels[place];
    const sizes = [...new Set(series.flatMap((one) => one.bytes))].sort((a, b) => a - b);
    charts.push(() => {
      const shown = series.filter((one) => !hidden.has(one.contender));
      const traces = shown.map((one) => {
        const contender = data.contenders[one.contender];
        const spread = key === "seconds" && {
          error_y: {
            type: "data", symmetric: false, thickness: 1, width: 0, color: contender.color,
            array: one.high.map((v, i) => v - one.seconds[i]), arrayminus: one.low.map((v, i) => one.seconds[i] - v),
          },
        };
        return {
          ...look(contender, lit !== null && lit !== one.contender), ...spread, x: one.bytes, y: one[key],
          customdata: one[key].map((v, i) => [text(v), sizeText(one.bytes[i])]),
          hovertemplate: `<b>${plain(contender.label)}</b><br>%{customdata[1]}<br>%{customdata[0]}<extra></extra>`,
        };
      });
      const values = (shown.length ? shown : series).flatMap((one) => one[key]);
      draw(element, traces, { xaxis: sizeAxis(sizes), yaxis: valueAxis(values, text) });
      element.setAttribute("aria-label", `${unit} over size on ${ranks} ranks`);
    });
  };
  const bandwidthText = (v) => `${Number((v / 1e9).toPrecision(3))} GB/s`;
  for (const element of document.querySelectorAll("[data-time]")) panel(element, element.dataset.time, "seconds", secondsText, "time of a call");
  for (const element of document.querySelectorAll("[data-bandwidth]")) panel(element, element.dataset.bandwidth, "bus_bandwidth", bandwidthText, "bus bandwidth");

  const drawAll = () => {
    let drawn = 0;
    for (const chart of charts) {
      try {
        chart();
        drawn += 1;
      } catch (error) {
        fail(error.stack || error);
      }
    }
    body.dataset.chartsDrawn = drawn;
    body.dataset.width = document.documentElement.scrollWidth;
  };

  for (const chip of document.querySelectorAll(".legend button[data-run]")) {
    const run = Number(chip.dataset.run);
    const light = (on) => () => { lit = on && !hidden.has(run) ? run : null; drawAll(); };
    chip.addEventListener("click", () => {
      hidden.has(run) ? hidden.delete(run) : hidden.add(run);
      chip.setAttribute("aria-pressed", !hidden.has(run));
      lit = null;
      drawAll();
    });
    if (!touch) {
      chip.addEventListener("pointerenter", light(true));
      chip.addEventListener("pointerleave", light(false));
    }
  }

  if (data.calibration) {
    const { links, algorithms } = data.calibration;
    const words = (name) => name.replace(/_/g, " ");
    const looks = algorithms.map((name) => ({ ...data.contenders.find((one) => one.name === name.replace(/_/g, "-")), label: name }));
    for (const one of looks) {
      const key = document.createElement("span");
      key.className = "key";
      key.innerHTML = `<i style="background:${one.color}"></i>${plain(words(one.label))}`;
      $("fit-legend").append(key);
    }
    for (const element of document.querySelectorAll("[data-fit]")) {
      const link = links[element.dataset.fit];
      charts.push(() => {
        const traces = link.series.flatMap((one) => {
          const style = looks[algorithms.indexOf(one.algorithm)];
          const hover = (what, y) => ({
            customdata: y.map((v, i) => [secondsText(v), sizeText(one.bytes[i])]),
            hovertemplate: `<b>${plain(words(one.algorithm))}</b>, ${what}<br>%{customdata[1]}<br>%{customdata[0]}<extra></extra>`,
          });
          return [
            { type: "scatter", mode: "lines", x: one.bytes, y: one.predicted, line: { color: style.color, width: 2 }, ...hover("predicted", one.predicted) },
            { type: "scatter", mode: "markers", x: one.bytes, y: one.measured, marker: { color: style.color, size: 8 }, ...hover("measured", one.measured) },
          ];
        });
        const sizes = [...new Set(link.series.flatMap((one) => one.bytes))].sort((a, b) => a - b);
        const values = link.series.flatMap((one) => [...one.predicted, ...one.measured]);
        const within = link.crossovers.filter((cross) => cross.bytes >= sizes[0] && cross.bytes <= sizes[sizes.length - 1]);
        draw(element, traces, {
          xaxis: sizeAxis(sizes), yaxis: valueAxis(values, secondsText),
          shapes: within.map((cross) => ({ type: "line", xref: "x", yref: "paper", x0: cross.bytes, x1: cross.bytes, y0: 0, y1: 1, line: { color: "var(--soft)", width: 1, dash: "dot" } })),
          annotations: within.map((cross) => ({ xref: "x", yref: "paper", x: Math.log10(cross.bytes), y: 1, yanchor: "top", xanchor: "right", textangle: -90, showarrow: false, bgcolor: "var(--page)", text: `${plain(words(cross.to))}, from ${sizeText(cross.bytes)}`, font: { size: 12, color: "var(--soft)" } })),
        });
        element.setAttribute("aria-label", `predicted and measured time over size on ${link.ranks} ranks`);
      });
    }
  }

  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  try {
    const kept = localStorage.getItem("dure-theme");
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  } catch { /* a file page may have no storage */ }
  $("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("dure-theme", root.dataset.theme); } catch { /* as above */ }
    drawAll();
  });
  system.addEventListener("change", drawAll);
  drawAll();
})();
