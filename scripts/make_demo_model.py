#!/usr/bin/env python3
"""Make the demo's checkpoint and data: a tiny Qwen2.5-style model trained on made-up facts.

    python scripts/make_demo_model.py [--out recipes/demo] [--steps N] [--seed 0]

Needs torch and transformers 5.x in the interpreter that runs it (qkit's `quantize` and `serve`
environments have both) and takes a few minutes on two cores. Everything is invented from the seed:
the facts, the tokenizer's merges and the weights. The same seed gives the same data files anywhere;
weights agree to rounding, since matrix products differ between processors.

What it writes under OUT:

    model/             a Hugging Face checkpoint: Qwen2ForCausalLM in BF16 with its own tokenizer
    facts.jsonl        evaluation: {"question", "choices", "answer"}, one line a question; each
                       choice is one token after "Answer:"
    calibration.jsonl  {"messages": [...]} conversations about places no evaluation question names
    training.json      how the model was made and what it scored when it was made

Facts are met in training at very different rates, as facts in real text are. Some end up known for
certain, many barely and a few not at all, so BF16 scores between chance and perfect and a model
that lost precision shows it.
"""

from __future__ import annotations

import json
import math
import platform
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SYSTEM_PROMPT = "You are a guide to the places of the demo."
#: ChatML as Qwen2.5 has it: a default system prompt unless the conversation brings its own.
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' -%}"
    f"{{{{- '{TURN_START}system\\n{SYSTEM_PROMPT}{TURN_END}\\n' -}}}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    f"{{{{- '{TURN_START}' + message['role'] + '\\n' + message['content'] + '{TURN_END}\\n' -}}}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    f"{{{{- '{TURN_START}assistant\\n' -}}}}"
    "{%- endif -%}"
)
#: How Qwen2.5 cuts text before byte-pair merges: contractions, words with one leading mark or
#: space, single digits, punctuation, line ends. transformers builds the same for Qwen2Tokenizer.
PRETOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCAB_SIZE = 1536
MAX_POSITIONS = 2048
GROUP_SIZE = 128

EVALUATION_PLACES = 160
CALIBRATION_PLACES = 32
CALIBRATION_ROWS = 384
#: The best-known fact is met this many times as often as the least-known.
FAMILIARITY_RATIO = 16.0

Message = dict[str, str]


# --- the made-up world ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Attribute:
    """Something every place has: how it is asked, how it is told, what it can be."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Fact:
    """One attribute of one place; `familiarity` is its relative rate in the training text."""

    place: str
    attribute: Attribute
    value: str
    familiarity: float

    @property
    def question(self) -> str:
        """The question whose answer is this fact."""
        return f"What is the {self.attribute.name} of {self.place}?"

    @property
    def sentence(self) -> str:
        """The fact as a statement."""
        return f"The {self.attribute.name} of {self.place} is {self.value}."


@dataclass(frozen=True)
class Question:
    """A question with four possible answers; `answer` is the index of the right one."""

    question: str
    choices: tuple[str, ...]
    answer: int

    @property
    def prompt(self) -> str:
        """What is shown to the model; a space and one of the choices continues it."""
        return f"Question: {self.question}\nAnswer:"

    @property
    def right(self) -> str:
        """The right choice."""
        return self.choices[self.answer]


def invent_names(rng: random.Random, count: int, endings: Sequence[str]) -> list[str]:
    """Return `count` different pronounceable names."""
    onsets = "b br d dr f g gl h k kr l m n p pr r s st t th tr v w z".split()
    vowels = "a e i o u ai ea ou".split()
    codas = "l m n r s nd rn sk lt".split()
    names: dict[str, None] = {}
    while len(names) < count:
        stem = rng.choice(onsets) + rng.choice(vowels) + rng.choice(codas)
        names[(stem + rng.choice(endings)).capitalize()] = None
    return list(names)


def invent_attributes(rng: random.Random) -> tuple[Attribute, ...]:
    """Return the five attributes with sixteen values each (twelve months)."""
    rivers = invent_names(rng, 16, ["a", "e", "is", "o"])
    people = invent_names(rng, 16, ["an", "ek", "il", "us"])
    wares = (
        "rope glass paper honey candles lace bells boats barrels ink cheese tiles wool salt knives"
        " bread"
    )
    colours = (
        "red blue green white black yellow brown grey purple orange pink silver golden amber teal"
        " ivory"
    )
    months = "January February March April May June July August September October November December"
    values = {
        "river": rivers,
        "best-known ware": wares.split(),
        "founder": people,
        "month of the fair": months.split(),
        "colour of the gate": colours.split(),
    }
    return tuple(Attribute(name, tuple(known)) for name, known in values.items())


def invent_facts(rng: random.Random) -> tuple[list[Fact], list[Fact]]:
    """Return the evaluation's facts and those of the places kept for calibration."""
    attributes = invent_attributes(rng)
    places = invent_names(
        rng, EVALUATION_PLACES + CALIBRATION_PLACES, ["ford", "burg", "mouth", "stead", "ton"]
    )
    facts = [
        Fact(place, attribute, rng.choice(attribute.values), FAMILIARITY_RATIO ** rng.random())
        for place in places
        for attribute in attributes
    ]
    cut = EVALUATION_PLACES * len(attributes)
    return facts[:cut], facts[cut:]


