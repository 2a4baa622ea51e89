"""Quantize with llm-compressor alone, as one would without qkit: the yardstick of a benchmark.

    python bare_llmcompressor.py MODEL ROWS.jsonl OUT METHOD SAMPLES SEQ_LEN SEED DONE.json

Runs under llm-compressor's environment and knows nothing of qkit. Rows, their order, packing and
recipe are those of `qkit quantize`, so the weights come out the same to the byte. Seconds of each
part go to DONE.json.
"""

from __future__ import annotations

import time

started = time.perf_counter()

import json  # noqa: E402  (the clock starts before the imports)
import random  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from datasets import Dataset  # noqa: E402
from llmcompressor import oneshot  # noqa: E402
from llmcompressor.modifiers.gptq import GPTQModifier  # noqa: E402
from llmcompressor.modifiers.quantization import QuantizationModifier  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed  # noqa: E402

IGNORE = ["lm_head"]
RECIPES = {
    "gptq": lambda: GPTQModifier(targets="Linear", scheme="W4A16", ignore=IGNORE),
    "rtn": lambda: QuantizationModifier(targets="Linear", scheme="W4A16", ignore=IGNORE),
    "fp8": lambda: QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=IGNORE),
}
CALIBRATED = ("gptq",)


def main() -> None:
    model_path, rows_path, out, method, samples, seq_len, seed, done = sys.argv[1:]
    parts = {"import": time.perf_counter() - started}

    def part(name: str) -> None:
        parts[name] = time.perf_counter() - started - sum(parts.values())

    set_seed(int(seed))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    part("load")
    arguments = {}
    if method in CALIBRATED:
        rows = [json.loads(line) for line in Path(rows_path).read_text().splitlines()]
        random.Random(int(seed)).shuffle(rows)
        ids: list[int] = []
        for row in rows:
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) >= int(samples) * int(seq_len):
                break
        packed = [ids[i * int(seq_len) : (i + 1) * int(seq_len)] for i in range(int(samples))]
        arguments = {
            "dataset": Dataset.from_dict({"input_ids": packed}),
            "num_calibration_samples": len(packed),
            "shuffle_calibration_samples": False,
        }
    part("calibration")
    oneshot(model=model, processor=tokenizer, recipe=RECIPES[method](), **arguments)
    part("quantize")
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)
    part("save")
    Path(done).write_text(json.dumps(parts))


if __name__ == "__main__":
    main()
