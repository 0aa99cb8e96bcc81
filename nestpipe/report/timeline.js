/* The timeline: one row for each lane of each rank, one bar for each operation. Times are microseconds. */
const LIGHT = { ink: "#1c2127", quiet: "#58626e", line: "#dfe3e8", row: "#f6f7f9", paper: "#ffffff", starved: "#f7d4d0", exposed: "#c0392b" };
const DARK = { ink: "#e3e7ec", quiet: "#9da8b4", line: "#2e353d", row: "#1b2026", paper: "#14181d", starved: "#57302f", exposed: "#f0776a" };
const ROW = 26, BAR = 20, HEAD = 36, BETWEEN = 10, STRIP = 4, SHORTEST = 5;
const night = matchMedia("(prefers-color-scheme: dark)");

function duration(micro) {
  if (micro < 1000) return `${micro.toFixed(micro < 10 ? 1 : 0)} µs`;
  return micro < 1e6 ? `${(micro / 1000).toFixed(micro < 1e5 ? 2 : 1)} ms` : `${(micro / 1e6).toFixed(2)} s`;
}

function mix(one, other, share) {
  const channel = (at) => parseInt(one.slice(at, at + 2), 16) * (1 - share) + parseInt(other.slice(at, at + 2), 16) * share;
  return "#" + [1, 3, 5].map((at) => Math.round(channel(at)).toString(16).padStart(2, "0")).join("");
}

function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#10141a" : "#ffffff";
}

class Timeline {
  constructor(root) {
    this.root = root;
    this.data = JSON.parse(root.querySelector("script").textContent);
    this.canvas = root.querySelector("canvas");
    this.pen = this.canvas.getContext("2d");
    this.several = this.data.ranks.length > 1;
    this.rows = []; // {rank, lane, name, top, events}
    this.height = HEAD;
    for (const rank of this.data.ranks) {
      if (this.several) this.height += this.rows.length ? BETWEEN + 18 : 18;
      rank.top = this.height;
      rank.lanes.forEach((name, lane) => {
        const events = rank.events.filter((event) => event[0] === lane);
        this.rows.push({ rank, lane, name, top: this.height, events });
        this.height += ROW;
      });
    }
    this.height += 4;
    this.canvas.style.height = `${this.height}px`;
    this.printing = false;
    this.over = this.chosen = null; // {row, index}
    this.fit();
    const { steps } = this.data, few = Math.min(steps.length, this.width < 560 ? 1 : 3), first = Math.floor((steps.length - few) / 2);
    this.look(steps[first][1], steps[first + few - 1][2]);
    new ResizeObserver(() => this.fit()).observe(this.canvas);
  }

  /* What is seen */
  fit() {
    this.width = this.canvas.clientWidth;
    this.gutter = this.width < 560 ? 62 : 72;
    this.drawSoon();
  }
  look(begin, end) {
    const span = Math.min(this.data.span, Math.max(SHORTEST, end - begin));
    this.from = Math.max(0, Math.min(this.data.span - span, begin));
    this.to = this.from + span;
    this.drawSoon();
  }
  zoom(factor, at = (this.from + this.to) / 2) {
    const span = Math.min(this.data.span, Math.max(SHORTEST, (this.to - this.from) * factor));
    const share = (at - this.from) / (this.to - this.from);
    this.look(at - span * share, at + span * (1 - share));
  }
  pan(pixels) {
    const shift = (pixels * (this.to - this.from)) / (this.width - this.gutter);
    this.look(this.from + shift, this.to + shift);
  }
  x(time) {
    return this.gutter + ((time - this.from) / (this.to - this.from)) * (this.width - this.gutter);
  }
  time(x) {
    return this.from + ((x - this.gutter) / (this.width - this.gutter)) * (this.to - this.from);
  }
  eventOf(place) {
    return this.rows[place.row].events[place.index];
  }
  /* The operation at a point of the canvas, or null. */
  at(x, y) {
    const row = this.rows.findIndex((one) => y >= one.top && y < one.top + ROW);
    if (x < this.gutter || row < 0) return null;
    const when = this.time(x);
    let best = null, distance = this.time(x + 2) - when;
    this.rows[row].events.forEach(([, , , , start, took], index) => {
      const away = Math.max(start - when, when - start - took, 0);
      if (away < distance) [best, distance] = [{ row, index }, away];
    });
    return best;
  }

