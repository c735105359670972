// Draws the charts of the report from the page's JSON and makes its controls work: sorting, axes, runs, zoom, print.
"use strict";
(() => {
  const { $, data, touch, text, plain, draw: react, mark, drawEach, root, onTheme } = common;
  const narrow = () => innerWidth < 640;
  let printing = false;

  const axis = (more) => ({
    ...common.axis(more), title: { text: plain(more.title || ""), standoff: 10, font: { color: "var(--soft)", size: 13 } },
  });
  const draw = (element, traces, wanted) => {
    // A page of paper is narrower than the window, and plotly does not notice that it is printed.
    const width = printing ? { width: Math.min(680, element.clientWidth) } : {};
    react(element, traces, { ...wanted, ...width });
  };

  for (const swatch of document.querySelectorAll(".swatch")) mark(swatch, data.runs[swatch.dataset.run]);

  // A row of buttons of which one is pressed.
  const choice = (element, entries, chosen, then) => {
    for (const entry of entries) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = entry.name;
      button.setAttribute("aria-pressed", entry.key === chosen);
      button.addEventListener("click", () => {
        for (const other of element.children) other.setAttribute("aria-pressed", other === button);
        then(entry);
      });
      element.append(button);
    }
  };

  const charts = [];

  // The overview: a point a run, families by colour and marker. On a logarithmic axis, zero has a place left of the
  // smallest value.
  const roundTicks = (low, high) => {
    const inside = (digits) => {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1)
        for (const digit of digits) found.push(digit * 10 ** power);
      return found.filter((v) => v >= low * 0.8 && v <= high * 1.25);
    };
    const whole = inside([1]);
    const known = whole.length > 1 ? whole : inside([1, 2, 5]);
    return known.filter((_, i) => i % Math.ceil(known.length / 4) === 0);
  };
  const unit = (key, value) => (key === "bytes" || key === "memory" ? common.bytes(value) : common.seconds(value));
  for (const element of document.querySelectorAll("[data-overview]")) {
    const { families, share, metric, range } = data.overview;
    const { points, log, key } = data.overview.charts[element.dataset.overview];
    const overview = () => {
      const known = points.map((point) => point.x).filter((x) => x > 0);
      const [low, high] = [Math.min(...known), Math.max(...known)];
      const zero = low / 4;
      const place = (x) => (log && x === 0 ? zero : x);
      const shown = points.filter((point) => tools.named.has(point.run));
      // Points at the same place are seen as one: its text names all of them.
      const texts = new Map();
      for (const point of shown) {
        const where = `${point.x.toPrecision(2)} ${point.y.toPrecision(3)}`;
        texts.set(where, [...(texts.get(where) || []), point.text]);
      }
      const traces = families.map((family, number) => {
        const own = shown.filter((point) => point.family === number);
        return {
          type: "scatter", mode: "markers", name: family.name, x: own.map((point) => place(point.x)), y: own.map((point) => point.y),
          customdata: own.map((point) => [...new Set([point.text, ...texts.get(`${point.x.toPrecision(2)} ${point.y.toPrecision(3)}`)])].slice(0, 6).join("<br><br>")),
          marker: { color: family.color, size: 10, opacity: 0.85, symbol: own.map((point) => family.symbol + (point.open ? "-open" : "")), line: { width: 1, color: family.color } },
          hovertemplate: "%{customdata}<extra></extra>",
        };
      }).filter((trace) => trace.x.length);
      const zeros = log && points.some((point) => point.x === 0);
      const named = log ? roundTicks(low, high) : [];
      const across = log
        ? { type: "log", tickvals: [...(zeros ? [zero] : []), ...named], ticktext: [...(zeros ? ["0"] : []), ...named.map((v) => unit(key, v))],
            tickangle: 0, range: [Math.log10((zeros ? zero : low) / 1.6), Math.log10(high * 1.6)] }
        : { ...(low > 0.5 * high ? {} : { rangemode: "tozero" }), nticks: 5, ...(key === "bytes" || key === "memory" ? { tickformat: "~s", ticksuffix: "B" } : { ticksuffix: " s" }) };
      draw(element, traces, {
        height: 240, margin: { l: 4, r: 8, t: 8, b: 4 },
        xaxis: axis(across),
        yaxis: axis({ nticks: 6, range, ...(share ? { tickformat: ".0%" } : {}) }),
      });
      element.setAttribute("aria-label", text("{metric}, {count} runs", { metric, count: shown.length }));
    };
    tools.onNames.push(overview);
    charts.push(overview);
  }
  for (const one of document.querySelectorAll("[data-family]")) common.symbol(one, data.overview.families[one.dataset.family]);

  if (data.curves) {
    const { axes, metrics, series } = data.curves;
    const hidden = new Set();
    let x = axes[0];
    let y = metrics[0];
    let lit = null;
    const values = (key) => series.flatMap((one) => (one.y[key] || []).filter((v) => v !== null));
    // What starts out logarithmic: an axis of very different runs, and a falling metric of more than 30 times.
    const startLogs = () => {
      $("log-x").checked = x.log;
      const known = values(y.key);
      const low = Math.min(...known);
      $("log-y").checked = !y.rises && low > 0 && Math.max(...known) > 30 * low;
    };
    const curves = () => {
      const logX = $("log-x").checked;
      const drawn = series.filter((one) => one.y[y.key] && !hidden.has(one.run) && tools.named.has(one.run));
      // A run without a place on this axis is named below the chart.
      const shown = (one) => one.x[x.key].some((v) => v !== null && (!logX || v > 0));
      // On a logarithmic axis zero lies infinitely far away: plotly would draw a line to it.
      const seen = (numbers, log) => (log ? numbers.map((v) => (v > 0 ? v : null)) : numbers);
      const logY = $("log-y").checked;
      const weight = Number($("smooth").value);
      const alone = drawn.filter(shown).map((one) => ({ run: one.run, label: data.runs[one.run].label, x: one.x[x.key], y: tools.smooth(one.y[y.key], weight) }));
      const lines = $("join-seeds")?.checked ? tools.overSeeds(alone) : alone;
      const bands = lines.filter((one) => one.low).map((one) => {
        // From left to right along the lower edge, and back along the upper one.
        const [there, back] = [seen(one.x, logX), [...seen(one.x, logX)].reverse()];
        return {
          type: "scatter", mode: "lines", fill: "toself", hoverinfo: "skip", skip: true, opacity: 0.25, line: { width: 0, color: data.runs[one.run].color },
          x: [...there, ...back], y: seen([...one.low, ...[...one.high].reverse()], logY), fillcolor: data.runs[one.run].color,
        };
      });
      // What was measured, behind what was smoothed of it, where the lines are few.
      const raw = weight && lines === alone && alone.length <= 12 ? drawn.filter(shown).map((one) => ({
        type: "scatter", mode: "lines", hoverinfo: "skip", skip: true, opacity: 0.25, line: { width: 1, color: data.runs[one.run].color },
        x: seen(one.x[x.key], logX), y: seen(one.y[y.key], logY),
      })) : [];
      const own = lines.map((one) => {
        const run = data.runs[one.run];
        const few = one.x.length < 30;
        return {
          type: "scatter", mode: "lines+markers", name: plain(one.label), x: seen(one.x, logX), y: seen(one.y, logY),
          opacity: lit === null || lit === one.run ? 1 : 0.18,
          line: { color: run.color, dash: run.dash, width: 2 },
          marker: { color: run.color, symbol: run.symbol, size: 7, maxdisplayed: few ? 0 : 12 },
          hovertemplate: `<b>%{fullData.name}</b><br>${plain(y.name)} %{y:${y.share ? ".2%" : ".4~g"}}` +
            `<br>%{x:${x.key === "bytes" ? ".3~s" : ".4~r"}}${x.key === "bytes" ? "B" : " " + plain(x.name)}<extra></extra>`,
        };
      });
      const traces = [...bands, ...raw, ...own];
      // Labels at 1, 2 and 5 of each decade, or, where there are many decades, at 1.
      const scale = (on, numbers) => {
        if (!on) return { type: "linear" };
        const known = numbers.filter((v) => v > 0);
        return { type: "log", dtick: Math.max(...known) > 1000 * Math.min(...known) || narrow() ? 1 : "D2", tickformat: "~g" };
      };
      draw($("curves"), traces, {
        xaxis: axis({ title: x.title, ...scale(logX, traces.flatMap((trace) => trace.x)), ...(x.key === "bytes" ? { tickformat: "~s", ticksuffix: "B" } : {}),
          ...(logX ? {} : { rangemode: "tozero" }), nticks: narrow() ? 5 : 10 }),
        yaxis: axis({ ...scale($("log-y").checked, traces.flatMap((trace) => trace.y)), ...(y.share ? { tickformat: ".0%" } : {}) }),
        // plotly keeps the zoom while this text stays the same: another axis begins anew.
        uirevision: [x.key, y.key, logX, $("log-y").checked].join(),
      });
      const off = [...new Set(drawn.filter((one) => !shown(one)).map((one) => data.runs[one.run].label))];
      // Systems that compute the same lie on one line, of which only the last is seen.
      const alike = new Map();
      for (const one of drawn.filter(shown)) {
        const line = JSON.stringify([one.x[x.key], one.y[y.key].map((v) => v && v.toPrecision(3))]);
        alike.set(line, [...(alike.get(line) || []), data.runs[one.run].label]);
      }
      const same = [...alike.values()].filter((labels) => labels.length > 1);
      $("curve-note").textContent = [
        ...same.map((labels) => text("On one and the same line: {runs}.", { runs: labels.join(", ") })),
        ...(off.length ? [text("Not on this axis, having no {axis} to show: {runs}.", { axis: x.name, runs: off.join(", ") })] : []),
      ].join(" ");
      $("curves").setAttribute("aria-label", text("{metric} against {axis}", { metric: y.name, axis: x.title }));
    };
    choice($("curve-metric"), metrics, y.key, (entry) => { y = entry; startLogs(); curves(); });
    choice($("curve-axis"), axes, x.key, (entry) => { x = entry; startLogs(); curves(); });
    for (const id of ["log-x", "log-y", "join-seeds"]) $(id)?.addEventListener("change", curves);
    $("smooth").addEventListener("input", curves);
    tools.onNames.push(curves);
    for (const chip of document.querySelectorAll(".legend button")) {
      const run = Number(chip.dataset.run);
      const light = (on) => () => { lit = on && !hidden.has(run) ? run : null; curves(); };
      chip.addEventListener("click", () => {
        hidden.has(run) ? hidden.delete(run) : hidden.add(run);
        chip.setAttribute("aria-pressed", !hidden.has(run));
        lit = null;
        curves();
      });
      if (!touch) {
        chip.addEventListener("pointerenter", light(true));
        chip.addEventListener("pointerleave", light(false));
      }
    }
    startLogs();
    charts.push(curves);
  }

  if (data.timelines.length) {
    let line = data.timelines[$("timeline-run").value];
    let range = line.range;
    const timeline = () => {
      const traces = Object.entries(line.spans).map(([category, spans]) => ({
        type: "bar", orientation: "h", name: text(category), width: 0.72, marker: { color: `var(--${category})`, line: { width: 0 } },
        y: spans.map((span) => span[0]), base: spans.map((span) => span[1]), x: spans.map((span) => span[2]),
        customdata: spans.map((span) => span[3]), textposition: "none",
        hovertemplate: `<b>%{customdata}</b><br>${text(category)}<br>${text("{length}, from {start}", { length: `%{x:.4~r} ${line.unit}`, start: "%{base:.6~r}" })}<extra></extra>`,
      }));
      const rows = line.lanes.length;
      draw($("timeline"), traces, {
        barmode: "overlay", height: 30 * rows + 60,
        xaxis: axis({ ticksuffix: ` ${line.unit}`, range: [...range], nticks: narrow() ? 5 : 12 }),
        yaxis: axis({ tickvals: [...Array(rows).keys()], ticktext: line.lanes, range: [rows - 0.5, -0.5], fixedrange: true, showgrid: false }),
      });
      $("timeline-note").textContent = line.note;
    };
    const go = (from, to) => { range = [from, to]; timeline(); };
    const moves = {
      earlier: (a, b) => [a - (b - a) / 2, b - (b - a) / 2], later: (a, b) => [a + (b - a) / 2, b + (b - a) / 2],
      out: (a, b) => [a - (b - a) / 2, b + (b - a) / 2], in: (a, b) => [a + (b - a) / 4, b - (b - a) / 4],
      // From the start of the run to the end of what is drawn.
      all: () => [Math.min(line.range[0], 0), line.end],
    };
    $("timeline-run").addEventListener("change", (event) => {
      line = data.timelines[event.target.value];
      go(...line.range);
    });
    $("timeline-move").addEventListener("click", (event) => {
      const move = event.target.dataset.move;
      if (move) go(...moves[move](...range));
    });
    charts.push(() => {
      timeline();
      // plotly makes `on` in the first drawing; a change of theme draws again, and must not listen twice.
      if ($("timeline").dataset.listens) return;
      $("timeline").dataset.listens = "yes";
      // A range dragged with the mouse is where the buttons go on from.
      $("timeline").on("plotly_relayout", (change) => {
        if ("xaxis.range[0]" in change) range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
        if (change["xaxis.autorange"]) go(...line.range);
      });
    });
  }

  if (data.answers.length) {
    const matrix = () => {
      const told = data.answers[$("answers-run").value];
      const of = told.cells.map((row) => row.reduce((sum, v) => sum + v, 0));
      const places = told.classes.map((_, i) => i);
      const names = told.classes.map(plain);
      const many = places.length > 20;
      const every = Math.ceil(places.length / (narrow() ? 12 : 25));
      const ticks = { tickvals: places.filter((i) => i % every === 0), ticktext: names.filter((_, i) => i % every === 0), showgrid: false };
      const side = Math.max(300, Math.min(620, 130 + 34 * places.length));
      $("answers-chart").style.maxWidth = `${side + 150}px`;
      draw($("answers-chart"), [{
        type: "heatmap", name: plain(data.runs[told.run].label), x: places, y: places, z: told.cells.map((row, i) => row.map((v) => v / (of[i] || 1))),
        text: told.cells.map((row) => row.map((v) => (v ? String(v) : ""))), texttemplate: many || narrow() ? "" : "%{text}",
        customdata: told.cells.map((row, i) => row.map((_, j) => [names[i], names[j]])), zmin: 0, zmax: 1, xgap: 1, ygap: 1,
        colorscale: [[0, "var(--empty)"], [1, "var(--full)"]],
        colorbar: { thickness: 10, len: 0.72, outlinewidth: 0, tickformat: ".0%", tickfont: { color: "var(--soft)" } },
        hovertemplate: `${text("{label}, said to be {said}", { label: "%{customdata[0]}", said: "%{customdata[1]}" })}<br>${text("{count} examples, {share} of the class", { count: "%{text}", share: "%{z:.1%}" })}<extra></extra>`,
      }], {
        height: side, dragmode: false,
        xaxis: axis({ title: text("the model says"), ...ticks }), yaxis: axis({ title: text("class"), ...ticks, autorange: "reversed" }),
      });
    };
    $("answers-run").addEventListener("change", matrix);
    charts.push(matrix);
  }

  for (const element of document.querySelectorAll("[data-partition]")) {
    const part = data.partitions[element.dataset.partition];
    charts.push(() => {
      const many = part.clients.length > 40;
      const shown = part.clients.filter((_, at) => at % (narrow() && part.clients.length > 12 ? 5 : 1) === 0);
      const bars = {
        type: "bar", x: part.clients, y: part.counts, yaxis: part.cells ? "y2" : "y", marker: { color: "var(--soft)", line: { width: 0 } },
        customdata: part.names,
        hovertemplate: `${text("client {name}", { name: "%{customdata}" })}<br>${text("{count} examples", { count: "%{y:,}" })}<extra></extra>`,
      };
      const heat = part.cells && {
        type: "heatmap", x: part.clients, y: part.classes.map((_, i) => i), z: part.cells, customdata: part.cells.map((row, i) => row.map((_, at) => [part.names[at], part.classes[i]])),
        xgap: many ? 0 : 2, ygap: part.classes.length > 40 ? 0 : 2, zmin: 0, zmax: Math.max(1, ...part.cells.map((row) => Math.max(...row))),
        colorscale: [[0, "var(--empty)"], [1, "var(--full)"]],
        colorbar: { thickness: 10, len: 0.72, y: 0, yanchor: "bottom", outlinewidth: 0, title: { text: text("examples"), font: { size: 12 } }, tickfont: { color: "var(--soft)" } },
        hovertemplate: `${text("client {name}, class {label}", { name: "%{customdata[0]}", label: "%{customdata[1]}" })}<br>${text("{count} examples", { count: "%{z:,}" })}<extra></extra>`,
      };
      const classes = part.classes.length;
      const steps = Math.max(1, Math.ceil(classes / 20));
      const ticks = part.classes.map((_, i) => i).filter((i) => i % steps === 0);
      const height = heat ? Math.min(520, Math.max(300, 130 + 22 * classes)) : 240;
      element.style.maxWidth = `${Math.max(360, 46 * part.clients.length + 190)}px`;
      draw(element, heat ? [heat, bars] : [bars], {
        height, bargap: many ? 0 : 0.18, dragmode: false,
        xaxis: axis({ title: text("client"), showgrid: false, nticks: narrow() ? 6 : 20, ...(many ? {} : { tickvals: shown, ticktext: shown.map((client) => part.names[part.clients.indexOf(client)]) }) }),
        ...(heat
          ? {
              yaxis: axis({ title: text("class"), domain: [0, 0.72], tickvals: ticks, ticktext: ticks.map((i) => part.classes[i]), showgrid: false, autorange: "reversed" }),
              yaxis2: axis({ title: text("examples"), domain: [0.77, 1], nticks: 3, rangemode: "tozero" }),
            }
          : { yaxis: axis({ title: text("examples"), rangemode: "tozero" }) }),
      });
    });
  }

  const many = (series) => series.reduce((sum, one) => sum + one.spans.length, 0);
  const lanes = (element, { rows, series, x, range, who = text("client"), unit = text("round") }) => {
    const height = Math.min(22, Math.max(12, 760 / rows.length));
    // Bars that touch are told apart by a gap, where there is room for one.
    const line = { color: "var(--page)", width: many(series) > 25 * rows.length ? 0 : 1 };
    const steps = Math.ceil(14 / height);
    const ticks = rows.map((_, i) => i).filter((i) => i % steps === 0);
    draw(element, series.map(({ name, color, wide, spans }) => ({
      // What takes no time is a mark.
      type: "bar", orientation: "h", name, width: wide ? 1 : 0.8, marker: { color, line: spans.every((span) => span[2] === 0) ? { color, width: 2 } : line }, textposition: "none",
      y: spans.map((span) => span[0]), base: spans.map((span) => span[1]), x: spans.map((span) => span[2]),
      customdata: spans.map((span) => [rows[span[0]], span[3]]),
      hovertemplate: `<b>${who} %{customdata[0]}</b>${wide || spans[0]?.[3] === null ? "" : `, ${unit} %{customdata[1]:,}`}<br>${name}<br>${text("{length}, from {start}", { length: "%{x:.4~r} s", start: "%{base:.6~r} s" })}<extra></extra>`,
    })), {
      barmode: "overlay", height: height * rows.length + 70,
      xaxis: axis({ title: x, nticks: narrow() ? 5 : 12, ...(range ? { range } : { rangemode: "tozero" }) }),
      yaxis: axis({ title: who, tickvals: ticks, ticktext: ticks.map((i) => rows[i]), range: [rows.length - 0.5, -0.5], fixedrange: true, showgrid: false }),
    });
  };
  const xy = (element, { x, y, series, share, shares, log, diagonal, ranges = {}, whole, guess }) => {
    const value = share ? ".1%" : ".4~g";
    const traces = series.map((one) => ({
      ...(one.type === "bar" ? { type: "bar" } : { type: "scatter", mode: one.type }),
      name: one.name, x: one.x, y: one.y, text: one.said || "", textposition: "none",
      ...(one.type === "lines" ? { line: { color: one.color, dash: one.dash, width: 2 } } : {}),
      ...(one.type === "markers" ? { opacity: 0.7 } : {}),
      ...(one.type === "lines" ? {} : { marker: { color: one.color, line: { width: 0 }, ...(one.symbol ? { symbol: one.symbol, size: one.x.length > 500 ? 5 : 7 } : {}) } }),
      hovertemplate: `<b>%{fullData.name}</b>${one.said ? ", %{text}" : ""}<br>${plain(y)} %{y:${value}}<br>${plain(x)} %{x:${shares ? ".0%" : diagonal ? value : ".4~g"}}<extra></extra>`,
    }));
    const ends = diagonal ? series.flatMap((one) => [...one.x, ...one.y]) : [];
    const line = [Math.min(...ends), Math.max(...ends)];
    const equal = { type: "scatter", mode: "lines", x: line, y: line, hoverinfo: "skip", line: { color: "var(--soft)", dash: "dot", width: 1 } };
    const percent = { tickformat: ".0%" };
    // Bars stand at whole numbers: no labels between them.
    const counted = series.some((one) => (whole || one.type === "bar") && Math.max(...one.x) <= 12);
    const across = guess === undefined ? {} : { shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: guess, y1: guess, line: { color: "var(--soft)", dash: "dot", width: 1 } }] };
    draw(element, diagonal ? [...traces, equal] : traces, {
      ...across,
      height: 320, bargap: 0.18,
      xaxis: axis({ title: x, nticks: narrow() ? 5 : 9, ...(shares || (share && diagonal) ? percent : {}), ...(shares ? { range: [0, 1.03] } : {}), ...(counted ? { dtick: 1 } : {}), ...(ranges.x ? { range: ranges.x } : {}) }),
      yaxis: axis({ title: y, ...(log ? { type: "log", dtick: 1 } : {}), ...(share ? percent : {}), ...(ranges.y ? { range: ranges.y } : {}) }),
    });
  };
  for (const element of document.querySelectorAll("[data-figure]")) {
    const figure = data.figures[element.dataset.figure];
    charts.push(() => ({ lanes, xy })[figure.kind](element, figure));
  }

  const drawAll = () => drawEach(charts, printing);
  // On paper always in light colours.
  onTheme(drawAll, (on) => {
    printing = on;
    root.style.colorScheme = on ? "light" : "";
    drawAll();
  });

  // Sorting: what has no value stays below.
  const heads = [...document.querySelectorAll("#table thead th")];
  heads.forEach((head, place) => {
    head.firstChild.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => {
        const cell = row.children[place];
        if (place === 0) return cell.textContent;
        const raw = cell.dataset.value;
        return raw === undefined || cell.classList.contains("text") ? raw : Number(raw);
      };
      const rows = [...document.querySelectorAll("#table tbody:first-of-type tr")];
      rows.sort((one, other) => {
        const [a, b] = [value(one), value(other)];
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        return (typeof a === "number" ? a - b : a.localeCompare(b)) * (up ? 1 : -1);
      });
      // A page that is shown live keeps this order.
      rows.forEach((row) => { row.parentNode.dataset.sorted = "yes"; row.parentNode.append(row); });
    });
  });

  drawAll();
})();
