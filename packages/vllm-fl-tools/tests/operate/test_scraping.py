"""The workers' metrics on `/metrics`, with vLLM's metrics, even if files change or disappear."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from operate.test_metrics import until

from vllm_fl_tools.operate import scraping
from vllm_fl_tools.operate.scraping import Scraped
from vllm_fl_tools.operate.state_file import StateFile

pytest.importorskip("prometheus_client")


def text(rank: int, value: int = 1) -> str:
    name = "vllm_fl_refusals_total"
    head = f"# HELP {name} Calls.\n# TYPE {name} counter\n"
    return f'{head}{name}{{engine="chat",rank="{rank}"}} {value}\n'


def samples(scraped: Scraped) -> dict[str, float]:
    """Rank -> value; one family has them all."""
    families = list(scraped.collect())
    assert [f.name for f in families] in ([], ["vllm_fl_refusals"])
    return {s.labels["rank"]: s.value for family in families for s in family.samples}


def test_each_workers_file_is_read_again_for_each_scrape(tmp_path: Path) -> None:
    scraped = Scraped(str(tmp_path / "chat.prom"))
    assert samples(scraped) == {}
    (tmp_path / "chat.rank0.prom").write_text(text(0))
    (tmp_path / "chat.dp1.rank0.prom").write_text(text(10))
    for other in ("chat.prom", "chat.report.json", "chats.rank0.prom", "chat.rank1.prom.part"):
        (tmp_path / other).write_text(text(99))
    assert samples(scraped) == {"0": 1, "10": 1}
    (tmp_path / "chat.rank0.prom").write_text(text(0, 20))
    assert samples(scraped) == {"0": 20, "10": 1}
    (tmp_path / "chat.rank0.prom").unlink()
    assert samples(scraped) == {"10": 1}


def test_what_an_engine_that_was_killed_left_is_not_shown(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"chat.rank{rank}.prom").write_text(text(rank))
    scraped = Scraped(str(tmp_path / "chat.prom"))
    assert samples(scraped) == {}
    new = tmp_path / "new"
    new.write_text(text(0, 7))
    os.replace(new, tmp_path / "chat.rank0.prom")  # as a worker writes
    assert samples(scraped) == {"0": 7}


@pytest.mark.parametrize("odd", [
    b"\xff\xfe", b"vllm_fl_x{", b"", b"# TYPE vllm_fl_x what\n", b"# TYPE\n",
    b'# TYPE vllm_fl_x gauge\nvllm_fl_x{a="b"} many\n', b"# TYPE vllm:evil gauge\nvllm:evil{} 1\n",
])  # fmt: skip
def test_an_odd_file_costs_no_scrape(tmp_path: Path, odd: bytes) -> None:
    scraped = Scraped(str(tmp_path / "chat.prom"))
    (tmp_path / "chat.rank0.prom").write_text(text(0))
    (tmp_path / "chat.rank1.prom").write_bytes(odd)
    (tmp_path / "chat.rank2.prom").mkdir()
    os.mkfifo(tmp_path / "chat.rank3.prom")
    (tmp_path / "chat.rank4.prom").symlink_to("nowhere")
    (tmp_path / "chat.rank5.prom").write_text(text(5))
    assert samples(scraped) == {"0": 1, "5": 1}


def test_a_folder_that_is_not_there_or_does_not_answer_costs_no_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert samples(Scraped(str(tmp_path / "missing" / "chat.prom"))) == {}
    scraped = Scraped(str(tmp_path / "chat.prom"))
    answers = threading.Event()

    def hanging(_: object) -> set[scraping.Written]:
        answers.wait()
        return set()

    monkeypatch.setattr(scraping, "PATIENCE", 0.01)
    monkeypatch.setattr(scraping._Files, "_new", hanging)
    before = threading.active_count()
    try:
        assert [samples(scraped) for _ in range(3)] == [{}] * 3
        assert threading.active_count() == before + 1, "one thread waits for all scrapes"
    finally:
        answers.set()


def test_a_scrape_has_the_counts_of_now(tmp_path: Path) -> None:
    named, count = tmp_path / "chat.prom", [0]
    scraped = Scraped(str(named))
    own = tmp_path / "chat.rank0.prom"
    file = StateFile(named, own, lambda: text(0, count[0]))
    try:
        until(own.exists, "it is written")
        for count[0] in range(5):
            assert samples(scraped).get("0", 0) == count[0]
    finally:
        file.close()
    assert not [*tmp_path.iterdir()]


def test_a_first_count_is_written_at_once(tmp_path: Path) -> None:
    path, count = tmp_path / "chat.rank0.prom", [0]
    file = StateFile(
        *(tmp_path / "chat.prom", path, lambda: text(0, count[0])),
        has_counted=lambda: bool(count[0]),
    )
    for count[0] in (0, 7):
        until(lambda: path.exists() and f" {count[0]}\n" in path.read_text(), "it is written")
    file.close()


def test_a_name_of_another_owner_is_not_shown_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from prometheus_client import REGISTRY, Counter

    theirs = Counter("vllm_fl_refusals", "theirs")
    try:
        (tmp_path / "new").write_text(text(0))
        scraped = Scraped(str(tmp_path / "chat.prom"))
        os.replace(tmp_path / "new", tmp_path / "chat.rank0.prom")
        assert [samples(scraped) for _ in range(2)] == [{}, {}]
        (line,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert "vllm_fl_refusals" in line
    finally:
        REGISTRY.unregister(theirs)


BOTH = """
import os, sys
from vllm_fl_tools.operate.scraping import show_worker_files
folder = sys.argv[1]
for name in ("chat", "chat", "draw"):
    show_worker_files(f"{folder}/{name}.prom")
for name in ("chat", "draw"):
    open(f"{folder}/{name}.rank0.prom", "w").write(sys.argv[2].replace("chat", name))
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
Gauge("their", "own", multiprocess_mode="max").set(3)
print(generate_latest().decode())
registry = CollectorRegistry()
MultiProcessCollector(registry)
print("=====")
print(generate_latest(registry).decode())
"""


def test_both_of_the_registries_that_vllm_shows_have_them_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOTH, str(tmp_path), text(0)],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    single, several = done.stdout.split("=====")
    for shown in (single, several):
        for name in ("chat", "draw"):
            assert shown.count(f'vllm_fl_refusals_total{{engine="{name}",rank="0"}} 1.0') == 1
        assert shown.count("# TYPE vllm_fl_refusals_total") == 1
        assert "their 3.0" in shown
