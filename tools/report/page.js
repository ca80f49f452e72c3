"use strict";
// Draws the report from the JSON in the page. Numbers are shown as they are there, converted only in
// unit: bytes to MiB.
(() => {
  const MIB = 2 ** 20;
  const CATEGORIES = [
    ["parameters", "#2563a8"], ["gradients", "#d97a1e"], ["optimizer", "#3d9463"], ["unsharded", "#7bb0e3"],
    ["activations", "#a86bb5"], ["buckets", "#c9a227"], ["data", "#8a97a5"], ["other", "#c5cdd6"],
  ];
  const COLORS = { none: "#8a97a5", manual: "#c9a227", ddp: "#d97a1e", zero1: "#a86bb5", zero2: "#3d9463", fsdp: "#2563a8" };
  const CONFIG = { displayModeBar: false, responsive: true };
  const FONT = { family: 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif', size: 12.5, color: "#1c2733" };

  const byId = (id) => document.getElementById(id);
  const mib = (bytes) => bytes / MIB;
  const digits = (value) => {  // three significant ones
    if (value === 0) return "0";
    const places = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
    return value.toFixed(Math.min(places, 6));
  };
  const GAP = { ticks: "outside", ticklen: 5, tickcolor: "rgba(0,0,0,0)" };  // between numbers and their axis
  const count = (value) => value.toLocaleString("en-US");

  function element(parent, tag, text, attributes = {}) {
    const made = parent.appendChild(document.createElement(tag));
    made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  function plot(id, traces, layout) {
    return Plotly.newPlot(id, traces, {
      font: FONT, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 70, r: 20, t: 10, b: 45 },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal", itemwidth: 30 },
      hoverlabel: { font: FONT }, ...layout,
    }, CONFIG);
  }

  function describeJob(report) {
    byId("job").textContent = `${report.model}, ${count(report.parameters)} parameters (${report.dtype}), ` +
      `a batch of ${report.batch} on each of ${report.ranks} ranks, ${report.steps} steps, seed ${report.seed}`;
  }

  // The headline comparisons, where both sides were measured.
  function showFindings(report, find) {
    const show = (figure, text) => {
      const box = element(byId("findings"), "div", "", { class: "finding" });
      element(box, "b", figure);
      element(box, "span", text);
    };
    const ddp = find("ddp"), manual = find("manual"), fsdp = find("fsdp");
    if (ddp && fsdp && fsdp.ranks > 1) {
      show(`${digits(ddp.kept_bytes / fsdp.kept_bytes)}× less`, `kept between steps by fsdp than by ddp: ` +
        `${digits(mib(fsdp.kept_bytes))} against ${digits(mib(ddp.kept_bytes))} MiB a rank`);
      show(`${digits(fsdp.sent_bytes_per_step / ddp.sent_bytes_per_step)}× the bytes`, `sent by fsdp for that: ` +
        `${digits(mib(fsdp.sent_bytes_per_step))} against ${digits(mib(ddp.sent_bytes_per_step))} MiB a step`);
    }
    const talking = [ddp, fsdp].filter((s) => s && s.communication_ms > 0);
    if (talking.length) {
      show(talking.map((s) => `${Math.round(100 * s.split_ms.hidden / s.communication_ms)} %`).join(" / "),
        `of the communication of ${talking.map((s) => s.strategy).join(" / ")} is hidden behind computing`);
    }
    if (ddp && manual && manual.ranks > 1) {
      const saved = Math.round(100 * (1 - ddp.step_ms / manual.step_ms));
      const alike = Math.abs(saved) <= 5;  // as much as two runs differ
      show(alike ? "about as long" : `${Math.abs(saved)} % ${saved > 0 ? "less" : "more"} time`, "for a step of ddp " +
        `${alike ? "as" : "than"} with an all-reduce by hand: ${digits(ddp.step_ms)} against ${digits(manual.step_ms)} ms`);
    }
    if (report.strategies.length > 1) {
      show(`≤ ${report.loss_difference.toExponential(1)}`, "the largest relative difference between the strategies' losses at any step");
    }
  }

  function drawTime(strategies) {
    const names = strategies.map((s) => s.strategy);
    const known = strategies.every((s) => s.communication_ms !== null);
    const parts = [["compute", known ? "computing alone" : "computing", "#2563a8"], ["hidden", "computing, communication hidden", "#7bb0e3"],
      ["exposed", "waiting: communication exposed", "#d9534f"]];
    const traces = parts.map(([key, name, color]) => ({
      type: "bar", orientation: "h", name, y: names, x: strategies.map((s) => s.split_ms[key]), marker: { color },
      hovertemplate: `%{y}: %{x:.3~f} ms ${name}<extra></extra>`,
    }));
    // Beside it communication alone, on a scale of its own: it may be a small part of a step.
    for (const part of traces.slice(1)) traces.push({ ...part, xaxis: "x2", yaxis: "y2", showlegend: false });
    const label = (s, x, text, axes) => ({ x, y: s.strategy, xanchor: "left", showarrow: false, xshift: 6, text, ...axes });
    return plot("time", traces, {
      barmode: "stack", height: 120 + 46 * names.length, bargap: 0.38,
      xaxis: { title: { text: "ms a step" }, rangemode: "tozero", domain: [0, 0.52] },
      xaxis2: { title: { text: "ms of communication a step" }, rangemode: "tozero", domain: [0.7, 0.94] },
      yaxis: { autorange: "reversed", automargin: true, ...GAP }, yaxis2: { autorange: "reversed", anchor: "x2", showticklabels: false },
      annotations: [
        ...strategies.map((s) => label(s, s.split_ms.compute + s.split_ms.hidden + s.split_ms.exposed,
          `${digits(s.step_ms)} ms, ${digits(s.samples_per_s)} samples/s`)),
        ...strategies.map((s) => label(s, s.split_ms.hidden + s.split_ms.exposed,
          s.communication_ms === null ? `${digits(s.split_ms.exposed)} ms exposed` :
            s.communication_ms > 0 ? `${digits(s.communication_ms)} ms` : "none", { xref: "x2", yref: "y2" })),
      ],
    });
  }

  function drawMemory(strategies) {
    const shown = strategies.filter((s) => s.timeline.time_ms.length > 0);
    const columns = Math.min(shown.length, 2), rows = Math.ceil(shown.length / columns);
    const top = 1.06 * mib(Math.max(...shown.flatMap((s) =>
      s.timeline.time_ms.map((_, i) => CATEGORIES.reduce((sum, [key]) => sum + s.timeline.bytes[key][i], 0)))));
    const categories = CATEGORIES.filter(([key]) => shown.some((s) => Math.max(...s.timeline.bytes[key]) > 0.002 * top * MIB));
    const traces = [], layout = { shapes: [], annotations: [], height: 60 + 300 * rows };
    layout.grid = { rows, columns, pattern: "independent", xgap: 0.16, ygap: 0.32 };
    shown.forEach((s, index) => {
      const axis = index === 0 ? "" : String(index + 1);
      layout[`xaxis${axis}`] = { title: { text: "ms", standoff: 4 }, rangemode: "tozero" };
      layout[`yaxis${axis}`] = { title: { text: "MiB" }, range: [0, top], ...GAP };
      for (const [key, color] of categories) {
        traces.push({
          type: "scatter", mode: "lines", line: { width: 0, shape: "hv" }, fillcolor: color, stackgroup: s.strategy, name: key,
          legendgroup: key, showlegend: index === 0, x: s.timeline.time_ms, y: s.timeline.bytes[key].map(mib),
          xaxis: `x${axis}`, yaxis: `y${axis}`, hovertemplate: `${key} %{y:.3~f}<extra>${s.strategy}</extra>`,
        });
      }
      for (const [phase, [from, to]] of Object.entries(s.timeline.phases_ms)) {
        layout.shapes.push({ type: "line", x0: to, x1: to, y0: 0, y1: 1, xref: `x${axis}`, yref: `y${axis} domain`,
          line: { color: "#5b6b7b", width: 1, dash: "dot" } });
        if (to - from < 0.08 * s.step_ms) continue;  // no room for its name
        layout.annotations.push({ x: (from + to) / 2, y: 1, xref: `x${axis}`, yref: `y${axis} domain`, yanchor: "top",
          showarrow: false, text: phase, font: { size: 11, color: "#5b6b7b" } });
      }
      layout.annotations.push({ x: 0, y: 1.01, xref: `x${axis} domain`, yref: `y${axis} domain`, xanchor: "left", yanchor: "bottom",
        showarrow: false, text: `<b>${s.strategy}</b>, peak ${digits(mib(s.total_peak_bytes))} MiB` });
    });
    layout.legend = { orientation: "h", y: 1.08, yanchor: "bottom", x: 0, traceorder: "normal" };
    layout.margin = { l: 70, r: 20, t: 60, b: 45 };
    return plot("memory", traces, layout);
  }

  const diamonds = (strategies, values, name) => ({
    type: "scatter", mode: "markers", cliponaxis: false, name, x: strategies.map((s) => s.strategy), y: values,
    marker: { symbol: "diamond", size: 11, color: "#fff", line: { color: "#1c2733", width: 2 } },
    hovertemplate: `%{x}: formula %{y:.4~f} MiB<extra></extra>`,
  });

  function drawPeak(strategies) {
    const names = strategies.map((s) => s.strategy);
    const categories = CATEGORIES.filter(([key]) => strategies.some((s) => s.peak_make_up_bytes[key] > 0.002 * s.total_peak_bytes));
    const traces = categories.map(([key, color]) => ({
      type: "bar", name: key, x: names, y: strategies.map((s) => mib(s.peak_make_up_bytes[key])), marker: { color },
      hovertemplate: `%{x}: %{y:.4~f} MiB ${key}<extra></extra>`,
    }));
    traces.push(diamonds(strategies, strategies.map((s) => mib(s.formula_bytes.kept)), "formula, kept"));
    return plot("peak", traces, { barmode: "stack", height: 380, yaxis: { title: { text: "MiB" }, ...GAP }, bargap: 0.35 });
  }

  function drawBytes(strategies) {
    const bars = {
      type: "bar", name: "measured", x: strategies.map((s) => s.strategy), y: strategies.map((s) => mib(s.sent_bytes_per_step)),
      marker: { color: strategies.map((s) => COLORS[s.strategy]) }, showlegend: false,
      text: strategies.map((s) => (s.sent_bytes_per_step > 0 ? `in ${count(s.collectives_per_step)}` : "")), textposition: "inside",
      insidetextanchor: "middle", textangle: 0, insidetextfont: { color: "#fff", size: 14 },
      hovertemplate: "%{x}: %{y:.4~f} MiB<extra></extra>",
    };
    const formulas = diamonds(strategies, strategies.map((s) => mib(s.formula_bytes.sent_per_step)), "formula");
    return plot("bytes", [bars, formulas], { height: 380, yaxis: { title: { text: "MiB" }, rangemode: "tozero", ...GAP }, bargap: 0.35 });
  }

  function drawLoss(report, strategies) {
    byId("loss-note").textContent = "Over the global batch of each step. A strategy changes how a model is trained, never what " +
      `comes out: the curves lie on each other, at most a relative ${report.loss_difference.toExponential(1)} apart.`;
    const traces = strategies.map((s, index) => ({
      type: "scatter", mode: "lines+markers", name: s.strategy, x: s.losses.map((_, i) => i + 1), y: s.losses,
      line: { color: COLORS[s.strategy], width: 2 + 2 * (strategies.length - 1 - index) }, marker: { size: 5 + 2 * (strategies.length - 1 - index) },
      hovertemplate: "step %{x}: %{y:.6f}<extra>" + s.strategy + "</extra>",
    }));
    return plot("loss", traces, { height: 330, xaxis: { title: { text: "step" } }, yaxis: { title: { text: "loss" }, ...GAP } });
  }

  function fillTable(report, strategies) {
    byId("formula-note").textContent = `Ψ = ${count(report.parameters)} parameters, of which Ψ_root = ` +
      `${count(report.root_parameters)} in no Unit; e = ${report.dtype === "f64" ? 8 : 4} bytes; N ranks. eΨ parameters, eΨ gradients, ` +
      "2eΨ optimizer state of AdamW, 4eΨ kept, 2(N−1)/N eΨ sent. What a strategy shards is 1/N of that; fsdp sends " +
      "(N−1)/N e(3Ψ − Ψ_root), and has two Units' and the root's own gradients besides during backward. Padding comes on top. MiB, measured / formula.";
    const table = byId("table");
    const columns = [["parameters", (s) => s.peak_bytes.parameters, (s) => s.formula_bytes.parameters],
      ["gradients, peak", (s) => s.peak_bytes.gradients, (s) => s.formula_bytes.gradients],
      ["optimizer", (s) => s.peak_bytes.optimizer, (s) => s.formula_bytes.optimizer],
      ["kept", (s) => s.kept_bytes, (s) => s.formula_bytes.kept],
      ["sent a step", (s) => s.sent_bytes_per_step, (s) => s.formula_bytes.sent_per_step]];
    const head = element(element(table, "thead", ""), "tr", "");
    element(head, "th", "strategy");
    for (const [name] of columns) element(head, "th", name, { colspan: 2 });
    for (const name of ["peak", "ms a step", "samples/s", "last loss"]) element(head, "th", name);
    const body = element(table, "tbody", "");
    for (const s of strategies) {
      const row = element(body, "tr", "", { "data-strategy": s.strategy });
      element(row, "td", s.strategy);
      for (const [name, measured, formula] of columns) {
        const bound = name.startsWith("gradients") && (s.strategy === "fsdp" || s.strategy === "zero2") ? "≤ " : "";
        element(row, "td", digits(mib(measured(s))), { "data-value": measured(s) });
        element(row, "td", bound + digits(mib(formula(s))), { class: "formula", "data-value": formula(s) });
      }
      element(row, "td", digits(mib(s.total_peak_bytes)), { "data-value": s.total_peak_bytes });
      element(row, "td", digits(s.step_ms), { "data-value": s.step_ms });
      element(row, "td", digits(s.samples_per_s), { "data-value": s.samples_per_s });
      element(row, "td", s.losses[s.losses.length - 1].toFixed(6), { "data-value": s.losses[s.losses.length - 1] });
    }
  }

  function listTraces(strategies) {
    for (const s of strategies) for (const trace of s.timeline_files) element(byId("traces"), "code", trace);
  }

  async function draw() {
    const report = JSON.parse(byId("data").textContent);
    const strategies = report.strategies;
    describeJob(report);
    showFindings(report, (name) => strategies.find((s) => s.strategy === name));
    fillTable(report, strategies);
    listTraces(strategies);
    await Promise.all([drawTime(strategies), drawMemory(strategies), drawPeak(strategies), drawBytes(strategies),
      drawLoss(report, strategies)]);
    document.documentElement.dataset.state = "ready";
  }

  draw().catch((error) => {
    document.documentElement.dataset.state = "failed";
    byId("failure").hidden = false;
    byId("failure").textContent = `The report could not be drawn: ${error}`;
    console.error(error);
  });
})();
