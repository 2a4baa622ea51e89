"""Prompts are ordered so that no shared block is computed twice."""

from __future__ import annotations

import random

import pytest

from qkit.evaluate.prefix_order import BlockTrie, PrefixScheduler, minimum_prefill

BLOCK = 4


def few_shot_prompts(subjects: int, questions: int) -> list[list[int]]:
    """Prompts of several subjects, whose questions share a long prefix, in mixed order."""
    rng = random.Random(0)
    prompts = []
    for subject in range(subjects):
        shots = [1, 2, 3, 4] + [rng.randrange(100) + 100 * subject for _ in range(21)]
        prompts += [
            shots + [rng.randrange(1000) for _ in range(rng.randrange(1, 9))]
            for _ in range(questions)
        ]
    rng.shuffle(prompts)
    return prompts


class TestMinimum:
    def test_shared_whole_blocks_count_once(self) -> None:
        # Blocks 1234 and 5678 once each; tails 9 and (10, 11) are never cached.
        assert minimum_prefill([[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 10, 11]], 4) == 8 + 1 + 2

    def test_blocks_after_a_difference_are_not_shared(self) -> None:
        assert minimum_prefill([[0, 5, 6], [1, 5, 6]], 1) == 6

    def test_a_prompt_shorter_than_a_block_is_never_shared(self) -> None:
        assert minimum_prefill([[1, 2, 3], [1, 2, 3]], 4) == 6

    def test_paths_agree_exactly_where_tokens_agree(self) -> None:
        trie = BlockTrie(2)
        one, two = trie.add([1, 2, 3, 4, 5]), trie.add([1, 2, 3, 9])
        assert one[0] == two[0]
        assert one[1] != two[1]
        assert len(trie) == 3

    def test_a_block_holds_a_token(self) -> None:
        with pytest.raises(ValueError, match="at least one token"):
            BlockTrie(0)


class Simulation:
    """A server with a block cache that becomes usable when a request returns."""

    def __init__(self, prompts: list[list[int]], slots: int, seed: int) -> None:
        self.prompts, self.slots = prompts, slots
        self.rng = random.Random(seed)
        self.cached: set[tuple[int, ...]] = set()
        self.prefilled = 0
        self.most = 0

    def blocks(self, prompt: list[int]) -> list[tuple[int, ...]]:
        return [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]

    def run(self, scheduler: PrefixScheduler) -> list[int]:
        running: list[int] = []
        order: list[int] = []
        while True:
            while len(running) < self.slots and (index := scheduler.next()) is not None:
                blocks = self.blocks(self.prompts[index])
                found = next((i for i, b in enumerate(blocks) if b not in self.cached), len(blocks))
                self.prefilled += len(self.prompts[index]) - found * BLOCK
                running.append(index)
                order.append(index)
            self.most = max(self.most, len(running))
            if not running:
                return order
            done = running.pop(self.rng.randrange(len(running)))
            self.cached.update(self.blocks(self.prompts[done]))
            scheduler.finished(done)


class TestScheduler:
    @pytest.mark.parametrize("slots", [1, 3, 32])
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_computes_no_block_twice_whatever_returns_first(self, slots: int, seed: int) -> None:
        prompts = few_shot_prompts(subjects=7, questions=12)
        server = Simulation(prompts, slots, seed)
        order = server.run(PrefixScheduler(prompts, BLOCK))
        assert sorted(order) == list(range(len(prompts)))
        assert server.prefilled == minimum_prefill(prompts, BLOCK)

    def test_sending_all_at_once_computes_prefixes_many_times(self) -> None:
        # What the scheduler is for: without it, the same work costs several times the minimum.
        prompts = few_shot_prompts(subjects=7, questions=12)
        server = Simulation(prompts, 32, 0)
        server.run(PrefixScheduler([None] * len(prompts), BLOCK))
        assert server.prefilled > 2 * minimum_prefill(prompts, BLOCK)

    def test_prompts_that_share_nothing_go_out_together(self) -> None:
        prompts = [[i] * 9 for i in range(20)]
        server = Simulation(prompts, 8, 0)
        server.run(PrefixScheduler(prompts, BLOCK))
        assert server.most == 8

    def test_followers_go_out_together_once_the_first_has_returned(self) -> None:
        prompts = [[*range(8), i] for i in range(6)]
        scheduler = PrefixScheduler(prompts, BLOCK)
        first = scheduler.next()
        assert first == 0
        assert scheduler.next() is None
        scheduler.finished(first)
        assert [scheduler.next() for _ in range(6)] == [1, 2, 3, 4, 5, None]

    def test_requests_without_a_prefix_neither_wait_nor_are_waited_for(self) -> None:
        scheduler = PrefixScheduler([None, [1] * 9, None, [1] * 9], BLOCK)
        assert [scheduler.next() for _ in range(4)] == [0, 2, 1, None]
        scheduler.finished(1)
        assert scheduler.next() == 3
