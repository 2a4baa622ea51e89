"""Calibration data: what is read, how it is packed, and what a person is told when it is wrong."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes.checkpoints import CHAT_TEMPLATE, TinyQwen2, write_tokenizer

from qkit.errors import EXIT_USAGE, InputError
from qkit.measurements import CalibrationRecord
from qkit.quantize import calibration_rows
from qkit.quantize.calibration import check_calibration, prepare_calibration
from qkit.quantize.calibration_rows import load_rows, sample_rows
from qkit.quantize.calibration_scripts import mix_label, script_mix, script_of
from qkit.recipe import Calibration

TEXTS = [
    f"Sentence number {index} is about the letter {chr(97 + index % 26)}." for index in range(40)
]
CHAT = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
]
SHARE_GPT = [
    {"from": "human", "value": "What is two and two?"},
    {"from": "gpt", "value": "Four."},
]
PARTS = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in CHAT]
#: The tokenizer's only merges are its special tokens, so text tokens are bytes.
CHAT_BYTES = "user\nWhat is two and two?", "\n", "assistant\nFour.", "\n"


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyQwen2().write(tmp_path_factory.mktemp("tokenizer") / "model")


def prepare(
    source: Path, tokenizer_path: Path, tmp_path: Path, **settings: Any
) -> tuple[CalibrationRecord, list[list[int]]]:
    config = Calibration(
        **{"source": str(source), "samples": 4, "seq_len": 32, "split": "train", **settings}
    )
    out = tmp_path / "out" / "calibration.jsonl"
    record = prepare_calibration(config, tokenizer_path=tokenizer_path, out=out)
    assert record.tokens_hash == hashlib.sha256(out.read_bytes()).hexdigest()
    return record, [json.loads(line) for line in out.read_text().splitlines()]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json_array(path: Path, rows: list[Any]) -> Path:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_csv(path: Path, rows: list[Any]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_paragraphs(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n\n".join(row["text"] for row in rows) + "\n", encoding="utf-8")
    return path


WRITERS: list[tuple[str, Callable[[Path, list[Any]], Path]]] = [
    ("data.jsonl", write_jsonl),
    ("data.json", write_json_array),
    ("lines.json", write_jsonl),
    ("data.parquet", write_parquet),
    ("data.csv", write_csv),
    ("data.txt", write_paragraphs),
]


@pytest.mark.parametrize(("name", "writer"), WRITERS, ids=[name for name, _ in WRITERS])
def test_every_kind_of_file_gives_the_same_tokens(
    tmp_path: Path, tokenizer_path: Path, name: str, writer: Callable[[Path, list[Any]], Path]
) -> None:
    source = writer(tmp_path / name, [{"text": text} for text in TEXTS])
    record, samples = prepare(source, tokenizer_path, tmp_path)
    reference, expected = prepare(
        write_jsonl(tmp_path / "reference.jsonl", TEXTS), tokenizer_path, tmp_path
    )
    assert samples == expected
    assert record.tokens_hash == reference.tokens_hash
    assert [len(sample) for sample in samples] == [32] * 4
    assert (record.requested_samples, record.used_samples, record.total_tokens) == (4, 4, 128)


def test_a_folder_is_read_whole_and_a_split_of_it_alone(
    tmp_path: Path, tokenizer_path: Path
) -> None:
    data = tmp_path / "set" / "data"
    data.mkdir(parents=True)
    rows = [{"text": text} for text in TEXTS]
    write_parquet(data / "train-00000-of-00002.parquet", rows[:10])
    write_parquet(data / "train-00001-of-00002.parquet", rows[10:20])
    write_jsonl(data / "test.jsonl", rows[20:])
    (data.parent / "README.md").write_text("not read")
    (data.parent / "dataset_infos.json").write_text("{}")
    everything = {"samples": 1000, "seq_len": 8}
    train, _ = prepare(data.parent, tokenizer_path, tmp_path, **everything)
    assert train.rows_read == 20
    every, _ = prepare(data.parent, tokenizer_path, tmp_path, split="validation", **everything)
    assert every.rows_read == 40


def test_no_token_is_lost_in_packing(tmp_path: Path, tokenizer_path: Path) -> None:
    """The samples are the rows, end to end, in the order of the seed's shuffle."""
    source = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    record, samples = prepare(source, tokenizer_path, tmp_path, samples=1000, seq_len=50)
    total = sum(len(text.encode()) for text in TEXTS)
    assert (
        record.total_tokens
        == sum(map(len, samples))
        == total - (total % 50 if total % 50 < 8 else 0)
    )
    assert {len(sample) for sample in samples[:-1]} == {50}
    assert record.used_samples == len(samples)
    assert (record.rows_read, record.rows_skipped) == (40, 0)


