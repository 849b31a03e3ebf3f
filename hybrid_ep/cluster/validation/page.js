// Draws what would be too large as HTML: the matrix of nodes and checks (only the rows in view), and the heat map.
// The data is the JSON of page.py; text reaches the page as textContent only, never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const LETTER = { p: "pass", f: "fail", w: "warn", u: "unknown", n: "does not apply", "-": "not examined" };
  const WRONG = "fuw";
  const MANY = 100; // from here on, nodes without a problem are hidden at first
  const ROW = 26; // px, as in page.css
  const MOST_PRINTED = 200;

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  // ---- detail: what a cell, or all of a node's problems, mean ----

  const detail = byId("detail");
  let opener = null;

  function badge(letter) {
    return element("span", { class: `badge ${LETTER[letter]}` }, LETTER[letter]);
  }

  function facts(node, column) {
    const [expected, source, remedy] = data.wants[data.shapes[node.shape][column]].map((index) => data.texts[index]);
    const rows = [["seen", data.texts[node.seen[column]]], ["expected", expected], ["read from", source], ["remedy", remedy]];
    const list = element("dl");
    for (const [name, text] of rows) {
      if (text) list.append(element("dt", {}, name), element("dd", { class: name }, text));
    }
    return list;
  }

  function place(node) {
    const parts = [`platform ${node.platform}`];
    if (node.domain) parts.push(`domain ${node.domain}`);
    return parts.join(", ");
  }

  function open(from, title, ...children) {
    document.querySelectorAll(".cell.open").forEach((cell) => cell.classList.remove("open"));
    opener = from;
    const close = element("button", { class: "close", "aria-label": "close", type: "button" }, "×");
    close.addEventListener("click", shut);
    detail.replaceChildren(close, element("h3", { id: "detail-title" }, title), ...children);
    detail.hidden = false;
    close.focus({ preventScroll: true });
  }

  function shut() {
    if (detail.hidden) return;
    detail.hidden = true;
    document.querySelectorAll(".cell.open").forEach((cell) => cell.classList.remove("open"));
    if (opener && opener.isConnected) opener.focus({ preventScroll: true });
  }

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") shut();
  });

  function openCell(cell, node, column) {
    const letter = node.status[column];
    const check = data.checks[column];
    const body = "n-".includes(letter)
      ? [element("p", {}, letter === "n" ? "The node's profile does not ask for it." : "The node's report does not have it.")]
      : [facts(node, column)];
    open(cell, `${node.name}: ${check.id}`, element("p", {}, badge(letter), ` ${check.title}`), element("p", {}, place(node)), ...body);
    cell.classList.add("open");
  }

  function openNode(cell, node) {
    const wrong = [...node.status].map((letter, column) => [letter, column]).filter(([letter]) => WRONG.includes(letter));
    wrong.sort((a, b) => WRONG.indexOf(a[0]) - WRONG.indexOf(b[0]));
    const problems = wrong.map(([letter, column]) =>
      element("div", { class: "problem" }, badge(letter), ` ${data.checks[column].id}: ${data.checks[column].title}`, facts(node, column)));
    const said = node.fit ? "Fit for test jobs." : "Not fit: it takes no part in test jobs.";
    const rest = wrong.length ? `${wrong.length} of its checks did not pass.` : "Every check passed.";
    open(cell, node.name, element("p", {}, `${said} ${rest}`), element("p", {}, place(node)), ...problems);
  }

  // ---- matrix ----

  const table = byId("matrix");
  const scroll = byId("matrix-scroll");
  const body = element("tbody");
  let rows = data.nodes; // nodes that the filter lets through
  let columns = []; // columns of the chosen group
  let current = [0, -1]; // row and column (−1: the node's name) that the keyboard is at
  let drawn = [-1, -1];

  function head() {
    const line = element("tr", {}, element("th", { scope: "col" }, "node"));
    for (const column of columns) {
      const check = data.checks[column];
      const label = element("th", { scope: "col", title: check.title }, element("span", {}, check.id));
      if (starts(column)) label.className = "first";
      line.append(label);
    }
    table.replaceChildren(element("thead", {}, line), body);
    table.setAttribute("aria-colcount", columns.length + 1);
  }

  function starts(column) {
    const at = columns.indexOf(column);
    return at === 0 || data.checks[columns[at - 1]].group !== data.checks[column].group;
  }

  function rowOf(node, index, firsts) {
    const line = element("tr", { "aria-rowindex": index + 2 });
    const name = element("th", { scope: "row", tabindex: -1, title: node.name }, node.name);
    if (!node.fit) name.className = "unfit";
    name.dataset.row = index;
    name.dataset.column = -1;
    line.append(name);
    columns.forEach((column, at) => {
      const letter = node.status[column];
      const cell = element("td", { class: `cell ${letter === "-" ? "" : letter}${firsts[at] ? " first" : ""}`, tabindex: -1,
        "aria-label": `${node.name} ${data.checks[column].id}: ${LETTER[letter]}` });
      cell.dataset.row = index;
      cell.dataset.column = at;
      line.append(cell);
    });
    return line;
  }

  function spacer(count) {
    const filler = element("td", { colspan: columns.length + 1 });
    filler.style.height = `${count * ROW}px`;
    return element("tr", { "aria-hidden": "true" }, filler);
  }

  // Only rows in view are in the document; two spacers keep the scroll bar honest.
  function draw(force = false, all = false) {
    const from = all ? 0 : Math.max(0, Math.floor(scroll.scrollTop / ROW) - 15);
    const to = all ? Math.min(rows.length, MOST_PRINTED) : Math.min(rows.length, from + Math.ceil(scroll.clientHeight / ROW) + 30);
    if (!force && drawn[0] === from && drawn[1] === to) return;
    const focused = body.contains(document.activeElement);
    drawn = [from, to];
    const firsts = columns.map(starts);
    const lines = [];
    if (from > 0) lines.push(spacer(from));
    for (let index = from; index < to; index += 1) lines.push(rowOf(rows[index], index, firsts));
    if (to < rows.length && !all) lines.push(spacer(rows.length - to));
    body.replaceChildren(...lines);
    mark(focused);
  }

  function cellAt(row, column) {
    return body.querySelector(`[data-row="${row}"][data-column="${column}"]`);
  }

  function mark(focus) {
    body.querySelectorAll('[tabindex="0"]').forEach((cell) => cell.setAttribute("tabindex", -1));
    const cell = cellAt(...current) || body.querySelector("th");
    if (!cell) return;
    cell.setAttribute("tabindex", 0);
    if (focus) cell.focus({ preventScroll: true });
  }

  function move(down, right) {
    const row = Math.min(rows.length - 1, Math.max(0, current[0] + down));
    const column = Math.min(columns.length - 1, Math.max(-1, current[1] + right));
    current = [row, column];
    const top = row * ROW;
    const room = scroll.clientHeight - table.tHead.offsetHeight - 2 * ROW;
    if (top < scroll.scrollTop) scroll.scrollTop = top;
    else if (top > scroll.scrollTop + room) scroll.scrollTop = top - room;
    draw();
    mark(true);
    const cell = cellAt(row, column);
    if (cell) cell.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  function activate(cell) {
    current = [Number(cell.dataset.row), Number(cell.dataset.column)];
    mark(false);
    const node = rows[current[0]];
    if (current[1] < 0) openNode(cell, node);
    else openCell(cell, node, columns[current[1]]);
  }

  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-15, 0], PageDown: [15, 0] };
  body.addEventListener("keydown", (event) => {
    const cell = event.target.closest("[data-row]");
    if (!cell) return;
    if (event.key === "Enter" || event.key === " ") activate(cell);
    else if (STEPS[event.key]) move(...STEPS[event.key]);
    else return;
    event.preventDefault();
  });
  body.addEventListener("click", (event) => {
    const cell = event.target.closest("[data-row]");
    if (cell) activate(cell);
  });
  scroll.addEventListener("scroll", () => draw());
  window.addEventListener("resize", () => draw());
  window.addEventListener("beforeprint", () => draw(true, true));
  window.addEventListener("afterprint", () => draw(true));

  // ---- filter ----

  function matches(node, words) {
    if (!words) return true;
    const said = [node.name, node.platform, node.domain];
    for (const column of columns) {
      if (WRONG.includes(node.status[column])) said.push(data.checks[column].id, data.texts[node.seen[column]]);
    }
    return said.join("\n").toLowerCase().includes(words);
  }

  function filter() {
    const group = byId("group").value;
    const words = byId("text").value.trim().toLowerCase();
    const onlyProblems = byId("only-problems").checked;
    columns = data.checks.map((_, column) => column).filter((column) => !group || data.checks[column].group === group);
    const hasProblem = (node) => columns.some((column) => WRONG.includes(node.status[column]));
    rows = data.nodes.filter((node) => (!onlyProblems || hasProblem(node)) && matches(node, words));
    byId("shown").textContent = `${rows.length} of ${data.nodes.length} nodes`;
    current = [0, -1];
    scroll.scrollTop = 0;
    table.setAttribute("aria-rowcount", rows.length + 1);
    head();
    draw(true);
  }

  function legend() {
    const counts = {};
    for (const node of data.nodes) for (const letter of node.status) counts[letter] = (counts[letter] || 0) + 1;
    for (const letter of "pfwu") {
      if (counts[letter]) byId("legend").append(element("span", {}, badge(letter), ` ${counts[letter].toLocaleString("en")}`));
    }
    if (counts.n) byId("legend").append(element("span", {}, "· does not apply to the platform"));
  }

  function startMatrix() {
    for (const group of new Set(data.checks.map((check) => check.group))) {
      byId("group").append(element("option", { value: group }, group));
    }
    const wrong = data.nodes.some((node) => [...node.status].some((letter) => WRONG.includes(letter)));
    byId("only-problems").checked = wrong && data.nodes.length > MANY;
    byId("filter").addEventListener("input", filter);
    byId("filter").addEventListener("submit", (event) => event.preventDefault());
    byId("matrix-tool").hidden = false;
    legend();
    filter();
  }

  // ---- heat map: host × host, or blocks of hosts where they are many ----

  const WIDTH = 640; // px at most
  const FEWEST_BLOCKS = 48; // to a side
  const MOST_NAMED = 16; // hosts whose figures fit into the picture
  const TICK = 80; // px from one name along an axis to the next, where there are more hosts
  let heat = null;

  function cells(pairs) {
    const involved = [...new Set([...pairs.a, ...pairs.b])].sort((x, y) => x - y);
    const rank = new Map(involved.map((host, index) => [host, index]));
    // A round is one diagonal, and few rounds leave gaps between them; a block is wide enough to meet one.
    const gap = (involved.length * involved.length) / pairs.v.length / 2;
    const block = involved.length <= FEWEST_BLOCKS ? 1 : Math.ceil(Math.min(gap / 2, involved.length / FEWEST_BLOCKS));
    const size = Math.ceil(involved.length / block);
    const slowest = new Map();
    pairs.v.forEach((value, index) => {
      const x = Math.floor(rank.get(pairs.a[index]) / block);
      const y = Math.floor(rank.get(pairs.b[index]) / block);
      for (const key of [x * size + y, y * size + x]) {
        if (!slowest.has(key) || value < pairs.v[slowest.get(key)]) slowest.set(key, index);
      }
    });
    return { pairs, involved, block, size, slowest };
  }

  // From half the median (orange, dark) to the median (pale blue): legible for every kind of colour vision.
  const LOW = [178, 58, 0], MIDDLE = [243, 178, 90], HIGH = [150, 200, 232];
  function colour(share) {
    const t = Math.min(1, Math.max(0, (share - 0.5) / 0.5));
    const [from, to, at] = t < 0.6 ? [LOW, MIDDLE, t / 0.6] : [MIDDLE, HIGH, (t - 0.6) / 0.4];
    return `rgb(${from.map((value, index) => Math.round(value + (to[index] - value) * at)).join(",")})`;
  }

  function share(index, pairs) {
    return pairs.median ? pairs.v[index] / pairs.median : 0;
  }

  function said(index, pairs) {
    const names = [pairs.a[index], pairs.b[index]].map((host) => data.nodes[host].name).join(" – ");
    return `${names}: ${pairs.v[index]} ${pairs.unit}, ${Math.round(100 * share(index, pairs))} % of the median`;
  }

  function drawHeat() {
    heat = cells(data.pairs[byId("metric").selectedIndex]);
    const { pairs, involved, block, size, slowest } = heat;
    const named = involved.length <= MOST_NAMED;
    const style = getComputedStyle(document.documentElement);
    const canvas = byId("heat");
    const paint = canvas.getContext("2d");
    const font = "13px system-ui, sans-serif";
    paint.font = font;
    const nameOf = (index) => data.nodes[involved[Math.min(index * block, involved.length - 1)]].name;
    const most = Math.min(WIDTH, canvas.parentElement.clientWidth); // a picture that is shrunk has names too small to read
    const every = named ? 1 : Math.ceil(size / Math.floor(most / TICK)); // cells from one label to the next
    const ticks = Array.from({ length: Math.ceil(size / every) }, (_, tick) => tick * every);
    const margin = Math.min(150, 14 + Math.max(...ticks.map((index) => paint.measureText(nameOf(index)).width)));
    const room = Math.floor((most - margin) / size);
    const step = named ? Math.max(38, Math.min(72, room)) : Math.max(1, room);
    const sharp = Math.max(1, window.devicePixelRatio || 1);
    const width = margin + step * size, height = step * size + 26;
    canvas.width = width * sharp;
    canvas.height = height * sharp;
    canvas.style.width = `${width}px`;
    canvas.style.aspectRatio = `${width} / ${height}`;
    paint.scale(sharp, sharp);
    paint.fillStyle = style.getPropertyValue("--panel");
    paint.fillRect(margin, 0, step * size, step * size);
    const gap = step > 6 ? 1 : 0;
    for (const [key, index] of slowest) {
      paint.fillStyle = colour(share(index, pairs));
      paint.fillRect(margin + (key % size) * step, Math.floor(key / size) * step, step - gap, step - gap);
      if (named) {
        paint.fillStyle = share(index, pairs) < 0.65 ? "#fff" : "#1b2430";
        paint.font = font;
        paint.textAlign = "center";
        paint.textBaseline = "middle";
        paint.fillText(Number(pairs.v[index].toPrecision(3)), margin + (key % size) * step + step / 2, Math.floor(key / size) * step + step / 2);
      }
    }
    paint.fillStyle = style.getPropertyValue("--ink");
    paint.font = font;
    paint.textBaseline = "middle";
    for (const index of ticks) {
      const middle = index * step + step / 2;
      paint.textAlign = "right";
      paint.fillText(nameOf(index), margin - 8, Math.max(8, middle), margin - 10);
      paint.textAlign = "center";
      paint.fillText(nameOf(index), margin + middle, size * step + 14, every * step - 4);
      if (named) continue;
      paint.fillRect(margin - 5, middle, 4, 1);
      paint.fillRect(margin + middle, size * step + 1, 1, 4);
    }
    Object.assign(heat, { margin, step, width });
    const untested = "Empty: not tested.";
    byId("heat-note").textContent = block === 1
      ? `${involved.length} × ${involved.length} hosts. ${untested}`
      : `${involved.length} × ${involved.length} hosts; each cell is the slowest tested pair of ${block} × ${block} hosts. ${untested}`;
    const ramp = element("span", { class: "ramp" });
    ramp.style.background = `linear-gradient(to right, ${[0.5, 0.8, 1].map(colour).join(",")})`;
    byId("heat-scale").replaceChildren("half of the median or less", ramp, `median, ${Number(pairs.median.toPrecision(4))} ${pairs.unit}`);
    byId("heat-seen").textContent = `Slowest: ${said(0, pairs)}.`;
  }

  function pointed(event) {
    const canvas = byId("heat");
    const box = canvas.getBoundingClientRect();
    const scale = heat.width / box.width;
    const x = Math.floor(((event.clientX - box.left) * scale - heat.margin) / heat.step);
    const y = Math.floor(((event.clientY - box.top) * scale) / heat.step);
    const index = x < 0 || x >= heat.size ? undefined : heat.slowest.get(y * heat.size + x);
    if (index !== undefined) byId("heat-seen").textContent = said(index, heat.pairs);
  }

  function startHeat() {
    if (!data.pairs.length) return;
    for (const pairs of data.pairs) byId("metric").append(element("option", {}, pairs.metric));
    byId("metric").addEventListener("change", drawHeat);
    byId("heat").addEventListener("pointermove", pointed);
    byId("heat").addEventListener("click", pointed);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawHeat);
    byId("heat-tool").hidden = false;
    drawHeat();
  }

  startMatrix();
  startHeat();
})();
