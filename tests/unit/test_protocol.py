from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest

from qkit.protocol import (
    Envelope,
    Failure,
    QuantizeRequest,
    SchemaError,
    dump,
    load,
    read_json,
    write_json,
)

REQUEST = QuantizeRequest(
    method="awq",
    model_path="/models/a",
    out_path="/models/b",
    calibration_path=None,
    weight_bits=4,
    group_size=128,
    symmetric=False,
    actorder=None,
    dampening_frac=0.01,
    smoothing_strength=0.8,
    rounding="gptq",
    scales="dynamic",
    kv_cache=None,
    ignore=("lm_head",),
    seed=0,
    device="cpu",
    trust_remote_code=False,
)
ENVELOPE = Envelope(
    schema_version=1,
    status="error",
    value=None,
    error=Failure("ValueError", "no", "Traceback"),
    versions={"torch": "2"},
    duration_s=1.5,
)


@pytest.mark.parametrize("value", [REQUEST, replace(REQUEST, calibration_path="x"), ENVELOPE])
def test_a_value_survives_json(value):
    assert load(type(value), json.loads(json.dumps(dump(value)))) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grup_size": 1}, "QuantizeRequest: unknown key 'grup_size'"),
        ({"group_size": "128"}, "QuantizeRequest.group_size: expected int, found str"),
        ({"group_size": True}, "QuantizeRequest.group_size: expected int, found bool"),
        ({"ignore": "lm_head"}, "QuantizeRequest.ignore: expected a list, found str"),
        ({"ignore": [1]}, "QuantizeRequest.ignore[0]: expected str, found int"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(change, message):
    with pytest.raises(SchemaError) as caught:
        load(QuantizeRequest, {**dump(REQUEST), **change})
    assert str(caught.value) == message


def test_a_missing_key_is_refused():
    value = dump(REQUEST)
    del value["seed"]
    with pytest.raises(SchemaError, match="missing key 'seed'"):
        load(QuantizeRequest, value)


def test_literals_and_nested_values_are_checked():
    with pytest.raises(SchemaError, match=r"Envelope\.status: 'fine' is none of"):
        load(Envelope, {**dump(ENVELOPE), "status": "fine"})
    with pytest.raises(SchemaError, match=r"Envelope\.error: missing key 'traceback'"):
        load(Envelope, {**dump(ENVELOPE), "error": {"type": "a", "message": "b"}})


def test_an_int_is_read_where_a_float_is_expected():
    assert load(Envelope, {**dump(ENVELOPE), "duration_s": 2}).duration_s == 2.0


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    @dataclass(frozen=True)
    class Bad:
        value: float

    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, Bad(float("nan")))
    assert read_json(path) == {"a": 1}


def test_a_file_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("{")
    with pytest.raises(SchemaError, match=r"result\.json: not valid JSON"):
        read_json(path)
