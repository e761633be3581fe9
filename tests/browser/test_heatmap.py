"""The heat map in a real browser: it is drawn, it answers the pointer, and it asks for nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from midstream.web import heatmap_html
from unit.captures import made

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--hide-scrollbars", "--window-size=1000,900",
]  # fmt: skip

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def browse(page: Path, *flags: str) -> str:
    """What Chromium prints for a page, in a profile that is thrown away."""
    assert CHROMIUM is not None
    profile = page.parent / "profile"
    line = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    environment = {**os.environ, "HOME": str(page.parent)}
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=True, env=environment).stdout


@pytest.fixture
def page(tmp_path: Path) -> Path:
    capture = made(layers=(0, 2))
    rows = torch.zeros(8, 4)
    rows[:, 0] = torch.tensor([900.0, 10, 20, 5, 10, 10, 10, 10])
    capture = replace(
        capture,
        tensors={("resid_post", 0): torch.ones(8, 4), ("resid_post", 2): rows},
        decode=lambda ids: [f"</td><b>{token}" for token in ids],
    )
    path = tmp_path / "page.html"
    path.write_text(heatmap_html(capture))
    return path


def with_script(page: Path, script: str) -> Path:
    """The page, with something done to it once it is there."""
    path = page.with_name("acted.html")
    path.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    return path


def test_it_stands_as_it_was_written(page: Path) -> None:
    dom = browse(page, "--dump-dom")
    assert dom.count("<table>") == 3
    assert dom.count("<b>") == 0
    assert len(re.findall(r"<td[^>]*data-norm", dom)) == 16


def test_pointing_at_a_cell_reads_it(page: Path) -> None:
    script = """
      const cell = document.querySelectorAll("tbody tr:nth-child(2) td[data-norm]")[0];
      cell.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
    """
    dom = browse(with_script(page, script), "--dump-dom")
    (tip,) = re.findall(r'<div id="tip" role="status">(.*?)</div>', dom, re.DOTALL)
    assert tip == "layer 2, position 0: &lt;/td&gt;&lt;b&gt;11\nnorm 900 = 90 × the layer's median of 10"
    away = script + 'document.querySelector("h1").dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));'
    assert re.search(r'<div id="tip" role="status" hidden="">', browse(with_script(page, away), "--dump-dom"))


def test_all_numbers_can_be_shown(page: Path) -> None:
    dom = browse(with_script(page, 'document.getElementById("numbers").click();'), "--dump-dom")
    assert '<body class="numbers">' in dom


def test_nothing_is_fetched_and_nothing_fails(page: Path) -> None:
    script = """
      const report = document.createElement("pre");
      report.id = "report";
      report.textContent = performance.getEntriesByType("resource").map((entry) => entry.name).join("\\n");
      document.body.append(report);
    """
    dom = browse(with_script(page, script), "--dump-dom")
    assert '<pre id="report"></pre>' in dom
    assert CHROMIUM is not None
    line = [CHROMIUM, *FLAGS, f"--user-data-dir={page.parent / 'other'}", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([*line, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_seen_in_both_schemes(page: Path, scheme: str) -> None:
    image = pytest.importorskip("PIL.Image")
    shot = page.with_name(f"{scheme}.png")
    browse(page, f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}")
    with image.open(shot) as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3).astype(int)
    paper, massive, strong = {
        "light": ((0xFF, 0xFF, 0xFF), (0x4A, 0x1A, 0x6B), (217, 89, 11)),
        "dark": ((0x17, 0x17, 0x1A), (0xE3, 0xB8, 0xFF), (250, 140, 60)),
    }[scheme]
    assert tuple(pixels[5]) == paper
    for colour in (massive, strong):
        assert (np.abs(pixels - colour).max(axis=1) <= 2).sum() > 200, colour
