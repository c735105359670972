// What a reader does with what is drawn: smooth, join seeds, narrow to some runs or clients, and save as a file.
// Nothing here asks a network: a file is made in the page, and handed over as a download.
"use strict";
const tools = (() => {
  const { body, $, data, text: translated } = common;

  // Exponential moving average, in which the first values weigh as much as they would without a beginning.
  const smooth = (values, weight) => {
    let sum = 0;
    let share = 0;
    return values.map((value) => {
      if (value === null || !weight) return value;
      sum = weight * sum + (1 - weight) * value;
      share = weight * share + (1 - weight);
      return sum / share;
    });
  };

  // The value of a curve at x, linear between its points; null outside of them.
  const at = (points, x) => {
    let low = 0;
    let high = points.length - 1;
    if (high < 0 || x < points[0][0] || x > points[high][0]) return null;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] <= x) low = middle; else high = middle;
    }
    const [[x0, y0], [x1, y1]] = [points[low], points[high]];
    return x1 === x0 || x === x0 ? y0 : y0 + ((y1 - y0) * (x - x0)) / (x1 - x0);
  };

  // One line of several runs: the mean at the points of the first one, and a standard deviation each way.
  const joined = (lines, label) => {
    const points = lines.map((line) => line.x.map((x, i) => [x, line.y[i]]).filter(([x, y]) => x !== null && y !== null));
    const told = points[0].map(([x]) => [x, points.map((one) => at(one, x))]).filter(([, values]) => !values.includes(null));
    const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;
    const spread = (values) => Math.sqrt(values.reduce((sum, v) => sum + (v - mean(values)) ** 2, 0) / Math.max(values.length - 1, 1));
    return {
      run: lines[0].run, label: translated("{label}, mean of {count}", { label, count: lines.length }), x: told.map(([x]) => x), y: told.map(([, values]) => mean(values)),
      low: told.map(([, values]) => mean(values) - spread(values)), high: told.map(([, values]) => mean(values) + spread(values)),
    };
  };
  const overSeeds = (lines) => {
    const rest = new Set(lines);
    const means = [];
    for (const group of data.groups) {
      const members = lines.filter((line) => group.runs.includes(line.run));
      if (members.length < 2) continue;
      members.forEach((line) => rest.delete(line));
      means.push(joined(members, group.label));
    }
    return [...means, ...rest];
  };

  // Narrowed to the runs whose name has a text in it.
  const named = new Set(data.runs.keys());
  const onNames = [];
  const filter = $("run-filter");
  const narrow = () => {
    const text = filter.value.trim().toLowerCase();
    named.clear();
    data.runs.forEach((run, place) => { if (run.label.toLowerCase().includes(text)) named.add(place); });
    for (const swatch of document.querySelectorAll(".swatch")) {
      const place = swatch.closest("tr, .legend button, .bars, .pipeline, details.run");
      if (place) place.hidden = !named.has(Number(swatch.dataset.run));
    }
    onNames.forEach((then) => then());
  };
  if (filter) filter.addEventListener("input", narrow);

  // Long lists of clients are narrowed each by a field of its own.
  for (const list of new Set([...document.querySelectorAll("[data-client]")].map((row) => row.parentNode))) {
    if (list.children.length < 8) continue;
    const field = document.createElement("input");
    field.type = "search";
    field.dataset.added = "";
    field.placeholder = translated("part of a client’s name");
    field.setAttribute("aria-label", translated("Show clients whose name has this in it"));
    field.addEventListener("input", () => {
      const text = field.value.trim().toLowerCase();
      for (const row of list.children) row.hidden = !row.dataset.client.toLowerCase().includes(text);
    });
    (list.closest(".scroll") || list).before(field);
  }

  // Files.
  const handOver = (address, name) => {
    const link = document.createElement("a");
    link.setAttribute("href", address);
    link.download = name;
    link.click();
  };
  const title = (element) => (element.getAttribute("aria-label") || element.getAttribute("aria-labelledby") || "dure").toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-");
  // A text that a spreadsheet would take for a formula is marked as text.
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    const safe = /^[=+\-@\t\r]/.test(text) && !Number.isFinite(Number(text)) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
  };
  const csv = (rows, name) => {
    const text = rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
    handOver(`data:text/csv;charset=utf-8,${encodeURIComponent(text)}`, `${name}.csv`);
  };
  const said = (element) => {
    if (element.dataset.value !== undefined) return element.dataset.value;
    const twin = element.cloneNode(true);
    twin.querySelectorAll("small, .unseen, svg").forEach((one) => one.remove());
    return twin.textContent.trim();
  };
  const tableRows = (table) => [...table.rows].filter((row) => !row.hidden).map((row) => [...row.cells].map(said));
  // What is drawn, as plotly has it: a line for each point, or of a table of numbers for each cell.
  const chartRows = (chart) => {
    const rows = [["name", "x", "y", "value"]];
    for (const one of chart.data.filter((trace) => !trace.skip)) {
      const text = (value) => (typeof value === "string" ? value.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&") : value);
      if (one.z) one.z.forEach((line, i) => line.forEach((value, j) => rows.push([text(one.name), one.x[j], one.y[i], value])));
      else [...one.x].forEach((x, i) => rows.push([text(one.name), one.base ? one.base[i] : x, one.y[i], one.base ? x : ""]));
    }
    return rows;
  };
  const picture = async (chart, format) => {
    const back = getComputedStyle(body).backgroundColor;
    const layout = { ...chart.layout, paper_bgcolor: back, plot_bgcolor: back };
    const size = { width: chart.clientWidth, height: chart.clientHeight };
    handOver(await Plotly.toImage({ data: chart.data, layout }, { format, scale: 2, ...size }), `${title(chart)}.${format}`);
  };
  const saves = (entries) => {
    const row = document.createElement("div");
    row.className = "save";
    row.dataset.added = "";
    row.append(`${translated("save")} `);
    for (const [name, then] of entries) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.addEventListener("click", then);
      row.append(button);
    }
    return row;
  };
  for (const chart of document.querySelectorAll(".chart"))
    chart.after(saves([
      ["SVG", () => picture(chart, "svg")], ["PNG", () => picture(chart, "png")],
      ["CSV", () => csv(chartRows(chart), title(chart))],
    ]));
  for (const scroll of document.querySelectorAll(".scroll"))
    if (scroll.querySelector("table")) scroll.after(saves([["CSV", () => csv(tableRows(scroll.querySelector("table")), title(scroll))]]));

  return { smooth, overSeeds, named, onNames };
})();
