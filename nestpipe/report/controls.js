/* The timeline in the hands of the reader: what an operation says of itself, mouse and fingers, keys and buttons. */
function words(timeline, place) {
  const row = timeline.rows[place.row], [lane, op, batch, part, , took, exposed] = timeline.eventOf(place);
  const what = `${timeline.data.ops[op]}, batch ${batch}` + (part < 0 ? "" : `, micro-batch ${part}`);
  let share = "all of it hidden behind compute";
  if (lane === row.rank.compute) share = "on the compute lane: all of it counts";
  else if (exposed > 0.05) share = `exposed: ${duration(exposed)} (${Math.round((100 * exposed) / took)}%)`;
  return `${what}\n${duration(took)}\n${share}\nlane ${row.name}${timeline.several ? `, rank ${row.rank.rank}` : ""}`;
}

function tell(timeline, place) {
  const [, , , , start, took] = timeline.eventOf(place), box = timeline.canvas.getBoundingClientRect();
  const left = Math.max(timeline.x(start), timeline.gutter), right = Math.min(timeline.x(start + took), timeline.width);
  showTip(words(timeline, place), box.left + (left + right) / 2, box.top + timeline.rows[place.row].top + ROW - 10);
}

const equal = (one, other) => one?.row === other?.row && one?.index === other?.index;
let scrolled = 0; // when the page was last scrolled
addEventListener("scroll", () => (scrolled = performance.now()), { passive: true });

function pointers(timeline) {
  const { canvas } = timeline, fingers = new Map();
  let moved = 0;
  canvas.addEventListener("wheel", (event) => {
    if (performance.now() - scrolled < 250 && !event.ctrlKey) return; // the page is being scrolled past the timeline
    const scale = event.deltaMode === 1 ? 16 : 1, whole = timeline.to - timeline.from >= timeline.data.span;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!sideways && event.deltaY > 0 && whole && !event.ctrlKey) return;
    event.preventDefault();
    if (sideways) timeline.pan((event.deltaX || event.deltaY) * scale);
    else timeline.zoom(Math.exp(event.deltaY * scale * (event.ctrlKey ? 0.01 : 0.002)), timeline.time(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, event.offsetX);
    if (fingers.size === 1) moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) return hover(event);
    const [one, other] = fingers.values(), before = other ?? one;
    moved += Math.abs(event.offsetX - fingers.get(event.pointerId));
    if (moved < 4) return;
    hideTip();
    canvas.classList.add("dragging");
    fingers.set(event.pointerId, event.offsetX);
    const [left, right] = fingers.values(), now = right ?? left;
    if (other === undefined) return timeline.pan(before - now);
    const factor = Math.max(20, Math.abs(one - other)) / Math.max(20, Math.abs(left - right));
    timeline.zoom(factor, timeline.time((one + other) / 2));
    timeline.pan((one + other - left - right) / 2);
  });
  const hover = (event) => {
    const place = timeline.at(event.offsetX, event.offsetY);
    canvas.classList.toggle("on-event", !!place);
    if (!equal(place, timeline.over)) timeline.drawSoon();
    timeline.over = place;
    if (place) showTip(words(timeline, place), event.clientX, event.clientY);
    else hideTip();
  };
  const lift = (event) => {
    const tapped = event.type === "pointerup" && moved < 4 && fingers.size === 1;
    fingers.delete(event.pointerId);
    canvas.classList.remove("dragging");
    if (!tapped) return;
    const place = timeline.at(event.offsetX, event.offsetY);
    timeline.chosen = equal(place, timeline.chosen) ? null : place;
    timeline.drawSoon();
    if (timeline.chosen) tell(timeline, timeline.chosen);
    else hideTip();
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", ofMouse(() => {
    timeline.over = null;
    timeline.drawSoon();
    hideTip();
  }));
}

/* To the operation before or after, or to the nearest of another lane; the first time to one in the middle. */
function go(timeline, lanes, operations) {
  const { rows, from, to, chosen } = timeline, span = to - from;
  const middle = chosen ? timeline.eventOf(chosen)[4] : (from + to) / 2;
  let row = chosen ? chosen.row : rows.findIndex((one) => one.lane === one.rank.compute);
  if (chosen && lanes) {
    do row += lanes;
    while (rows[row] && !rows[row].events.length);
    if (!rows[row]) return;
  }
  const away = rows[row].events.map(([, , , , start, took]) => Math.max(start - middle, middle - start - took, 0));
  const index = chosen && !lanes ? chosen.index + operations : away.indexOf(Math.min(...away));
  if (!rows[row].events[index]) return;
  timeline.chosen = { row, index };
  const [, , , , start, took] = rows[row].events[index], centre = start + took / 2;
  if (start < from || start + took > to) timeline.look(centre - span / 2, centre + span / 2);
  timeline.drawSoon();
  tell(timeline, timeline.chosen);
}

function keys(timeline) {
  const { canvas, root } = timeline;
  const actions = {
    in: () => timeline.zoom(0.5),
    out: () => timeline.zoom(2),
    left: () => timeline.pan(-timeline.width / 4),
    right: () => timeline.pan(timeline.width / 4),
    all: () => timeline.look(0, timeline.data.span),
    clear: () => {
      timeline.chosen = null;
      timeline.drawSoon();
    },
  };
  const bound = {
    "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.all, Home: actions.all, Escape: actions.clear,
    ArrowLeft: (shift) => (shift ? actions.left() : go(timeline, 0, -1)),
    ArrowRight: (shift) => (shift ? actions.right() : go(timeline, 0, 1)),
    ArrowUp: () => go(timeline, -1, 0),
    ArrowDown: () => go(timeline, 1, 0),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in bound)) return;
    event.preventDefault();
    bound[event.key](event.shiftKey);
  });
  canvas.addEventListener("blur", hideTip);
  root.addEventListener("click", (event) => actions[event.target.closest("[data-do]")?.dataset.do]?.());
}

for (const root of document.querySelectorAll(".timeline")) {
  const timeline = new Timeline(root);
  pointers(timeline);
  keys(timeline);
  const print = (printing) => {
    timeline.printing = printing;
    timeline.draw(); // at once: the printer does not wait for a frame
  };
  night.addEventListener("change", () => timeline.drawSoon());
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  timeline.draw();
}
document.documentElement.dataset.ready = "yes";
