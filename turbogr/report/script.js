"use strict";
// Shows the values under the pointer, which the charts have in data-hover. Without this script they stay readable.
const tip = document.getElementById("tip");
const svgName = "http://www.w3.org/2000/svg";

function cursorOf(svg, plot) {
  let line = svg.querySelector(".cursor");
  if (!line) {
    line = document.createElementNS(svgName, "line");
    line.setAttribute("class", "cursor axis");
    line.setAttribute("y1", plot[1]);
    line.setAttribute("y2", plot[3]);
    svg.appendChild(line);
  }
  return line;
}

function hide(svg) {
  tip.hidden = true;
  svg.querySelector(".cursor")?.remove();
}

function show(svg, hover, event) {
  const box = svg.getBoundingClientRect();
  const scale = svg.viewBox.baseVal.width / box.width;
  const x = (event.clientX - box.left) * scale;
  const y = (event.clientY - box.top) * scale;
  const [left, top, right, bottom] = hover.plot;
  if (x < left - 8 || x > right + 8 || y < top - 8 || y > bottom + 8) return hide(svg);
  let nearest = hover.points[0];
  for (const point of hover.points) if (Math.abs(point[0] - x) < Math.abs(nearest[0] - x)) nearest = point;
  const line = cursorOf(svg, hover.plot);
  line.setAttribute("x1", nearest[0]);
  line.setAttribute("x2", nearest[0]);
  tip.replaceChildren();
  const heading = document.createElement("strong");
  heading.textContent = nearest[1];
  tip.append(heading);
  for (const entry of nearest[2]) {
    const row = document.createElement("div");
    row.textContent = entry[2];
    tip.append(row);
  }
  tip.hidden = false;
  const at = box.left + nearest[0] / scale;
  const width = document.documentElement.clientWidth;
  const beside = at + 14 + tip.offsetWidth < width ? at + 14 : at - 14 - tip.offsetWidth;
  tip.style.left = `${Math.max(4, beside) + window.scrollX}px`;
  tip.style.top = `${Math.max(box.top + top / scale, 4) + window.scrollY}px`;
}

for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const hover = JSON.parse(svg.dataset.hover);
  // The browser's own tooltips would appear beside ours; the chart's name stays in aria-label.
  for (const title of svg.querySelectorAll("title")) title.remove();
  svg.addEventListener("pointermove", (event) => show(svg, hover, event));
  svg.addEventListener("pointerdown", (event) => show(svg, hover, event));
  svg.addEventListener("pointerleave", () => hide(svg));
}