  /* Drawing */
  get night() {
    return night.matches && !this.printing;
  }
  drawSoon() {
    this.frame ||= requestAnimationFrame(() => this.draw());
  }
  draw() {
    this.frame = 0;
    const { pen, canvas, width, height, gutter, data } = this;
    const theme = this.night ? DARK : LIGHT, colours = this.night ? data.dark : data.light; // of an op: fill, edge
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.textBaseline = "middle";
    pen.fillStyle = theme.row;
    for (const row of this.rows) pen.fillRect(gutter, row.top + 2, width - gutter, ROW - 4);
    pen.save();
    pen.beginPath();
    pen.rect(gutter, 0, width - gutter, height);
    pen.clip();
    this.drawGaps(theme);
    this.drawSteps(theme);
    const pale = colours.map(([fill]) => mix(fill, theme.paper, 0.55));
    let drawn = 0;
    for (const [number, row] of this.rows.entries()) {
      drawn += this.drawRow(row, number, colours, pale, theme);
      this.drawExposed(row, theme);
    }
    pen.restore();
    this.drawNames(theme);
    this.drawWhere(theme);
    for (const key of this.root.querySelectorAll("[data-op]")) {
      const [fill, edge] = colours[key.dataset.op];
      Object.assign(key.style, { background: fill, boxShadow: `inset 0 0 0 1px ${edge}` });
    }
    Object.assign(canvas.dataset, { drawn, from: this.from.toFixed(1), to: this.to.toFixed(1) });
    const steps = data.steps.filter((step) => step[2] > this.from && step[1] < this.to);
    const told = steps.length > 1 ? `batches ${steps[0][0]} to ${steps[steps.length - 1][0]}` : `batch ${steps[0]?.[0]}`;
    this.root.querySelector(".range").textContent = `${duration(this.to - this.from)} shown, ${told}`;
  }

  drawGaps(theme) {
    this.pen.fillStyle = theme.starved;
    for (const rank of this.data.ranks) {
      for (const [begin, end] of rank.gaps) {
        if (end < this.from || begin > this.to) continue;
        this.pen.fillRect(this.x(begin), rank.top + rank.compute * ROW + 2, this.x(end) - this.x(begin), ROW - 4);
      }
    }
  }

  drawSteps(theme) {
    const pen = this.pen;
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.strokeStyle = pen.fillStyle = theme.quiet;
    pen.lineWidth = 1;
    pen.setLineDash([4, 3]);
    pen.globalAlpha = 0.7;
    pen.beginPath();
    for (const [, begin] of this.data.steps) {
      if (begin <= this.from || begin >= this.to) continue;
      pen.moveTo(Math.round(this.x(begin)) + 0.5, HEAD - 14);
      pen.lineTo(Math.round(this.x(begin)) + 0.5, this.height);
    }
    pen.stroke();
    pen.setLineDash([]);
    pen.globalAlpha = 1;
    for (const [batch, begin, end] of this.data.steps) {
      const left = Math.max(this.gutter, this.x(begin)), right = Math.min(this.width, this.x(end));
      const text = [`step of batch ${batch}`, `${batch}`].find((one) => pen.measureText(one).width + 8 < right - left);
      if (text) pen.fillText(text, (left + right) / 2, HEAD - 10);
    }
  }