def test_too_little_data_gives_fewer_samples_and_says_so(
    tmp_path: Path, tokenizer_path: Path
) -> None:
    source = write_jsonl(tmp_path / "data.jsonl", ["a" * 100, "", "b" * 20])
    record, samples = prepare(source, tokenizer_path, tmp_path, samples=16, seq_len=50)
    assert [len(sample) for sample in samples] == [50, 50, 20]
    assert (record.requested_samples, record.used_samples, record.total_tokens) == (16, 3, 120)
    assert (record.rows_read, record.rows_skipped) == (3, 1)


def test_only_the_rows_needed_are_read_and_every_one_is_accounted_for(
    tmp_path: Path, tokenizer_path: Path
) -> None:
    source = write_jsonl(tmp_path / "data.jsonl", ["x" * 60] * 900 + [" "] * 100)
    record, samples = prepare(source, tokenizer_path, tmp_path, samples=8, seq_len=32)
    assert sum(map(len, samples)) == 256
    assert record.rows_there == 1000
    assert record.rows_read == record.rows_used + record.rows_skipped
    # 256 tokens are four rows of 60 and 16 tokens of a fifth.
    assert (record.rows_used, record.rows_truncated, record.tokens_left_out) == (5, 1, 44)


def test_a_last_sample_that_is_too_short_is_left_out_and_counted(
    tmp_path: Path, tokenizer_path: Path
) -> None:
    source = write_jsonl(tmp_path / "data.jsonl", ["x" * 35])
    record, samples = prepare(source, tokenizer_path, tmp_path, samples=4, seq_len=32)
    assert [len(sample) for sample in samples] == [32]
    assert (record.rows_used, record.rows_truncated, record.tokens_left_out) == (1, 1, 3)


def test_the_script_mix_is_that_of_the_rows_and_not_of_the_template(
    tmp_path: Path, tokenizer_path: Path
) -> None:
    turns = [{"role": "user", "content": "二加二是多少"}, {"role": "assistant", "content": "四 ok"}]
    source = write_jsonl(tmp_path / "data.jsonl", [{"messages": turns}])
    record, _ = prepare(source, tokenizer_path, tmp_path, seq_len=512)
    assert record.scripts == {"Han": pytest.approx(7 / 9), "Latin": pytest.approx(2 / 9)}
    # A vocabulary of bytes holds ASCII letters alone: nothing says that the model knows more.
    assert record.warning is None


def test_one_script_for_a_model_of_many_is_warned_of(tmp_path: Path) -> None:
    folder = tmp_path / "multilingual"
    folder.mkdir()
    write_tokenizer(folder, words=("и", "не", "на", "的", "是", "不"))
    latin = write_jsonl(tmp_path / "latin.jsonl", TEXTS)
    record, _ = prepare(latin, folder, tmp_path)
    assert record.warning is not None
    assert record.warning.startswith(
        "100 % of the calibration's letters are Latin, and the model's vocabulary also holds"
    )
    assert "Cyrillic" in record.warning
    assert "Han" in record.warning
    mixed = write_jsonl(tmp_path / "mixed.jsonl", [*TEXTS, *["не на и " * 20] * 10])
    assert prepare(mixed, folder, tmp_path, samples=1000)[0].warning is None


@pytest.mark.parametrize(
    ("letters", "script"),
    [
        ("aÉßﬁ\uff21ª\U0001d400\u212a", "Latin"),
        ("中々〇㐀𠀀", "Han"),
        ("жЯ", "Cyrillic"),
        ("عربي", "Arabic"),
        ("हन", "Devanagari"),
        ("한글", "Hangul"),
        ("ひカｶー", "Kana"),
        ("Ωµ", "Greek"),
        ("ไ", "Thai"),
        ("א", "Hebrew"),
    ],
)
def test_letters_and_their_scripts(letters: str, script: str) -> None:
    for letter in letters:
        if letter.isalpha():
            assert script_of(letter) == script, letter
    assert script_mix(dict.fromkeys(letters + "12 .,😀\ufffd", 1)) == {script: 1.0}