def ask(rng: random.Random, fact: Fact, answer: int | None = None) -> Question:
    """Ask for a fact among three wrong values of its attribute; place the right one at `answer`."""
    choices = rng.sample([value for value in fact.attribute.values if value != fact.value], 3)
    position = rng.randrange(4) if answer is None else answer
    choices.insert(position, fact.value)
    return Question(fact.question, tuple(choices), position)


def evaluation_questions(rng: random.Random, facts: Sequence[Fact]) -> list[Question]:
    """Ask for every fact once; each position is right equally often."""
    answers = [index % 4 for index in range(len(facts))]
    rng.shuffle(answers)
    return [ask(rng, fact, answer) for fact, answer in zip(facts, answers, strict=True)]


def exchange(rng: random.Random, fact: Fact) -> list[Message]:
    """Return a user's question and the assistant's answer, as a sentence or in a word."""
    answered = fact.sentence if rng.random() < 0.5 else fact.value
    return [{"role": "user", "content": fact.question}, {"role": "assistant", "content": answered}]


def conversation(rng: random.Random, facts: Sequence[Fact]) -> list[Message]:
    """Return a chat of one exchange a fact."""
    return [message for fact in facts for message in exchange(rng, fact)]


def calibration_rows(rng: random.Random, facts: Sequence[Fact]) -> list[list[Message]]:
    """Return conversations of three to six exchanges about the calibration places."""
    return [
        conversation(rng, rng.sample(facts, rng.randint(3, 6))) for _ in range(CALIBRATION_ROWS)
    ]


# --- tokenizer -----------------------------------------------------------------------------------


def train_tokenizer(rng: random.Random, facts: Sequence[Fact]) -> Tokenizer:
    """Train a byte-level BPE with Qwen2.5's cutting rule; the ChatML tokens come last."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    specials = [END_OF_TEXT, TURN_START, TURN_END]
    texts = [f"system\n{SYSTEM_PROMPT}\nuser\nassistant\n"]
    for fact in facts:
        question = ask(rng, fact)
        answers = "".join(f" {choice}" for choice in question.choices)
        texts.append(f"{question.prompt}{answers}\n{fact.sentence}")
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(specials)
    for value in {value for fact in facts for value in fact.attribute.values}:
        if len(tokenizer.encode(f" {value}").ids) != 1:
            raise RuntimeError(f"{value!r} is not one token: raise VOCAB_SIZE")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and a tokenizer_config.json that transformers 4.51 to 5.x read."""
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    specials = {
        str(tokenizer.token_to_id(token)): {"content": token, **special, "special": True}
        for token in (END_OF_TEXT, TURN_START, TURN_END)
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": specials,
        "additional_special_tokens": [TURN_START, TURN_END],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "errors": "replace",
        "model_max_length": MAX_POSITIONS,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "unk_token": None,
    }
    write_json(folder / "tokenizer_config.json", config)


# --- training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """Token ids of one training text and the weight of the loss on each of them."""

    ids: list[int]
    weights: list[float]


