"""The page in a real browser, on a real service: by keyboard, on a phone, in dark and light."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import trainer
from tests import runs
from tests.service.browser import PATIENCE_S, Page, browser

RUN = ["+recipe=digits_lenet", "tracking=none", "execution.threads=1", "launch.cores=1"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page that is logged in, of a service with four real runs: 1 done, 2 failed, 3 runs, 4 waits."""
    folder = tmp_path_factory.mktemp("page")
    environment = {**runs.environment(), "TRAINER_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "trainer", "serve", "--port", "0"]
    with browser(folder / "profile") as found:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            address, token = (process.stdout.readline().split()[1] for _ in range(2))
            client = trainer.Client(address, token)
            assert client.run([*RUN, "max_steps=3"]).status == "done"
            client.submit([*RUN, "optimizer.lr=1e30"])
            until_state(client, 2, "failed")
            client.submit([*RUN, "epochs=100000"])
            until_state(client, 3, "running")
            client.submit([*RUN, f"launch.cores={len(os.sched_getaffinity(0))}"])
            found.size(1200, 900)
            found.go(address)
            found.until("!document.getElementById('login').hidden")
            found.press("Tab")
            found.type(token)
            found.press("Enter")
            found.until("document.querySelectorAll('#runs tr').length === 4")
            yield found
            client.cancel(4)
            client.cancel(3)
            until_state(client, 3, "cancelled")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def until_state(client: trainer.Client, number: int, state: str) -> None:
    """Wait until a run is in a state."""
    end = time.monotonic() + PATIENCE_S
    while (now := client.show(number)["state"]) != state:
        assert time.monotonic() < end, now
        time.sleep(0.2)


def focused(page: Page) -> str:
    """What has the focus: its label, or its id."""
    return str(page.value("document.activeElement.dataset.what || document.activeElement.id"))


@pytest.mark.all
def test_each_run_says_its_state_and_why_it_waits_or_failed(page: Page) -> None:
    text = page.until("/free: \\d+ of \\d+ cores/.test(document.getElementById('runs').innerText)") and page.value(
        "[...document.querySelectorAll('#runs tr')].map((row) => row.innerText.replace(/\\s+/g, ' ')).join('\\n')"
    )
    assert re.search(r"3 running digits_lenet", text) and re.search(r"4 queued .*position 1\. free: ", text), text
    assert re.search(r"2 failed .*exit code 1", text) and re.search(r"1 done .*100 %", text), text


def test_a_run_is_opened_read_and_closed_by_the_keyboard_alone(page: Page) -> None:
    page.value("document.activeElement.blur(); document.body.focus()")
    seen = []
    while "show 2" not in seen:
        page.press("Tab")
        seen.append(focused(page))
        assert len(seen) < 40, seen
    shows = [what for what in seen if what.startswith("show")]
    assert shows == ["show 3", "show 4", "show 2"], "in the order of the rows"
    assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"
    page.press("Enter")
    page.until("document.getElementById('title').textContent === 'Run 2: digits_lenet, failed'")
    assert focused(page) == "title" and "loss is nan" in page.value("document.getElementById('end').textContent")
    page.press("Tab")
    assert focused(page) == "close"
    page.press("Escape")
    assert page.value("document.getElementById('detail').hidden") and focused(page) == "show 2"
    page.press(" ")
    page.until("!document.getElementById('detail').hidden")
    page.value("document.getElementById('close').focus()")
    page.press("Enter")
    assert page.value("document.getElementById('detail').hidden") and focused(page) == "show 2"


def test_all_that_can_be_pressed_has_a_name(page: Page) -> None:
    nameless = page.value(
        "[...document.querySelectorAll('button, input, pre, section, img')].filter((one) => !(one.alt || "
        "one.ariaLabel || one.innerText || one.getAttribute('aria-labelledby') || one.closest('label')))"
        ".map((one) => one.outerHTML).join()"
    )
    assert nameless == ""


def tick(page: Page, *numbers: int) -> None:
    """Tick or untick runs."""
    for number in numbers:
        page.value(f"document.querySelector('[data-what=\"compare {number}\"]').click()")


def test_a_comparison_says_why_it_shows_little(page: Page) -> None:
    """Run 2 has failed without a best value, and run 4 waits without config, result and points."""
    said = "document.getElementById('common').textContent"
    compared = "document.getElementById('compare').innerText"
    page.value("window.kept = ask; ask = () => new Promise(() => {})")
    tick(page, 1, 2)
    assert page.value(said) == "Loading the runs"
    tick(page, 1, 2)
    page.value("ask = async () => { throw new Error('it is gone'); }")
    tick(page, 1, 2)
    page.until(f"{said} === 'The runs cannot be compared: it is gone'")
    tick(page, 1, 2)
    page.value("ask = window.kept")
    tick(page, 1, 2)
    page.until(f"{said} === ''")
    text = page.value(compared)
    assert "train/loss" in text and re.search(r"optimizer.lr\s+0.05\s+1e\+30", text) and "NaN" not in text
    tick(page, 2, 4)
    page.until(f"{said} === 'These runs have no metric in common, so each curve is of one run.'")
    tick(page, 1, 2)
    page.until(f"{said}.startsWith('There are no curves') && {compared}.includes('run 2')")
    tick(page, 2, 4)


@pytest.mark.all
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_it_fits_the_width_and_its_text_is_seen(page: Page, width: int, scheme: str) -> None:
    page.size(width, 844, scheme)
    page.value("document.querySelector('[data-what=\"show 3\"]').click()")
    page.until("document.getElementById('title').textContent.startsWith('Run 3:')")
    page.until("document.querySelectorAll('#curves svg').length > 1 && document.getElementById('log').innerText")
    assert page.value("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut or scrolls sideways"
    colours = "[getComputedStyle({0}).color, getComputedStyle(document.body).backgroundColor]"
    for one in ("document.body", "document.querySelector('.failed')", "document.querySelector('.running')"):
        text, back = (brightness(found) for found in page.value(colours.replace("{0}", one)))
        assert (max(text, back) + 0.05) / (min(text, back) + 0.05) >= 4.5, "WCAG AA"
        assert (back < 0.5) == (scheme == "dark")
    page.press("Escape")


def brightness(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)`` (WCAG 2)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
