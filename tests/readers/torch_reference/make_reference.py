"""Trains a small classifier with torch and stores what came out, as a reference without torch.

    python -m tests.readers.torch_reference.make_reference

makes ``reference.npz`` anew, with torch's CPU build. It has the inputs and targets of one batch,
the weights to start from, and for each optimizer the losses of ``STEPS`` steps, the weights after
the first and the last, and how far torch's own float32 was from its float64.
"""

import collections
import pathlib

import numpy as np

REFERENCE = pathlib.Path(__file__).with_name("reference.npz")
STEPS = 4
EMBEDDING, NEURONS, CLASSES, BATCH = 8, 16, 8, 16


def classifier(seed):
    """A model as users of torch write it."""
    import torch

    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(EMBEDDING, NEURONS),
        torch.nn.Tanh(),
        torch.nn.Linear(NEURONS, EMBEDDING),
        torch.nn.Sigmoid(),
        torch.nn.Linear(EMBEDDING, CLASSES),
    )


def batch(seed):
    """Inputs of a batch and the right classes."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(BATCH, EMBEDDING, generator=generator)
    return inputs, torch.randint(CLASSES, (BATCH,), generator=generator)


def optimizer_of(name, parameters):
    """An optimizer of torch."""
    import torch

    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    return torch.optim.Adam(parameters, lr=0.01)


def train(name, weights, inputs, targets, dtype="float32"):
    """The losses of a few steps and the weights after each, as NumPy arrays."""
    import torch

    model = classifier(seed=0).to(getattr(torch, dtype))
    model.load_state_dict(weights)
    optimizer = optimizer_of(name, model.parameters())
    losses, after = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        outputs = model(inputs.to(getattr(torch, dtype)))
        loss = torch.nn.functional.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after.append({key: x.detach().numpy().copy() for key, x in model.state_dict().items()})
    return np.array(losses), after


def results(seed):
    """All that is stored, by name."""
    inputs, targets = batch(seed)
    weights = classifier(seed).state_dict()
    found = {"inputs": inputs.numpy(), "targets": targets.numpy().astype(np.int32)}
    found |= {f"start/{key}": x.numpy().copy() for key, x in weights.items()}
    for name in ("sgd", "adam"):
        losses, after = train(name, weights, inputs, targets)
        exact_losses, exact = train(name, weights, inputs, targets, "float64")
        found[f"{name}/losses"] = losses
        found[f"{name}/rounding of losses"] = abs(losses - exact_losses).max()
        found[f"{name}/rounding of weights"] = max(
            abs(after[step][key] - exact[step][key]).max()
            for step in range(STEPS)
            for key in weights
        )
        for step in (0, STEPS - 1):
            found |= {f"{name}/after {step + 1}/{key}": x for key, x in after[step].items()}
    return found


def part(found, prefix):
    """The weights under a prefix, in the order of a state dict."""
    return collections.OrderedDict(
        (name.removeprefix(prefix), x) for name, x in found.items() if name.startswith(prefix)
    )


if __name__ == "__main__":
    np.savez(REFERENCE, **results(seed=1))
