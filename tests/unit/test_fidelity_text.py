"""The text of the fidelity suite: what can be read, what is refused, and how it is cut."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from qkit.errors import InputError
from qkit.evaluate.fidelity import make_work, window_length
from qkit.evaluate.fidelity_text import BUNDLED_FILE, hash_documents, read_documents
from qkit.evaluate.fidelity_windows import Window, make_prompts, make_windows
from qkit.suites import FidelitySuite


def test_the_bundled_text_has_several_domains_and_a_notice_of_its_licences() -> None:
    documents = read_documents(None)
    domains = Counter(document.name.split("/")[0] for document in documents)
    assert set(domains) == {"reference", "questions", "code", "chinese", "table"}
    assert len(documents) >= 40
    assert 300_000 < BUNDLED_FILE.stat().st_size < 500_000
    assert any("一" <= character <= "鿿" for d in documents for character in d.text)
    notice = (BUNDLED_FILE.parent / "NOTICE.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in notice
    assert notice.count("MIT License") == 2


def test_the_bundled_text_does_not_change_unnoticed() -> None:
    """Measurements of another text are not comparable: a change here is a change for users."""
    assert hash_documents(read_documents(None)).startswith("09dbecc82e03faf8")


def test_files_and_folders_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    line = json.dumps({"text": "with a line separator: \u2028.", "id": "x"}, ensure_ascii=False)
    (tmp_path / "b.jsonl").write_text(line + "\n\n", encoding="utf-8")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    names = [document.name for document in read_documents(str(tmp_path))]
    assert names == ["a.txt", "x"]
    assert [d.text for d in read_documents(str(tmp_path / "a.txt"))] == ["one\n\ntwo\n"]


@pytest.mark.parametrize(
    ("name", "content", "what", "where"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a line is not JSON", ":2"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "no `text` (found ['body'])", ":2"),
        ("a.jsonl", b'{"text": "a"}\n\n["b"]\n', "no `text` (found list)", ":3"),
        ("a.jsonl", b'{"text": "a"}\n{"text": " "}\n', "no `text`", ":2"),
        ("a.jsonl", b"\n", "the text is empty", ""),
        ("a.txt", b"one\ntwo \xff\n", "line 2 is not UTF-8", ""),
        ("a.txt", b" \n", "the text is empty", ""),
        ("a.pdf", b"x", "a .pdf file is no text", ""),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, what: str, where: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_documents(str(tmp_path / name))
    assert what in caught.value.what
    assert (caught.value.where or "").endswith(f"{name}{where}")
    assert caught.value.fix


def test_missing_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no text"):
        read_documents(str(tmp_path / "nothing.txt"))
    with pytest.raises(InputError, match=r"no \.txt"):
        read_documents(str(tmp_path))


def test_windows_take_turns_between_documents() -> None:
    documents = [range(10), range(100, 103), range(200, 206), [7]]
    windows = make_windows(documents, window_tokens=4, tokens=1000)
    assert [(w.document, w.tokens) for w in windows] == [
        (0, (0, 1, 2, 3)),
        (1, (100, 101, 102)),
        (2, (200, 201, 202, 203)),
        (0, (4, 5, 6, 7)),
        (2, (204, 205)),
        (0, (8, 9)),
    ]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 9, 12, 100])
def test_the_limit_counts_scored_tokens(tokens: int) -> None:
    windows = make_windows([range(10), range(9)], window_tokens=4, tokens=tokens)
    whole = sum(
        len(w.tokens) - 1 for w in make_windows([range(10), range(9)], window_tokens=4, tokens=999)
    )
    assert sum(len(window.tokens) - 1 for window in windows) == min(tokens, whole)
    assert all(len(window.tokens) > 1 for window in windows)


def test_prompts_are_beginnings_of_long_enough_windows() -> None:
    windows = [Window(0, (1, 2, 3)), Window(1, (4,) * 2), Window(2, (5, 6, 7, 8))]
    assert make_prompts(windows, prompts=9, prompt_tokens=3) == (
        Window(0, (1, 2, 3)),
        Window(2, (5, 6, 7)),
    )
    assert len(make_prompts(windows, prompts=1, prompt_tokens=3)) == 1


def test_windows_fit_the_served_length() -> None:
    assert window_length(FidelitySuite(), 4096) == 512
    assert window_length(FidelitySuite(), 300) == 299
    assert window_length(FidelitySuite(window_tokens=100), None) == 100
    with pytest.raises(InputError, match=r"window_tokens.* does not fit the served length of 256"):
        window_length(FidelitySuite(window_tokens=256), 256)
    with pytest.raises(InputError, match=r"greedy_tokens.* 128 are needed"):
        window_length(FidelitySuite(), 127)
    assert window_length(FidelitySuite(greedy_prompts=0), 127) == 126
    with pytest.raises(InputError, match="does not say"):
        window_length(FidelitySuite(), None)


def test_a_text_of_one_token_is_refused() -> None:
    with pytest.raises(InputError, match="fewer than two tokens"):
        make_work(FidelitySuite(), read_documents(None)[:1], 512, lambda _: [1])