def test_a_mix_is_told_in_one_line() -> None:
    assert mix_label({"Latin": 0.992, "Han": 0.008}) == "Latin 99.2 %, Han 0.8 %"
    assert mix_label({}) == "no letters"
    many = dict.fromkeys("abcdefgh", 1 / 8)
    assert mix_label(many, shown=2) == "a 12.5 %, b 12.5 %, others 75 %"


@pytest.mark.parametrize(("name", "writer"), WRITERS, ids=[name for name, _ in WRITERS])
def test_a_sample_is_the_beginning_of_a_source(
    tmp_path: Path, name: str, writer: Callable[[Path, list[Any]], Path]
) -> None:
    source = str(writer(tmp_path / name, [{"text": f"{n} {t}"} for n, t in enumerate(TEXTS * 40)]))
    whole = load_rows(source, split="train")
    assert sample_rows(source, split="train", max_bytes=1 << 20) == (list(whole), True)
    found = sample_rows(source, split="train", max_bytes=4000)
    if name.endswith(".json"):  # read whole or not at all: it may be one array
        assert found is None
        return
    assert found is not None
    rows, everything = found
    assert not everything
    assert 20 <= len(rows) < len(whole)
    assert rows[:-1] == list(whole)[: len(rows) - 1]


def test_a_sample_of_a_folder_and_of_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", TEXTS)
    write_jsonl(folder / "b.jsonl", TEXTS)
    rows, whole = sample_rows(str(folder), split="train", max_bytes=1 << 20) or ([], False)
    assert (len(rows), whole) == (80, True)
    rows, whole = sample_rows(str(folder), split="train", max_bytes=100) or ([], True)
    assert not whole
    assert len(rows) < 40
    assert sample_rows("owner/name", split="train", max_bytes=100) is None
    with pytest.raises(InputError, match="there is no calibration file"):
        sample_rows("./nowhere.jsonl", split="train", max_bytes=100)


def test_a_local_source_is_checked_and_nothing_kept(tmp_path: Path, tokenizer_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", TEXTS)
    check_calibration(Calibration(source=str(good), samples=1, seq_len=32), tokenizer_path)
    assert {path.name for path in tmp_path.iterdir()} == {"good.jsonl"}
    # The hub is nobody's business before the variant that needs it.
    check_calibration(Calibration(source="owner/name"), tokenizer_path)
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"messages": [{"role": "alien"}]}])
    with pytest.raises(InputError, match="a chat turn's role is 'alien'"):
        check_calibration(Calibration(source=str(bad)), tokenizer_path)


def test_the_seed_decides_the_order(tmp_path: Path, tokenizer_path: Path) -> None:
    source = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    first, samples = prepare(source, tokenizer_path, tmp_path, seed=1)
    again, same = prepare(source, tokenizer_path, tmp_path, seed=1)
    other, different = prepare(source, tokenizer_path, tmp_path, seed=2)
    assert (first.tokens_hash, samples) == (again.tokens_hash, same)
    assert first.tokens_hash != other.tokens_hash
    assert samples != different


@pytest.mark.parametrize(
    ("column", "turns"),
    [
        ("messages", CHAT),
        ("conversations", SHARE_GPT),
        (
            "messages",
            [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in CHAT],
        ),
    ],
    ids=["messages", "conversations", "parts"],
)
@pytest.mark.parametrize("writer", [write_jsonl, write_parquet])
def test_chats_go_through_the_template(
    tmp_path: Path,
    tokenizer_path: Path,
    column: str,
    turns: list[Any],
    writer: Callable[[Path, list[Any]], Path],
) -> None:
    suffix = "jsonl" if writer is write_jsonl else "parquet"
    source = writer(tmp_path / f"data.{suffix}", [{"id": 1, column: turns}])
    _, samples = prepare(source, tokenizer_path, tmp_path, seq_len=512)
    start, end = 257, 258
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    user, line, assistant, last = (tokenizer(part)["input_ids"] for part in CHAT_BYTES)
    assert samples == [[start, *user, end, *line, start, *assistant, end, *last]]


