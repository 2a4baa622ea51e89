"""Files of prompts: what is read, and what is said about broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qkit.errors import InputError
from qkit.evaluate.workloads.rows import TraceRow, read_rows
from qkit.evaluate.workloads.units import Message

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def read(tmp_path: Path, name: str, text: str, file_format: Any = "auto") -> Any:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_rows(path, file_format)


def test_formats_are_told_apart(tmp_path: Path) -> None:
    share = read(tmp_path, "a.json", '[{"conversations": [{"from": "human", "value": "q"}]}]')
    assert (share.format, share.chats[0].messages) == ("sharegpt", (Message("user", "q"),))
    vllm = read(tmp_path, "b.jsonl", '{"prompt": "q", "output_tokens": 3}\n\n{"prompt": "r"}\n')
    assert (vllm.format, [row.output_tokens for row in vllm.chats]) == ("vllm", [3, None])
    parts = '[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]'
    chat = read(tmp_path, "c.jsonl", f'{{"messages": [{{"role": "user", "content": {parts}}}]}}')
    assert (chat.format, chat.chats[0].messages) == ("openai", (Message("user", "ab"),))
    trace = read(tmp_path, "d.csv", HEAD + "10.5,3,4\n12,5,6\n")
    assert trace.trace == (TraceRow(0.0, 3, 4), TraceRow(1.5, 5, 6))


def test_answers_without_a_question_are_passed_over(tmp_path: Path) -> None:
    text = (
        '[{"conversations": [{"from": "gpt", "value": "a"}]},'
        '{"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "q"}]}]'
    )
    (row,) = read(tmp_path, "a.json", text).chats
    assert row.messages == (Message("user", "q"),)


@pytest.mark.parametrize(
    ("name", "text", "place", "message"),
    [
        ("a.jsonl", '{"prompt": "q"}\n{"prompt": \n', "a.jsonl:2", "not valid JSON"),
        ("a.json", '[{"conversations": []},\n {"conv\n]', "a.json:2", "not valid JSON"),
        ("a.jsonl", '{"prompt": "q"}\n[1]\n', "a.jsonl:2", "not a JSON object but list"),
        ("a.jsonl", '{"prompt": "q"}\n{"text": "q"}\n', "a.jsonl:2", "`prompt` is missing"),
        ("a.jsonl", '{"prompt": "q", "output_tokens": 0}', "a.jsonl:1", "`output_tokens` is 0"),
        ("a.jsonl", '{"text": "q"}\n', "a.jsonl:1", "has none of messages, conversations, prompt"),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "q"}]}\n{"messages": [{"role": "user"}]}',
            "a.jsonl:2",
            "not both `role` and `content`",
        ),
        (
            "a.json",
            '[{"conversations": [{"from": "alien", "value": "q"}]}]',
            "a.json, conversation 1",
            "`from` is 'alien'",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens\n1,2\n", "a.csv:1", "no column GeneratedTokens"),
        ("a.csv", HEAD + "1,2,3\n2,x,3\n", "a.csv:3", "ContextTokens is 'x'"),
        ("a.csv", HEAD + "1,2,0\n", "a.csv:2", "GeneratedTokens is 0, below 1"),
        ("a.csv", HEAD + "noon,2,3\n", "a.csv:2", "TIMESTAMP is 'noon'"),
        ("a.csv", HEAD + "5,2,3\n4,2,3\n", "a.csv:3", "lies before the one above"),
        ("a.csv", HEAD, "a.csv", "no prompt in it"),
        ("a.jsonl", "\n", "a.jsonl", "no prompt in it"),
    ],
)
def test_a_broken_file_is_named_with_its_line(
    tmp_path: Path, name: str, text: str, place: str, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, name, text)
    assert message in caught.value.what
    assert caught.value.where == str(tmp_path / place)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_rows(tmp_path / "none.jsonl", "auto")
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(InputError, match="not UTF-8"):
        read_rows(tmp_path / "b.jsonl", "auto")
