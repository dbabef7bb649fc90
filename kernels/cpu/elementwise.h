// Norms, rotary embedding and activations of single rows. Where transformers rounds to the model's type between two
// operations, so do these.
#pragma once

#include "vec.h"

namespace HEADRACE_ISA {

// out = weight * (x / sqrt(mean(x * x) + eps)) (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019)
template <class T>
inline void rms_norm_row(const T* x, const T* weight, int n, float eps, T* out) {
    vf sum[2] = {vzero(), vzero()};
    int i = 0;
    for (; i + 2 * W <= n; i += 2 * W)
        for (int j = 0; j < 2; ++j) {
            const vf v = vload(x + i + j * W);
            sum[j] = vfma(v, v, sum[j]);
        }
    for (; i < n; i += W) {
        const vf v = vload(x + i);
        sum[0] = vfma(v, v, sum[0]);
    }
    const vf scale = vset(1.0f / std::sqrt(vsum(vadd(sum[0], sum[1])) / float(n) + eps));
    for (i = 0; i < n; i += W) vstore(out + i, vmul(vload(weight + i), vrounded<T>(vmul(vload(x + i), scale))));
}

// Rotate the two halves of the first `rotary` dimensions of one head, in place (Su et al., RoFormer, 2021, in the
// layout of transformers' rotate_half). cos, sin: [rotary / 2].
template <class T>
inline void rotate_head(T* x, const T* cos, const T* sin, int rotary) {
    const int half = rotary / 2;
    int i = 0;
    for (; i + W <= half; i += W) {
        const vf a = vload(x + i), b = vload(x + half + i), c = vload(cos + i), s = vload(sin + i);
        vstore(x + i, vsub(vrounded<T>(vmul(a, c)), vrounded<T>(vmul(b, s))));
        vstore(x + half + i, vadd(vrounded<T>(vmul(b, c)), vrounded<T>(vmul(a, s))));
    }
    for (; i < half; ++i) {
        const float a = to_float(x[i]), b = to_float(x[half + i]), c = to_float(cos[i]), s = to_float(sin[i]);
        auto round = [](float v) { return to_float(from_float<T>(v)); };
        x[i] = from_float<T>(round(a * c) - round(b * s));
        x[half + i] = from_float<T>(round(b * c) + round(a * s));
    }
}

enum class Activation : int { silu = 0, gelu_tanh = 1 };

template <class T>
inline vf activate(Activation kind, vf x) {
    if (kind == Activation::silu) return vrounded<T>(vsilu(x));
    // 0.5 x (1 + tanh(z)) = x / (1 + exp(-2z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
    const vf cube = vmul(vmul(x, x), x);
    const vf z = vmul(vset(0.7978845608028654f), vfma(vset(0.044715f), cube, x));
    return vrounded<T>(vdiv(x, vadd(vset(1.0f), vexp(vmul(vset(-2.0f), z)))));
}

}  // namespace HEADRACE_ISA