def test_a_byte_order_mark_and_line_separators_in_strings_are_fine(
    tmp_path: Path, tokenizer_path: Path
) -> None:
    source = tmp_path / "data.jsonl"
    source.write_text(
        "\ufeff" + json.dumps({"text": "one\u2028two " * 10}, ensure_ascii=False) + "\r\n\r\n",
        encoding="utf-8",
    )
    record, _ = prepare(source, tokenizer_path, tmp_path)
    assert (record.rows_read, record.rows_skipped) == (1, 0)


def text(value: str, encoding: str = "utf-8") -> Callable[[Path], object]:
    return lambda path: path.write_bytes(value.encode(encoding))


def rows(*values: Any) -> Callable[[Path], object]:
    return lambda path: write_jsonl(path, list(values))


LONG = {"text": "x" * 100}
BAD: list[tuple[str, str, Callable[[Path], object], dict[str, Any], str, str, str]] = [
    # id, file, content, settings, message, place after the file's name, part of the fix
    ("empty", "a.jsonl", text(""), {}, "the calibration file is empty", "", ""),
    ("blank", "a.jsonl", text(" \n\n"), {}, "the calibration file is blank", "", ""),
    (
        "broken line",
        "a.jsonl",
        text('{"text": "fine"}\n\n{"text": "cut\n'),
        {},
        "line 3 is not valid JSON",
        ":3",
        "every line must be one JSON object",
    ),
    (
        "a number for a row",
        "a.jsonl",
        text('{"text": "fine"}\n42\n'),
        {},
        "a calibration row is int, not an object or a text",
        ":2",
        "",
    ),
    (
        "a broken array",
        "a.json",
        text('[{"text": "fine"}, '),
        {},
        "the file is not valid JSON",
        ":1",
        "it must be one array of rows",
    ),
    (
        "half a character",
        "a.jsonl",
        text('{"text": "fine"}\n{"text": "broken \\ud83d"}\n'),
        {},
        "the text holds half a character (\\ud83d), which no tokenizer takes",
        ":2",
        "leave it out",
    ),
    (
        "one object",
        "a.json",
        text('{\n"text": "fine"}'),
        {},
        "the JSON file holds one object, not an array of rows",
        "",
        "wrap the rows in [ ]",
    ),
    (
        "UTF-16",
        "a.jsonl",
        text('{"text": "fine"}', "utf-16"),
        {},
        "a.jsonl is UTF-16 (or binary), not UTF-8",
        "",
        "iconv -f UTF-16 -t UTF-8 a.jsonl > converted.jsonl",
    ),
    (
        "UTF-16 without a mark",
        "a.txt",
        text("plain text", "utf-16-le"),
        {},
        "a.txt is UTF-16 (or binary), not UTF-8",
        "",
        "iconv -f UTF-16",
    ),
    (
        "Latin-1",
        "a.txt",
        text("first line\nsecond line\ncaf\u00e9\n", "latin-1"),
        {},
        "line 3 is not UTF-8 (byte 0xe9)",
        ":3",
        "iconv -f LATIN1 -t UTF-8 a.txt > converted.txt",
    ),
    (
        "no known column",
        "a.jsonl",
        rows({"prompt": "x", "answer": "y"}),
        {},
        "none of the columns messages, conversations, text is in the calibration data",
        ":1",
        "set calibration.column to one of them",
    ),
    (
        "a wrong column",
        "a.jsonl",
        rows({"text": "x", "answer": "y"}),
        {"column": "answers"},
        "the calibration data has no column 'answers', did you mean 'answer'?",
        ":1",
        "set calibration.column to one of them",
    ),
    (
        "a column of plain texts",
        "a.txt",
        text("some text"),
        {"column": "text"},
        "calibration.column is 'text', but the rows are plain texts",
        ":1",
        "leave calibration.column out",
    ),
    (
        "a column of numbers",
        "a.jsonl",
        rows({"text": 5}),
        {},
        "column 'text' holds int, not a text or a list of messages",
        ":1",
        "set calibration.column",
    ),
    (
        "texts and objects mixed",
        "a.jsonl",
        rows("text", {"text": "x"}),
        {},
        "some calibration rows are texts and this one is not",
        ":2",
        "",
    ),
    (
        "only blank rows",
        "a.jsonl",
        rows({"text": ""}, {"text": " "}, {"text": None}),
        {},
        "holds 0 tokens in 3 rows (3 of them without text); at least 8 are needed",
        "",
        "give more text",
    ),
    (
        "too little text",
        "a.jsonl",
        rows({"text": "abc"}),
        {},
        "holds 3 tokens in 1 rows (0 of them without text); at least 8 are needed",
        "",
        "give more text",
    ),
    (
        "an unknown role",
        "a.jsonl",
        rows({"conversations": [{"from": "alien", "value": "hello"}]}),
        {},
        "a chat turn's role is 'alien'",
        ":1",
        "known: human, user, gpt",
    ),
    (
        "a turn without content",
        "a.jsonl",
        rows({"messages": CHAT}, {"messages": [{"role": "user"}]}),
        {},
        "a chat turn has no text in 'content' (or 'value')",
        ":2",
        "every turn needs role and content",
    ),
    (
        "a turn that is no object",
        "a.jsonl",
        rows({"messages": ["hello"]}),
        {},
        "a chat turn is str, not an object",
        ":1",
        "",
    ),
    (
        "a ragged CSV",
        "a.csv",
        text("text,label\nhello,1\nhello, world,1\n"),
        {},
        "line 3 has another number of columns than the header",
        ":3",
        "quote cells that hold commas",
    ),
    (
        "a CSV with an open quote",
        "a.csv",
        text('text\n"never closed\n'),
        {},
        "line 2 is not valid CSV",
        ":2",
        "",
    ),
    ("a CSV without rows", "a.csv", text("text\n"), {}, "holds no row", "", ""),
    (
        "not Parquet",
        "a.parquet",
        text("text, but no table"),
        {},
        "the Parquet file cannot be read",
        "",
        "",
    ),
    (
        "another kind of file",
        "a.arrow",
        text("x"),
        {},
        "calibration files of the kind '.arrow' are not read",
        "",
        "give one of .jsonl, .json, .parquet, .csv, .txt",
    ),
]


