"""What the options of ``strategy=local_sgd`` mean for a run, before any process starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer.config.run_config import RunConfig
from trainer.config.schema import LocalSgdStrategy
from trainer.errors import UserError
from trainer.wording import counted, sized


def exchange(options: LocalSgdStrategy, sizes: Sequence[int], size: int) -> str:
    """What the workers exchange and when, in words.

    Args:
        sizes: numbers of each trained parameter. size: bytes of a number.
    """
    streaming = options.streaming
    sent = sized(sum(sizes) * {"full": size, "bf16": 2, "int8": 1}[options.exchange])
    said = f"{sent} of each worker every {counted(options.k_steps, 'update')}"
    said += " at first, then as the loss says (1 to 16)" if options.adaptive else ""
    said += f", in {counted(streaming.fragments, 'part')} in turn" if streaming.fragments > 1 else ""
    return said + (f"; {options.begin} after each of the first {options.begin_step}" if options.begin_step else "")


def refuse(options: LocalSgdStrategy, config: RunConfig, workers: int) -> Iterator[UserError]:
    """Yield every reason why the options cannot work with a config."""
    if options.begin == "gradients" and not options.begin_step:
        why = "with strategy.begin_step=0 no gradients are averaged"
        yield UserError("strategy.begin=gradients", why, "strategy.begin_step=1000")
    if options.begin == "gradients" and config.on_nonfinite == "skip":
        why = "a worker that leaves out its update alone would leave the others waiting for its gradients"
        yield UserError("on_nonfinite=skip", why, "strategy.begin=parameters (or on_nonfinite=rewind)")
    yield from _refuse_streaming(options)
    for limit, value in (("clip_norm", options.clip_norm), ("clip_value", options.clip_value)):
        if value is not None and options.k_steps == 1 and workers > 1:
            why = "local_sgd clips each worker's own gradient, so with k_steps=1 it is not what collective does"
            yield UserError(f"strategy.{limit}={value}", why, "strategy.k_steps=2 (or strategy=collective)")


def _refuse_streaming(options: LocalSgdStrategy) -> Iterator[UserError]:
    fragments, delay = options.streaming.fragments, options.streaming.delay
    if options.adaptive and fragments > 1:
        why = "strategy.adaptive=true finds the next average of the whole model"
        yield UserError(f"strategy.streaming.fragments={fragments}", why, "strategy.adaptive=false")
    elif fragments > options.k_steps:
        why = f"in strategy.k_steps={options.k_steps} updates no more parts have their turn"
        yield UserError(
            f"strategy.streaming.fragments={fragments}", why, f"strategy.streaming.fragments={options.k_steps}"
        )
    if delay and (delay >= options.k_steps or options.adaptive):
        why = "an average is used before the next one of the same parameters begins"
        instead = f"strategy.k_steps={delay + 1}" + (" strategy.adaptive=false" if options.adaptive else "")
        yield UserError(f"strategy.streaming.delay={delay}", why, instead)
