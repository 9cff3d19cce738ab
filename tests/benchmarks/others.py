"""The same models and weights in JAX and torch, differentiated the way their users do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

SIZES = tuple(1 << power for power in range(11))  # windows a call
SECONDS, PATIENCE = 1.0, 20.0


def best_rate(make: Callable[[int], Callable[[], Any]], sizes: Sequence[int] = SIZES) -> float:
    """Windows a second at the best of `sizes`: see `best_size`."""
    return best_size(make, sizes)[1]


def best_size(make: Callable[[int], Callable[[], Any]], sizes: Sequence[int] = SIZES) -> tuple[int, float]:
    """The size at which a call gives the most windows a second, and how many; larger ones are left out once a call
    takes too long, or where the next may take more memory than there is.
    """
    from sensitivity.machine import available_memory, peak_memory

    best = sizes[0], 0.0
    for size, following in zip(sizes, [*sizes[1:], 0], strict=True):
        call = make(size)
        start = time.perf_counter()
        call()  # compiles
        seconds: list[float] = []
        while len(seconds) < 2 or sum(seconds) < SECONDS:
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        best = max(best, (size, size / float(np.median(seconds))), key=lambda one: one[1])
        if time.perf_counter() - start > PATIENCE or peak_memory() * (following / size - 1) > available_memory():
            break
    return best


def jax_rate(path: str, windows: np.ndarray, mode: str) -> tuple[float, np.ndarray]:
    """Keras' own JAX backend (`lax.scan` for recurrent layers) under jit(vmap(jacrev)) or jacfwd."""
    import jax
    import keras

    model = keras.models.load_model(path)
    trainable = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]

    def output(window: Any) -> Any:
        return model.stateless_call(trainable, others, window[None])[0][0].reshape(-1)

    derive = {"jacrev": jax.jacrev, "jacfwd": jax.jacfwd}[mode]
    jacobian = jax.jit(jax.vmap(derive(output)))
    first = np.asarray(jacobian(windows[:4]))

    def make(size: int) -> Callable[[], Any]:
        some = jax.numpy.asarray(np.resize(windows, (size, *windows.shape[1:])))
        return lambda: np.asarray(jacobian(some))

    return best_rate(make), first


def torch_rate(path: str, windows: np.ndarray, threads: int) -> tuple[float, np.ndarray]:
    """torch's own modules; batched vector-Jacobian products where they have a rule, else one output after another."""
    import torch

    torch.set_num_threads(threads)
    forward = torch_model(path)

    def jacobian(some: np.ndarray, batched: bool) -> np.ndarray:
        source = torch.from_numpy(some).requires_grad_()
        rows = forward(source).reshape(len(some), -1)
        if batched:
            basis = torch.eye(rows.shape[1])[:, None, :].expand(-1, len(some), -1)
            (found,) = torch.autograd.grad(rows, source, basis, is_grads_batched=True)
        else:
            sums = rows.sum(0)
            found = torch.stack(
                [torch.autograd.grad(total, source, retain_graph=True)[0] for total in sums]  # windows are independent
            )
        return found.transpose(0, 1).numpy()

    rates = []
    for batched in (False, True):

        def make(size: int, batched: bool = batched) -> Callable[[], Any]:
            some = np.resize(windows, (size, *windows.shape[1:]))
            return lambda: jacobian(some, batched)

        try:
            rates.append(best_rate(make))
        except RuntimeError:  # no batching rule for torch's fused recurrent layers
            continue
    return max(rates), jacobian(windows[:4].copy(), False)


def torch_model(path: str) -> Callable[[Any], Any]:
    """A Keras file as a function of torch tensors `(batch, step, feature)`."""
    import keras
    import torch

    model = keras.models.load_model(path)

    def tensor(value: Any) -> Any:
        return torch.from_numpy(np.array(value))

    def run(layer: Any) -> Callable[[Any], Any]:
        kind, config = type(layer).__name__, layer.get_config()
        weights = [tensor(weight) for weight in layer.get_weights()]
        if kind == "Dense":
            act = _activation(config["activation"])
            return lambda x: act(x @ weights[0] + weights[1])
        if kind == "TimeDistributed":
            return run(layer.layer)
        if kind == "Flatten":
            return lambda x: x.flatten(1)
        if kind == "LayerNormalization":
            return lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:], *weights, eps=config["epsilon"])
        if kind == "Conv1D":
            act, reach = _activation(config["activation"]), config["dilation_rate"][0]
            pad = (config["kernel_size"][0] - 1) * reach
            kernel = weights[0].permute(2, 1, 0).contiguous()

            def convolve(x: Any) -> Any:
                padded = torch.nn.functional.pad(x.transpose(1, 2), (pad, 0))
                return act(torch.nn.functional.conv1d(padded, kernel, weights[1], dilation=reach)).transpose(1, 2)

            return convolve
        if kind == "Bidirectional":
            return _recurrent(weights[:3], "LSTM", "tanh", False, weights[3:])
        if kind in ("LSTM", "GRU"):
            return _recurrent(weights, kind, config["activation"], config["return_sequences"])
        raise NotImplementedError(kind)

    if isinstance(model, keras.Sequential):
        parts = [run(layer) for layer in model.layers]

        def chain(x: Any) -> Any:
            for part in parts:
                x = part(x)
            return x

        return chain
    return _transformer(model, run, tensor)


