"""Which parameters are matrices of hidden layers, that Muon updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from trainer.errors import UserError
from trainer.optim.layers import NORMS
from trainer.optim.state_transfer import named
from trainer.wording import counted


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the parameters that Muon updates: those of two and more dimensions of all layers but the first and the
    last, in the order of their definition. Left out are embeddings, norms, parameters that the model names in
    ``no_weight_decay()``, and those with one row or one input (position embeddings, depthwise convolutions)."""
    layers = {name: own for name, module in model.named_modules() if (own := _matrices(module))}
    named_by_model = getattr(model, "no_weight_decay", None)
    spared = set(named_by_model()) if callable(named_by_model) else set()
    ends = {id(p) for name in [*layers][:1] + [*layers][-1:] for p in layers[name]}
    found = {id(p) for own in layers.values() for p in own if min(p.shape[:2]) > 1} - ends
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    return {n for n, p in model.named_parameters() if id(p) in found - embeddings and n not in spared}


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    """A layer's own parameters of two and more dimensions; none of a norm. Tokens and position embeddings, which have
    one row, make no layer of a module that holds layers."""
    own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
    holds_layers = any(True for child in module.children() for _ in child.parameters())
    tokens = holds_layers and all(p.shape[0] == 1 for p in own)
    return [] if tokens or isinstance(module, NORMS) else own


def check_matrices(
    node: Mapping[str, Any], trained: Sequence[tuple[str, nn.Parameter]], matrices: Sequence[str]
) -> None:
    """Refuse torch's Muon for a model with trained parameters that are no matrices, and ours for one without hidden
    matrices.

    Args:
        matrices: names of hidden ones, with ours.

    Raises:
        UserError: with the names of the others.
    """
    if not node.get("name") and not str(node.get("_target_")).startswith("torch."):
        if not matrices:
            why = "the model has no matrix between its first and its last layer"
            raise UserError("optimizer=muon", why, "optimizer=adamw")
    elif others := [name for name, p in trained if p.dim() != 2]:
        why = f"takes matrices alone (2 dimensions), and {named(others, ())} {'is' if len(others) == 1 else 'are'} none"
        raise UserError("optimizer (torch.optim.Muon)", why, "optimizer=muon")


def described(sizes: Mapping[str, int], matrices: Sequence[str]) -> str:
    """Which parameters Muon updates, in words.

    Args:
        sizes: numbers of each parameter that is trained.
    """
    muon = [sizes[name] for name in matrices if name in sizes]
    rest, numbers = len(sizes) - len(muon), sum(sizes.values()) - sum(muon)
    return (
        f"Muon for {counted(len(muon), 'matrix')} of hidden layers ({sum(muon):,} numbers), AdamW for "
        f"{counted(rest, 'other parameter')} ({numbers:,})"
    )