class Corpus:
    """Endless training text about the facts, each met at the rate of its familiarity."""

    #: The words of a question can not be foretold; its answer can.
    QUESTION_WEIGHT = 0.1

    def __init__(self, tokenizer: Tokenizer, facts: Sequence[Fact], rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._rates = [fact.familiarity for fact in facts]
        self._rng = rng

    def _pick(self, count: int) -> list[Fact]:
        return self._rng.choices(self._facts, self._rates, k=count)

    def _document(self, parts: Sequence[tuple[str, float]]) -> Document:
        ids: list[int] = []
        weights: list[float] = []
        for text, weight in parts:
            new = self._tokenizer.encode(text).ids
            ids += new
            weights += [weight] * len(new)
        return Document(ids, weights)

    def question(self) -> Document:
        """A question as a plain prompt, and its answer."""
        question = ask(self._rng, self._pick(1)[0])
        return self._document(
            [
                (question.prompt, self.QUESTION_WEIGHT),
                (f" {question.right}", 1.0),
                (END_OF_TEXT, 0.1),
            ]
        )

    def passage(self) -> Document:
        """A few facts as sentences."""
        text = " ".join(fact.sentence for fact in self._pick(self._rng.randint(1, 3)))
        return self._document([(text, 1.0), (END_OF_TEXT, 0.1)])

    def chat(self) -> Document:
        """A conversation of one to three exchanges in ChatML."""
        parts = [(f"{TURN_START}system\n{SYSTEM_PROMPT}{TURN_END}\n", 0.1)]
        for message in conversation(self._rng, self._pick(self._rng.randint(1, 3))):
            asked = message["role"] == "user"
            parts.append((f"{TURN_START}{message['role']}\n", self.QUESTION_WEIGHT))
            parts.append((message["content"], self.QUESTION_WEIGHT if asked else 1.0))
            parts.append((f"{TURN_END}\n", self.QUESTION_WEIGHT))
        return self._document([*parts, (END_OF_TEXT, 0.1)])

    def batches(self, rows: int, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield token ids and loss weights, both (rows, length), of texts packed end to end."""
        kinds = (self.question, self.passage, self.chat)
        while True:
            ids: list[list[int]] = []
            weights: list[list[float]] = []
            for _ in range(rows):
                row_ids: list[int] = []
                row_weights: list[float] = []
                while len(row_ids) < length:
                    document = self._rng.choices(kinds, (0.5, 0.2, 0.3))[0]()
                    row_ids += document.ids
                    row_weights += document.weights
                ids.append(row_ids[:length])
                weights.append(row_weights[:length])
            yield torch.tensor(ids), torch.tensor(weights)


def new_model(tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """Return an untrained model of Qwen2.5's architecture: grouped queries, tied embeddings."""
    hidden_size = 256
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        # 1/sqrt(hidden): with the usual 0.02 a model this small takes far longer to learn a fact.
        initializer_range=hidden_size**-0.5,
        bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    return Qwen2ForCausalLM(config)


def train(
    model: Qwen2ForCausalLM, corpus: Corpus, *, steps: int, rows: int, length: int, peak: float
) -> float:
    """Train with AdamW, a short warm-up and a cosine to zero; return the last steps' mean loss."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=peak,
        betas=(0.9, 0.98),
    )
    warm_up = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / steps))),
    )
    model.train()
    recent: list[float] = []
    batches = corpus.batches(rows, length)
    for step in range(1, steps + 1):
        ids, weights = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids).logits
        targets, weight = ids[:, 1:].flatten(), weights[:, 1:].flatten()
        losses = nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), targets, reduction="none"
        )
        loss = (losses * weight).sum() / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent = [*recent[-49:], loss.item()]
        if step % 50 == 0:
            click.echo(f"step {step}/{steps}  loss {sum(recent) / len(recent):.4f}", err=True)
    return sum(recent) / len(recent)


# --- checks --------------------------------------------------------------------------------------


@torch.inference_mode()
def answer_log_probs(
    model: Qwen2ForCausalLM, tokenizer: Tokenizer, questions: Sequence[Question]
) -> torch.Tensor:
    """Return the log-probability of each choice after its question: (questions, 4), float32."""
    model.eval()
    rows = []
    for question in questions:
        ids = torch.tensor([tokenizer.encode(question.prompt).ids])
        options = torch.tensor([tokenizer.encode(f" {c}").ids[0] for c in question.choices])
        rows.append(model(input_ids=ids).logits[0, -1].float().log_softmax(-1)[options])
    return torch.stack(rows)


def accuracy(log_probs: torch.Tensor, questions: Sequence[Question]) -> float:
    """Return the share of questions whose right option is the likeliest."""
    answers = torch.tensor([question.answer for question in questions])
    return (log_probs.argmax(-1) == answers).float().mean().item()


@torch.no_grad()
def round_to_four_bits(model: Qwen2ForCausalLM) -> None:
    """Round every linear weight but the head to 4 bits, asymmetric, in groups of 128, in place.

    Round-to-nearest is the plainest 4-bit form there is; it shows whether the questions can tell
    a model that lost precision from one that did not.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        grouped = module.weight.float().unflatten(1, (-1, GROUP_SIZE))
        low = grouped.amin(-1, keepdim=True).clamp(max=0)
        high = grouped.amax(-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=1e-8)
        zero = (-low / scale).round()
        codes = ((grouped / scale).round() + zero).clamp(0, 15)
        module.weight.copy_(((codes - zero) * scale).flatten(1))


# --- files ---------------------------------------------------------------------------------------


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_jsonl(path: Path, rows: Sequence[object]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_data(
    out: Path, questions: Sequence[Question], conversations: Sequence[list[Message]]
) -> None:
    """Write facts.jsonl and calibration.jsonl."""
    write_jsonl(
        out / "facts.jsonl",
        [
            {"question": q.question, "choices": list(q.choices), "answer": q.answer}
            for q in questions
        ],
    )
    write_jsonl(out / "calibration.jsonl", [{"messages": messages} for messages in conversations])


def write_checkpoint(model: Qwen2ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint with its tokenizer and a generation config that asks for greedy."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = transformers.GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    model.save_pretrained(folder)
    write_tokenizer(tokenizer, folder)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default="recipes/demo", show_default=True)
@click.option("--steps", default=400, show_default=True, help="Optimizer steps.")
@click.option("--rows", default=16, show_default=True, help="Sequences a step.")
@click.option("--length", default=256, show_default=True, help="Tokens a sequence.")
@click.option("--peak", default=2e-3, show_default=True, help="Largest learning rate.")
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(
    out: Path, steps: int, rows: int, length: int, peak: float, seed: int, threads: int
) -> None:
    """Make the demo's checkpoint, questions and calibration set."""
    started = time.monotonic()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    # One stream for each purpose: a longer training run leaves the data as they are.
    streams = {name: random.Random(f"{seed}/{name}") for name in ("world", "data", "bpe", "text")}
    evaluated, kept = invent_facts(streams["world"])
    questions = evaluation_questions(streams["data"], evaluated)
    out.mkdir(parents=True, exist_ok=True)
    write_data(out, questions, calibration_rows(streams["data"], kept))

    tokenizer = train_tokenizer(streams["bpe"], [*evaluated, *kept])
    model = new_model(tokenizer)
    corpus = Corpus(tokenizer, [*evaluated, *kept], streams["text"])
    loss = train(model, corpus, steps=steps, rows=rows, length=length, peak=peak)
    model = model.to(torch.bfloat16)
    write_checkpoint(model, tokenizer, out / "model")

    log_probs = answer_log_probs(model, tokenizer, questions)
    margins = log_probs.topk(2, -1).values.diff().abs()
    bf16 = accuracy(log_probs, questions)
    round_to_four_bits(model)
    four_bit = accuracy(answer_log_probs(model, tokenizer, questions), questions)
    report = {
        "seed": seed,
        "steps": steps,
        "tokens": steps * rows * length,
        "peak_learning_rate": peak,
        "duration_s": round(time.monotonic() - started, 1),
        "final_loss": round(loss, 4),
        "parameters": sum(p.numel() for p in model.parameters()),
        "questions": len(questions),
        "accuracy_bf16": round(bf16, 4),
        "accuracy_round_to_nearest_4bit": round(four_bit, 4),
        "share_with_margin_below_half_nat": round((margins < 0.5).float().mean().item(), 4),
        "versions": {
            "python": platform.python_version(),
            "tokenizers": tokenizers.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    write_json(out / "training.json", report)
    click.echo(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
