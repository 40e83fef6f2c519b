"""The status page in a real browser, on a phone's screen, while requests draft."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from benchmarks.server import LiveServer
from tests.engine.commands.conftest import KEY

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_page_shows_live_requests(
    server: LiveServer, client: OpenAI, texts: dict[str, list[int]], tmp_path: Path
) -> None:
    url = server.url.replace("http://", f"http://browser:{KEY.replace(' ', '%20')}@") + "/vericache/"
    picture = tmp_path / "page.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=420,900"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000"]

    def browser(*more: str) -> str:
        return subprocess.run([CHROMIUM, *flags, *more, url], capture_output=True, text=True, timeout=120).stdout

    with ThreadPoolExecutor() as pool:
        running = [
            pool.submit(
                client.completions.create,
                model="demo",
                prompt=ids,
                max_tokens=400,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            for ids in list(texts.values())[:4]
        ]
        page = browser("--dump-dom")
        browser(f"--screenshot={picture}")
        for answer in running:
            answer.result()
    assert re.search(r'<span id="model">demo</span>', page)
    assert "snapkv uniform, ratio 0.25, staggered" in page
    assert page.count("<rect") == 2 * 64  # both rings over the window
    assert len(re.findall(r"<td>(?:drafting|loading|verifying|waiting|demoting)</td>", page)) >= 1
    assert "draft arena" in page
    assert '<p id="error" role="alert"></p>' in page
    assert picture.read_bytes().startswith(b"\x89PNG")