@pytest.mark.parametrize(
    ("name", "write", "settings", "message", "place", "fix"),
    [case[1:] for case in BAD],
    ids=[case[0] for case in BAD],
)
def test_bad_data(
    tmp_path: Path,
    tokenizer_path: Path,
    name: str,
    write: Callable[[Path], object],
    settings: dict[str, Any],
    message: str,
    place: str,
    fix: str,
) -> None:
    source = tmp_path / name
    write(source)
    with pytest.raises(InputError) as caught:
        prepare(source, tokenizer_path, tmp_path, **settings)
    assert message in caught.value.what
    assert caught.value.where == f"{source}{place}"
    assert fix in (caught.value.fix or "")
    assert caught.value.exit_code == EXIT_USAGE
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.jsonl", write_jsonl, "line 2 is oversized: it has 115 characters, and a row may have"),
        ("a.txt", write_paragraphs, "line 3 is oversized: it has 103 characters, and a row may"),
        ("a.csv", write_csv, "line 3 is not valid CSV: field larger than field limit (100)"),
    ],
)
def test_a_row_longer_than_any_text(
    tmp_path: Path,
    tokenizer_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    write: Callable[[Path, list[Any]], Path],
    message: str,
) -> None:
    monkeypatch.setattr(calibration_rows, "MAX_ROW_CHARACTERS", 100)
    source = write(tmp_path / name, [{"text": "fine"}, {"text": "x" * 103}])
    with pytest.raises(InputError) as caught:
        prepare(source, tokenizer_path, tmp_path)
    assert message in caught.value.what
    assert caught.value.where == f"{source}:{message.split()[1]}"


def test_the_columns_there_are_listed(tmp_path: Path, tokenizer_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "answer": "y"}])
    with pytest.raises(InputError) as caught:
        prepare(source, tokenizer_path, tmp_path)
    assert caught.value.detail == "columns there: prompt, answer"


