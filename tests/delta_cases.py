"""The gated delta rule's problems, its rows one after the other, and comparisons with the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import quick_compile
import recurrent_oracle

from jaxspec.recurrent import gated_delta

CHUNK = 8
HK, K, V = 2, 8, 12
NAMES = ("q", "k", "v", "log_decay", "beta", "state")


@functools.cache
def compiled(keep="last", chunk=CHUNK):
    return jax.jit(functools.partial(gated_delta, keep=keep, chunk=chunk), compiler_options=quick_compile.options())


def problem(seed, T, *, kind="mild", ratio=2, B=3, width=K, channels=False):
    """Arguments in float32. Gates of 0 and 1 are among them. channels: a decay for each key channel.

    strong: most decays forget all, so that sums of a chunk pass -88, and small ones follow large ones.
    alike: keys nearly parallel and every gate 1, the system that is hardest to solve.
    """
    rng = np.random.default_rng(seed)
    HV = HK * ratio
    q, k = (3 * rng.standard_normal((B, T, HK, width)) for _ in range(2))
    log_decay, beta = -0.2 * rng.random((B, T, HV, width) if channels else (B, T, HV)), rng.random((B, T, HV))
    beta[rng.random(beta.shape) < 0.2] = 0
    beta[rng.random(beta.shape) < 0.2] = 1
    if kind == "strong":
        log_decay = np.where(rng.random(log_decay.shape) < 0.5, -20.0, log_decay)
    if kind == "alike":
        k, beta = k[:, :1] + 0.05 * k, np.ones_like(beta)
    values = q, k, rng.standard_normal((B, T, HV, V)), log_decay, beta, rng.standard_normal((B, HV, V, width))
    return tuple(x.astype(np.float32) for x in values)


def assert_close(got, want, tolerance=1e-5):
    """Relative to the largest entry of the same head (and row)."""
    got, want = np.asarray(got, np.float64), np.asarray(want)
    axes = (-1, -2) if want.ndim > 3 else (-1,)
    scale = np.abs(want).max(axis=axes, keepdims=True, initial=1e-30)
    assert got.shape == want.shape
    assert (np.abs(got - want) <= tolerance * scale).all(), (np.abs(got - want) / scale).max()


def check(arguments, real=None, *, chunk=CHUNK):
    want, states = recurrent_oracle.gated_delta(*arguments, real)
    mask = None if real is None else jnp.asarray(real)
    out, last = compiled("last", chunk)(*arguments, real=mask)
    assert_close(out, want)
    assert_close(last, states[:, -1] if states.shape[1] else arguments[-1])
    return out, last, want, states


def poisoned(arguments, real):
    return [np.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, np.nan) for x in arguments[:5]] + [arguments[5]]


def sequential(q, k, v, log_decay, beta, state, real):
    """The rule as a scan over rows: whose gradients are asked for."""
    repeat = v.shape[2] // k.shape[2]

    def normal(x):
        return jnp.repeat(x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6), repeat, axis=2)

    q, k = normal(q) / q.shape[-1] ** 0.5, normal(k)

    def row(S, inputs):
        q, k, v, log_decay, beta, real = inputs
        decay = jnp.exp(log_decay if log_decay.ndim == k.ndim else log_decay[..., None])
        T = decay[..., None, :] * S
        u = beta[..., None] * (v - (T * k[..., None, :]).sum(-1))
        S = jnp.where(real[:, None, None, None], T + u[..., None] * k[..., None, :], S)
        return S, jnp.where(real[:, None, None], (S * q[..., None, :]).sum(-1), 0)

    rows = tuple(x.swapaxes(0, 1) for x in (q, k, v, log_decay, beta, real))
    state, out = jax.lax.scan(row, state, rows)
    return out.swapaxes(0, 1), state


@functools.cache
def gradients(rule, **settings):
    """Of a loss that looks at every output and at the last state."""

    def loss(weights, real, *arguments):
        out, state = rule(*arguments, real=real, **settings)
        return jnp.sum(weights * out) + jnp.sum(jnp.sin(state))

    return jax.jit(jax.grad(loss, argnums=range(2, 8)), compiler_options=quick_compile.options())
