"use strict";

/* What shows on hover, tap and focus: the values of a bar (its data-tip) and of a curve. */
const tip = document.getElementById("tip");

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const width = document.documentElement.clientWidth, height = window.innerHeight;
  const left = Math.max(8, Math.min(x + 14, width - box.width - 8));
  const below = y + 18 + box.height < height;
  tip.style.transform = `translate(${left}px, ${Math.max(8, below ? y + 18 : y - box.height - 12)}px)`;
}

function hideTip() {
  tip.hidden = true;
}

function follow(event) {
  const bar = event.target.closest?.("[data-tip]");
  if (bar) showTip(bar.dataset.tip, event.clientX, event.clientY);
  else if (!event.target.closest?.(".area, canvas")) hideTip();
}
const ofMouse = (work) => (event) => event.pointerType === "mouse" && work(); // a finger leaves whenever it is lifted
document.addEventListener("pointermove", follow);
document.addEventListener("pointerdown", follow);
document.documentElement.addEventListener("pointerleave", ofMouse(hideTip));
addEventListener("scroll", hideTip, { passive: true });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});

for (const plot of document.querySelectorAll(".plot")) {
  const data = JSON.parse(plot.querySelector("script").textContent);
  const area = plot.querySelector(".area"), cursor = plot.querySelector(".cursor");
  let shown = -1;

  const show = (index, y) => {
    shown = index;
    const box = area.getBoundingClientRect();
    cursor.hidden = false;
    cursor.style.left = `${data.at[index]}%`;
    const lines = data.lines.map(([name, values]) => (data.lines.length > 1 ? `${name}: ${values[index]}` : values[index]));
    showTip([data.x[index], ...lines].join("\n"), box.left + (box.width * data.at[index]) / 100, y ?? box.top + box.height / 3);
  };
  const nearest = (event) => {
    const box = area.getBoundingClientRect();
    const at = (100 * (event.clientX - box.left)) / box.width;
    let best = 0;
    data.at.forEach((place, index) => {
      if (Math.abs(place - at) < Math.abs(data.at[best] - at)) best = index;
    });
    show(best, event.clientY);
  };
  const leave = () => {
    cursor.hidden = true;
    hideTip();
  };
  area.addEventListener("pointermove", nearest);
  area.addEventListener("pointerdown", nearest);
  area.addEventListener("pointerleave", ofMouse(leave));
  document.addEventListener("pointerdown", (event) => area.contains(event.target) || (cursor.hidden = true));
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(Math.max(0, Math.min(data.at.length - 1, shown + move)));
  });
}

/* On paper nothing can be folded out. */
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details.numbers:not([open])")];
  for (const one of folded) one.open = true;
});
addEventListener("afterprint", () => {
  for (const one of folded) one.open = false;
});
