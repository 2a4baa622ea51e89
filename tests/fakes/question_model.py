"""A tiny random checkpoint whose tokenizer has " A" to " D" as single tokens, for scoring tests."""

from __future__ import annotations

from pathlib import Path

from fakes.checkpoints import SPECIAL_TOKENS, VOCAB_SIZE, TinyQwen2, write_json
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

#: Enough for five-shot MMLU questions at about two characters a token.
MAX_LENGTH = 8192


def write_question_model(folder: Path, texts: list[str]) -> Path:
    """Write the checkpoint; its tokenizer is trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = ["Answer: A", "Answer: B", "Answer: C", "Answer: D"] * len(texts)
    tokenizer.train_from_iterator(
        [*texts, *letters],
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    end_of_turn = tokenizer.token_to_id("<|im_end|>")
    TinyQwen2(
        hidden=128,
        intermediate=256,
        config={
            "max_position_embeddings": MAX_LENGTH,
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_turn,
        },
    ).write(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": [end_of_turn, end_of_text]})
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
