// Draws the charts of a benchmark from the page's JSON; contenders are switched on and off.
"use strict";
(() => {
  const { $, data, touch, plain, draw: react, mark, drawEach, onTheme } = common;

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
  const axis = (more) => common.axis({ tickfont: { color: "var(--soft)", size: 12 }, type: "log", ...more });
  const sizeAxis = (sizes) => {
    // Of many sizes every second one is written, so that the texts do not meet.
    const few = sizes.filter((_, i) => sizes.length < 6 || i % 2 === 0);
    return axis({ tickvals: few, ticktext: few.map(sizeText), tickangle: 0, range: [Math.log10(sizes[0] / 1.4), Math.log10(sizes[sizes.length - 1] * 1.4)] });
  };
  const valueAxis = (values, text) => {
    const known = values.filter((v) => v > 0);
    const ticks = ticksOf(Math.min(...known), Math.max(...known));
    const pad = 1.3;
    return axis({ tickvals: ticks, ticktext: ticks.map(text), range: [Math.log10(Math.min(...known) / pad), Math.log10(Math.max(...known) * pad)] });
  };
  const draw = (element, traces, wanted) => react(element, traces, { margin: { l: 12, r: 12, t: 12, b: 32 }, ...wanted });

  for (const element of document.querySelectorAll(".swatch")) mark(element, data.contenders[element.dataset.run]);

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
            // From the median to the quartiles, above and below.
            array: one.high.map((v, i) => v - one.seconds[i]), arrayminus: one.low.map((v, i) => one.seconds[i] - v),
          },
        };
        return {
          ...look(contender, lit !== null && lit !== one.contender), ...spread, x: one.bytes, y: one[key],
          customdata: one[key].map((v, i) => [text(v), sizeText(one.bytes[i])]),
          hovertemplate: `<b>${plain(contender.label)}</b><br>%{customdata[1]}<br>%{customdata[0]}<extra></extra>`,
        };
      });
      // With all of them hidden the axis has room for all.
      const values = (shown.length ? shown : series).flatMap((one) => one[key]);
      draw(element, traces, { xaxis: sizeAxis(sizes), yaxis: valueAxis(values, text) });
      element.setAttribute("aria-label", `${unit} over size on ${ranks} ranks`);
    });
  };
  const bandwidthText = (v) => `${Number((v / 1e9).toPrecision(3))} GB/s`;
  for (const element of document.querySelectorAll("[data-time]")) panel(element, element.dataset.time, "seconds", secondsText, "time of a call");
  for (const element of document.querySelectorAll("[data-bandwidth]")) panel(element, element.dataset.bandwidth, "bus_bandwidth", bandwidthText, "bus bandwidth");

  const drawAll = () => drawEach(charts);

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

  onTheme(drawAll);
  drawAll();
})();
