"""The gated delta rule and the short convolution row by row in float64, from their formulas."""

import numpy as np


def gated_delta(q, k, v, log_decay, beta, state, real=None):
    """(out [B, T, HV, V], states after each row [B, T, HV, V, K]); log_decay [B, T, HV] or [B, T, HV, K]."""
    q, k, v, log_decay, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta, state))
    B, T, HK, K = k.shape
    HV, V = v.shape[2:]
    out, states = np.zeros((B, T, HV, V)), np.zeros((B, T, HV, V, K))
    for b in range(B):
        for head in range(HV):
            S, source = state[b, head].T, head // (HV // HK)
            for t in range(T):
                if real is None or real[b, t]:
                    key, query = (x / np.sqrt(x @ x + 1e-6) for x in (k[b, t, source], q[b, t, source]))
                    S = (np.exp(log_decay[b, t, head]) * np.ones(K))[:, None] * S
                    S = S + np.outer(key, beta[b, t, head] * (v[b, t, head] - S.T @ key))
                    out[b, t, head] = S.T @ query / np.sqrt(K)
                states[b, t, head] = S.T
    return out, states


def short_conv(x, window, weight, real=None):
    """(y [B, T, C], windows after each row [B, T, W - 1, C])."""
    x, window, weight = (np.asarray(a, np.float64) for a in (x, window, weight))
    B, T, C = x.shape
    W = weight.shape[1]
    y, windows = np.zeros((B, T, C)), np.zeros((B, T, W - 1, C))
    for b in range(B):
        past = list(window[b])
        for t in range(T):
            if real is None or real[b, t]:
                past.append(x[b, t])
                z = sum(weight[:, W - 1 - age] * past[-1 - age] for age in range(W))
                y[b, t] = z / (1 + np.exp(-z))
            if W > 1:
                windows[b, t] = past[-(W - 1) :]
    return y, windows