@pytest.mark.parametrize("name", ["nothing.jsonl", "./no/such/folder", "~/no-such-file.txt"])
def test_a_missing_file_is_not_looked_for_on_the_hub(
    tmp_path: Path, tokenizer_path: Path, name: str
) -> None:
    with pytest.raises(InputError, match="there is no calibration file"):
        prepare(Path(name), tokenizer_path, tmp_path)


def test_a_folder_without_data(tmp_path: Path, tokenizer_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").touch()
    with pytest.raises(InputError, match="the calibration folder holds no file qkit reads"):
        prepare(tmp_path / "empty", tokenizer_path, tmp_path)


def test_chats_need_a_template(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    write_tokenizer(tmp_path / "bare", chat_template=None)
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    with pytest.raises(InputError, match="the checkpoint's tokenizer has no chat template"):
        prepare(source, tmp_path / "bare", tmp_path)


def test_a_template_that_refuses_a_row_names_it(tmp_path: Path) -> None:
    (tmp_path / "strict").mkdir()
    write_tokenizer(
        tmp_path / "strict",
        chat_template="{% if messages[0]['role'] != 'system' %}"
        "{{ raise_exception('a system message is needed') }}{% endif %}" + CHAT_TEMPLATE,
    )
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    with pytest.raises(InputError, match="refuses this row: a system message is needed") as caught:
        prepare(source, tmp_path / "strict", tmp_path)
    assert caught.value.where == f"{source}:1"


def test_a_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(InputError, match="the checkpoint's tokenizer cannot be loaded"):
        prepare(source, tmp_path / "broken", tmp_path)


def test_an_unreachable_hub_is_explained(tmp_path: Path, tokenizer_path: Path) -> None:
    """Offline mode is read when the hub's client is imported, hence the process of its own."""
    code = (
        "import sys; from pathlib import Path\n"
        "from qkit.errors import HubUnreachableError\n"
        "from qkit.quantize.calibration import prepare_calibration\n"
        "from qkit.recipe import Calibration\n"
        "try:\n"
        "    prepare_calibration(Calibration(), tokenizer_path=Path(sys.argv[1]),"
        " out=Path(sys.argv[2]))\n"
        "except HubUnreachableError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tokenizer_path), str(tmp_path / "out.jsonl")],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        "the calibration data set 'HuggingFaceH4/ultrachat_200k' cannot be had from the Hugging"
        " Face hub" in done.stdout
    )
    assert "give a local file or folder with --calibration" in done.stdout
    assert (
        "hf download --repo-type dataset HuggingFaceH4/ultrachat_200k --local-dir DIR"
        in done.stdout
    )
    assert not (tmp_path / "out.jsonl").exists()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's `owner/chats` be a local file, read by the real datasets library."""
    import datasets

    load = datasets.load_dataset
    chats = [{"id": n, "talk": CHAT, "prompt": TEXTS[n]} for n in range(20)]
    files = {"train_sft": str(write_jsonl(tmp_path / "hub.jsonl", chats))}

    def from_the_hub(name: str, *, split: str) -> Any:
        assert name == "owner/chats"
        return load("json", data_files=files, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", from_the_hub)


@pytest.mark.usefixtures("hub")
def test_a_hub_data_set_with_split_and_column(tmp_path: Path, tokenizer_path: Path) -> None:
    settings = {"split": "train_sft", "samples": 2, "seq_len": 64}
    record, samples = prepare(
        Path("owner/chats"), tokenizer_path, tmp_path, column="talk", **settings
    )
    assert (record.source, record.rows_there, len(samples)) == ("owner/chats", 20, 2)
    assert samples[0][0] == 257  # the template's first token
    _, prompts = prepare(Path("owner/chats"), tokenizer_path, tmp_path, column="prompt", **settings)
    assert 257 not in prompts[0]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "train_stf"}, "has no split 'train_stf', did you mean 'train_sft'?"),
        ({"split": "train_sft", "column": "takl"}, "no column 'takl', did you mean 'talk'?"),
        ({"split": "train_sft"}, "none of the columns messages, conversations, text"),
    ],
)
def test_a_hub_data_set_without_the_split_or_column(
    tmp_path: Path, tokenizer_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        prepare(Path("owner/chats"), tokenizer_path, tmp_path, **settings)
    assert message in caught.value.what
