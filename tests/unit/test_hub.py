"""A hub that cannot be reached is told from one that is slow or refuses; the hubs are local."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest
from datasets import Dataset
from huggingface_hub import constants

from qkit.errors import HubUnreachableError
from qkit.quantize import hub
from qkit.quantize.calibration_rows import load_rows
from qkit.quantize.hub import TRIES, hub_switched_off, why_unreachable

NAME = "someone/some_chats"


@contextmanager
def local_hub(status: int, delay_s: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server that answers every request with a status, and its requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            time.sleep(delay_s)
            self.send_response(status)
            self.end_headers()

        do_GET = do_HEAD  # noqa: N815  (the base class's name)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "PAUSE_S", 0.0)
    for name in ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def closed_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Point the client at a port that refuses connections, and yield the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets it
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        yield address


@pytest.mark.parametrize("status", [200, 307, 401, 404, 429, 503])
def test_any_answer_is_a_hub_that_can_be_reached(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    with local_hub(status) as (address, asked):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert why_unreachable() is None
        assert len(asked) == 1


def test_a_hub_that_connects_and_is_slow_is_left_to_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "CONNECT_TIMEOUT_S", 0.2)
    with local_hub(200, delay_s=1.0) as (address, asked):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert why_unreachable() is None
        assert len(asked) == 1


def test_a_refused_connection_is_tried_again_once_and_named(
    monkeypatch: pytest.MonkeyPatch, closed_port: str
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(hub.time, "sleep", pauses.append)
    reason = why_unreachable()
    assert reason is not None
    assert reason.startswith(f"no connection to {closed_port}: ")
    assert len(pauses) == TRIES - 1


def test_an_unknown_host_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    reason = why_unreachable()
    assert reason is not None
    assert "Name or service not known" in reason


def test_a_hub_switched_off_by_the_person_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, closed_port: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert why_unreachable() is None


def test_the_hub_is_switched_on_again(closed_port: str) -> None:
    during = []
    with suppress(ZeroDivisionError), hub_switched_off():
        during += [constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE]
        raise ZeroDivisionError
    assert during == [True, True]
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_the_client_does_not_retry_where_nothing_can_be_reached(
    monkeypatch: pytest.MonkeyPatch, closed_port: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(HubUnreachableError) as caught:
        load_rows(NAME, split="train")
    assert sum(pauses) == 0  # the client would sleep 1, 2, 4, 8 and 8 seconds
    assert caught.value.detail is not None
    assert caught.value.detail.startswith(f"no connection to {closed_port}: ")
    assert "--calibration" in str(caught.value.fix)


def test_a_set_downloaded_before_is_used_where_the_hub_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, closed_port: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    # As `datasets` keeps a prepared set: NAMESPACE___NAME/CONFIG/VERSION/HASH.
    folder = tmp_path / "someone___some_chats" / "default" / "0.0.0" / "abc"
    folder.mkdir(parents=True)
    rows = Dataset.from_dict({"text": ["one", "two"]})
    rows.save_to_disk(str(tmp_path / "rows"))
    arrow = next((tmp_path / "rows").glob("*.arrow"))
    arrow.rename(folder / "some_chats-train.arrow")
    (folder / "dataset_info.json").write_text(
        json.dumps(
            {
                "dataset_name": "some_chats",
                "config_name": "default",
                "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0},
                "features": {"text": {"dtype": "string", "_type": "Value"}},
                "splits": {
                    "train": {"name": "train", "num_examples": 2, "dataset_name": "some_chats"}
                },
            }
        )
    )
    found = load_rows(NAME, split="train")
    assert [row.value["text"] for row in found] == ["one", "two"]
