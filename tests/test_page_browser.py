from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser
from report_fixtures import write_run

from rlsp.report.gates import Verdict
from rlsp.report.metrics import METRICS
from rlsp.report.page import PAGE_NAME
from rlsp.report.verdict import seal

pytestmark = pytest.mark.browser

VIEWPORTS = {"phone": (390, 844), "desktop": (1280, 900)}
BACKGROUND = {"light": "rgb(255, 255, 255)", "dark": "rgb(14, 17, 22)"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def wide(run_dir: Path) -> Path:
    """Write a failed run with all that takes room: many ranks, long names and reasons, a NaN."""
    name = "a-name-without-a-blank-" * 8

    def differ(index, tensors):
        other = np.nextafter(tensors["train_logprob"], np.float32(0))
        tensors["train_logprob"] = np.where(tensors["active_mask"], other, np.float32(0))

    config = {"name": name, "parallel__tp": 8, "parallel__sp": 8, "rollout__engines": 5, "num_rollouts": 40}
    write_run(run_dir, tensors=differ, config=config, rollouts=40)
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        for number, metric in enumerate(METRICS):
            row.setdefault(metric, 1e6 * abs(math.sin(number + row["rollout"])))
    rows[3]["train/loss"] = "NaN"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert seal(run_dir).verdict is Verdict.FAIL
    return run_dir / PAGE_NAME


def aborted(run_dir: Path) -> Path:
    reason = "rank 1 was killed by SIGKILL (at: rollout 0: generating; collective gather bfloat16[32,8,128])"
    assert seal(write_run(run_dir, rollouts=0, aborted=reason), reason).verdict is Verdict.ABORTED
    return run_dir / PAGE_NAME


def passed(run_dir: Path) -> Path:
    assert seal(write_run(run_dir)).verdict is Verdict.PASS
    return run_dir / PAGE_NAME


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("runs")
    return {"PASS": passed(home / "p"), "FAIL": wide(home / "f"), "ABORTED": aborted(home / "a")}


@pytest.mark.parametrize("scheme", BACKGROUND)
@pytest.mark.parametrize("viewport", VIEWPORTS)
@pytest.mark.parametrize("verdict", ["PASS", "FAIL", "ABORTED"])
def test_the_page_fits_the_screen_shows_its_verdict_and_asks_for_nothing(
    browser, pages, verdict, viewport, scheme, tmp_path
):
    width, height = VIEWPORTS[viewport]
    browser.show(pages[verdict], width, height, scheme)
    seen = browser.run(
        """
        const badge = document.querySelector(".badge"), place = badge.getBoundingClientRect();
        return {inner: innerWidth, text: badge.innerText, top: place.top, bottom: place.bottom,
                right: place.right, style: getComputedStyle(document.body).backgroundColor,
                resources: performance.getEntriesByType("resource").length}
        """
    )
    assert seen["inner"] == width
    assert verdict in seen["text"]
    assert 0 <= seen["top"] < seen["bottom"] <= height / 4
    assert seen["right"] <= width
    assert seen["style"] == BACKGROUND[scheme], "the policy kept the page's own style out"
    for state in ("folded", "open"):
        overflow = browser.run(
            "const root = document.documentElement; return [root.scrollWidth, innerWidth, root.scrollHeight]"
        )
        assert overflow[0] <= overflow[1], f"{state}: the page scrolls sideways"
        browser.run("document.querySelectorAll('details').forEach(part => part.open = true)")
    shot = tmp_path / f"{verdict}-{viewport}-{scheme}.png"
    shot.write_bytes(browser.screenshot())
    assert shot.stat().st_size > 10_000, "an empty picture"
    assert browser.complaints() == []
    assert seen["resources"] == 0
    assert set(browser.requests()) == {pages[verdict].resolve().as_uri()}


@pytest.mark.parametrize("viewport", VIEWPORTS)
def test_letters_in_plots_are_as_large_as_small_print_and_do_not_collide(browser, pages, viewport):
    browser.show(pages["FAIL"], *VIEWPORTS[viewport], "light")
    sizes, collisions = browser.run(
        """
        const sizes = [], collisions = [];
        for (const image of document.querySelectorAll("figure > svg")) {
            const texts = [...image.querySelectorAll("text.tick")].map(text => text.getBoundingClientRect());
            sizes.push(12 * image.getBoundingClientRect().width / image.viewBox.baseVal.width);
            const frame = image.getBoundingClientRect();
            texts.forEach((one, at) => {
                if (one.left < frame.left - 1 || one.right > frame.right + 1) collisions.push(at);
                for (const other of texts.slice(at + 1))
                    if (one.left < other.right && other.left < one.right
                        && one.top < other.bottom && other.top < one.bottom) collisions.push(at);
            });
        }
        return [sizes, collisions]
        """
    )
    assert len(sizes) > 5
    assert min(sizes) >= 10.5
    assert collisions == []


def test_a_page_that_asks_for_something_is_noticed(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<!DOCTYPE html><title>x</title><img src='missing.png'><script>console.error('no')</script>"
    )
    browser.show(page, 390, 844, "light")
    assert any("no" in line for line in browser.complaints())
    assert any(address.endswith("missing.png") for address in browser.requests())