def _activation(name: str) -> Callable[[Any], Any]:
    import torch

    table = {"linear": lambda x: x, "relu": torch.relu, "tanh": torch.tanh, "gelu": torch.nn.functional.gelu}
    return table[name]


def _recurrent(weights: list[Any], kind: str, activation: str, sequences: bool, back: list[Any] | None = None):
    import torch

    kernel, recurrent, bias = weights
    inputs, units = kernel.shape[0], recurrent.shape[0]
    if activation != "tanh":
        return _lstm_by_hand(kernel, recurrent, bias, _activation(activation), sequences)
    module = getattr(torch.nn, kind)(inputs, units, batch_first=True, bidirectional=back is not None)
    for suffix, parts in (("_l0", weights), ("_l0_reverse", back)):
        if parts is not None:
            _load(module, suffix, kind, *parts)
    for parameter in module.parameters():
        parameter.requires_grad_(False)

    def forward(x: Any) -> Any:
        states, last = module(x)
        if sequences:
            return states
        if back is not None:
            return torch.cat([last[0][0], last[0][1]], -1)
        return states[:, -1]

    return forward


def _load(module: Any, suffix: str, kind: str, kernel: Any, recurrent: Any, bias: Any) -> None:
    import torch

    units = recurrent.shape[0]

    def ordered(weight: Any) -> Any:  # Keras' GRU has update, reset, new; torch's reset, update, new
        gates = list(weight.split(units, -1))
        return torch.cat([gates[1], gates[0], gates[2]] if kind == "GRU" else gates, -1)

    biases = bias if bias.ndim == 2 else torch.stack([bias, torch.zeros_like(bias)])
    for name, value in (
        ("weight_ih", ordered(kernel).T),
        ("weight_hh", ordered(recurrent).T),
        ("bias_ih", ordered(biases[0])),
        ("bias_hh", ordered(biases[1])),
    ):
        getattr(module, name + suffix).data.copy_(value)


def _lstm_by_hand(kernel: Any, recurrent: Any, bias: Any, act: Any, sequences: bool) -> Callable[[Any], Any]:
    import torch

    units = recurrent.shape[0]

    def forward(x: Any) -> Any:
        h = c = x.new_zeros(len(x), units)
        states = []
        for step in (x @ kernel + bias).unbind(1):
            i, f, g, o = (step + h @ recurrent).split(units, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * act(g)
            h = torch.sigmoid(o) * act(c)
            states.append(h)
        return torch.stack(states, 1) if sequences else h

    return forward


def _transformer(model: Any, run: Callable[[Any], Callable[[Any], Any]], tensor: Callable[[Any], Any]):
    """The encoder of `models.transformer`, layer by layer."""
    named = {kind: [layer for layer in model.layers if type(layer).__name__ == kind] for kind in _KINDS}
    embed, up, down, head = (run(layer) for layer in named["Dense"])
    first, second = (run(layer) for layer in named["LayerNormalization"])
    query, qb, key, kb, value, vb, out, ob = (tensor(weight) for weight in named["MultiHeadAttention"][0].get_weights())

    def attention(x: Any) -> Any:
        import torch

        q, k, v = (torch.einsum("btf,fhd->bhtd", x, w) + b[:, None] for w, b in ((query, qb), (key, kb), (value, vb)))
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)
        return torch.einsum("bhtd,hdf->btf", weights @ v, out) + ob

    def forward(x: Any) -> Any:
        hidden = embed(x)
        hidden = first(hidden + attention(hidden))
        return head(second(hidden + down(up(hidden))))

    return forward


_KINDS = ("Dense", "LayerNormalization", "MultiHeadAttention")
