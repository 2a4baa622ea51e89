"""Eight short everyday questions, the same for every level, variant and run."""

from __future__ import annotations

from dataclasses import dataclass

from qkit.evaluate.workloads.source import Part
from qkit.evaluate.workloads.units import ANY_HITS, Turn, Unit

PROMPTS = (
    "What is the difference between a virus and a bacterium? Explain it to a ten-year-old.",
    "I have eggs, rice, tomatoes and an onion. Suggest a quick dinner and how to cook it.",
    "Write a short, polite e-mail asking my landlord to repair the heating this week.",
    "请用三句话解释为什么天空是蓝色的。",
    "我下周要去成都玩两天, 请帮我安排一个简单的行程。",
    "Write a Python function that returns the n-th Fibonacci number without recursion, and "
    "explain how fast it is.",
    "用 SQL 查询每个部门工资最高的员工, 表 employees 有 name、department、salary 三列。",
    "Why does `0.1 + 0.2 == 0.3` give False in most programming languages?",
)


@dataclass(frozen=True)
class ShortChatSource:
    """The questions in turn. Each comes again and again, so the prefix cache may hold them all."""

    output_tokens: int
    ending: str
    hits_expected: bool = True
    fewest_warmups: int = 0

    @property
    def description(self) -> str:
        """The workload in one line."""
        return (
            f"{len(PROMPTS)} fixed short questions in turn, {self.ending} {self.output_tokens} "
            "tokens out"
        )

    def unit(self, cell: str, part: Part, index: int) -> Unit:  # noqa: ARG002  (fixed prompts)
        """Return one question."""
        return Unit((Turn(PROMPTS[index % len(PROMPTS)], self.output_tokens, ANY_HITS),))
