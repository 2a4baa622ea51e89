"""In which order prompts are sent, so that no shared prefix is computed twice.

vLLM caches the keys and values of whole blocks of tokens, and a block can be reused once the
request that computes it has returned. Sending many requests of one unseen prefix at once computes
that prefix many times. `PrefixScheduler` sends the first request of an unseen prefix alone and
holds the others back until it has returned; requests that share nothing go out together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Tokens = Sequence[int]


class BlockTrie:
    """Whole cache blocks of prompts, as a prefix trie.

    Args:
        block_size: Tokens in a cache block.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"a cache block holds at least one token, not {block_size}")
        self.block_size = block_size
        #: (parent node, tokens of the block) -> node; the root is 0.
        self._nodes: dict[tuple[int, tuple[int, ...]], int] = {}

    def add(self, prompt: Tokens) -> tuple[int, ...]:
        """Add a prompt and return its whole blocks' nodes, from the first on.

        Two prompts have a node in common exactly where all tokens up to that block's end agree.
        """
        node, path = 0, []
        for start in range(0, len(prompt) - self.block_size + 1, self.block_size):
            key = (node, tuple(prompt[start : start + self.block_size]))
            node = self._nodes.setdefault(key, len(self._nodes) + 1)
            path.append(node)
        return tuple(path)

    def __len__(self) -> int:
        """Return the number of different blocks."""
        return len(self._nodes)


def minimum_prefill(prompts: Sequence[Tokens], block_size: int) -> int:
    """Return the fewest prompt tokens a server with a prefix cache has to compute.

    Every different whole block once, and of every prompt the tokens after its last whole block,
    which are never cached. Equal prompts count as often as they are there.
    """
    trie = BlockTrie(block_size)
    tails = 0
    for prompt in prompts:
        trie.add(prompt)
        tails += len(prompt) % block_size
    return len(trie) * block_size + tails


class PrefixScheduler:
    """Hands out the indices of prompts, holding back those whose prefix is being computed.

    Prompts are taken in the order of their tokens, so that those that share a prefix follow each
    other while it is still in the cache.

    Args:
        prompts: Token ids of each request's prompt; None for a request that neither waits nor is
            waited for.
        block_size: Tokens in a block of the server's cache.
        backwards: Take them the other way round, so that other requests share a batch.
    """

    def __init__(
        self, prompts: Sequence[Tokens | None], block_size: int, *, backwards: bool = False
    ) -> None:
        trie = BlockTrie(block_size)
        self._paths = [() if prompt is None else trie.add(prompt) for prompt in prompts]
        numbers = range(len(prompts))
        self._order = sorted(
            reversed(numbers) if backwards else numbers,
            key=lambda i: tuple(prompts[i] or ()),
            reverse=backwards,
        )
        self._ready = list(range(len(prompts)))  # ranks in `_order`, a heap
        self._owner: dict[int, int] = {}  # block being computed -> request that computes it
        self._computed: set[int] = set()
        self._claims: dict[int, tuple[int, ...]] = {}
        self._waiting: dict[int, list[int]] = {}

    def next(self) -> int | None:
        """Return the index of a request to send now; None where all that is left has to wait."""
        while self._ready:
            rank = heapq.heappop(self._ready)
            index = self._order[rank]
            new = self._not_computed(self._paths[index])
            owner = self._owner.get(new[0]) if new else None
            if owner is not None:
                self._waiting.setdefault(owner, []).append(rank)
                continue
            # No later block can be another's: whoever computes it computes the first one too.
            self._claims[index] = new
            self._owner.update(dict.fromkeys(new, index))
            return index
        return None

    def finished(self, index: int) -> None:
        """Say that a request has returned: its blocks are in the cache now."""
        for block in self._claims.pop(index):
            del self._owner[block]
            self._computed.add(block)
        for rank in self._waiting.pop(index, ()):
            heapq.heappush(self._ready, rank)

    def _not_computed(self, path: tuple[int, ...]) -> tuple[int, ...]:
        for position, block in enumerate(path):
            if block not in self._computed:
                return path[position:]
        return ()
