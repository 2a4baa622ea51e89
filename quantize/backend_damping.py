"""Let GPTQ try again with more damping where a layer's Hessian is not positive definite.

llm-compressor 0.14 rounds such a layer to the nearest at once and goes on. More damping nearly
always helps, and costs a little accuracy instead of all that GPTQ gains. What was needed is kept
with the layers' names. Runs inside the quantize environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

#: Tried in turn after the damping asked for, those below it left out; a fraction of the mean of
#: the Hessian's diagonal.
MORE_DAMPING = (0.01, 0.1, 1.0)


@dataclass
class DampingRetries:
    """Layers that needed more damping than was asked for.

    Attributes:
        asked: The damping asked for; 0 until a layer was quantized.
        layers: Names by the damping they were quantized with.
    """

    asked: float = 0.0
    layers: dict[float, list[str]] = field(default_factory=dict)

    def add(self, name: str, damping: float) -> None:
        """Record a layer."""
        self.layers.setdefault(damping, []).append(name)

    def notes(self) -> tuple[str, ...]:
        """Return one sentence for each damping that was needed."""
        return tuple(
            f"GPTQ used dampening_frac {damping:g} instead of {self.asked:g} for {len(names)}"
            f" layer{'s' if len(names) > 1 else ''} whose Hessian was not positive definite:"
            f" {', '.join(names)}"
            for damping, names in sorted(self.layers.items())
        )


@contextmanager
def damping_retries(model: Any) -> Iterator[DampingRetries]:
    """Retry GPTQ's factorization with more damping while the context lasts.

    The Hessians of a batch are kept once more meanwhile, in the machine's memory, as they are
    factorized in place. A layer that no damping of `MORE_DAMPING` helps is rounded to the nearest,
    as llm-compressor does and logs.
    """
    from llmcompressor.modifiers.gptq import base, gptq_quantize

    retries = DampingRetries()
    batch: list[str] = []
    names = {module: name for name, module in model.named_modules()}
    prepare, factorize = base.prepare_batch, gptq_quantize.factorize_hessian

    def prepare_named(modules: list[Any], *statistics: Any) -> Any:
        batch[:] = [names[module] for module in modules]
        return prepare(modules, *statistics)

    def factorize_damped(weights: Any, hessians: Any, percdamp: float, failed: Any) -> Any:
        original = hessians.to("cpu", copy=True)
        factors = factorize(weights, hessians, percdamp, failed)
        retries.asked = percdamp
        for index in failed.nonzero().flatten().tolist():
            one = slice(index, index + 1)
            for damping in (value for value in MORE_DAMPING if value > percdamp):
                failed[one] = False
                again = factorize(
                    weights[one],
                    original[one].to(hessians.device, copy=True),
                    damping,
                    failed[one],
                )
                if not failed[index]:
                    factors[one] = again
                    retries.add(batch[index], damping)
                    break
        return factors

    base.prepare_batch, gptq_quantize.factorize_hessian = prepare_named, factorize_damped
    try:
        yield retries
    finally:
        base.prepare_batch, gptq_quantize.factorize_hessian = prepare, factorize
