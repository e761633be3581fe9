"""The style sheet and the script of the heat map's page, set into it as they are."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root {
  --paper: #ffffff; --ink: #1d1d1f; --quiet: #6a6a72; --line: #e3e3e6; --middle: #f2f1ef;
  --low: 33 102 172; --high: 217 89 11; --massive: #4a1a6b; --on-massive: #ffffff;
  --on-strong: #ffffff; --tip: #1d1d1f; --on-tip: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #17171a; --ink: #ececf0; --quiet: #a0a0aa; --line: #34343a; --middle: #2a2a2e;
    --low: 90 165 240; --high: 250 140 60; --massive: #e3b8ff; --on-massive: #24102f;
    --on-strong: #17171a; --tip: #ececf0; --on-tip: #17171a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 84rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; }
main { display: flex; flex-wrap: wrap; gap: 2rem 3.5rem; margin-top: 2rem; }
section { max-width: 100%; min-width: 0; }
h2 { font-size: 1rem; margin: 0 0 .1rem; }
h2 small { font-weight: normal; color: var(--quiet); }
header p { margin: 0 0 1rem; max-width: 52rem; color: var(--quiet); }
.text { margin: 0 0 .6rem; max-width: 60rem; contain: inline-size;
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  font-size: .85rem; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: .6rem 2rem; align-items: flex-start; padding: .8rem 1rem;
  border: 1px solid var(--line); border-radius: 8px; font-size: .85rem; }
.scale { width: 20rem; max-width: 100%; }
.bar { display: flex; height: .9rem; }
.bar i { flex: 1; }
.ticks { display: flex; justify-content: space-between; color: var(--quiet); }
.key b { display: inline-block; min-width: 2rem; padding: 0 .3rem; text-align: center; font-size: .72rem; }
.scroll { overflow-x: auto; padding-bottom: .3rem; }
.scroll:focus-visible { outline: 2px solid rgb(var(--low)); outline-offset: 3px; }
table { border-collapse: separate; border-spacing: 1px; font-variant-numeric: tabular-nums; }
thead th { vertical-align: bottom; font-weight: normal; font-size: .78rem; padding: 0 0 .2rem; }
thead th span { display: block; writing-mode: vertical-rl; transform: rotate(180deg); white-space: pre; margin: 0 auto;
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
thead th small { display: block; color: var(--quiet); font-size: .68rem; }
thead th:first-child, tbody th { position: sticky; left: 0; background: var(--paper); z-index: 1; }
tbody th { font-weight: normal; text-align: right; padding: 0 .6rem 0 0; font-size: .78rem; color: var(--quiet); }
thead th:first-child { text-align: right; padding-right: .6rem; color: var(--quiet); }
td { width: 2.2rem; min-width: 2.2rem; height: 1.45rem; padding: 0; text-align: center; font-size: .68rem;
  color: transparent; border-radius: 2px; cursor: default; }
td:hover { outline: 2px solid var(--ink); outline-offset: -1px; }
th.generated, u { text-decoration: none; border-bottom: 2px solid rgb(var(--low)); }
.median, td.median { width: auto; color: var(--quiet); text-align: right; padding-left: .8rem; font-size: .78rem;
  white-space: nowrap; background: none; }
td.median:hover { outline: none; }
.numbers td { color: var(--ink); }
.numbers td.median { color: var(--quiet); }
.numbers :is(.l6, .l7, .l8, .l9, .h7, .h8, .h9) { color: var(--on-strong); }
.m { background: var(--middle); }
.x, td.x, .numbers td.x { background: var(--massive); color: var(--on-massive); border-radius: 2px; }
.n { background: repeating-linear-gradient(45deg, var(--line) 0 3px, transparent 3px 6px); }
#tip { position: fixed; z-index: 9; pointer-events: none; padding: .45rem .65rem; border-radius: 6px; font-size: .82rem;
  line-height: 1.35; background: var(--tip); color: var(--on-tip); max-width: 22rem; white-space: pre-line; }
@media print { #tip { display: none; } }
""" + "".join(
    f".{side}{step} {{ background: linear-gradient(rgb(var(--{name}) / {step / 9:.2f}) 0 0), var(--middle); }}\n"
    for side, name in (("l", "low"), ("h", "high"))
    for step in range(1, 10)
)

SCRIPT: Final = """
const tip = document.getElementById("tip");
document.getElementById("numbers").addEventListener("change", (event) =>
  document.body.classList.toggle("numbers", event.target.checked));
document.addEventListener("pointerover", (event) => {
  const cell = event.target.closest("td[data-norm]");
  tip.hidden = !cell;
  if (!cell) return;
  const row = cell.parentElement, head = cell.closest("table").tHead.rows[0].cells[cell.cellIndex];
  const median = row.querySelector(".median").textContent;
  tip.textContent = "layer " + row.cells[0].textContent + ", position " + head.dataset.position + ": "
    + head.title.replace(/: position .*$/, "") + "\\nnorm " + cell.dataset.norm + " = " + cell.textContent
    + " \\u00d7 the layer's median of " + median;
});
document.addEventListener("pointermove", (event) => {
  if (tip.hidden) return;
  const wide = tip.offsetWidth, high = tip.offsetHeight;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - wide - 8)) + "px";
  tip.style.top = (event.clientY + 18 + high > innerHeight ? event.clientY - high - 12 : event.clientY + 18) + "px";
});
"""