  /* How many operations of the row are seen. */
  drawRow(row, number, colours, pale, theme) {
    const pen = this.pen, top = row.top + (ROW - BAR) / 2;
    const batch = this.chosen ? this.eventOf(this.chosen)[2] : null;
    let drawn = 0, last = -1;
    pen.font = "11.5px system-ui, sans-serif";
    pen.textAlign = "center";
    for (const [index, [, op, ofBatch, part, start, took]] of row.events.entries()) {
      if (start + took < this.from || start > this.to) continue;
      drawn += 1;
      const left = Math.max(this.x(start), this.gutter - 4), right = Math.min(this.x(start + took), this.width + 4);
      if (right - left < 1 && Math.floor(left) === last && batch === null) continue; // that pixel is filled already
      last = Math.floor(left);
      const wide = Math.max(1, right - left - (right - left > 4 ? 1 : 0)), light = ofBatch % 2 === 1 && wide > 3;
      pen.globalAlpha = batch === null || batch === ofBatch ? 1 : 0.2;
      const [whole, edge] = colours[op], fill = light ? pale[op] : whole;
      pen.fillStyle = wide > 3 ? fill : edge;
      pen.fillRect(left, top, wide, BAR);
      if (wide > 3 && fill !== edge) {
        pen.lineWidth = 1;
        pen.strokeStyle = edge;
        pen.strokeRect(left + 0.5, top + 0.5, wide - 1, BAR - 1);
      }
      if (wide > 14) {
        const short = part < 0 ? `${ofBatch}` : `${ofBatch}.${part}`;
        const text = [`${this.data.ops[op]} ${short}`, short].find((one) => pen.measureText(one).width + 6 < wide);
        pen.fillStyle = inkOn(fill);
        if (text) pen.fillText(text, (left + right) / 2, top + BAR / 2 + 0.5);
      }
      pen.globalAlpha = 1;
      const here = (place) => place?.row === number && place.index === index;
      if (here(this.over) || here(this.chosen)) {
        pen.lineWidth = 2;
        pen.strokeStyle = theme.ink;
        pen.strokeRect(left, top, wide, BAR);
      }
    }
    return drawn;
  }

  /* A strip under what runs while compute runs nothing. */
  drawExposed(row, theme) {
    if (row.lane === row.rank.compute) return;
    const { gaps } = row.rank;
    this.pen.fillStyle = theme.exposed;
    let first = 0;
    for (const [, , , , start, took] of row.events) {
      const end = start + took;
      if (end < this.from || start > this.to) continue;
      while (first < gaps.length && gaps[first][1] <= start) first += 1;
      for (let at = first; at < gaps.length && gaps[at][0] < end; at += 1) {
        const left = this.x(Math.max(start, gaps[at][0])), right = this.x(Math.min(end, gaps[at][1]));
        this.pen.fillRect(left, row.top + ROW - STRIP, Math.max(1, right - left), STRIP - 1);
      }
    }
  }

  drawNames(theme) {
    const pen = this.pen;
    pen.textAlign = "left";
    for (const [number, row] of this.rows.entries()) {
      const strong = this.chosen?.row === number || row.lane === row.rank.compute;
      pen.font = `${strong ? "600 " : ""}12.5px system-ui, sans-serif`;
      pen.fillStyle = strong ? theme.ink : theme.quiet;
      pen.fillText(row.name, 0, row.top + ROW / 2, this.gutter - 6);
    }
    if (!this.several) return;
    pen.font = "600 12.5px system-ui, sans-serif";
    pen.fillStyle = theme.ink;
    for (const rank of this.data.ranks) pen.fillText(`rank ${rank.rank}`, 0, rank.top - 9);
  }

  /* Which part of all steps is seen. */
  drawWhere(theme) {
    const wide = this.width - this.gutter, { span } = this.data;
    this.pen.fillStyle = theme.line;
    this.pen.fillRect(this.gutter, 4, wide, 4);
    this.pen.fillStyle = theme.quiet;
    this.pen.fillRect(this.gutter + (wide * this.from) / span, 4, Math.max(6, (wide * (this.to - this.from)) / span), 4);
  }
}
